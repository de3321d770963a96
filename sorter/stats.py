"""The counts of a sorter: snapshots for people, and the running counts behind them, passed to
Prometheus.

The metrics are sums over all sorters of the process.
"""

import threading
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from prometheus_client import Counter, Gauge, Histogram

_ROWS_IN: Final = Counter("tidemark_sorter_rows_in_total", "Row changes taken from pullers")
_ROWS_OUT: Final = Counter(
    "tidemark_sorter_rows_out_total", "Row changes handed out, each time they are"
)
_BLOCKS_WRITTEN: Final = Counter(
    "tidemark_sorter_blocks_written_total", "Blocks written to segments"
)
_BYTES_WRITTEN: Final = Counter("tidemark_sorter_written_bytes_total", "Bytes written to segments")
_MOVED_BYTES: Final = Counter(
    "tidemark_sorter_moved_bytes_total", "Bytes written again so that mostly dead segments could go"
)
_BLOCKS_READ: Final = Counter("tidemark_sorter_blocks_read_total", "Blocks read back")
_ROWS_READ: Final = Counter(
    "tidemark_sorter_rows_read_total",
    "Rows of the blocks read back: read amplification over rows out",
)
_FETCH_BLOCKS: Final = Histogram(
    "tidemark_sorter_fetch_blocks",
    "Blocks that a fetch has to read",
    buckets=(0, 1, 2, 4, 8, 16, 64, 256, 1024, 4096),
)
# by: table, range
_BLOCKS_SKIPPED: Final = Counter(
    "tidemark_sorter_blocks_skipped_total", "Blocks a fetch did not have to read", ["by"]
)
_MEMORY_BYTES: Final = Gauge("tidemark_sorter_memory_bytes", "Rows held in memory")


@dataclass(frozen=True, slots=True)
class SorterStats:
    """State and totals since the sorter was opened.

    `live_blocks` counts a block that tables share once for each of them; `blocks_skipped_*` say
    what fetches did not have to read, `rows_read` / `rows_out` is their read amplification;
    `disk_error` is what the disk said when it last refused rows, empty when it takes them;
    `waiting` is the number of calls of `add` that wait for it.
    """

    tables: int
    memory_bytes: int
    segments: int
    disk_bytes: int
    live_blocks: int
    rows_in: int
    rows_out: int
    blocks_written: int
    bytes_written: int
    blocks_read: int
    rows_read: int
    blocks_skipped_by_table: int
    blocks_skipped_by_range: int
    disk_error: str
    waiting: int


@dataclass(frozen=True, slots=True)
class TableStats:
    """One table: how far it is, what it holds, and what its fetches cost.

    `runs` are the pieces on disk that may overlap or are small; `blocks_read` and `rows_read` count
    what fetches had to open, `rows_out` what they handed out.
    """

    table_id: int
    resolved_ts: int
    cleaned_ts: int
    memory_bytes: int
    blocks: int
    runs: int
    fetches: int
    blocks_read: int
    rows_read: int
    rows_out: int


class FetchCounts:
    """The cost of one table's fetches; the table's lock guards it, but for `rows_out`, which is
    approximate.
    """

    __slots__ = ("blocks", "fetches", "rows_out", "rows_read")

    def __init__(self) -> None:
        self.fetches = self.blocks = self.rows_read = self.rows_out = 0

    def add_fetch(self, blocks: int, rows: int) -> None:
        """Count a fetch that needs these blocks, which have so many rows."""
        self.fetches += 1
        self.blocks += blocks
        self.rows_read += rows
        _FETCH_BLOCKS.observe(blocks)


class Counters:
    """Totals of one sorter; safe to call from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.memory_bytes = 0
        self.rows_in = self.rows_out = 0
        self.blocks_written = self.bytes_written = self.blocks_read = self.live_blocks = 0
        self.rows_read = 0
        self.skipped_by_table = self.skipped_by_range = 0

    def add_rows_in(self, rows: int) -> None:
        """Count rows that a puller brought."""
        with self._lock:
            self.rows_in += rows
        _ROWS_IN.inc(rows)

    def change_memory(self, change_bytes: int) -> None:
        """The rows in memory take so many bytes more (negative: fewer)."""
        if change_bytes:
            with self._lock:
                self.memory_bytes += change_bytes
            _MEMORY_BYTES.inc(change_bytes)

    def add_written_block(self, written_bytes: int, tables: int = 1) -> None:
        """Count a block on disk with rows of so many tables."""
        with self._lock:
            self.blocks_written += 1
            self.live_blocks += tables
            self.bytes_written += written_bytes
        _BLOCKS_WRITTEN.inc()
        _BYTES_WRITTEN.inc(written_bytes)

    def add_moved_bytes(self, moved_bytes: int) -> None:
        """Count bytes of a block that was written to another segment."""
        _MOVED_BYTES.inc(moved_bytes)

    def remove_blocks(self, blocks: int) -> None:
        """Blocks are dead now."""
        with self._lock:
            self.live_blocks -= blocks

    def add_read_block(self, rows: int) -> None:
        """Count a block of so many rows that was read."""
        with self._lock:
            self.blocks_read += 1
            self.rows_read += rows
        _BLOCKS_READ.inc()
        _ROWS_READ.inc(rows)

    def add_lookup(self, *, needed: int, of_table: int) -> None:
        """Count a fetch that needs `needed` of the `of_table` blocks that its table has."""
        with self._lock:
            by_table, by_range = self.live_blocks - of_table, of_table - needed
            self.skipped_by_table += by_table
            self.skipped_by_range += by_range
        _BLOCKS_SKIPPED.labels("table").inc(max(by_table, 0))
        _BLOCKS_SKIPPED.labels("range").inc(by_range)

    def add_rows_out(self, batch: pa.RecordBatch) -> None:
        """Count rows that a fetch handed out."""
        with self._lock:
            self.rows_out += batch.num_rows
        _ROWS_OUT.inc(batch.num_rows)
