"""What the worker does, under the names that TiDB's dashboards and runbooks look for."""

import pytest
import structlog
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from gcsafepoint.worker.config import GCConfig
from gcsafepoint.worker.delete_ranges import DeleteRange
from gcsafepoint.worker.gc_leader import Stage
from gcsafepoint.worker.round import GCRunningError, Result, Round
from server.gc_worker.listener import LogAndCount
from storage.model.errors import UnavailableError

AWAY = UnavailableError("the store is away")
IT = Round(id=1, safe_point=7, blocker="the service feed", result=Result.DONE)


@pytest.fixture(autouse=True)
def _all_levels() -> None:
    """Tests of the command line leave it at warnings."""
    structlog.reset_defaults()


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def test_every_metric_has_tidbs_name() -> None:
    listener = LogAndCount("me")
    with capture_logs():
        listener.tick_ended(leads=True)
        listener.configured(GCConfig(life_time_ms=1000))
        listener.page_resolved(3, more=True)
        listener.range_deleted(DeleteRange(1, 1, b"a", b"b", 5), AWAY, redo=True)
        listener.region_collected(None)
        listener.region_collected(AWAY)
        for stage in Stage:
            listener.stage_began(stage, IT)
            listener.stage_ended(stage, IT, 1.0, None)
            listener.stage_ended(stage, IT, 1.0, AWAY)
    for kind in (
        "check_leader",
        "register_leader",
        "run_job",
        "resolve_locks",
        "delete_range",
        "redo_delete_range",
    ):
        assert value("tidb_tikvclient_gc_worker_actions_total", type=kind), kind
    for stage in ("resolve_locks", "delete_ranges", "redo_delete_ranges", "do_gc", "total"):
        assert value("tidb_tikvclient_gc_seconds_count", stage=stage), stage
    for kind in (
        "prepare",
        "resolve_lock",
        "delete_range",
        "redo_delete_range",
        "upload_safe_point",
        "do_gc",
    ):
        assert value("tidb_tikvclient_gc_failure", type=kind), kind
    assert value("tidb_tikvclient_gc_config", type="tikv_gc_life_time") == 1.0
    assert value("tidb_tikvclient_gc_action_result", type="success")
    assert value("tidb_tikvclient_gc_action_result", type="fail")
    assert value("tidb_tikvclient_gc_region_too_many_locks")
    assert value("tidb_tikvclient_gc_unsafe_destroy_range_failures", type="send")
    with capture_logs():
        listener.tick_ended(leads=False)
    assert value("tidb_tikvclient_gc_config", type="tikv_gc_life_time") == 0.0


def test_only_the_leader_shows_the_safe_point() -> None:
    names = ("tidemark_gc_safe_point", "tidemark_gc_safe_point_timestamp_seconds")
    listener = LogAndCount("me")
    with capture_logs():
        listener.tick_ended(leads=True)
        listener.round_ended(IT)
        assert all(REGISTRY.get_sample_value(name) is not None for name in names)
        listener.tick_ended(leads=False)
        assert [REGISTRY.get_sample_value(name) for name in names] == [None, None]
        listener.round_ended(IT)  # it had begun before another worker was elected
    assert [REGISTRY.get_sample_value(name) for name in names] == [None, None]


def test_logs_speak_tidbs_words() -> None:
    with capture_logs() as logs:
        listener = LogAndCount("me")
        listener.round_skipped(GCRunningError("there's already a gc job running, skipped"))
        listener.held_back(IT, 9, moved=False)
        listener.held_back(IT, 9, moved=True)
        listener.life_time_raised(1000, 600_000)
        for off in (False, False, True, False):
            listener.configured(GCConfig(enable=off))
        listener.range_deleted(DeleteRange(1, 1, b"a", b"b", 5), AWAY, redo=False)
        listener.stage_ended(Stage.RESOLVE_LOCKS, IT, 1.0, AWAY)
    assert [entry["event"] for entry in logs] == [
        "there's already a gc job running, skipped",
        "txn safe point not advanced, GC will be skipped",
        (
            "there's another service in the cluster requires an earlier safe point. gc will continue "
            "with the earlier one"
        ),
        "invalid gc life time",
        "gc status is disabled.",
        "gc status is disabled.",
        "delete range failed on range",
        "resolve locks returns an error",
    ]
    assert {(entry["category"], entry["uuid"]) for entry in logs} == {("gc worker", "me")}
    assert logs[1]["blocker"] == "the service feed"
