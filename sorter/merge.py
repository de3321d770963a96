"""Merges sorted runs, overlapping in any way, into one sorted stream in bounded memory. Pure.

Runs are opened only when the stream reaches their first commit_ts. What lies before the next unopened run is complete;
where several runs overlap there, they are concatenated and sorted together, a window of bounded bytes at a time. The
windows are cut by the whole sort key, so that one transaction of any size passes too.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from sorter import order


@dataclass(frozen=True, slots=True)
class Run:
    """Sorted rows that can be opened; none of them has a commit_ts below `min_commit_ts`."""

    min_commit_ts: int
    number: int  # order of arrival: of equal rows the one with the higher number stays
    open: Callable[[], pa.RecordBatch]


@dataclass(slots=True)
class _Opened:
    number: int
    rows: pa.RecordBatch

    def take_below(self, commit_ts: int | None) -> pa.RecordBatch:
        """Take out the rows with a smaller commit_ts (None: all)."""
        count = self.rows.num_rows if commit_ts is None else order.count_below(self.rows, commit_ts)
        taken, self.rows = self.rows.slice(0, count), self.rows.slice(count)
        return taken


def merge(runs: Iterable[Run], window_bytes: int) -> Iterator[pa.RecordBatch]:
    """The rows of all runs, sorted, without duplicates and without empty batches."""
    waiting = deque(sorted(runs, key=lambda run: run.min_commit_ts))
    opened: list[_Opened] = []
    while waiting or opened:
        if waiting:
            # All runs that start together are opened together: nothing is complete before the last of them is.
            start = waiting[0].min_commit_ts
            while waiting and waiting[0].min_commit_ts == start:
                run = waiting.popleft()
                opened.append(_Opened(run.number, run.open()))
            opened.sort(key=lambda run: run.number)
        bound = waiting[0].min_commit_ts if waiting else None
        ready = [run.take_below(bound) for run in opened]
        opened = [run for run in opened if run.rows.num_rows]
        yield from _windows([rows for rows in ready if rows.num_rows], window_bytes)


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
