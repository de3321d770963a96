"""Merges sorted runs, overlapping in any way, into one sorted stream in bounded memory. Pure.

A run is opened when the stream reaches its first commit_ts, and then one block at a time. What lies before the next
unopened run, and not behind the end of any open block that has a successor, is complete. Where several runs overlap
there, they are concatenated and sorted together, a window of bounded bytes at a time. Windows are cut by the whole sort
key, so that one transaction of any size passes too.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from sorter import order
from sorter.order import SortKey


@dataclass(frozen=True, slots=True)
class Run:
    """Sorted rows in blocks that follow one another; none of them has a commit_ts below `min_commit_ts`."""

    min_commit_ts: int
    number: int  # order of arrival: of equal rows the one with the higher number stays
    blocks: Sequence[Callable[[], pa.RecordBatch]]


class _Opened:
    """A run with its current block."""

    def __init__(self, run: Run) -> None:
        self.number = run.number
        self._waiting = deque(run.blocks)
        self.rows = self._waiting.popleft()()
        self._refill()

    @property
    def first_commit_ts(self) -> int:
        return int(order.commit_ts(self.rows)[0])

    @property
    def end(self) -> SortKey | None:
        """What the run is known up to; None: to its end."""
        return order.row_key(self.rows, self.rows.num_rows - 1) if self._waiting else None

    def take(self, limit: SortKey | None) -> pa.RecordBatch:
        """Take out the rows of the current block up to `limit`."""
        count = self.rows.num_rows if limit is None else order.count_up_to(self.rows, limit)
        taken, self.rows = self.rows.slice(0, count), self.rows.slice(count)
        self._refill()
        return taken

    def _refill(self) -> None:
        while not self.rows.num_rows and self._waiting:
            self.rows = self._waiting.popleft()()


def merge(runs: Iterable[Run], window_bytes: int) -> Iterator[pa.RecordBatch]:
    """The rows of all runs, sorted, without duplicates and without empty batches."""
    waiting = deque(sorted(runs, key=lambda run: run.min_commit_ts))
    opened: list[_Opened] = []
    while waiting or opened:
        if waiting and all(run.first_commit_ts >= waiting[0].min_commit_ts for run in opened):
            opened.append(_Opened(waiting.popleft()))
        else:
            limit = _limit(opened, waiting)
            ready = [run.take(limit) for run in sorted(opened, key=lambda run: run.number)]
            yield from _windows([rows for rows in ready if rows.num_rows], window_bytes)
        opened = [run for run in opened if run.rows.num_rows]


def _limit(opened: list[_Opened], waiting: deque[Run]) -> SortKey | None:
    """Up to where all rows are in open blocks; None: to the end."""
    ends = [end for run in opened if (end := run.end) is not None] if len(opened) > 1 else []
    if waiting:
        ends.append((waiting[0].min_commit_ts, -1, 0, b""))
    return min(ends, default=None)


def _windows(parts: list[pa.RecordBatch], window_bytes: int) -> Iterator[pa.RecordBatch]:
    while len(parts) > 1:
        rows, size = sum(part.num_rows for part in parts), sum(part.nbytes for part in parts)
        share = rows * window_bytes // (size * len(parts))
        if size <= window_bytes:
            break
        heads, parts = _cut(parts, max(share, 1))
        yield order.sort(heads)
    if parts:
        yield order.sort(parts)


def _cut(parts: list[pa.RecordBatch], share: int) -> tuple[list[pa.RecordBatch], list[pa.RecordBatch]]:
    """Heads of at most `share` rows each (duplicates aside), at least one row in all, and what remains."""
    bound = min(order.row_key(part, min(share, part.num_rows) - 1) for part in parts)
    counts = [order.count_up_to(part, bound) for part in parts]
    heads = [part.slice(0, count) for part, count in zip(parts, counts, strict=True) if count]
    tails = [part.slice(count) for part, count in zip(parts, counts, strict=True) if count < part.num_rows]
    return heads, tails
