"""The rows of one table that are not cleaned yet: in memory (`Buffer`), on disk (`TableIndex`), and
the checksums of all of them (`ChecksumLog`), which fetches are compared with.

Invariants: blocks of resolved rows never overlap one another, only blocks that were spilled before
their rows were resolved do; a row is added to the checksum log before it is anywhere else. Of very
many tables most have nothing in memory: `freeze` packs such a backlog into a few bytes, and `thaw`
restores it.
"""

import contextlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import pyarrow as pa

from sorter import order
from sorter.buffer import Buffer, Rows
from sorter.checksum_log import ChecksumLog
from sorter.errors import BlockCorruptError, IndexLostError
from sorter.index import Entry, RunEntries, TableIndex
from sorter.merge import Run, RunLevels, merge
from sorter.order import Sorted
from sorter.store import BlockStore, Reader
from storage.model.event import Position
from storage.model.ts import MAX_TS

_IN_MEMORY: Final = MAX_TS
"""The run number of rows in memory: they came after every block, so of duplicates they are kept."""
_FROZEN_MAX_BYTES: Final = 256


@dataclass(frozen=True, slots=True)
class Extent:
    """Some of a table's rows in one place: how many, how large, and their sorted commit_ts (read
    when it is called).
    """

    min_commit_ts: int
    max_commit_ts: int
    rows: int
    bytes: int
    commit_ts: Callable[[], order.Timestamps]


@dataclass(frozen=True, slots=True)
class RunMerge:
    """Runs of a table that are being merged into one,
    and what is needed to write it without the table's lock.

    The merged run has the lowest of their numbers: of equal rows, those that came later in other
    runs win.
    """

    index: TableIndex
    runs: frozenset[int]
    rows: Iterator[pa.RecordBatch]
    block_bytes: int


class Backlog:
    """One table's rows; the caller serialises the calls."""

    __slots__ = ("_levels", "_store", "buffer", "checksums", "index")

    def __init__(
        self,
        store: BlockStore,
        unique_id: int,
        checksums: ChecksumLog,
        table_id: int,
        dropped_ts: int,
    ) -> None:
        """`dropped_ts`: all rows at or below it are dead, also those that the index still has."""
        self._store = store
        self._levels = RunLevels()
        self.checksums = checksums
        self.buffer = Buffer(checksums)
        self.index = store.index(unique_id, table_id, dropped_ts)

    @classmethod
    def thaw(
        cls, store: BlockStore, unique_id: int, table_id: int, dropped_ts: int, frozen: bytes
    ) -> "Backlog":
        """The backlog that `freeze` made `frozen` of; an empty one of b""."""
        if not frozen:
            return cls(store, unique_id, ChecksumLog(table_id, dropped_ts), table_id, dropped_ts)
        size = frozen[0]
        checksums = ChecksumLog.thaw(table_id, frozen[1 + size :])
        backlog = cls(store, unique_id, checksums, table_id, dropped_ts)
        numbers = array("Q", frozen[1 : 1 + size])
        backlog.index.blocks, backlog.index.widest_range = numbers[:2]
        backlog._levels.thaw(numbers[2:])
        return backlog

    def freeze(self) -> bytes | None:
        """The whole state in few bytes; None: there are rows in memory, or too much on disk."""
        if self.buffer.bytes:
            return None
        if not len(self.checksums) and not self.index.blocks:
            return b""
        numbers = (
            array("Q", (self.index.blocks, self.index.widest_range)).tobytes()
            + self._levels.freeze()
        )
        checksums = self.checksums.freeze()
        # Thawing costs as much as there is to thaw, at each call; and one byte holds the length.
        if len(numbers) + len(checksums) >= _FROZEN_MAX_BYTES:
            return None
        return bytes([len(numbers)]) + numbers + checksums

    @property
    def runs_on_disk(self) -> int:
        """The number of runs on disk that may overlap or are small."""
        return len(self._levels)

    def add(self, rows: Rows) -> None:
        """Take rows above the resolved_ts."""
        self._store.counters.change_memory(self.buffer.add(rows))

    def settle(self, upper_ts: int, resolved_ts: int) -> None:
        """Sort the resolved rows, if there are any at or below `upper_ts`."""
        if any(rows.min_commit_ts <= upper_ts for rows in self.buffer.pending):
            self._counted(lambda: self.buffer.settle(resolved_ts))

    def flush(self, block_bytes: int, resolved_ts: int) -> None:
        """Write resolved rows, once they fill a block."""
        if self.buffer.pending_bytes >= block_bytes:
            self._counted(lambda: self.buffer.settle(resolved_ts))
        if self.buffer.ready_bytes >= block_bytes:
            self._counted(self._write_ready)

    def spill(self, run_bytes: int, resolved_ts: int) -> bool:
        """Write the resolved rows, and a run of about `run_bytes` of other rows, which bounds the
        cost of sorting.

        Returns whether there are more.

        Raises:
            SorterDiskError: the disk does not take them; what was not written is still in memory.
        """
        # Settling sorts all that is resolved at once. Of more than a run's bytes that would take
        # memory just when there is none, so such rows are written as unresolved ones, by the run.
        if self.buffer.pending_bytes < run_bytes:
            self._counted(lambda: self.buffer.settle(resolved_ts))
        self._counted(self._write_ready)
        self._counted(lambda: self._write_pending(run_bytes))
        return bool(self.buffer.pending)

    def moved_to_disk(self, entry: Entry) -> None:
        """Drop the rows in memory, which are all in a shared block now."""
        self._counted(self.buffer.clear)
        self.index.count([entry], 0)
        self._levels.add(entry.run, entry.bytes)

    @property
    def wants_merge(self) -> bool:
        """Whether spills have left so many runs that they should be merged."""
        return self._levels.to_merge() is not None

    def begin_merge(self) -> RunMerge | None:
        """Choose runs to merge, if spills have left many;
        `end_merge` or `abandon_merge` must follow.

        Raises:
            BlockCorruptError: the index cannot be read.
        """
        while (chosen := self._levels.to_merge()) is not None:
            try:
                runs = self.index.runs(0, MAX_TS)
            except BlockCorruptError:
                self._levels.retain(chosen, frozenset())
                raise
            # Cleaning deletes blocks and leaves their runs in the levels.
            alive = {run: entries for run, entries in runs.items() if run in chosen}
            self._levels.retain(chosen, frozenset(alive))
            # When most of them were cleaned meanwhile, others are chosen.
            if len(alive) >= max(len(chosen) // 2, 2):
                merged = self._runs_of(
                    alive, Position(self.index.dead_ts + 1, 0), Position.fence(MAX_TS)
                )
                # Duplicates stay: the checksum log has counted each of them when it came, and a
                # fetch counts each that it reads.
                rows = merge(merged, self._store.block_bytes, unique=False)
                return RunMerge(
                    self.index, frozenset(alive), rows, self._store.spilled_bytes(len(self._levels))
                )
        return None

    def end_merge(self, run_merge: RunMerge, new: Sequence[Entry]) -> None:
        """Put `new`, which has the rows of the runs, in their place;
        some may have been cleaned or moved meanwhile.

        Raises:
            SorterDiskError: there is no room; nothing has changed, and `new` is released.
            BlockCorruptError: the index cannot be read; the same.
        """
        # Read anew: while the rows were merged without the lock, blocks were cleaned, or moved to
        # other segments by a compaction.
        try:
            old = [entry for entry in self.index.scan(0, MAX_TS) if entry.run in run_merge.runs]
        except BlockCorruptError:
            self._store.release(new)
            raise
        alive = [entry for entry in new if entry.meta.max_commit_ts > self.index.dead_ts]
        self._store.release(
            [entry for entry in new if entry.meta.max_commit_ts <= self.index.dead_ts]
        )
        self._store.replace(self.index, alive, old)
        self._levels.merged(run_merge.runs, sum(entry.bytes for entry in alive))

    def abandon_merge(self, run_merge: RunMerge) -> None:
        """Never merge these runs again: they cannot be read, and fetching them raises an error."""
        self._levels.retain(run_merge.runs, frozenset())

    def move(self, entries: Sequence[Entry]) -> None:
        """Write those of the blocks that are still alive to another segment.

        Raises:
            SorterDiskError: the disk does not take them; those that remain are where they were.
        """
        for entry in entries:
            if self.index.has(entry):
                # fetching it raises the error
                with contextlib.suppress(BlockCorruptError):
                    self._store.move(self.index, entry)

    def runs(
        self, lower: Position, upper: Position, resolved_ts: int
    ) -> tuple[list[Run], int, int]:
        """The runs with rows in a range, and how many blocks and rows on disk they have."""
        self.settle(upper.commit_ts, resolved_ts)
        on_disk = self.index.runs(lower.commit_ts, upper.commit_ts)
        blocks = sum(len(entries) for entries in on_disk.values())
        self._store.counters.add_lookup(needed=blocks, of_table=self.index.blocks)
        runs = self._runs_of(on_disk, lower, upper)
        # The batches themselves are kept, not the list: a flush or a cleaning that comes while the
        # range is read takes nothing away from its reader.
        clipped = [partial(order.clip, rows.batch, lower, upper) for rows in self.buffer.ready]
        if clipped:
            runs.append(Run(self.buffer.ready[0].min_commit_ts, _IN_MEMORY, clipped))
        return runs, blocks, sum(entries.rows for entries in on_disk.values())

    def extents(self, lower_ts: int, upper_ts: int, resolved_ts: int) -> list[Extent]:
        """The extents of rows in a range; those at the edges reach beyond it."""
        self.settle(upper_ts, resolved_ts)
        extents = [
            _extent_on_disk(entry, self._store.reader(entry))
            for entry in self.index.scan(lower_ts, upper_ts)
        ]
        extents += [_extent_in_memory(rows) for rows in self.buffer.ready]
        return [
            extent
            for extent in extents
            if extent.max_commit_ts >= lower_ts and extent.min_commit_ts <= upper_ts
        ]

    def drop_up_to(self, dead_ts: int, resolved_ts: int) -> None:
        """Drop batches and blocks that have no row above `dead_ts`."""
        self.settle(dead_ts, resolved_ts)
        self._counted(lambda: self.buffer.drop_up_to(dead_ts))
        if self.index.blocks:
            self._store.delete_up_to(self.index, dead_ts)
        self.index.dead_ts = dead_ts
        self.checksums.drop_up_to(dead_ts)

    def drop_all(self) -> None:
        """Drop everything; blocks that a damaged index cannot name stay until the sorter is
        closed.
        """
        self._store.counters.change_memory(-self.buffer.bytes)
        with contextlib.suppress(BlockCorruptError, IndexLostError):
            self._store.delete_up_to(self.index, MAX_TS)

    def _counted(self, change: Callable[[], object]) -> None:
        """Apply a change to the buffer, and count by how much its memory changed."""
        before = self.buffer.bytes
        try:
            change()
        finally:
            # Also after a write that failed half-way: what was written is out of the buffer.
            self._store.counters.change_memory(self.buffer.bytes - before)

    def _runs_of(
        self, on_disk: Mapping[int, RunEntries], lower: Position, upper: Position
    ) -> list[Run]:
        runs = []
        for number, entries in on_disk.items():
            blocks = (
                partial(_read_clipped, read, lower, upper) for read in self._store.readers(entries)
            )
            runs.append(Run(entries.min_commit_ts, number, blocks))
        return runs

    def _write_ready(self) -> None:
        rows = self.buffer.take_ready()
        if rows is not None:
            # Resolved rows overlap no others: their runs are merged only where they are small.
            small = rows.nbytes < self._store.small_bytes
            self._write(
                Sorted(rows, None),
                self._store.block_bytes,
                self.buffer.put_back_ready,
                merged=small,
            )

    def _write_pending(self, run_bytes: int) -> None:
        rows = self.buffer.take_pending(run_bytes)
        if rows is not None:
            block_bytes = self._store.spilled_bytes(len(self._levels))
            self._write(rows, block_bytes, self.buffer.put_back_pending, merged=True)

    def _write(
        self,
        rows: Sorted,
        block_bytes: int,
        put_back: Callable[[pa.RecordBatch], None],
        *,
        merged: bool,
    ) -> None:
        written, size, run = 0, 0, None
        try:
            for piece in rows.pieces(block_bytes):
                # A batch may begin with rows that were cleaned meanwhile.
                if int(order.commit_ts(piece)[-1]) > self.index.dead_ts:
                    entry = self._store.write(self.index, piece, run)
                    run, size = entry.run, size + entry.bytes
                written += piece.num_rows
        finally:
            # A full disk loses nothing: what was not written is in memory again, in its old place.
            if written < rows.num_rows:
                put_back(rows.batch(written))
            if run is not None and merged:
                self._levels.add(run, size)


def _read_clipped(read: Reader, lower: Position, upper: Position) -> pa.RecordBatch:
    return order.clip(read(), lower, upper)


def _extent_on_disk(entry: Entry, read: Reader) -> Extent:
    """The rows of a block, or of a table's share of one."""
    meta = entry.meta
    return Extent(
        meta.min_commit_ts,
        meta.max_commit_ts,
        meta.rows,
        entry.bytes,
        lambda: order.commit_ts(read()),
    )


def _extent_in_memory(rows: Rows) -> Extent:
    """Sorted rows."""
    batch = rows.batch
    size = batch.nbytes
    return Extent(
        rows.min_commit_ts, rows.max_commit_ts, batch.num_rows, size, lambda: order.commit_ts(batch)
    )
