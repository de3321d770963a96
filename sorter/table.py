"""One table (span) of the sorter: rows in memory and blocks on disk, behind one lock.

Invariants: no row at or below `resolved_ts` is ever added; blocks of resolved rows never overlap one another, only
those spilled before they were resolved do; nothing at or below `cleaned` is handed out.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import pyarrow as pa

from sorter import order
from sorter.buffer import Buffer, Rows
from sorter.checksum import Checksum, by_bucket
from sorter.errors import (
    BlockCorruptError,
    EventBelowResolvedError,
    NotResolvedError,
    RangeCleanedError,
    ResolvedRegressedError,
    SorterDiskError,
    TableNotFoundError,
)
from sorter.index import Entry
from sorter.ledger import Ledger
from sorter.levels import RunLevels
from sorter.merge import Run, merge
from sorter.stats import Counters, Reads, TableStats
from sorter.store import BlockStore, Reader
from storage.model.event import Position
from storage.model.span import Span
from storage.model.ts import MAX_TS

_IN_MEMORY = MAX_TS  # arrived after every block
_NEVER_S = float("-inf")


@dataclass(frozen=True, slots=True)
class Extent:
    """Some of a table's rows: how many, how large, and their sorted commit_ts (read when asked for)."""

    min_commit_ts: int
    max_commit_ts: int
    rows: int
    bytes: int
    commit_ts: Callable[[], order.Timestamps]


class Table:
    """One incarnation of a span; safe to call from several threads."""

    __slots__ = (
        "_buffer",
        "_counters",
        "_forgotten_at_s",
        "_forgotten_ts",
        "_index",
        "_ledger",
        "_levels",
        "_lock",
        "_reads",
        "_removed",
        "_store",
        "cleaned",
        "resolved_ts",
        "span",
    )

    def __init__(self, span: Span, unique_id: int, start_ts: int, store: BlockStore, counters: Counters) -> None:
        self.span = span
        self.resolved_ts = start_ts
        self.cleaned = _began(start_ts)
        self._lock = threading.Lock()
        self._store = store
        self._counters = counters
        self._ledger = Ledger(span.table_id, start_ts)
        self._buffer = Buffer(self._ledger)
        self._index = store.index(unique_id, span.table_id)
        self._levels = RunLevels()
        self._reads: Reads | None = None  # made by the first fetch
        self._forgotten_ts = start_ts
        self._forgotten_at_s = _NEVER_S
        self._removed = False

    @property
    def memory_bytes(self) -> int:
        """What its rows take in memory."""
        return self._buffer.bytes

    def is_empty(self) -> bool:
        """See `Sorter.is_empty`; the ledger knows a row before anything else does, and forgets it last."""
        return not len(self._ledger)

    def add(self, rows: Rows) -> None:
        """See `Sorter.add`."""
        with self._lock:
            self._check_present()
            if rows.min_commit_ts <= self.resolved_ts:
                raise EventBelowResolvedError(
                    f"table {self.span.table_id} got a row with commit_ts {rows.min_commit_ts}, but all up to "
                    f"{self.resolved_ts} had been promised; this is a defect of the puller: the batch was not taken"
                )
            before = self._buffer.bytes
            self._buffer.add(rows)
            self._counters.memory(self._buffer.bytes - before)

    def resolve(self, ts: int) -> None:
        """See `Sorter.resolve`."""
        with self._lock:
            self._check_present()
            if ts < self.resolved_ts:
                raise ResolvedRegressedError(
                    f"resolved_ts of table {self.span.table_id} cannot go back from {self.resolved_ts} to {ts}"
                )
            self.resolved_ts = ts

    def flush(self, block_bytes: int) -> None:
        """Write resolved rows, once they fill a block."""
        with self._lock:
            before = self._buffer.bytes
            if self._buffer.pending_bytes >= block_bytes:
                self._buffer.settle(self.resolved_ts)
            try:
                if self._buffer.ready_bytes >= block_bytes and not self._removed:
                    self._write(self._buffer.take_ready(), self._buffer.put_back_ready, spilled=False)
            finally:
                self._counters.memory(self._buffer.bytes - before)

    def spill(self, run_bytes: int) -> None:
        """Write all rows, resolved or not; the latter in runs of about `run_bytes`, which bounds what sorting takes.

        Raises:
            SorterDiskError: the disk does not take them; what it took not is in memory still.
        """
        with self._lock:
            before = self._buffer.bytes
            self._buffer.settle(self.resolved_ts)
            try:
                if not self._removed:
                    self._write(self._buffer.take_ready(), self._buffer.put_back_ready, spilled=False)
                    while self._buffer.pending:
                        self._write(self._buffer.take_pending(run_bytes), self._buffer.put_back_pending, spilled=True)
                    self._merge_levels()
            finally:
                self._counters.memory(self._buffer.bytes - before)

    def fetch(self, lower: Position, upper: Position, window_bytes: int) -> Iterator[pa.RecordBatch]:
        """See `Sorter.fetch`; what it yields is fixed when this returns."""
        with self._lock:
            self._check_range(lower, upper)
            runs = self._runs(lower, upper) if lower <= upper else []
            shift = self._ledger.shift
        return self._checked(lower, upper, runs, window_bytes, shift)

    def stats(self) -> TableStats:
        """See `Sorter.table_stats`."""
        with self._lock:
            reads = self._reads or Reads()
            return TableStats(
                self.span.table_id,
                self.resolved_ts,
                self.cleaned.commit_ts,
                self._buffer.bytes,
                self._index.blocks,
                len(self._levels),
                reads.fetches,
                reads.blocks,
                reads.rows_read,
                reads.rows_out,
            )

    def extents(self, lower_ts: int, upper_ts: int) -> list[Extent]:
        """See `Sorter.extents`."""
        lower, upper = Position(lower_ts, 0), Position.fence(upper_ts)
        with self._lock:
            self._check_range(lower, upper)
            self._settle(upper_ts)
            found = [self._extent_on_disk(entry) for entry in self._index.scan(lower_ts, upper_ts)]
            found += [_extent_in_memory(rows) for rows in self._buffer.ready]
        return [extent for extent in found if extent.max_commit_ts >= lower_ts and extent.min_commit_ts <= upper_ts]

    def clean(self, upper: Position, now_s: float, interval_s: float) -> None:
        """See `Sorter.clean`."""
        with self._lock:
            self._check_present()
            if upper.commit_ts > self.resolved_ts:
                raise NotResolvedError(
                    f"cannot clean table {self.span.table_id} up to {upper.commit_ts}: "
                    f"it is resolved up to {self.resolved_ts} only"
                )
            self.cleaned = max(self.cleaned, upper)
            self._forget(now_s, interval_s)

    def forget_cleaned(self, now_s: float, interval_s: float) -> None:
        """Drop what was cleaned too soon after the last time."""
        with self._lock:
            self._forget(now_s, interval_s)

    def remove(self) -> None:
        """Drop all rows; later calls find no table."""
        with self._lock:
            self._removed = True
            self._counters.memory(-self._buffer.bytes)
            self._ledger = Ledger(self.span.table_id, self.resolved_ts)
            self._buffer = Buffer(self._ledger)
            self._store.forget(self._index, MAX_TS)

    def _forget(self, now_s: float, interval_s: float) -> None:
        dead_ts = self.cleaned.commit_ts if self.cleaned.is_commit_fence else self.cleaned.commit_ts - 1
        if dead_ts <= self._forgotten_ts or now_s - self._forgotten_at_s < interval_s:
            return
        self._settle(dead_ts)
        before = self._buffer.bytes
        self._buffer.drop_up_to(dead_ts)
        self._counters.memory(self._buffer.bytes - before)
        if self._index.blocks:
            self._store.forget(self._index, dead_ts)
        self._ledger.forget(dead_ts)
        self._forgotten_ts, self._forgotten_at_s = dead_ts, now_s

    def _runs(self, lower: Position, upper: Position) -> list[Run]:
        self._settle(upper.commit_ts)
        on_disk: dict[int, list[Entry]] = {}
        for entry in self._index.scan(lower.commit_ts, upper.commit_ts):
            if entry.meta.max_commit_ts >= lower.commit_ts:
                on_disk.setdefault(entry.run, []).append(entry)
        wanted = sum(map(len, on_disk.values()))
        self._counters.looked_up(wanted=wanted, of_table=self._index.blocks)
        self._reads = self._reads or Reads()
        self._reads.looked_up(wanted, sum(entry.meta.rows for entries in on_disk.values() for entry in entries))
        runs = self._runs_of(on_disk, lower, upper)
        clipped = [partial(order.clip, rows.batch, lower, upper) for rows in self._buffer.ready]
        if clipped:
            runs.append(Run(self._buffer.ready[0].min_commit_ts, _IN_MEMORY, clipped))
        return runs

    def _runs_of(self, on_disk: Mapping[int, Sequence[Entry]], lower: Position, upper: Position) -> list[Run]:
        runs = []
        for number, entries in on_disk.items():
            blocks = [partial(_read_clipped, self._store.reader(entry), lower, upper) for entry in entries]
            runs.append(Run(entries[0].meta.min_commit_ts, number, blocks))
        return runs

    def _merge_levels(self) -> None:
        """Make one run of many, where spills have left many."""
        while (level := self._levels.full()) is not None:
            wanted, found = self._levels.runs(level), defaultdict[int, list[Entry]](list)
            for entry in self._index.scan(0, MAX_TS):
                if entry.run in wanted:
                    found[entry.run].append(entry)
            if len(found) < self._levels.fan_in // 2:
                self._levels.keep(level, frozenset(found))
                continue
            number = min(found)  # older than all that came later and may hold the same rows again
            runs = self._runs_of(found, Position(self._forgotten_ts + 1, 0), Position.fence(MAX_TS))
            old = [entry for entries in found.values() for entry in entries]
            try:
                self._store.rewrite(self._index, old, merge(runs, self._store.block_bytes, unique=False), number)
            except SorterDiskError:
                return  # it is the next spill that tries again
            except BlockCorruptError:
                self._levels.keep(level, frozenset())  # who fetches it is told
            else:
                self._levels.merged(level, number)

    def _settle(self, upper_ts: int) -> None:
        if any(rows.min_commit_ts <= upper_ts for rows in self._buffer.pending):
            before = self._buffer.bytes
            self._buffer.settle(self.resolved_ts)
            self._counters.memory(self._buffer.bytes - before)

    def _write(
        self, batch: pa.RecordBatch | None, put_back: Callable[[pa.RecordBatch], None], *, spilled: bool
    ) -> None:
        if batch is None:
            return
        written, run = 0, None
        try:
            for piece in self._store.pieces(batch, spilled=spilled):
                if int(order.commit_ts(piece)[-1]) > self._forgotten_ts:
                    run = self._store.write(self._index, piece, run)
                written += piece.num_rows
        finally:
            if written < batch.num_rows:
                put_back(batch.slice(written))
            # Resolved rows overlap no others: their runs are merged only where they are small.
            if run is not None and (spilled or batch.nbytes < self._store.small_bytes):
                self._levels.add(run)

    def _extent_on_disk(self, entry: Entry) -> Extent:
        meta, read = entry.meta, self._store.reader(entry)
        size = entry.pointer.length
        return Extent(meta.min_commit_ts, meta.max_commit_ts, meta.rows, size, lambda: order.commit_ts(read()))

    def _checked(
        self, lower: Position, upper: Position, runs: list[Run], window_bytes: int, shift: int
    ) -> Iterator[pa.RecordBatch]:
        """The merged rows; at their end, what was read is compared with what had been added."""
        found: dict[int, Checksum] = {}

        def seen(batch: pa.RecordBatch) -> None:
            for bucket, checksum in by_bucket(batch, shift).items():
                found[bucket] = found.get(bucket, Checksum()) + checksum

        for batch in merge(runs, window_bytes, seen):
            self._counters.gave(batch)
            if self._reads is not None:
                self._reads.rows_out += batch.num_rows
            yield batch
        with self._lock:
            whole = not lower.start_ts and upper.is_commit_fence and lower <= upper
            if whole and lower > self.cleaned and not self._removed:
                self._ledger.check(lower.commit_ts, upper.commit_ts, found, shift)

    def _check_present(self) -> None:
        if self._removed:
            raise TableNotFoundError(f"table {self.span.table_id} has been removed from the sorter")

    def _check_range(self, lower: Position, upper: Position) -> None:
        self._check_present()
        if upper.commit_ts > self.resolved_ts:
            raise NotResolvedError(
                f"table {self.span.table_id} is complete up to {self.resolved_ts}, not yet to {upper.commit_ts}; "
                "wait for its resolved_ts"
            )
        if lower <= self.cleaned:
            raise RangeCleanedError(
                f"table {self.span.table_id} is cleaned up to commit_ts {self.cleaned.commit_ts}, "
                f"rows from {lower.commit_ts} on are gone; start at the checkpoint_ts"
            )


@lru_cache(maxsize=1)
def _began(start_ts: int) -> Position:
    """Where tables that begin there are cleaned up to: one object for all."""
    return Position.fence(start_ts)


def _extent_in_memory(rows: Rows) -> Extent:
    batch = rows.batch
    size = batch.nbytes
    return Extent(rows.min_commit_ts, rows.max_commit_ts, batch.num_rows, size, lambda: order.commit_ts(batch))


def _read_clipped(read: Reader, lower: Position, upper: Position) -> pa.RecordBatch:
    return order.clip(read(), lower, upper)
