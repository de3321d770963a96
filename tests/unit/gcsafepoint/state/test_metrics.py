"""GC's numbers under PD's names, with a bounded number of labels."""

from gcsafepoint.state.metrics import SafePointCollector
from gcsafepoint.state.rules import GC_WORKER, NEVER_S, GcState, ServiceSafePoint
from gcsafepoint.state.states import GcStates, Keyspace
from storage.model.ts import compose


def samples(states: GcStates) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    collector = SafePointCollector()
    collector.states = states
    return {
        (sample.name, tuple(sample.labels.items())): sample.value
        for family in collector.collect()
        for sample in family.samples
    }


def test_pds_names_tell_the_safe_points_and_the_barriers() -> None:
    null = GcState(
        [
            ServiceSafePoint("ticdc-a", 2000, compose(5000)),
            ServiceSafePoint(GC_WORKER, NEVER_S, 80),
        ],
        50,
        40,
    )
    seven = GcState([ServiceSafePoint("b", 2000, compose(7500))])
    everywhere = [ServiceSafePoint("native_br", 2000, compose(6000))]
    found = samples(GcStates(null, everywhere, [Keyspace(7, "seven", level_gc=True)], {7: seven}))
    types = {
        labels[0][1]: value
        for (name, labels), value in found.items()
        if name == "pd_gc_gc_safepoint"
    }
    assert types == {"gc_safepoint": 40, "txn_safe_point": 50, "min_service_safe_point": 80}
    barriers = {
        tuple(value for _, value in labels): value
        for (name, labels), value in found.items()
        if name == "pd_gc_barrier_timestamp_seconds"
    }
    assert barriers == {
        ("keyspace", "4294967295", "", "ticdc-a"): 5.0,
        ("global", "", "", "native_br"): 6.0,
        ("keyspace", "7", "seven", "b"): 7.5,
    }


def test_ten_thousand_services_are_twenty_labels() -> None:
    null = GcState(
        [ServiceSafePoint(f"{number:05}" + "x" * 200, 2000, number) for number in range(10_000)]
    )
    found = samples(GcStates(null))
    for name in ("pd_gc_barrier_timestamp_seconds", "tidemark_gcsafepoint_service_safe_point_ts"):
        labels = [labels[-1][1] for (metric, labels) in found if metric == name]
        assert len(labels) == 20
        assert max(map(len, labels)) == 64


def test_who_leads_no_more_shows_nothing() -> None:
    states = GcStates()
    collector = SafePointCollector()
    collector.states = states
    collector.remove(GcStates())
    assert list(collector.collect())
    collector.remove(states)
    assert not list(collector.collect())
