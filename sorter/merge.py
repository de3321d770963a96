"""Merging the sorted runs of a table, which may overlap: `merge` makes one sorted stream of them,
and `RunLevels` chooses the runs on disk to be merged into larger ones. Pure.

`merge` works in bounded memory. It opens a run when the stream reaches the run's first commit_ts,
and then reads one block of it at a time. Rows are complete, and come out, up to the first row of
the next unopened run and up to the last row in memory of each open run that has more blocks. Where
several runs have such rows, these are concatenated and sorted, a window of bounded bytes at a time.
Windows are cut by the whole sort key, so even one transaction that is larger than memory passes.
Two cases are made faster: where many runs overlap, as of a transaction that was spilled in pieces,
a whole block more is read of each, since otherwise some run's block would always be near its end
and a step would yield a few rows only; and of a run that overlaps no other a window of blocks is
read at once.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, NamedTuple

import pyarrow as pa

from sorter import order
from sorter.order import Sorted, SortKey

FAN_IN: Final = 32
MOST_RUNS: Final = 768
LARGE_BYTES: Final = 4 << 20

_FEW_RUNS: Final = 4
_PART_BYTES: Final = 32 << 10
_UNBOUNDED: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Run:
    """Sorted rows in blocks that follow one another;
    none of them has a commit_ts below `min_commit_ts`.
    """

    min_commit_ts: int
    number: int
    """Ascends in the order of arrival: of duplicates, the one in the run of the higher number is
    kept.
    """
    blocks: Iterable[Callable[[], pa.RecordBatch]]
    """Readers of the blocks; iterated once."""


def merge(
    runs: Iterable[Run],
    window_bytes: int,
    on_read: Callable[[pa.RecordBatch], None] = lambda _: None,
    *,
    unique: bool = True,
) -> Iterator[pa.RecordBatch]:
    """The rows of all runs, sorted, without empty batches and (`unique`) without duplicates.

    `on_read` is called with the rows as they are taken from the runs, duplicates included. Windows
    have about `window_bytes`.
    """
    runs = list(runs)
    if len(runs) == 1 and unique:
        yield from _merge_one(runs[0], window_bytes, on_read)
        return
    # With duplicates, a window is one piece: copies of a row stay in one batch.
    piece_bytes = max(window_bytes // 2, 1) if unique else _UNBOUNDED
    unopened = deque(sorted(runs, key=lambda run: run.min_commit_ts))
    opened: list[_OpenRun] = []
    while unopened or opened:
        # An open run has a block in memory, so it is not opened before the stream reaches its first
        # commit_ts; nor later, as rows would come out before smaller ones.
        if unopened and all(run.first[0] >= unopened[0].min_commit_ts for run in opened):
            opened.append(_OpenRun(unopened.popleft()))
        else:
            parts = _take_complete(opened, unopened, window_bytes)
            many = len(parts) > _FEW_RUNS
            for window in _windows(parts, window_bytes, unique=unique):
                on_read(window.rows)
                yield from window.pieces(piece_bytes)
            if many:
                del parts, window
                # Otherwise the pool keeps as much again as is in use.
                pa.default_memory_pool().release_unused()
        opened = [run for run in opened if run.rows.num_rows]


class _OpenRun:
    """A run that is being read: `rows` are those in memory, `first` is the key of their first one,
    and `end` that of the last one (None: the run has no more blocks).
    """

    first: SortKey
    end: SortKey | None

    def __init__(self, run: Run) -> None:
        self.number = run.number
        self.end = None
        self._blocks = iter(run.blocks)
        self._next_read = next(self._blocks, None)
        self._block_rows = 0
        self.rows = self._next_block()
        self._skip_empty_blocks()

    def take(self, limit: SortKey | None) -> pa.RecordBatch:
        """Take out the rows in memory up to `limit` (None: all)."""
        count = self.rows.num_rows if limit is None else order.count_up_to(self.rows, limit)
        taken, self.rows = self.rows.slice(0, count), self.rows.slice(count)
        self._skip_empty_blocks()
        return taken

    def read_ahead(self, size: int = 0) -> None:
        """Read until there are as many rows as in the last block, and about `size` bytes,
        or all there are.
        """
        parts, rows, bytes_read = [self.rows], self.rows.num_rows, self.rows.nbytes
        while self._next_read is not None and (rows < self._block_rows or bytes_read < size):
            parts.append(self._next_block())
            rows, bytes_read = rows + parts[-1].num_rows, bytes_read + parts[-1].nbytes
        if len(parts) > 1:
            self.rows = pa.concat_batches(parts)
            self._skip_empty_blocks()

    def _skip_empty_blocks(self) -> None:
        while not self.rows.num_rows and self._next_read is not None:
            self.rows = self._next_block()
        if self.rows.num_rows:
            self.first = order.row_key(self.rows, 0)

    def _next_block(self) -> pa.RecordBatch:
        assert self._next_read is not None, "a run has one block at least"
        block = self._next_read()
        self._next_read = next(self._blocks, None)
        self._block_rows = block.num_rows
        if self._next_read is None:
            self.end = None
        elif block.num_rows:
            self.end = order.row_key(block, block.num_rows - 1)
        return block


def _merge_one(
    run: Run, window_bytes: int, on_read: Callable[[pa.RecordBatch], None]
) -> Iterator[pa.RecordBatch]:
    """The rows of a run that no other overlaps; copies of a row are always in one block."""
    for read in run.blocks:
        rows = read()
        if rows.num_rows:
            on_read(rows)
            yield from order.arrange([rows]).pieces(window_bytes)


def _take_complete(
    opened: list[_OpenRun], unopened: deque[Run], window_bytes: int
) -> list[pa.RecordBatch]:
    """Take out, in the order of arrival, all rows up to which every run is in memory."""
    limit = _limit(opened, unopened)
    taking = [run for run in opened if limit is None or run.first <= limit]
    # One run alone, or many: without more rows of each, every step would take a few rows only.
    if len(taking) == 1 or len(taking) > _FEW_RUNS:
        for run in taking:
            run.read_ahead(window_bytes // len(taking))
        # What was read has moved the ends of runs on.
        limit = _limit(opened, unopened)
        taking = [run for run in opened if limit is None or run.first <= limit]
    # By number, which is the order of arrival: sorting is stable, and of copies the last one stays.
    taken = [run.take(limit) for run in sorted(taking, key=lambda run: run.number)]
    return [rows for rows in taken if rows.num_rows]


def _limit(opened: list[_OpenRun], unopened: deque[Run]) -> SortKey | None:
    """The key up to which the rows of all runs are in memory; None: to the end."""
    # The next block of a run that stands alone cannot hold anything smaller than what it has.
    ends = [end for run in opened if (end := run.end) is not None] if len(opened) > 1 else []
    if unopened:
        # a key below its first row: no change has op 0
        ends.append((unopened[0].min_commit_ts, 0, 0, b""))
    return min(ends, default=None)


def _windows(parts: list[pa.RecordBatch], window_bytes: int, *, unique: bool) -> Iterator[Sorted]:
    """Sort the parts together, a window at a time; however many parts there are,
    each gives rows to a window.
    """
    window_bytes = max(window_bytes, len(parts) * _PART_BYTES)
    while len(parts) > 1:
        rows, size = sum(part.num_rows for part in parts), sum(part.nbytes for part in parts)
        share = rows * window_bytes // (size * len(parts))
        if size <= window_bytes:
            break
        heads, parts = _split(parts, max(share, 1))
        yield order.arrange(heads, unique=unique)
    if parts:
        yield order.arrange(parts, unique=unique)


def _split(
    parts: list[pa.RecordBatch], share: int
) -> tuple[list[pa.RecordBatch], list[pa.RecordBatch]]:
    """Heads of at most `share` rows each (duplicates aside), at least one row in all,
    and what remains.
    """
    # The least of the keys at which the shares end: each part gives all its rows up to this key, so
    # every row that remains is above it.
    bound = min(order.row_key(part, min(share, part.num_rows) - 1) for part in parts)
    counts = [order.count_up_to(part, bound) for part in parts]
    heads = [part.slice(0, count) for part, count in zip(parts, counts, strict=True) if count]
    tails = [
        part.slice(count)
        for part, count in zip(parts, counts, strict=True)
        if count < part.num_rows
    ]
    return heads, tails


class LevelRun(NamedTuple):
    """A run on disk, its size and its level."""

    run: int
    bytes: int
    level: int


class RunLevels:
    """Chooses which of one table's runs on disk are merged,
    so that it is read in few pieces however it was spilled.

    It has the runs that may overlap or are small, in the order of their arrival. A run that memory
    pressure wrote is of level 0; `fan_in` neighbours of one level are merged into one of the next,
    so each row is written again once a level. A run of `large_bytes` is left as it is: it costs a
    reader a block or two in memory, and rewriting it would cost its size. Only when there are more
    than `most_runs`, the `fan_in` neighbours with the fewest bytes are merged. Only neighbours are
    merged: that keeps the order in which rows arrived.
    """

    __slots__ = ("_runs",)

    fan_in = FAN_IN
    most_runs = MOST_RUNS
    large_bytes = LARGE_BYTES

    def __init__(self) -> None:
        self._runs: tuple[LevelRun, ...] = ()

    def freeze(self) -> bytes:
        """The whole state in few bytes."""
        return array("Q", chain.from_iterable(self._runs)).tobytes()

    def thaw(self, frozen: Sequence[int]) -> None:
        """Restore what `freeze` gave."""
        self._runs = tuple(map(LevelRun, frozen[::3], frozen[1::3], frozen[2::3]))

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, run: int, size: int) -> None:
        """Add a new run of so many bytes, of level 0."""
        self._runs = (*self._runs, LevelRun(run, size, 0))

    def to_merge(self) -> frozenset[int] | None:
        """The numbers of runs that should be merged now; None: none."""
        first = self._same_level()
        if first is None and len(self._runs) > self.most_runs:
            first = self._smallest()
        return (
            None
            if first is None
            else frozenset(member.run for member in self._runs[first : first + self.fan_in])
        )

    def merged(self, runs: frozenset[int], size: int) -> None:
        """Replace `runs`, which `to_merge` gave, with one of `size` bytes and the lowest of their
        numbers.
        """
        level = 1 + max(member.level for member in self._runs if member.run in runs)
        # The lowest number: rows that came in runs which were spilled meanwhile have higher ones,
        # and win over copies in the merged one.
        merged = LevelRun(min(runs), size, level)
        replaced = runs - {merged.run}
        self._runs = tuple(
            merged if member.run == merged.run else member
            for member in self._runs
            if member.run not in replaced
        )

    def retain(self, runs: frozenset[int], alive: frozenset[int]) -> None:
        """Remove those of `runs` that are not `alive`."""
        self._runs = tuple(
            member for member in self._runs if member.run not in runs or member.run in alive
        )

    def _same_level(self) -> int | None:
        """The index of the first of `fan_in` neighbours of one level that are not large."""
        count, level = 0, -1
        for number, member in enumerate(self._runs):
            is_small = member.bytes < self.large_bytes
            count = (count + 1 if member.level == level else 1) if is_small else 0
            level = member.level if is_small else -1
            if count == self.fan_in:
                return number + 1 - self.fan_in
        return None

    def _smallest(self) -> int:
        """The index of the first of the `fan_in` neighbours with the fewest bytes."""
        sizes = [member.bytes for member in self._runs]
        return min(
            range(len(sizes) - self.fan_in + 1),
            key=lambda first: sum(sizes[first : first + self.fan_in]),
        )
