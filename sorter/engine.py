"""The sorter of a capture: pullers add row changes of many tables in any order, the sink manager
fetches them in commit order.

`Sorter` has one `Table` for each span. Rows are in memory until a table's resolved rows fill a
block, or memory is short; then they go to disk (`Spiller`, `BlockStore`). `resolve` is cheap and
sorts nothing. The files are a cache of the upstream: nothing survives a restart, the capture pulls
again from the checkpoint. Source: TiCDC's SortEngine, with Arrow batches in the place of rows; see
docs/design/0006-sorter.md.
"""

import fcntl
import itertools
import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
from prometheus_client import Gauge

from sorter.backlog import Extent
from sorter.buffer import Rows
from sorter.errors import (
    EventBatchError,
    SorterClosedError,
    SorterDiskError,
    TableExistsError,
    TableNotFoundError,
)
from sorter.spill import Compaction, DiskStatus, Spiller
from sorter.stats import Counters, SorterStats, TableStats
from sorter.store import BlockStore, open_shards, shard_of
from sorter.table import Table
from storage.leveldb import DirectoryLockedError, DirectoryUnusableError
from storage.model.event import RAW_SCHEMA, Position
from storage.model.span import Span
from storage.spill_codec import PLAIN, SpillCodec

ResolveHook = Callable[[Span, int], None]
_LOCKS: Final = 256
"""Locks that all tables share: one for each would be most of an idle table's memory."""
_LOCK_FILE: Final = "LOCK"
_DISK_BYTES: Final = Gauge("tidemark_sorter_disk_bytes", "Size of all segments")
_TABLES: Final = Gauge("tidemark_sorter_tables", "Tables being sorted")


@dataclass(frozen=True, slots=True, kw_only=True)
class SorterSettings:
    """Settings of a sorter: its memory, and how it writes the rest to disk."""

    memory_bytes: int = 128 << 20
    """Bounds the rows of all tables in memory."""
    segment_bytes: int = 64 << 20
    """The size of a file."""
    block_bytes: int = 512 << 10
    """The size at which a table's resolved rows are written."""
    shards: int = 4
    """The number of databases that the tables are dealt to."""
    clean_interval_s: float = 5.0
    """The least time between two deletions of a table's blocks (TiCDC: 5 s)."""
    disk_retry_s: float = 1.0
    """The time after a refused write until the disk is tried again."""
    codec: SpillCodec = PLAIN
    """The encoding of blocks on the disk."""


DEFAULTS: Final = SorterSettings()


class Sorter:
    """Sorts the tables of one capture; every method may be called from any thread."""

    def __init__(
        self,
        directory: Path,
        settings: SorterSettings = DEFAULTS,
        *,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Open in `directory`, and remove whatever an earlier process left there; `clock` gives
        monotonic seconds (None: this machine's).

        Raises:
            DirectoryLockedError: another process uses the directory.
            DirectoryUnusableError: it cannot be created or written.
        """
        self._counters = Counters()
        self._directory = SorterDirectory(directory)
        try:
            self._stores = open_shards(
                directory,
                settings.shards,
                segment_bytes=settings.segment_bytes,
                block_bytes=settings.block_bytes,
                counters=self._counters,
                codec=settings.codec,
            )
        except BaseException:
            # The error's traceback keeps this object alive, and with it the lock.
            self._directory.close()
            raise
        self._clock = clock or time.monotonic
        self._disk = DiskStatus(settings.disk_retry_s, self._clock)
        self._spiller = Spiller(self._counters, settings.memory_bytes, settings.block_bytes)
        self._compaction = Compaction()
        self._block_bytes = settings.block_bytes
        self._clean_interval_s = settings.clean_interval_s
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
            # A new id for each incarnation: blocks that an earlier one of the span left in the
            # index are never taken for rows of this one.
            unique_id = next(self._unique_ids)
            store = self._stores[shard_of(span, len(self._stores))]
            lock = self._locks[unique_id % _LOCKS]
            self._tables[span] = Table(span, unique_id, start_ts, store, lock)
        _TABLES.inc()

    def remove_table(self, span: Span) -> None:
        """Drop a table and all its rows; fetches under way finish. It is no error if the table is
        not being sorted.
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
                # The rows are taken and stay in memory; what waits is the caller, so its feed
                # brings no more.
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
        # A write here only spares a later spill, so a disk that refuses is left alone until it is
        # to be tried again: `resolve` never waits for it.
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
        """The extents of rows with commit_ts in `[lower_ts, upper_ts]`, without reading them.

        Extents at the edges reach beyond the range; duplicates are counted each time they came.

        Raises:
            NotResolvedError, RangeCleanedError: as `fetch`.
        """
        return self._table(span).extents(lower_ts, upper_ts)

    def clean(self, span: Span, upper: Position) -> None:
        """Drop rows at or below `upper` (inclusive): `fetch` refuses them at once, the disk gives
        their space back within `clean_interval_s`.

        Raises:
            NotResolvedError: `upper` is above the resolved_ts.
        """
        self._table(span).clean(upper, self._clock(), self._clean_interval_s)

    def resolved_ts(self, span: Span) -> int:
        """The last promise for the table; at first its start_ts."""
        return self._table(span).resolved_ts

    def is_empty(self, span: Span) -> bool:
        """Whether the table has no row, so that there is none up to its resolved_ts; cheap."""
        return self._table(span).is_empty()

    def has_rows_above(self, span: Span, ts: int) -> bool:
        """Whether there may be a row with a commit_ts above `ts`; cheap."""
        table = self._table(span)
        return table.newest_ts > ts and not table.is_empty()

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
        # A spill under way writes to the stores, and so may the compaction that follows it.
        self._spiller.stop()
        # Stores may only be closed when no compaction writes to them.
        self._compaction.stop()
        _TABLES.dec(len(tables))
        for store in self._stores:
            store.close()
        # Last: another process empties the directory as soon as it has the lock.
        self._directory.close()

    def _compact(self, store: BlockStore) -> None:
        # Only a new segment can have made others sparse since the last look.
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


class SorterDirectory:
    """A locked directory, empty at first; the lock ends with the process, however it ends."""

    def __init__(self, path: Path) -> None:
        """Lock `path`, and only then remove everything in it:
        a full disk has room again after that.

        Raises:
            DirectoryLockedError: another process uses it; its files are left alone.
            DirectoryUnusableError: it cannot be created, written or emptied.
        """
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            fd = os.open(path / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._release = weakref.finalize(self, os.close, fd)
            try:
                # flock belongs to the descriptor: the kernel releases it after kill -9, too, so no
                # stale lock file ever keeps a capture from starting.
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _empty(path)
            except BaseException:
                # The error's traceback keeps this object alive, and with it the lock.
                self.close()
                raise
        except BlockingIOError as err:
            raise DirectoryLockedError(
                f"{path} is in use by another sorter; stop it or choose another"
            ) from err
        except OSError as err:
            raise DirectoryUnusableError(
                f"cannot use {path}: {err}; check that it exists and is writable"
            ) from err

    def close(self) -> None:
        """Release the lock."""
        self._release()


def _empty(path: Path) -> None:
    for leftover in path.iterdir():
        if leftover.is_dir():
            shutil.rmtree(leftover)
        elif leftover.name != _LOCK_FILE:
            leftover.unlink()


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
