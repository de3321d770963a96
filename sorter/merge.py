"""Merges sorted runs, overlapping in any way, into one sorted stream in bounded memory. Pure.

A run is opened when the stream reaches its first commit_ts, and then one block at a time. What lies before the next
unopened run, and not behind the end of any open block that has a successor, is complete. Where several runs overlap
there, they are concatenated and sorted together, a window of bounded bytes at a time. Windows are cut by the whole sort
key, so that one transaction of any size passes too. Where many runs overlap, as in a transaction that was spilled in
pieces, each of them is kept one whole block ahead: else some run's block would always be about to end, and each step
would take a few rows only. Where one run stands alone, a window of its blocks is taken at once.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from sorter import order
from sorter.order import Sorted, SortKey

_FEW_RUNS: Final = 4
_PART_BYTES: Final = 32 << 10
_WHOLE: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Run:
    """Sorted rows in blocks that follow one another; none of them has a commit_ts below `min_commit_ts`."""

    min_commit_ts: int
    number: int  # order of arrival: of equal rows the one with the higher number stays
    blocks: Iterable[Callable[[], pa.RecordBatch]]
    """Gone through once."""


class _Opened:
    """A run with its current rows; `first` is their first key, `end` what the run is known up to (None: to its end)."""

    first: SortKey
    end: SortKey | None

    def __init__(self, run: Run) -> None:
        self.number = run.number
        self.end = None
        self._blocks = iter(run.blocks)
        self._waiting = next(self._blocks, None)
        self._block_rows = 0
        self.rows = self._next_block()
        self._look()

    def take(self, limit: SortKey | None) -> pa.RecordBatch:
        """Take out the current rows up to `limit`."""
        count = self.rows.num_rows if limit is None else order.count_up_to(self.rows, limit)
        taken, self.rows = self.rows.slice(0, count), self.rows.slice(count)
        self._look()
        return taken

    def read_ahead(self, size: int = 0) -> None:
        """Have at least as many rows as the last block brought, and about `size` bytes, or all there are."""
        parts, rows, have = [self.rows], self.rows.num_rows, self.rows.nbytes
        while self._waiting is not None and (rows < self._block_rows or have < size):
            parts.append(self._next_block())
            rows, have = rows + parts[-1].num_rows, have + parts[-1].nbytes
        if len(parts) > 1:
            self.rows = pa.concat_batches(parts)
            self._look()

    def _look(self) -> None:
        while not self.rows.num_rows and self._waiting is not None:
            self.rows = self._next_block()
        if self.rows.num_rows:
            self.first = order.row_key(self.rows, 0)

    def _next_block(self) -> pa.RecordBatch:
        assert self._waiting is not None, "a run has one block at least"
        block = self._waiting()
        self._waiting = next(self._blocks, None)
        self._block_rows = block.num_rows
        if self._waiting is None:
            self.end = None
        elif block.num_rows:
            self.end = order.row_key(block, block.num_rows - 1)
        return block


def merge(
    runs: Iterable[Run],
    window_bytes: int,
    seen: Callable[[pa.RecordBatch], None] = lambda _: None,
    *,
    unique: bool = True,
) -> Iterator[pa.RecordBatch]:
    """The rows of all runs, sorted, without empty batches and (`unique`) without duplicates.

    `seen` is called with the rows as they are taken from the runs, duplicates included.
    """
    runs = list(runs)
    if len(runs) == 1 and unique:
        yield from _alone(runs[0], window_bytes, seen)
        return
    piece_bytes = max(window_bytes // 2, 1) if unique else _WHOLE  # copies of a row stay in one batch
    waiting = deque(sorted(runs, key=lambda run: run.min_commit_ts))
    opened: list[_Opened] = []
    while waiting or opened:
        if waiting and all(run.first[0] >= waiting[0].min_commit_ts for run in opened):
            opened.append(_Opened(waiting.popleft()))
        else:
            parts = _complete(opened, waiting, window_bytes)
            many = len(parts) > _FEW_RUNS
            for window in _windows(parts, window_bytes, unique=unique):
                seen(window.rows)
                yield from window.pieces(piece_bytes)
            if many:
                del parts, window
                pa.default_memory_pool().release_unused()  # else it keeps as much again as is in use
        opened = [run for run in opened if run.rows.num_rows]


def _alone(run: Run, window_bytes: int, seen: Callable[[pa.RecordBatch], None]) -> Iterator[pa.RecordBatch]:
    """The rows of a run that no other overlaps; what came twice stands in one block."""
    for read in run.blocks:
        rows = read()
        if rows.num_rows:
            seen(rows)
            yield from order.arrange([rows]).pieces(window_bytes)


def _complete(opened: list[_Opened], waiting: deque[Run], window_bytes: int) -> list[pa.RecordBatch]:
    """Take out, in the order of arrival, all rows up to where nothing can come between."""
    limit = _limit(opened, waiting)
    here = [run for run in opened if limit is None or run.first <= limit]
    if len(here) == 1 or len(here) > _FEW_RUNS:
        for run in here:
            run.read_ahead(window_bytes // len(here))
        limit = _limit(opened, waiting)
        here = [run for run in opened if limit is None or run.first <= limit]
    taken = [run.take(limit) for run in sorted(here, key=lambda run: run.number)]
    return [rows for rows in taken if rows.num_rows]


def _limit(opened: list[_Opened], waiting: deque[Run]) -> SortKey | None:
    """Up to where all rows are in open blocks; None: to the end."""
    ends = [end for run in opened if (end := run.end) is not None] if len(opened) > 1 else []
    if waiting:
        ends.append((waiting[0].min_commit_ts, 0, 0, b""))  # below every row: no change has op 0
    return min(ends, default=None)


def _windows(parts: list[pa.RecordBatch], window_bytes: int, *, unique: bool) -> Iterator[Sorted]:
    """Sort the parts together, a window at a time; of very many parts each brings some rows to a window."""
    window_bytes = max(window_bytes, len(parts) * _PART_BYTES)
    while len(parts) > 1:
        rows, size = sum(part.num_rows for part in parts), sum(part.nbytes for part in parts)
        share = rows * window_bytes // (size * len(parts))
        if size <= window_bytes:
            break
        heads, parts = _cut(parts, max(share, 1))
        yield order.arrange(heads, unique=unique)
    if parts:
        yield order.arrange(parts, unique=unique)


def _cut(parts: list[pa.RecordBatch], share: int) -> tuple[list[pa.RecordBatch], list[pa.RecordBatch]]:
    """Heads of at most `share` rows each (duplicates aside), at least one row in all, and what remains."""
    bound = min(order.row_key(part, min(share, part.num_rows) - 1) for part in parts)
    counts = [order.count_up_to(part, bound) for part in parts]
    heads = [part.slice(0, count) for part, count in zip(parts, counts, strict=True) if count]
    tails = [part.slice(count) for part, count in zip(parts, counts, strict=True) if count < part.num_rows]
    return heads, tails
