"""The pump's counters, and gauges read from its storage when Prometheus asks."""

import time
from typing import Protocol

from prometheus_client import Counter, Gauge, Histogram

from storage.model.ts import MAX_TS, physical_ms, physical_s
from storage.pump.storage import PumpStorage, Statistics

WRITTEN = Counter(
    "tidemark_pump_written_binlogs_total", "Binlogs acknowledged, but those without content."
)
WRITTEN_BYTES = Counter("tidemark_pump_written_bytes_total", "Payload bytes acknowledged.")
REFUSED = Counter(
    "tidemark_pump_refused_binlogs_total", "WriteBinlog calls answered with an error."
)
WRITE_SECONDS = Histogram(
    "tidemark_pump_write_seconds", "A group of binlogs on its way to the disk."
)
PULLED = Counter("tidemark_pump_pulled_binlogs_total", "Binlogs sent to readers, for each reader.")
ORPHANS = Counter(
    "tidemark_pump_orphan_commits_total", "Commits not sent because their prewrite is not known."
)
UNMATCHED_CHECKS = Counter(
    "tidemark_pump_lonely_prewrites_asked_total",
    "Questions to the store what became of a prewrite: committed, rolled_back, undecided, failed.",
    ["answer"],
)
SKIPPED_BYTES = Counter(
    "tidemark_pump_skipped_bytes_total", "Damaged log bytes that a start passed over."
)
GC_KEYS = Counter("tidemark_pump_gc_keys_total", "Index keys removed by GC.")
GC_PAUSES = Counter(
    "tidemark_pump_gc_pauses_total", "Times GC waited because LevelDB had many level-0 files."
)
GC_OVERTAKEN = Counter(
    "tidemark_pump_gc_overtaken_readers_total", "Connected readers that lost binlogs to GC."
)
READERS = Gauge("tidemark_pump_readers", "Open PullBinlogs streams.")

_MAX_COMMIT_TS = Gauge(
    "tidemark_pump_max_commit_ts", "Every commit up to here can be pulled (TSO)."
)
_GC_TS = Gauge("tidemark_pump_gc_ts", "Commits up to here were removed (TSO).")
_READER_TS = Gauge(
    "tidemark_pump_slowest_reader_ts",
    "What the slowest connected reader has had (TSO); 0: nobody reads.",
)
_WAITING = Gauge("tidemark_pump_waiting_prewrites", "Prewrites without an outcome.")
_WAITING_BYTES = Gauge("tidemark_pump_waiting_prewrites_bytes", "About the memory they take.")
_WAIT_SECONDS = Gauge(
    "tidemark_pump_head_of_line_wait_seconds",
    "Age of the oldest prewrite without an outcome; everything committed after it waits for it. "
    "0: none.",
)
_LATE = Gauge("tidemark_pump_late_commits", "Commits that came after readers may have passed them.")
_INDEX_BEHIND = Gauge(
    "tidemark_pump_index_behind", "1 while the index is caught up from the log, as it stalled."
)
_INDEX_FAILURES = Gauge(
    "tidemark_pump_index_failures", "Refused writes to the index since the start."
)
_LOG_BYTES = Gauge("tidemark_pump_value_log_bytes", "Size of the value log.")
_AVAILABLE_BYTES = Gauge(
    "tidemark_pump_available_bytes", "Space left on the disk of the data directory."
)

_DISK_LOW = Gauge(
    "tidemark_pump_disk_low", "1 while binlogs are refused, as the disk has too little space."
)
_MAX_COMMIT_SECONDS = Gauge(
    "tidemark_pump_max_commit_timestamp_seconds", "Unix time of tidemark_pump_max_commit_ts."
)
_GC_SECONDS = Gauge("tidemark_pump_gc_timestamp_seconds", "Unix time of tidemark_pump_gc_ts.")
_READER_SECONDS = Gauge(
    "tidemark_pump_slowest_reader_timestamp_seconds",
    "Unix time of tidemark_pump_slowest_reader_ts; 0: nobody reads.",
)

# TiDB's pump shows these; its timestamps are milliseconds since 1970, not TSOs.
_TIDB_MAX_COMMIT_MS = Gauge(
    "binlog_pump_storage_max_commit_ts", "Milliseconds of tidemark_pump_max_commit_ts."
)
_TIDB_GC_MS = Gauge("binlog_pump_storage_gc_ts", "Milliseconds of tidemark_pump_gc_ts.")
_TIDB_SIZE = Gauge(
    "binlog_pump_storage_storage_size_bytes",
    "Type available: space left on the disk of the data directory.",
    ["type"],
)


def count_group(seconds: float, binlogs: int, size: int) -> None:
    """Count a group of binlogs; `size` in bytes."""
    WRITE_SECONDS.observe(seconds)
    WRITTEN.inc(binlogs)
    WRITTEN_BYTES.inc(size)


class Disk(Protocol):
    """The space left for binlogs: `server.pump.upkeep.DiskWatch`."""

    available_bytes: int

    @property
    def is_low(self) -> bool:
        """Whether binlogs are refused for want of disk space."""


def watch(storage: PumpStorage, disk: Disk) -> None:
    """Let the metrics show this storage from now on."""
    storage.observe_groups(count_group)
    for gauge, value in (
        (_MAX_COMMIT_TS, lambda: storage.max_commit_ts),
        (_GC_TS, lambda: storage.gc_ts),
        (_READER_TS, lambda: storage.readers.lowest_ts % MAX_TS),
        (_WAITING, lambda: storage.statistics().waiting_prewrites),
        (_WAITING_BYTES, lambda: storage.waiting_bytes),
        (_WAIT_SECONDS, lambda: _wait_seconds(storage.statistics())),
        (_LATE, lambda: storage.statistics().late_commits),
        (_INDEX_BEHIND, lambda: storage.statistics().index_behind),
        (_INDEX_FAILURES, lambda: storage.statistics().index_failures),
        (_LOG_BYTES, lambda: storage.statistics().log_bytes),
        (_AVAILABLE_BYTES, lambda: disk.available_bytes),
        (_DISK_LOW, lambda: disk.is_low),
        (_MAX_COMMIT_SECONDS, lambda: physical_s(storage.max_commit_ts)),
        (_GC_SECONDS, lambda: physical_s(storage.gc_ts)),
        (_READER_SECONDS, lambda: physical_s(storage.readers.lowest_ts % MAX_TS)),
        (_TIDB_MAX_COMMIT_MS, lambda: physical_ms(storage.max_commit_ts)),
        (_TIDB_GC_MS, lambda: physical_ms(storage.gc_ts)),
        (_TIDB_SIZE.labels("available"), lambda: disk.available_bytes),
    ):
        gauge.set_function(value)


def _wait_seconds(statistics: Statistics) -> float:
    oldest_ts = statistics.oldest_waiting_ts
    return max(0.0, time.time() - physical_ms(oldest_ts) / 1000) if oldest_ts else 0.0
