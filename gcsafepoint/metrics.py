"""What GC waits for, as numbers; services beyond the lowest few are counted, not named, to bound the labels."""

import heapq

from prometheus_client import Counter, Gauge

from gcsafepoint.rules import SafePoints

_NAMED = 20

GC_SAFE_POINT = Gauge("tidemark_gcsafepoint_gc_safe_point_ts", "What stores collect up to")
TXN_SAFE_POINT = Gauge("tidemark_gcsafepoint_txn_safe_point_ts", "Below it no reader may start")
MIN_SAFE_POINT = Gauge("tidemark_gcsafepoint_min_service_safe_point_ts", "The minimum over the live services")
SERVICES = Gauge("tidemark_gcsafepoint_services", "Services that hold GC back")
SERVICE_SAFE_POINT = Gauge(
    "tidemark_gcsafepoint_service_safe_point_ts", f"Safe points of the {_NAMED} lowest services", ["service"]
)
UPDATES_TOTAL = Counter("tidemark_gcsafepoint_updates_total", "Service safe point updates answered")
TRANSACTIONS_TOTAL = Counter("tidemark_gcsafepoint_transactions_total", "Metadata transactions written")


def show(state: SafePoints) -> None:
    """Set the gauges from `state`."""
    GC_SAFE_POINT.set(state.gc_safe_point)
    TXN_SAFE_POINT.set(state.txn_safe_point)
    MIN_SAFE_POINT.set(state.minimum().safe_point)
    SERVICES.set(len(state.services) + 1)
    SERVICE_SAFE_POINT.clear()
    lowest = heapq.nsmallest(_NAMED - 1, state.services.values(), key=lambda service: service.safe_point)
    for service in (state.gc_worker, *lowest):
        SERVICE_SAFE_POINT.labels(service.service_id[:64]).set(service.safe_point)
