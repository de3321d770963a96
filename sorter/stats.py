"""What a sorter has done and holds: a snapshot for people, and running counts that threads may share."""

import threading
from dataclasses import dataclass

import pyarrow as pa

from sorter import metrics


@dataclass(frozen=True, slots=True)
class SorterStats:
    """State and totals since the sorter was opened.

    `live_blocks` counts a block that tables share once for each of them; `blocks_skipped_*` say what fetches did not
    have to read, `rows_read` / `rows_out` is their read amplification; `disk_error` is what the disk said when it last
    refused rows, empty when it takes them; `waiting` is the number of calls of `add` that wait for it.
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

    `runs` are the pieces on disk that may overlap or are small; `blocks_read` and `rows_read` count what fetches had to
    open, `rows_out` what they handed out.
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


class Reads:
    """What the fetches of one table cost; the table's lock guards it, but for rows_out, which is a hint."""

    __slots__ = ("blocks", "fetches", "rows_out", "rows_read")

    def __init__(self) -> None:
        self.fetches = self.blocks = self.rows_read = self.rows_out = 0

    def looked_up(self, blocks: int, rows: int) -> None:
        """A fetch needs these blocks, which have so many rows."""
        self.fetches += 1
        self.blocks += blocks
        self.rows_read += rows
        metrics.FETCH_BLOCKS.observe(blocks)


class Counters:
    """Totals of one sorter, passed on to Prometheus."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.memory_bytes = 0
        self.rows_in = self.rows_out = 0
        self.blocks_written = self.bytes_written = self.blocks_read = self.live_blocks = 0
        self.rows_read = 0
        self.skipped_by_table = self.skipped_by_range = 0

    def took(self, rows: int) -> None:
        """A puller brought rows."""
        with self._lock:
            self.rows_in += rows
        metrics.ROWS_IN.inc(rows)

    def memory(self, change_bytes: int) -> None:
        """The rows in memory became more, or fewer."""
        if change_bytes:
            with self._lock:
                self.memory_bytes += change_bytes
            metrics.MEMORY_BYTES.inc(change_bytes)

    def wrote(self, written_bytes: int, tables: int = 1) -> None:
        """A block with rows of so many tables went to disk."""
        with self._lock:
            self.blocks_written += 1
            self.live_blocks += tables
            self.bytes_written += written_bytes
        metrics.BLOCKS_WRITTEN.inc()
        metrics.BYTES_WRITTEN.inc(written_bytes)

    def dropped(self, blocks: int) -> None:
        """Blocks were cleaned."""
        with self._lock:
            self.live_blocks -= blocks

    def read(self, rows: int) -> None:
        """A block of so many rows was read."""
        with self._lock:
            self.blocks_read += 1
            self.rows_read += rows
        metrics.BLOCKS_READ.inc()
        metrics.ROWS_READ.inc(rows)

    def looked_up(self, *, wanted: int, of_table: int) -> None:
        """A fetch wants `wanted` of a table's blocks."""
        with self._lock:
            by_table, by_range = self.live_blocks - of_table, of_table - wanted
            self.skipped_by_table += by_table
            self.skipped_by_range += by_range
        metrics.BLOCKS_SKIPPED.labels("table").inc(max(by_table, 0))
        metrics.BLOCKS_SKIPPED.labels("range").inc(by_range)

    def gave(self, batch: pa.RecordBatch) -> None:
        """A fetch handed out rows."""
        with self._lock:
            self.rows_out += batch.num_rows
        metrics.ROWS_OUT.inc(batch.num_rows)
