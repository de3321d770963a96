"""Prometheus metrics of the store; those of GC under TiKV's own names,
so that its dashboards and alerts fit.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.samples import Sample

from storage.model.ts import physical_s

GROUP_COMMANDS = Histogram(
    "tidemark_store_group_commands",
    "Write commands per synced group.",
    buckets=[1, 2, 4, 8, 16, 32, 64, 128, 256, 1024],
)
GROUP_SECONDS = Histogram(
    "tidemark_store_group_duration_seconds",
    "Time to decide and sync one group.",
    buckets=[0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5],
)
REGIONS = Gauge("tidemark_store_regions", "Regions served by this store.")
OPEN_LOCKS = Gauge(
    "tidemark_store_open_locks", "Put and Delete locks that are neither committed nor rolled back."
)
FEED_REGIONS = Gauge("tidemark_store_feed_regions", "Region subscriptions of change feeds.")
FEED_ROWS = Counter("tidemark_store_feed_rows_total", "Rows queued for change feeds.")
FEED_CONGESTED = Counter(
    "tidemark_store_feed_congested_total", "Subscriptions cut because their reader was too slow."
)
FEED_QUEUED_BYTES = Gauge(
    "tidemark_store_feed_queued_bytes", "Bytes of changes that wait for their readers."
)
RESOLVED_TS = Gauge(
    "tidemark_store_resolved_ts", "Nothing will commit at or before it in any region of this store."
)
RESOLVED_SECONDS = Gauge(
    "tidemark_store_resolved_timestamp_seconds", "Unix time of tidemark_store_resolved_ts."
)
REGION_SPLITS = Counter("tidemark_store_region_splits_total", "Region splits, by call and by size.")
REGION_HANDOVERS = Counter(
    "tidemark_store_region_handovers_total", "Empty regions given to another store."
)
REGION_MERGES = Counter("tidemark_store_region_merges_total", "Region merges, by call and by size.")
GC_TASK_SECONDS = Histogram(
    "tikv_gcworker_gc_task_duration_vec",
    "Duration of GC tasks.",
    ["task"],
    buckets=[0.0005 * 2**power for power in range(20)],
)
GC_DELETED_VERSIONS = Histogram(
    "tikv_storage_mvcc_gc_delete_versions",
    "Versions deleted per region and walk.",
    buckets=[2.0**power for power in range(24)],
)
GC_WRITTEN_BYTES = Counter("tidemark_store_gc_write_bytes_total", "Bytes of deletes that GC wrote.")
GC_MAX_WRITE_BYTES = Gauge(
    "tidemark_store_gc_max_write_bytes_per_second", "The limit of GC's writes; 0 is none."
)
GC_STATUS = Gauge("tikv_gcworker_autogc_status", "1 for the state the store's GC is in.", ["state"])
GC_SAFE_POINT = Gauge("tikv_gcworker_autogc_safe_point", "Safepoint the store collects at.")
GC_REGIONS = Gauge(
    "tikv_gcworker_autogc_processed_regions", "Regions done in the current walk.", ["type"]
)
LOCK_WAITS = Counter(
    "tidemark_store_lock_waits_total", "Times a pessimistic lock request began to wait for a key."
)
DEADLOCKS = Counter(
    "tidemark_store_deadlocks_total",
    "Pessimistic lock requests refused because they would deadlock.",
)


def show_resolved_ts(ts: int) -> None:
    """`ts` as a TSO, and as a time."""
    RESOLVED_TS.set(ts)
    RESOLVED_SECONDS.set(physical_s(ts))


def observe_group(commands: int, seconds: float) -> None:
    """One durable group."""
    GROUP_COMMANDS.observe(commands)
    GROUP_SECONDS.observe(seconds)


class TikvCounter(Counter):
    """A counter whose samples carry its name as it is: TiKV's do not end in `_total`.

    It is shown without a type, as a counter's name in the lines of help and type does end so, and
    these lines would then belong to no sample.
    """

    _type = "unknown"

    def _child_samples(self) -> Iterable[Sample]:
        return [
            sample._replace(name="")
            for sample in super()._child_samples()
            if sample.name == "_total"
        ]


GC_TASKS = TikvCounter("tikv_gcworker_gc_tasks_vec", "GC tasks run.", ["task"])
GC_TASKS_FAILED = TikvCounter("tikv_gcworker_gc_task_fail_vec", "GC tasks that failed.", ["task"])
GC_KEYS = TikvCounter(
    "tikv_gcworker_gc_keys",
    "Write records GC looked at (total) and deleted (deleted).",
    ["cf", "tag"],
)
# TiKV's name has the word counter in it, which promtool refuses.
GC_SKIPPED = Counter(
    "tidemark_store_gc_skipped_regions_total",
    "Regions skipped because they hold too few old versions.",
)


@contextmanager
def gc_task(name: str) -> Iterator[None]:
    """Count and time a task."""
    GC_TASKS.labels(name).inc()
    try:
        with GC_TASK_SECONDS.labels(name).time():
            yield
    except BaseException:
        GC_TASKS_FAILED.labels(name).inc()
        raise


def observe_gc(seen: int, deleted: int) -> None:
    """One region was walked."""
    GC_KEYS.labels("write", "total").inc(seen)
    GC_KEYS.labels("write", "deleted").inc(deleted)
    GC_DELETED_VERSIONS.observe(deleted)


def show_gc_state(state: str) -> None:
    """The store's GC is `working` or `idle`."""
    for each in ("working", "idle"):
        GC_STATUS.labels(each).set(each == state)
