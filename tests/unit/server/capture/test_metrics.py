"""What a capture shows when it is scraped: names as Prometheus wants them,
and the lag of each stage.
"""

import re
import time
from types import SimpleNamespace

from prometheus_client import CollectorRegistry, generate_latest

from server.capture.audit import Audit
from server.capture.feed import ReadActivity
from server.capture.history import KeptHistory
from server.capture.metrics import FeedCollector
from server.capture.processor import ProcessorStats
from server.capture.readers import ReaderRecord, Readers
from server.changefeed.info import State
from sink.retention import Retention

NAME = re.compile(
    r"tidemark_capture_(regions|sorter_waiting_calls|[a-z_]+_(ts|seconds|bytes|total|refuses|state))"
    r"|ticdc_owner_(status|(checkpoint|resolved)_ts(_lag)?)"
)


def ts_ago(seconds):
    return int((time.time() - seconds) * 1000) << 18


def feed():
    stats = ProcessorStats(regions=2, pulled_ts=ts_ago(10), sorted_ts=ts_ago(30))
    processor = SimpleNamespace(
        resolved_ts=ts_ago(60), checkpoint_ts=ts_ago(100), stats=lambda: stats
    )
    info = SimpleNamespace(
        state=State.NORMAL,
        error=None,
        retention=Retention(age_s=50, size_bytes=4000),
        reader_limit_s=604_800,
    )
    history = KeptHistory(is_kept=True)
    history.size_bytes = 5000
    return SimpleNamespace(
        id="bank",
        processor=processor,
        checkpoint_ts=ts_ago(100),
        info=info,
        job=None,
        audit=Audit(),
        reading=ReadActivity(time.monotonic() - 300),
        readers=Readers({"etl": ReaderRecord(ts_ago(40))}, ts_ago(100), has_lake_job=True),
        history=history,
        kept_ts=ts_ago(160),
    )


def test_names_and_stages():
    registry = CollectorRegistry()
    registry.register(FeedCollector(lambda: [feed()]))
    names = {
        line.split()[2]
        for line in generate_latest(registry).decode().splitlines()
        if line.startswith("# TYPE")
    }
    assert [name for name in names if not NAME.fullmatch(name)] == []
    lags = {
        stage: round(
            registry.get_sample_value(
                "tidemark_capture_stage_lag_seconds", {"changefeed": "bank", "stage": stage}
            ),
            -1,
        )
        for stage in ("puller", "sorter", "sink", "reader")
    }
    assert lags == {"puller": 10, "sorter": 20, "sink": 30, "reader": 40}
    unread_s = registry.get_sample_value("tidemark_capture_unread_seconds", {"changefeed": "bank"})
    assert round(unread_s, -1) == 300

    def value(name, **labels):
        name = f"tidemark_capture_{name}"
        return registry.get_sample_value(name, {"changefeed": "bank"} | labels)

    assert value("reader_ttl_seconds", reader="etl") == 604_800
    assert value("reader_silent_seconds", reader="etl") is not None
    assert value("kept_history_limit_seconds") == 50
    assert value("kept_history_limit_bytes") == 4000


def test_ticdc_names_have_ticdc_units():
    registry = CollectorRegistry()
    shown = feed()
    registry.register(FeedCollector(lambda: [shown]))

    def value(name):
        labels = {"namespace": "default", "changefeed": "bank"}
        return registry.get_sample_value(f"ticdc_owner_{name}", labels)

    assert value("checkpoint_ts") == shown.checkpoint_ts >> 18
    assert value("resolved_ts") == shown.processor.resolved_ts >> 18
    assert round(value("checkpoint_ts_lag"), -1) == 100
    assert round(value("resolved_ts_lag"), -1) == 60
    statuses = {}
    for state in State:
        shown.info.state = state
        statuses[state.value] = value("status")
    assert statuses == {
        "normal": 0,
        "failed": 2,
        "stopped": 3,
        "finished": 4,
        "removed": 5,
        "warning": 6,
    }


def test_stats_of_several_processes_are_as_far_as_the_slowest_that_tells():
    total = sum(
        (ProcessorStats(pulled_ts=7), ProcessorStats(pulled_ts=5, sorted_ts=3)), ProcessorStats()
    )
    assert (total.pulled_ts, total.sorted_ts) == (5, 3)
