"""Prometheus metrics of GC under TiKV's own names, so that its dashboards and alerts fit."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.samples import Sample


class TikvCounter(Counter):
    """A counter whose samples carry its name as it is: TiKV's do not end in `_total`."""

    def _child_samples(self) -> Iterable[Sample]:
        return [sample._replace(name="") for sample in super()._child_samples() if sample.name == "_total"]


TASKS = TikvCounter("tikv_gcworker_gc_tasks_vec", "GC tasks run.", ["task"])
TASKS_FAILED = TikvCounter("tikv_gcworker_gc_task_fail_vec", "GC tasks that failed.", ["task"])
TASK_SECONDS = Histogram(
    "tikv_gcworker_gc_task_duration_vec",
    "Duration of GC tasks.",
    ["task"],
    buckets=[0.0005 * 2**power for power in range(20)],
)
KEYS = TikvCounter("tikv_gcworker_gc_keys", "Write records GC looked at (total) and deleted (deleted).", ["cf", "tag"])
DELETED_VERSIONS = Histogram(
    "tikv_storage_mvcc_gc_delete_versions",
    "Versions deleted per region and walk.",
    buckets=[2.0**power for power in range(24)],
)
SKIPPED = TikvCounter("tikv_storage_gc_skipped_counter", "Regions skipped because they hold too few old versions.")
WRITTEN_BYTES = Counter("tidemark_store_gc_write_bytes_total", "Bytes of deletes that GC wrote.")
MAX_WRITE_BYTES = Gauge("tidemark_store_gc_max_write_bytes_per_sec", "The limit of GC's writes; 0 is none.")
AUTO_STATUS = Gauge("tikv_gcworker_autogc_status", "1 for the state the store's GC is in.", ["state"])
AUTO_SAFE_POINT = Gauge("tikv_gcworker_autogc_safe_point", "Safepoint the store collects at.")
AUTO_REGIONS = Gauge("tikv_gcworker_autogc_processed_regions", "Regions done in the current walk.", ["type"])


@contextmanager
def task(name: str) -> Iterator[None]:
    """Count and time a task."""
    TASKS.labels(name).inc()
    try:
        with TASK_SECONDS.labels(name).time():
            yield
    except BaseException:
        TASKS_FAILED.labels(name).inc()
        raise


def collected(seen: int, deleted: int) -> None:
    """One region was walked."""
    KEYS.labels("write", "total").inc(seen)
    KEYS.labels("write", "deleted").inc(deleted)
    DELETED_VERSIONS.observe(deleted)


def auto_state(state: str) -> None:
    """The store's GC is `working` or `idle`."""
    for known in ("working", "idle"):
        AUTO_STATUS.labels(known).set(known == state)
