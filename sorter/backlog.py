"""The rows of one table that are not cleaned yet: in memory, on disk, and in the ledger that must agree with both.

Invariants: blocks of resolved rows never overlap one another, only those spilled before they were resolved do; rows are
booked in the ledger before they are anywhere else. Most of very many tables have nothing in memory: of those a few
numbers are kept, `frozen`, and no objects.
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
from sorter.errors import BlockCorruptError, IndexLostError
from sorter.extent import Extent, in_memory, on_disk
from sorter.index import Entry, RunEntries, TableIndex
from sorter.ledger import Ledger
from sorter.levels import RunLevels
from sorter.merge import Run, merge
from sorter.order import Sorted
from sorter.store import BlockStore, Reader
from storage.model.event import Position
from storage.model.ts import MAX_TS

_IN_MEMORY: Final = MAX_TS  # arrived after every block
_FROZEN_MOST: Final = 256  # bytes


@dataclass(frozen=True, slots=True)
class Merging:
    """Runs of a table that become one, of the lowest number: older than all that came later, and may have their rows.

    What is needed for writing it, without the table's lock.
    """

    index: TableIndex
    runs: frozenset[int]
    rows: Iterator[pa.RecordBatch]
    block_bytes: int


class Backlog:
    """One table's rows; the caller serialises the calls."""

    __slots__ = ("_levels", "_store", "buffer", "index", "ledger")

    def __init__(self, store: BlockStore, unique_id: int, ledger: Ledger, table_id: int, forgotten_ts: int) -> None:
        """`forgotten_ts`: all rows at or below are dead, in the index, too."""
        self._store = store
        self._levels = RunLevels()
        self.ledger = ledger
        self.buffer = Buffer(ledger)
        self.index = store.index(unique_id, table_id, forgotten_ts)

    @classmethod
    def thaw(cls, store: BlockStore, unique_id: int, table_id: int, forgotten_ts: int, frozen: bytes) -> "Backlog":
        """The rows that `freeze` was called for; none, of nothing."""
        if not frozen:
            return cls(store, unique_id, Ledger(table_id, forgotten_ts), table_id, forgotten_ts)
        size = frozen[0]
        backlog = cls(store, unique_id, Ledger.thaw(table_id, frozen[1 + size :]), table_id, forgotten_ts)
        numbers = array("Q", frozen[1 : 1 + size])
        backlog.index.blocks, backlog.index.widest = numbers[:2]
        backlog._levels.thaw(numbers[2:])
        return backlog

    def freeze(self) -> bytes | None:
        """All there is to know, in few bytes; None: there are rows in memory, or too much on disk."""
        if self.buffer.bytes:
            return None
        if not len(self.ledger) and not self.index.blocks:
            return b""
        numbers = array("Q", (self.index.blocks, self.index.widest)).tobytes() + self._levels.freeze()
        ledger = self.ledger.freeze()
        return bytes([len(numbers)]) + numbers + ledger if len(numbers) + len(ledger) < _FROZEN_MOST else None

    @property
    def runs_on_disk(self) -> int:
        """How many pieces there are that may overlap or are small."""
        return len(self._levels)

    def add(self, rows: Rows) -> None:
        """Take rows above the resolved_ts."""
        self._store.counters.memory(self.buffer.add(rows))

    def settle(self, upper_ts: int, resolved_ts: int) -> None:
        """Sort what is resolved, if anything of it is at or below `upper_ts`."""
        if any(rows.min_commit_ts <= upper_ts for rows in self.buffer.pending):
            self._counted(lambda: self.buffer.settle(resolved_ts))

    def flush(self, block_bytes: int, resolved_ts: int) -> None:
        """Write resolved rows, once they fill a block."""
        if self.buffer.pending_bytes >= block_bytes:
            self._counted(lambda: self.buffer.settle(resolved_ts))
        if self.buffer.ready_bytes >= block_bytes:
            self._counted(self._write_ready)

    def spill(self, run_bytes: int, resolved_ts: int) -> bool:
        """Write what is resolved, and of other rows a run of about `run_bytes`, which bounds what sorting takes.

        Returns whether there are more.

        Raises:
            SorterDiskError: the disk does not take them; what it took not is in memory still.
        """
        if self.buffer.pending_bytes < run_bytes:
            self._counted(lambda: self.buffer.settle(resolved_ts))
        self._counted(self._write_ready)
        self._counted(lambda: self._write_pending(run_bytes))
        return bool(self.buffer.pending)

    def took(self, entry: Entry) -> None:
        """All rows of the buffer are on disk now, in a shared block."""
        self._counted(self.buffer.clear)
        self.index.count([entry], 0)
        self._levels.add(entry.run, entry.bytes)

    @property
    def wants_merge(self) -> bool:
        """Whether spills have left many runs."""
        return self._levels.to_merge() is not None

    def begin_merge(self) -> Merging | None:
        """Where spills have left many runs: which are to become one; `end_merge` or `give_up_merge` must follow.

        Raises:
            BlockCorruptError: the index cannot be read.
        """
        while (wanted := self._levels.to_merge()) is not None:
            try:
                runs = self.index.runs(0, MAX_TS)
            except BlockCorruptError:
                self._levels.keep(wanted, frozenset())
                raise
            found = {run: entries for run, entries in runs.items() if run in wanted}
            self._levels.keep(wanted, frozenset(found))
            if len(found) >= max(len(wanted) // 2, 2):
                opened = self._runs_of(found, Position(self.index.dead_ts + 1, 0), Position.fence(MAX_TS))
                rows = merge(opened, self._store.block_bytes, unique=False)
                return Merging(self.index, frozenset(found), rows, self._store.spilled_bytes(len(self._levels)))
        return None

    def end_merge(self, merging: Merging, new: Sequence[Entry]) -> None:
        """Read `new`, which has the rows of the runs, from now on; some may have been cleaned or moved meanwhile.

        Raises:
            SorterDiskError: there is no room; nothing has changed, and `new` is given up.
            BlockCorruptError: the index cannot be read; the same.
        """
        try:
            old = [entry for entry in self.index.scan(0, MAX_TS) if entry.run in merging.runs]
        except BlockCorruptError:
            self._store.release(new)
            raise
        alive = [entry for entry in new if entry.meta.max_commit_ts > self.index.dead_ts]
        self._store.release([entry for entry in new if entry.meta.max_commit_ts <= self.index.dead_ts])
        self._store.replace(self.index, alive, old)
        self._levels.merged(merging.runs, sum(entry.pointer.length for entry in alive))

    def give_up_merge(self, merging: Merging) -> None:
        """Some of the runs cannot be read: they stay as they are, and who fetches them is told."""
        self._levels.keep(merging.runs, frozenset())

    def move(self, entries: Sequence[Entry]) -> None:
        """Write those of the blocks that are still there to another segment.

        Raises:
            SorterDiskError: the disk does not take them; those that remain are where they were.
        """
        for entry in entries:
            if self.index.has(entry):
                with contextlib.suppress(BlockCorruptError):  # who fetches it is told
                    self._store.move(self.index, entry)

    def runs(self, lower: Position, upper: Position, resolved_ts: int) -> tuple[list[Run], int, int]:
        """The runs with rows in a range, and how many blocks and rows on disk they have."""
        self.settle(upper.commit_ts, resolved_ts)
        found = self.index.runs(lower.commit_ts, upper.commit_ts)
        blocks = sum(len(entries) for entries in found.values())
        self._store.counters.looked_up(wanted=blocks, of_table=self.index.blocks)
        runs = self._runs_of(found, lower, upper)
        clipped = [partial(order.clip, rows.batch, lower, upper) for rows in self.buffer.ready]
        if clipped:
            runs.append(Run(self.buffer.ready[0].min_commit_ts, _IN_MEMORY, clipped))
        return runs, blocks, sum(entries.rows for entries in found.values())

    def extents(self, lower_ts: int, upper_ts: int, resolved_ts: int) -> list[Extent]:
        """Where rows lie; those at the edges reach beyond the range."""
        self.settle(upper_ts, resolved_ts)
        found = [on_disk(entry, self._store.reader(entry)) for entry in self.index.scan(lower_ts, upper_ts)]
        found += [in_memory(rows) for rows in self.buffer.ready]
        return [extent for extent in found if extent.max_commit_ts >= lower_ts and extent.min_commit_ts <= upper_ts]

    def forget(self, dead_ts: int, resolved_ts: int) -> None:
        """Drop what has no row above `dead_ts`."""
        self.settle(dead_ts, resolved_ts)
        self._counted(lambda: self.buffer.drop_up_to(dead_ts))
        if self.index.blocks:
            self._store.forget(self.index, dead_ts)
        self.index.dead_ts = dead_ts
        self.ledger.forget(dead_ts)

    def drop(self) -> None:
        """Drop everything; blocks that a damaged index does not tell stay until the sorter is closed."""
        self._store.counters.memory(-self.buffer.bytes)
        with contextlib.suppress(BlockCorruptError, IndexLostError):
            self._store.forget(self.index, MAX_TS)

    def _counted(self, change: Callable[[], object]) -> None:
        before = self.buffer.bytes
        try:
            change()
        finally:
            self._store.counters.memory(self.buffer.bytes - before)

    def _runs_of(self, found: Mapping[int, RunEntries], lower: Position, upper: Position) -> list[Run]:
        runs = []
        for number, entries in found.items():
            blocks = (partial(_read_clipped, read, lower, upper) for read in self._store.readers(entries))
            runs.append(Run(entries.min_commit_ts, number, blocks))
        return runs

    def _write_ready(self) -> None:
        rows = self.buffer.take_ready()
        if rows is not None:
            # Resolved rows overlap no others: their runs are merged only where they are small.
            small = rows.nbytes < self._store.small_bytes
            self._write(Sorted(rows, None), self._store.block_bytes, self.buffer.put_back_ready, merged=small)

    def _write_pending(self, run_bytes: int) -> None:
        rows = self.buffer.take_pending(run_bytes)
        if rows is not None:
            block_bytes = self._store.spilled_bytes(len(self._levels))
            self._write(rows, block_bytes, self.buffer.put_back_pending, merged=True)

    def _write(
        self, rows: Sorted, block_bytes: int, put_back: Callable[[pa.RecordBatch], None], *, merged: bool
    ) -> None:
        written, size, run = 0, 0, None
        try:
            for piece in rows.pieces(block_bytes):
                if int(order.commit_ts(piece)[-1]) > self.index.dead_ts:
                    entry = self._store.write(self.index, piece, run)
                    run, size = entry.run, size + entry.pointer.length
                written += piece.num_rows
        finally:
            if written < rows.num_rows:
                put_back(rows.batch(written))
            if run is not None and merged:
                self._levels.add(run, size)


def _read_clipped(read: Reader, lower: Position, upper: Position) -> pa.RecordBatch:
    return order.clip(read(), lower, upper)
