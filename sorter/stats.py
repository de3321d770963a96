"""What a sorter has done and holds: a snapshot for people, and running counts that threads may share."""

import threading
from dataclasses import dataclass

import pyarrow as pa

from sorter import metrics


@dataclass(frozen=True, slots=True)
class SorterStats:
    """State and totals since the sorter was opened; `blocks_skipped_*` say what fetches did not have to read."""

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
    blocks_skipped_by_table: int
    blocks_skipped_by_range: int


class Counters:
    """Totals of one sorter, passed on to Prometheus."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.memory_bytes = 0
        self.rows_in = self.rows_out = 0
        self.blocks_written = self.bytes_written = self.blocks_read = self.live_blocks = 0
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

    def wrote(self, written_bytes: int) -> None:
        """A block went to disk."""
        with self._lock:
            self.blocks_written += 1
            self.live_blocks += 1
            self.bytes_written += written_bytes
        metrics.BLOCKS_WRITTEN.inc()
        metrics.BYTES_WRITTEN.inc(written_bytes)

    def dropped(self, blocks: int) -> None:
        """Blocks were cleaned."""
        with self._lock:
            self.live_blocks -= blocks

    def read(self) -> None:
        """A block was read."""
        with self._lock:
            self.blocks_read += 1
        metrics.BLOCKS_READ.inc()

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
