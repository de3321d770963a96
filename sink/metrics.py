"""The sink manager's metrics, summed over all changefeeds of the process,
and what one sink manager tells of itself.

The metrics' meaning is that of TiCDC's.
"""

import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import Counter, Gauge, Histogram

from storage.model.span import Span
from storage.model.ts import physical_ms

# source: staged, sorter
ROWS_READ = Counter("tidemark_sink_rows_read_total", "Rows handed to readers", ["source"])
READS = Counter("tidemark_sink_reads_total", "Ranges read", ["source"])
ACKS = Counter("tidemark_sink_acks_total", "Acknowledgements that moved a checkpoint")
TABLES = Gauge("tidemark_sink_tables", "Tables of the sink managers")
FAILED_TABLES = Gauge(
    "tidemark_sink_failed_tables", "Tables whose staging failed, and which are read from the sorter"
)
ROWS_LOST = Counter(
    "tidemark_sink_rows_lost_total",
    "Tables stopped because rows were lost on the way to the reader",
)
QUOTA_BYTES = Gauge("tidemark_sink_quota_bytes", "Memory that may be taken")
MEMORY_BYTES = Gauge("tidemark_sink_memory_bytes", "Memory taken from the quota")
ACQUIRED = Counter(
    "tidemark_sink_acquisitions_total", "Requests of running tasks for more memory", ["mode"]
)
# result: done, gave_up, cleaned, failed, stopped
TASKS = Counter("tidemark_sink_tasks_total", "Tasks that ended", ["result"])
BATCH_ROWS = Histogram(
    "tidemark_sink_batch_rows",
    "Rows of the batches that are staged",
    buckets=tuple(4**power for power in range(11)),
)
AGE = Gauge(
    "tidemark_sink_slowest_table_age_seconds", "Age of the slowest table's timestamp", ["timestamp"]
)


@dataclass(frozen=True, slots=True)
class SinkStats:
    """State of the moment, and totals since the start."""

    tables: int
    resolved_ts: int
    checkpoint_ts: int
    barrier_ts: int | None
    quota_bytes: int
    used_bytes: int
    reads_staged: int
    reads_sorter: int
    # how far all tables are sorted, whether it may be read or not
    sorted_ts: int = 0
    slowest: Span | None = None  # the table with the least checkpoint_ts
    # why tables are not staged, but read from the sorter
    failures: Mapping[Span, str] = field(default_factory=dict)


class SlowestTable(Protocol):
    """A sink manager, as far as the ages of its slowest tables are concerned."""

    def slowest(self) -> tuple[int, int]:
        """The least (resolved_ts, checkpoint_ts) of the tables; 0 without tables."""
        ...


# Weak: a sink manager that was dropped without `stop` must not hold back the gauge for ever.
_AGES: weakref.WeakSet[SlowestTable] = weakref.WeakSet()
AGE.labels("resolved").set_function(lambda: _age_s(0))
AGE.labels("checkpoint").set_function(lambda: _age_s(1))


def watch(sink: SlowestTable) -> None:
    """Export the ages of its slowest tables until `unwatch`."""
    _AGES.add(sink)


def unwatch(sink: SlowestTable) -> None:
    """Export them no more."""
    _AGES.discard(sink)


def _age_s(which: int) -> float:
    oldest = min(_timestamps(which), default=0)
    return max(time.time() - physical_ms(oldest) / 1e3, 0.0) if oldest else 0.0


def _timestamps(which: int) -> Iterator[int]:
    for sink in list(_AGES):
        if ts := sink.slowest()[which]:
            yield ts
