"""What GC waits for, as numbers, gathered when asked for; only the lowest services are named, to bound the labels."""

import heapq
from collections.abc import Iterator

from prometheus_client import REGISTRY, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from gcsafepoint.rules import SafePoints

_NAMED = 20
_LABEL_CHARACTERS = 64

UPDATES_TOTAL = Counter("tidemark_gcsafepoint_updates_total", "Service safe point updates answered")
TRANSACTIONS_TOTAL = Counter("tidemark_gcsafepoint_transactions_total", "Metadata transactions written")


class SafePointCollector(Collector):
    """Gauges of one state; nothing until `state` is set."""

    def __init__(self) -> None:
        self.state: SafePoints | None = None

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The numbers of now; called in the HTTP thread, so services are copied first."""
        state = self.state
        if state is None:
            return
        services = list(state.services.values())
        lowest = heapq.nsmallest(_NAMED - 1, services, key=lambda service: service.safe_point)
        named = [state.gc_worker, *lowest]
        for name, text, number in (
            ("gc_safe_point_ts", "What stores collect up to", state.gc_safe_point),
            ("txn_safe_point_ts", "Below it no reader may start", state.txn_safe_point),
            ("min_service_safe_point_ts", "The minimum over services", min(service.safe_point for service in named)),
            ("services", "Services that hold GC back", len(services) + 1),
        ):
            yield GaugeMetricFamily(f"tidemark_gcsafepoint_{name}", text, value=number)
        safe_points = GaugeMetricFamily(
            "tidemark_gcsafepoint_service_safe_point_ts", "Safe points of the lowest services", labels=["service"]
        )
        shown = {service.service_id[:_LABEL_CHARACTERS]: service.safe_point for service in reversed(named)}
        for service_id, safe_point in shown.items():
            safe_points.add_metric([service_id], safe_point)
        yield safe_points


SAFE_POINTS = SafePointCollector()
REGISTRY.register(SAFE_POINTS)
