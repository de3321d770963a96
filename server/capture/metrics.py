"""Metrics of a capture: counters, and gauges that are computed from its changefeeds at each scrape.

`lags_s` is how far each stage of a changefeed is behind the one before it: upstream, puller,
sorter, sink, reader. Sorted is what the pullers have promised to the sorter to be complete; the
sink goes as far, but not beyond the schema changes that are known; the reader is where it has
acknowledged. What the lake job does itself is `tidemark_spark_*`.

`ticdc_owner_*` are TiCDC's names with TiCDC's units, so that its alerts and dashboards hold. Its
`ticdc_owner_ownership_counter` is not among them: promtool refuses the name.
"""

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import Counter, Gauge
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from server.capture.feed import Feed
from server.capture.job_report import JOB_STATES, shown_state
from server.capture.readers import READER_STATES
from server.changefeed.info import State
from server.leader_gauge import LeaderGauge
from storage.model.ts import physical_ms, physical_s

PULLER, SORTER, SINK, READER = STAGES = ("puller", "sorter", "sink", "reader")
OWNER = Gauge("tidemark_capture_is_owner", "1 if this capture owns the changefeeds")
MAINTAINED = Gauge(
    "tidemark_capture_maintained_changefeeds", "changefeeds of logs that this capture runs"
)
UNMAINTAINED = LeaderGauge(
    "tidemark_capture_unmaintained_changefeeds",
    "changefeeds of logs that no capture runs at this moment; only at the owner",
)
ERRORS = Counter(
    "tidemark_capture_changefeed_errors_total",
    "how often a changefeed stopped by an error",
    ["code"],
)
REPAIRS = Counter(
    "tidemark_capture_table_repairs_total", "tables pulled again, as rows of them were damaged here"
)
JOB_ERRORS = Counter(
    "tidemark_capture_job_errors_total",
    "errors that lake jobs reported, each once while it lasts",
    ["changefeed"],
)
SHARING_CAPTURES = LeaderGauge(
    "tidemark_capture_sharing_captures",
    "captures among which the owner divides tables, itself included; only at the owner",
)
MOVES = Counter(
    "tidemark_capture_moves_total",
    "how often a changefeed of a log went to another capture",
    ["changefeed"],
)
TABLES_MOVED = Counter(
    "tidemark_capture_tables_moved_total",
    "tables that went from one capture or worker process to another while their changefeed went on",
    ["changefeed"],
)
SAFEPOINTS = Counter(
    "tidemark_capture_safepoint_updates_total", "service safepoints set at the coordinator"
)
_GAUGES = {
    "tidemark_capture_checkpoint_ts": "everything up to it is at the target",
    "tidemark_capture_checkpoint_timestamp_seconds": "Unix time of checkpoint_ts",
    "tidemark_capture_checkpoint_lag_seconds": "wall clock minus checkpoint_ts",
    "tidemark_capture_resolved_ts": "everything up to it can be read",
    "tidemark_capture_resolved_timestamp_seconds": "Unix time of resolved_ts",
    "tidemark_capture_resolved_lag_seconds": "wall clock minus resolved_ts",
    "tidemark_capture_regions": "regions subscribed to",
    "tidemark_capture_staged_bytes": "mounted rows kept in memory for readers",
    "tidemark_capture_sorter_memory_bytes": "rows in memory, not yet in a block",
    "tidemark_capture_sorter_disk_bytes": "sorted rows on disk",
    "tidemark_capture_sorter_disk_refuses": "1 while the sorter's disk takes no rows",
    "tidemark_capture_sorter_waiting_calls": "calls that wait until the sorter's disk takes rows",
}

_TICDC_NAMESPACE = "default"
_TICDC_STATUS = {
    State.NORMAL: 0,
    State.FAILED: 2,
    State.STOPPED: 3,
    State.FINISHED: 4,
    State.REMOVED: 5,
    State.WARNING: 6,
}
"""TiCDC's number for each state; 1 is pending, which does not occur here."""


def lags_s(
    now_s: float, pulled_ts: int, sorted_ts: int, resolved_ts: int, checkpoint_ts: int
) -> dict[str, float]:
    """Seconds by stage, never below 0; a position that is not known (0) is no stage,
    and counts with the next.
    """
    lags, before_s = {}, now_s
    for stage, ts in zip(STAGES, (pulled_ts, sorted_ts, resolved_ts, checkpoint_ts), strict=True):
        if ts:
            # Positions are read one after the other while they move: one that is ahead of the
            # stage before it counts as level with it.
            at_s = min(physical_ms(ts) / 1e3, before_s)
            lags[stage] = before_s - at_s
            before_s = at_s
    return lags


class FeedCollector(Collector):
    """The gauges of the changefeeds this capture owns: as many series as changefeeds."""

    def __init__(self, feeds: Callable[[], Iterable[Feed]]) -> None:
        self._feeds = feeds

    def describe(self) -> list[GaugeMetricFamily]:
        """No family is known before `collect`."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield one family a gauge, and the states."""
        feeds = list(self._feeds())
        values = [(feed.id, _values(feed)) for feed in feeds]
        for name, text in _GAUGES.items():
            family = GaugeMetricFamily(name, text, labels=["changefeed"])
            for changefeed, shown in values:
                family.add_metric([changefeed], shown[name])
            yield family
        yield from _ticdc(feeds)
        yield _stage_lags(feeds)
        yield from _jobs(feeds)
        yield _unread(feeds)
        yield _readers(feeds)
        yield _reader_states(feeds)
        yield from _silences(feeds)
        yield from _histories(feeds)
        states = GaugeMetricFamily(
            "tidemark_capture_changefeed_state",
            "1 for the state it is in",
            labels=["changefeed", "state"],
        )
        for feed in feeds:
            current, _ = shown_state(feed.info, feed.job, feed.audit, time.monotonic())
            for state in State:
                states.add_metric([feed.id, state.value], float(state is current))
        yield states


def _ticdc(feeds: Iterable[Feed]) -> Iterator[GaugeMetricFamily]:
    """Positions are milliseconds since 1970 as TiCDC shows them, not TSOs; lags are seconds."""
    checkpoint = GaugeMetricFamily(
        "ticdc_owner_checkpoint_ts",
        "milliseconds of checkpoint_ts",
        labels=["namespace", "changefeed"],
    )
    checkpoint_lag = GaugeMetricFamily(
        "ticdc_owner_checkpoint_ts_lag",
        "seconds: wall clock minus checkpoint_ts",
        labels=["namespace", "changefeed"],
    )
    resolved = GaugeMetricFamily(
        "ticdc_owner_resolved_ts", "milliseconds of resolved_ts", labels=["namespace", "changefeed"]
    )
    resolved_lag = GaugeMetricFamily(
        "ticdc_owner_resolved_ts_lag",
        "seconds: wall clock minus resolved_ts",
        labels=["namespace", "changefeed"],
    )
    status = GaugeMetricFamily(
        "ticdc_owner_status",
        "0 normal, 2 failed, 3 stopped, 4 finished, 5 removed, 6 warning",
        labels=["namespace", "changefeed"],
    )
    for feed in feeds:
        labels = [_TICDC_NAMESPACE, feed.id]
        resolved_ts = feed.processor.resolved_ts
        state, _ = shown_state(feed.info, feed.job, feed.audit, time.monotonic())
        checkpoint.add_metric(labels, physical_ms(feed.checkpoint_ts))
        checkpoint_lag.add_metric(labels, _lag_s(feed.checkpoint_ts))
        resolved.add_metric(labels, physical_ms(resolved_ts))
        resolved_lag.add_metric(labels, _lag_s(resolved_ts))
        status.add_metric(labels, _TICDC_STATUS[state])
    yield from (checkpoint, checkpoint_lag, resolved, resolved_lag, status)


def _stage_lags(feeds: Iterable[Feed]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(
        "tidemark_capture_stage_lag_seconds",
        "how far each stage is behind the one before it: upstream, puller, sorter, sink, reader",
        labels=["changefeed", "stage"],
    )
    for feed in feeds:
        processor = feed.processor
        stats = processor.stats()
        positions = stats.pulled_ts, stats.sorted_ts, processor.resolved_ts, processor.checkpoint_ts
        lags = lags_s(time.time(), *positions)
        for stage, lag_s in lags.items():
            family.add_metric([feed.id, stage], lag_s)
    return family


def _jobs(feeds: Iterable[Feed]) -> Iterator[GaugeMetricFamily]:
    """State and lag of the lake jobs that have reported."""
    states = GaugeMetricFamily(
        "tidemark_capture_job_state",
        "1 for the state that the lake job is in",
        labels=["changefeed", "state"],
    )
    lags = GaugeMetricFamily(
        "tidemark_capture_job_lag_seconds",
        "wall clock minus the newest cut in the lake",
        labels=["changefeed"],
    )
    for feed in feeds:
        job = feed.job
        if job is None:
            continue
        current = job.state(time.monotonic())
        for state in JOB_STATES:
            states.add_metric([feed.id, state], float(state == current))
        if job.report.cut_ts:
            lags.add_metric([feed.id], _lag_s(job.report.cut_ts))
    yield states
    yield lags


def _unread(feeds: Iterable[Feed]) -> GaugeMetricFamily:
    """Measure for how long running changefeeds have not been read."""
    family = GaugeMetricFamily(
        "tidemark_capture_unread_seconds",
        "for how long nobody has asked for the changefeed's rows",
        labels=["changefeed"],
    )
    for feed in feeds:
        if feed.info.state.is_running:
            family.add_metric([feed.id], feed.reading.idle_s(time.monotonic()))
    return family


def _readers(feeds: Iterable[Feed]) -> GaugeMetricFamily:
    """Measure how far named readers are behind."""
    family = GaugeMetricFamily(
        "tidemark_capture_reader_lag_seconds",
        "wall clock minus what a reader that has a name has acknowledged",
        labels=["changefeed", "reader"],
    )
    for feed in feeds:
        for name, ts in feed.readers.named().items():
            family.add_metric([feed.id, name], _lag_s(ts))
    return family


def _reader_states(feeds: Iterable[Feed]) -> GaugeMetricFamily:
    """Show whether the history that named readers still need is kept for them."""
    family = GaugeMetricFamily(
        "tidemark_capture_reader_state",
        "1 for the state that a reader with a name is in",
        labels=["changefeed", "reader", "state"],
    )
    for feed in feeds:
        for reader in feed.readers.states(feed.kept_ts):
            for state in READER_STATES:
                shown = float(state == reader.state)
                family.add_metric([feed.id, reader.name, state], shown)
    return family


def _silences(feeds: Iterable[Feed]) -> Iterator[GaugeMetricFamily]:
    """Measure for how long named readers have acknowledged nothing, and the limit for that."""
    silences = GaugeMetricFamily(
        "tidemark_capture_reader_silent_seconds",
        "for how long a reader that has a name has acknowledged nothing",
        labels=["changefeed", "reader"],
    )
    limits = GaugeMetricFamily(
        "tidemark_capture_reader_ttl_seconds",
        "after so long a silence a reader that has a name is held for no more (--reader-ttl)",
        labels=["changefeed", "reader"],
    )
    for feed in feeds:
        for reader in feed.readers.states():
            silences.add_metric([feed.id, reader.name], reader.silent_s)
            limits.add_metric([feed.id, reader.name], float(feed.info.reader_limit_s))
    yield silences
    yield limits


def _histories(feeds: Iterable[Feed]) -> Iterator[GaugeMetricFamily]:
    """Measure how much acknowledged history changefeeds keep."""
    seconds = GaugeMetricFamily(
        "tidemark_capture_kept_history_seconds",
        "from the first change that is kept to the checkpoint",
        labels=["changefeed"],
    )
    sizes = GaugeMetricFamily(
        "tidemark_capture_kept_history_bytes",
        "sorted rows that readers have acknowledged and that are kept",
        labels=["changefeed"],
    )
    limits_s = GaugeMetricFamily(
        "tidemark_capture_kept_history_limit_seconds",
        "for how long acknowledged changes are kept, where that is said (--retain)",
        labels=["changefeed"],
    )
    limits_bytes = GaugeMetricFamily(
        "tidemark_capture_kept_history_limit_bytes",
        "up to which size acknowledged changes are kept, where that is said (--retain)",
        labels=["changefeed"],
    )
    for feed in feeds:
        if feed.history.is_kept:
            retention = feed.info.retention
            for limits, limit in (
                (limits_s, retention.age_s),
                (limits_bytes, retention.size_bytes),
            ):
                if limit:
                    limits.add_metric([feed.id], float(limit))
            kept_ts, checkpoint_ts = feed.kept_ts, feed.processor.checkpoint_ts
            kept_s = physical_s(checkpoint_ts) - physical_s(kept_ts)
            seconds.add_metric([feed.id], max(0.0, kept_s))
            sizes.add_metric([feed.id], float(feed.history.size_bytes))
    yield seconds
    yield sizes
    yield limits_s
    yield limits_bytes


def _values(feed: Feed) -> dict[str, float]:
    processor = feed.processor
    stats = processor.stats()
    numbers = (
        feed.checkpoint_ts,
        physical_s(feed.checkpoint_ts),
        _lag_s(feed.checkpoint_ts),
        processor.resolved_ts,
        physical_s(processor.resolved_ts),
        _lag_s(processor.resolved_ts),
        stats.regions,
        stats.staged_bytes,
        stats.sorter_memory_bytes,
        stats.sorter_disk_bytes,
        bool(stats.disk_error),
        stats.waiting,
    )
    return dict(zip(_GAUGES, map(float, numbers), strict=True))


def _lag_s(ts: int) -> float:
    return time.time() - physical_s(ts)
