"""The parts of a split table put together again: their slices, and their rows. Pure.

Rows come in the order in which one sorter would give those of the whole table: by commit_ts,
start_ts, operation and key. The parts are ranges of keys one behind the other, so among rows that
are equal in the first three the part's place decides. `_seq` is numbered anew: it counts the rows
of a transaction in the table. So a reader cannot tell a split table from another one.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sink.cut import SLICES_MAX, Slice
from storage.model.span import Span

_OPS: Final = pa.array(["delete", "update", "insert"])
"""The operations in their order within a transaction."""
_SEQ: Final = "_seq"


class _Place(NamedTuple):
    """The position of a row in the order of all parts."""

    commit_ts: int
    start_ts: int
    op: int


class _UnmergedRows:
    """Rows of one part that have not been given yet."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._batch: pa.RecordBatch | None = None
        self._places: tuple[npt.NDArray[np.int64], ...] = ()

    def fill(self) -> bool:
        """Have rows, as long as there are any."""
        while self._batch is None or not self._batch.num_rows:
            following = next(self._batches, None)
            if following is None:
                return False
            self._batch, self._places = following, _places(following)
        return True

    @property
    def first(self) -> _Place:
        """The place of the first row in memory."""
        return _Place(*(int(column[0]) for column in self._places))

    @property
    def last(self) -> _Place:
        """The place of the last row in memory; rows not yet read stand there or behind it."""
        return _Place(*(int(column[-1]) for column in self._places))

    def below(self, bound: _Place) -> pa.RecordBatch:
        """Take the rows in front of `bound`."""
        return self._take(self._count(bound, through=False))

    def through(self, bound: _Place) -> pa.RecordBatch:
        """Take the rows up to `bound`, and those at it."""
        return self._take(self._count(bound, through=True))

    def _count(self, bound: _Place, *, through: bool) -> int:
        ahead = np.zeros(len(self._places[0]), np.bool_)
        equal = np.ones(len(ahead), np.bool_)
        for column, limit in zip(self._places, bound, strict=True):
            ahead |= equal & (column < limit)
            equal &= column == limit
        return int(np.count_nonzero(ahead | equal if through else ahead))

    def _take(self, count: int) -> pa.RecordBatch:
        assert self._batch is not None, "it was filled"
        taken, self._batch = self._batch.slice(0, count), self._batch.slice(count)
        self._places = tuple(column[count:] for column in self._places)
        return taken


def merged(parts: Sequence[Iterator[pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
    """The rows of one range of a table, of all its parts in the order of their keys.

    Raises whatever a part raises. Of each part one batch is held.
    """
    waiting, numbers = [_UnmergedRows(part) for part in parts], _Numbers()
    while waiting := [part for part in waiting if part.fill()]:
        # No part has anything in front of the least of their last rows that is not here.
        bound = min(part.last for part in waiting)
        taken = [rows for part in waiting if (rows := part.below(bound)).num_rows]
        if not taken:
            # Some part's rows are all at `bound`, and may go on there in its next batch: those of
            # the first such part stand in front of the others'.
            taken = [next(part for part in waiting if part.first == bound).through(bound)]
        yield numbers.renumbered(_sorted(taken))


def _places(batch: pa.RecordBatch) -> tuple[npt.NDArray[np.int64], ...]:
    op = pc.index_in(batch.column("_op"), _OPS)
    columns = (batch.column("_commit_ts"), batch.column("_start_ts"), op)
    return tuple(
        np.asarray(column.to_numpy(zero_copy_only=False)).astype(np.int64) for column in columns
    )


def _sorted(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    rows = pa.concat_batches(batches)
    commit_ts, start_ts, op = _places(rows)
    # Stable, so rows that are equal stay in the order of the parts.
    return rows.take(pa.array(np.lexsort((op, start_ts, commit_ts))))


class _Numbers:
    """Counts the rows of each transaction over consecutive batches."""

    def __init__(self) -> None:
        self._last = (-1, -1)
        self._count = 0

    def renumbered(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows with their numbers."""
        commit_ts, start_ts, _ = _places(batch)
        begins = np.ones(len(commit_ts), np.bool_)
        begins[1:] = (commit_ts[1:] != commit_ts[:-1]) | (start_ts[1:] != start_ts[:-1])
        at = np.flatnonzero(begins)
        numbers = np.arange(len(begins)) - np.repeat(at, np.diff([*at, len(begins)]))
        if (int(commit_ts[0]), int(start_ts[0])) == self._last:
            going_on = int(at[1]) if len(at) > 1 else len(begins)
            numbers[:going_on] += self._count
        self._last = int(commit_ts[-1]), int(start_ts[-1])
        self._count = int(numbers[-1]) + 1
        index = batch.schema.get_field_index(_SEQ)
        return batch.set_column(index, batch.schema.field(index), pa.array(numbers, pa.int64()))


def joined(
    span: Span, slices: Iterable[Slice], bounds: tuple[int, int], slice_bytes: int | None
) -> list[Slice]:
    """The slices of a table's parts in one range as slices of the whole, which cover it without
    gaps; none if there are no rows.
    """
    start_ts, end_ts = bounds
    parts = sorted(slices, key=lambda part: part.end_ts)
    rows, size = sum(part.rows for part in parts), sum(part.bytes for part in parts)
    if not rows:
        return []
    if slice_bytes is None:
        return [Slice(span, start_ts, end_ts, rows, size)]
    # A part's slice counts where it ends: its rows lie somewhere before.
    enough = max(slice_bytes, -(-size // SLICES_MAX), 1)
    whole: list[Slice] = []
    begin, rows, size = start_ts, 0, 0
    for part in parts:
        rows, size = rows + part.rows, size + part.bytes
        if size >= enough and begin < part.end_ts < end_ts:
            whole.append(Slice(span, begin, part.end_ts, rows, size))
            begin, rows, size = part.end_ts, 0, 0
    return [*whole, Slice(span, begin, end_ts, rows, size)]
