"""Gauges of GC's blockers, computed at each scrape; only the lowest barriers are named, to bound
the labels.

`pd_gc_…` are PD's names, so that PD's dashboards and alerts hold.
"""

import heapq
from collections.abc import Iterator

from prometheus_client import REGISTRY, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from gcsafepoint.state.records import valid_text
from gcsafepoint.state.rules import ServiceSafePoint
from gcsafepoint.state.states import NULL_KEYSPACE, GcStates
from storage.model.ts import physical_s

_NAMED = 20
_LABEL_CHARACTERS = 64
_BARRIER_LABELS = ("scope", "keyspace_id", "keyspace_name", "barrier_id")

UPDATES_TOTAL = Counter("tidemark_gcsafepoint_updates_total", "Service safe point updates answered")
TRANSACTIONS_TOTAL = Counter(
    "tidemark_gcsafepoint_transactions_total", "Metadata transactions written"
)


class SafePointCollector(Collector):
    """Gauges of one state; nothing until `states` is set.

    Called in the HTTP thread, so barriers are copied first.
    """

    def __init__(self) -> None:
        self.states: GcStates | None = None

    def remove(self, states: GcStates | None) -> None:
        """Stop showing `states`, whose publisher leads no more."""
        if self.states is states:
            self.states = None

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The numbers of now."""
        states = self.states
        if states is None:
            return
        null = states.null
        services = null.barriers.snapshot()
        named = [null.gc_worker, *_lowest(services, _NAMED - 1)]
        lowest = min(service.safe_point for service in [*named, *states.global_barriers.snapshot()])
        yield from _safe_points(
            {
                "gc_safepoint": null.gc_safe_point,
                "txn_safe_point": null.txn_safe_point,
                "min_service_safe_point": lowest,
            }
        )
        yield _barriers(states)
        for name, text, number in (
            ("gc_safe_point_ts", "What stores collect up to", null.gc_safe_point),
            ("txn_safe_point_ts", "Below it no reader may start", null.txn_safe_point),
            ("min_service_safe_point_ts", "The minimum over services", lowest),
            ("services", "Services that hold GC back", len(services) + 1),
        ):
            yield GaugeMetricFamily(f"tidemark_gcsafepoint_{name}", text, value=number)
        yield _services(named)


def _safe_points(safe_points: dict[str, int]) -> Iterator[GaugeMetricFamily]:
    """Safepoints under PD's metric name, and as Unix times, which people can read."""
    family = GaugeMetricFamily("pd_gc_gc_safepoint", "Timestamps GC goes by", labels=["type"])
    times = GaugeMetricFamily(
        "tidemark_gcsafepoint_timestamp_seconds",
        "Unix times of what pd_gc_gc_safepoint shows",
        labels=["type"],
    )
    for kind, ts in safe_points.items():
        family.add_metric([kind], ts)
        times.add_metric([kind], physical_s(ts))
    yield family
    yield times


def _barriers(states: GcStates) -> GaugeMetricFamily:
    family = GaugeMetricFamily(
        "pd_gc_barrier_timestamp_seconds",
        "Unix time of what the lowest barriers hold back",
        labels=_BARRIER_LABELS,
    )
    lowest = heapq.nsmallest(_NAMED, _all_barriers(states), key=lambda item: item[1].safe_point)
    shown = {
        (*scope, _label(barrier)): physical_s(barrier.safe_point)
        for scope, barrier in reversed(lowest)
    }
    for labels, seconds in shown.items():
        family.add_metric(labels, seconds)
    return family


def _all_barriers(states: GcStates) -> Iterator[tuple[tuple[str, ...], ServiceSafePoint]]:
    for barrier in states.global_barriers.snapshot():
        yield ("global", "", ""), barrier
    for keyspace_id, state in states.scopes():
        name = "" if keyspace_id == NULL_KEYSPACE else states.keyspaces[keyspace_id].name
        for barrier in state.barriers.snapshot():
            yield ("keyspace", str(keyspace_id), name), barrier


def _services(named: list[ServiceSafePoint]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(
        "tidemark_gcsafepoint_service_safe_point_ts",
        "Safe points of the lowest services",
        labels=["service"],
    )
    shown = {_label(service): service.safe_point for service in reversed(named)}
    for service_id, safe_point in shown.items():
        family.add_metric([service_id], safe_point)
    return family


def _lowest(services: list[ServiceSafePoint], count: int) -> list[ServiceSafePoint]:
    return heapq.nsmallest(count, services, key=lambda service: service.safe_point)


def _label(barrier: ServiceSafePoint) -> str:
    return valid_text(barrier.service_id[:_LABEL_CHARACTERS])


SAFE_POINTS = SafePointCollector()
REGISTRY.register(SAFE_POINTS)
