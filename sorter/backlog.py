"""The rows of one table that are not cleaned yet: in memory, on disk, and in the ledger that must agree with both.

Invariants: blocks of resolved rows never overlap one another, only those spilled before they were resolved do; rows are
booked in the ledger before they are anywhere else. Most of very many tables have nothing in memory: of those a few
numbers are kept, `frozen`, and no objects.
"""

import contextlib
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

import pyarrow as pa

from sorter import order
from sorter.buffer import Buffer, Rows
from sorter.errors import BlockCorruptError, SorterDiskError
from sorter.extent import Extent, in_memory, on_disk
from sorter.index import Entry
from sorter.ledger import Ledger
from sorter.levels import RunLevels
from sorter.merge import Run, merge
from sorter.order import Sorted
from sorter.store import BlockStore, Reader
from storage.model.event import Position
from storage.model.ts import MAX_TS

_IN_MEMORY: Final = MAX_TS  # arrived after every block
_FROZEN_MOST: Final = 256  # bytes


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

    def spill(self, run_bytes: int, resolved_ts: int) -> None:
        """Write all rows; those that are not resolved in runs of about `run_bytes`, which bounds what sorting takes.

        Raises:
            SorterDiskError: the disk does not take them; what it took not is in memory still.
        """
        if self.buffer.pending_bytes < run_bytes:
            self._counted(lambda: self.buffer.settle(resolved_ts))
        self._counted(self._write_ready)
        while self.buffer.pending:
            self._counted(lambda: self._write_pending(run_bytes))
            self.merge_runs()
        self.merge_runs()

    def took(self, entry: Entry) -> None:
        """All rows of the buffer are on disk now, in a shared block."""
        self._counted(self.buffer.clear)
        self.index.count([entry], 0)
        self._levels.add(entry.run, entry.bytes)

    @property
    def wants_merge(self) -> bool:
        """Whether spills have left many runs."""
        return self._levels.to_merge() is not None

    def merge_runs(self) -> None:
        """Make one run of many, where spills have left many."""
        while (wanted := self._levels.to_merge()) is not None:
            found = defaultdict[int, list[Entry]](list)
            for entry in self.index.scan(0, MAX_TS):
                if entry.run in wanted:
                    found[entry.run].append(entry)
            if len(found) < max(len(wanted) // 2, 2):
                self._levels.keep(wanted, frozenset(found))
                continue
            number = min(found)  # older than all that came later and may hold the same rows again
            runs = self._runs_of(found, Position(self.index.dead_ts + 1, 0), Position.fence(MAX_TS))
            old = [entry for entries in found.values() for entry in entries]
            block_bytes = self._store.spilled_bytes(len(self._levels))
            batches = merge(runs, self._store.block_bytes, unique=False)
            try:
                size = self._store.rewrite(self.index, old, batches, number, block_bytes)
            except SorterDiskError:
                return  # it is the next spill that tries again
            except BlockCorruptError:
                self._levels.keep(wanted, frozenset())  # who fetches it is told
            else:
                self._levels.keep(wanted, frozenset(found))
                self._levels.merged(frozenset(found), size)

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
        found: dict[int, list[Entry]] = {}
        for entry in self.index.scan(lower.commit_ts, upper.commit_ts):
            if entry.meta.max_commit_ts >= lower.commit_ts:
                found.setdefault(entry.run, []).append(entry)
        entries = [entry for entries in found.values() for entry in entries]
        self._store.counters.looked_up(wanted=len(entries), of_table=self.index.blocks)
        runs = self._runs_of(found, lower, upper)
        clipped = [partial(order.clip, rows.batch, lower, upper) for rows in self.buffer.ready]
        if clipped:
            runs.append(Run(self.buffer.ready[0].min_commit_ts, _IN_MEMORY, clipped))
        return runs, len(entries), sum(entry.meta.rows for entry in entries)

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
        """Drop everything."""
        self._store.counters.memory(-self.buffer.bytes)
        self._store.forget(self.index, MAX_TS)

    def _counted(self, change: Callable[[], object]) -> None:
        before = self.buffer.bytes
        try:
            change()
        finally:
            self._store.counters.memory(self.buffer.bytes - before)

    def _runs_of(self, found: Mapping[int, Sequence[Entry]], lower: Position, upper: Position) -> list[Run]:
        runs = []
        for number, entries in found.items():
            blocks = [partial(_read_clipped, self._store.reader(entry), lower, upper) for entry in entries]
            runs.append(Run(entries[0].meta.min_commit_ts, number, blocks))
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
