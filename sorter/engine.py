"""The sorter: pullers add row changes of many tables in any order,
the sink manager fetches them sorted.

Rows wait in memory until a table's resolved rows fill a block, or memory is short; then they go to
disk. `resolve` costs next to nothing and sorts nothing by itself. The files are a cache of the
upstream: nothing survives a restart, the capture pulls again from the checkpoint. Source: TiCDC's
SortEngine, with Arrow batches in the place of rows; see docs/design/0006-sorter.md.
"""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
from prometheus_client import Gauge

from sorter.backlog import Extent
from sorter.buffer import Rows
from sorter.directory import DiskStatus, SorterDirectory
from sorter.errors import (
    EventBatchError,
    SorterClosedError,
    SorterDiskError,
    TableExistsError,
    TableNotFoundError,
)
from sorter.spill import Spiller
from sorter.stats import Counters, SorterStats, TableStats
from sorter.store import BlockStore, open_shards, shard_of
from sorter.table import Table
from storage.model.errors import CorruptError
from storage.model.event import RAW_SCHEMA, Position
from storage.model.span import Span

ResolveHook = Callable[[Span, int], None]
# shared by all tables: one for each would cost more than everything else of an idle table
_LOCKS: Final = 256
_DISK_BYTES: Final = Gauge("tidemark_sorter_disk_bytes", "Size of all segments")
_TABLES: Final = Gauge("tidemark_sorter_tables", "Tables being sorted")


@dataclass(frozen=True, slots=True, kw_only=True)
class SorterSettings:
    """How much a sorter keeps in memory, and how it writes the rest."""

    memory_bytes: int = 128 << 20
    """Bounds the rows of all tables in memory."""
    segment_bytes: int = 64 << 20
    """The size of a file."""
    block_bytes: int = 512 << 10
    """The size at which a table's resolved rows are written."""
    shards: int = 4
    """How many databases the tables are dealt to."""
    clean_interval_s: float = 5.0
    """The least time between two deletions of a table's blocks (TiCDC: 5 s)."""
    disk_retry_s: float = 1.0
    """How long after a refused write the disk is tried again."""


DEFAULTS: Final = SorterSettings()


class Sorter:
    """Sorts the tables of one capture; every method may be called from any thread."""

    def __init__(
        self,
        directory: Path,
        settings: SorterSettings = DEFAULTS,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open in `directory`, and remove whatever an earlier process left there; `clock` gives
        monotonic seconds.

        Raises:
            DirectoryLockedError: another process uses the directory.
            DirectoryUnusableError: it cannot be created or written.
        """
        self._counters = Counters()
        self._directory = SorterDirectory(directory)
        self._stores = open_shards(
            directory,
            settings.shards,
            segment_bytes=settings.segment_bytes,
            block_bytes=settings.block_bytes,
            counters=self._counters,
        )
        self._disk = DiskStatus(settings.disk_retry_s, clock)
        self._spiller = Spiller(self._counters, settings.memory_bytes, settings.block_bytes)
        self._compaction = _Compaction()
        self._block_bytes = settings.block_bytes
        self._clean_interval_s = settings.clean_interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self._locks = [threading.Lock() for _ in range(_LOCKS)]
        self._unique_ids = itertools.count(1)
        self._tables: dict[Span, Table] = {}
        self._hooks: list[ResolveHook] = []
        self._closed = False

    def add_table(self, span: Span, start_ts: int) -> None:
        """Begin to sort a table whose rows all have a commit_ts > `start_ts`;
        rows of an earlier table never come back.

        Raises:
            TableExistsError: it is there already.
        """
        with self._lock:
            self._check_open()
            if span in self._tables:
                raise TableExistsError(
                    f"table {span.table_id} is being sorted already; remove it first"
                )
            store, unique_id = (
                self._stores[shard_of(span, len(self._stores))],
                next(self._unique_ids),
            )
            self._tables[span] = Table(
                span, unique_id, start_ts, store, self._locks[unique_id % _LOCKS]
            )
        _TABLES.inc()

    def remove_table(self, span: Span) -> None:
        """Drop a table and all its rows; fetches under way finish.

        A table that is not there is no error.
        """
        with self._lock:
            self._check_open()
            table = self._tables.pop(span, None)
        if table is not None:
            table.remove()
            self._spiller.remove(table)
            _TABLES.dec()

    def add(self, span: Span, batch: pa.RecordBatch) -> None:
        """Take rows (RAW_SCHEMA) in any order, all above the table's resolved_ts;
        writes to disk when memory is short.

        While the disk takes nothing, this waits until it does, or until rows are cleaned or the
        table is removed: the feed pauses, and nothing is lost. `stats` and a metric show it.

        Raises:
            EventBatchError: another schema, or nulls where it allows none.
            EventBelowResolvedError: a row at or below the resolved_ts; nothing of the batch was
                taken.
            SorterClosedError: it was closed, or `end_waits` called, while this waited.
        """
        table = self._table(span)
        _check_batch(batch)
        if not batch.num_rows:
            return
        table.add(Rows.of(batch))
        self._counters.add_rows_in(batch.num_rows)
        self._spiller.add(table)
        # A table that was removed meanwhile must not keep its feed waiting.
        while self._spiller.is_short and self._tables.get(span) is table:
            try:
                self._spiller.spill()
                self._disk.record_success()
            except SorterDiskError as err:
                self._disk.record_failure(err)
                if not self._disk.wait_for_retry():
                    raise _closed() from err
            else:
                self._compact(table.store)

    def resolve(self, span: Span, ts: int) -> None:
        """Promise that all rows with commit_ts <= `ts` have been added;
        they can be fetched when the hooks are called.

        Rows that the disk does not take stay in memory, and can be fetched.

        Raises:
            ResolvedRegressedError: `ts` is below an earlier promise.
        """
        table = self._table(span)
        # The promise comes before the hooks: a hook may fetch up to `ts` at once.
        table.resolve(ts)
        for hook in self._hooks:
            hook(span, ts)
        if table.memory_bytes >= self._block_bytes and self._disk.may_write():
            written = self._counters.blocks_written
            try:
                table.flush(self._block_bytes)
            except SorterDiskError as err:
                self._disk.record_failure(err)
            else:
                if self._counters.blocks_written > written:
                    self._disk.record_success()
                    self._compact(table.store)
        table.drop_cleaned(self._clock(), self._clean_interval_s)

    def on_resolve(self, hook: ResolveHook) -> None:
        """Call `hook(span, ts)` after every `resolve`, in its thread; it must not wait."""
        self._hooks.append(hook)

    def fetch(self, span: Span, lower: Position, upper: Position) -> Iterator[pa.RecordBatch]:
        """Rows within `[lower, upper]`, sorted by (commit_ts, start_ts, op, key),
        without duplicates.

        A transaction may cross the borders of batches. The range is fixed when this returns;
        cleaning does not disturb it.

        Raises:
            NotResolvedError: `upper` is above the resolved_ts.
            RangeCleanedError: `lower` is not above what was cleaned (at first: the table's
                start_ts).
            BlockCorruptError: while iterating, a block is damaged.
        """
        return self._table(span).fetch(lower, upper, 2 * self._block_bytes)

    def extents(self, span: Span, lower_ts: int, upper_ts: int) -> list[Extent]:
        """Where rows with commit_ts in `[lower_ts, upper_ts]` lie, without reading them.

        Extents at the edges reach beyond the range; duplicates are counted each time they came.

        Raises:
            NotResolvedError, RangeCleanedError: as `fetch`.
        """
        return self._table(span).extents(lower_ts, upper_ts)

    def clean(self, span: Span, upper: Position) -> None:
        """Give up rows at or below `upper` (inclusive): at once for `fetch`,
        within `clean_interval_s` on disk.

        Raises:
            NotResolvedError: `upper` is above the resolved_ts.
        """
        self._table(span).clean(upper, self._clock(), self._clean_interval_s)

    def resolved_ts(self, span: Span) -> int:
        """The last promise for the table; at first its start_ts."""
        return self._table(span).resolved_ts

    def is_empty(self, span: Span) -> bool:
        """Whether no row of the table is held, so that there is none up to its resolved_ts;
        costs next to nothing.
        """
        return self._table(span).is_empty()

    def stats(self) -> SorterStats:
        """State and totals of this moment."""
        sizes = [store.sizes() for store in self._stores]
        segments, disk_bytes = (sum(column) for column in zip(*sizes, strict=True))
        _DISK_BYTES.set(disk_bytes)
        counters = self._counters
        return SorterStats(
            tables=len(self._tables),
            memory_bytes=counters.memory_bytes,
            segments=segments,
            disk_bytes=disk_bytes,
            live_blocks=counters.live_blocks,
            rows_in=counters.rows_in,
            rows_out=counters.rows_out,
            blocks_written=counters.blocks_written,
            bytes_written=counters.bytes_written,
            blocks_read=counters.blocks_read,
            rows_read=counters.rows_read,
            blocks_skipped_by_table=counters.skipped_by_table,
            blocks_skipped_by_range=counters.skipped_by_range,
            disk_error=self._disk.error,
            waiting=self._disk.waiting,
        )

    def table_stats(self, span: Span) -> TableStats:
        """State and totals of one table.

        Raises:
            TableNotFoundError: it is not being sorted.
        """
        return self._table(span).stats()

    def end_waits(self) -> None:
        """Let no `add` wait for the disk from now on;
        for a caller that joins the threads that add, before `close`.
        """
        self._disk.close()

    def close(self) -> None:
        """Drop everything; fetches under way finish. Closing twice is harmless."""
        with self._lock:
            if self._closed:
                return
            tables, self._tables = list(self._tables.values()), {}
            self._closed = True
        # An `add` that waits for the disk ends with its error now; its table is gone.
        self.end_waits()
        for table in tables:
            table.remove()
        self._spiller.stop()
        # Stores may only be closed when no compaction writes to them.
        self._compaction.stop()
        _TABLES.dec(len(tables))
        for store in self._stores:
            store.close()
        self._directory.close()

    def _compact(self, store: BlockStore) -> None:
        if store.began_segment:
            self._compaction.run(store, list(self._tables.values()))

    def _table(self, span: Span) -> Table:
        table = self._tables.get(span)
        if table is None:
            self._check_open()
            raise TableNotFoundError(
                f"table {span.table_id} is not being sorted here; add it first"
            )
        return table

    def _check_open(self) -> None:
        if self._closed:
            raise _closed()


def _closed() -> SorterClosedError:
    return SorterClosedError("the sorter is closed, or about to be; open a new one")


def _check_batch(batch: pa.RecordBatch) -> None:
    if not batch.schema.equals(RAW_SCHEMA):
        raise EventBatchError(f"rows need the schema\n{RAW_SCHEMA}\nbut have\n{batch.schema}")
    for field in RAW_SCHEMA:
        if not field.nullable and batch.column(field.name).null_count:
            raise EventBatchError(
                f"column {field.name!r} holds nulls; every change has a {field.name}"
            )


class _Compaction:
    """Empties sparse segments, in the thread that writes rows; safe to call from several.

    A few blocks of tables that nobody reads would keep whole segments alive. A segment is emptied
    when a quarter of it is alive at most, so at most a third of the space that becomes free is
    written again, and only when a new segment was begun, so that a sorter that nothing is written
    to does nothing.
    """

    def __init__(self) -> None:
        self._running = threading.Lock()

    def run(self, store: BlockStore, tables: Iterable[Table]) -> None:
        """Move what is alive in the sparse segments of `store`, if there are several;
        `tables` are all there are.
        """
        # One compaction at a time is enough; a thread that adds rows must not wait for another's.
        if not self._running.acquire(blocking=False):
            return
        try:
            sparse = store.sparse()
            if sparse:
                # It is tried again at the next segment; fetching a damaged block raises its error.
                with contextlib.suppress(SorterDiskError, CorruptError):
                    _empty_segments(store, sparse, {table.unique_id: table for table in tables})
        finally:
            self._running.release()

    def stop(self) -> None:
        """Wait for the one that runs, and let none begin."""
        self._running.acquire()


def _empty_segments(store: BlockStore, sparse: frozenset[int], tables: dict[int, Table]) -> None:
    for unique_id, entries in store.entries_in(sparse):
        table = tables.get(unique_id)
        if table is not None:  # it may have been removed meanwhile
            table.move(entries)
