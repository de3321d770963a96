"""The order of a table's row changes, (commit_ts, start_ts, op, key), on whole Arrow batches. Pure.

Two rows equal in all four are the same change sent twice (a restarted region subscription sends
again what it cannot know to have arrived); of those the one that arrived last is kept. TiCDC's
sorter does the same by overwriting its key.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from storage.model.event import Position
from storage.model.ts import MAX_TS

SortKey = tuple[int, int, int, bytes]
Side = Literal["left", "right"]
Timestamps = npt.NDArray[np.uint64]
Order = npt.NDArray[Any]  # row numbers

SORT_KEYS: Final = [
    ("commit_ts", "ascending"),
    ("start_ts", "ascending"),
    ("op", "ascending"),
    ("key", "ascending"),
]


def commit_ts(batch: pa.RecordBatch) -> Timestamps:
    """The commit_ts column, without a copy."""
    values: Timestamps = _numbers(batch, 0)
    return values


def start_ts(batch: pa.RecordBatch) -> Timestamps:
    """The start_ts column, without a copy."""
    values: Timestamps = _numbers(batch, 1)
    return values


@dataclass(frozen=True, slots=True)
class Sorted:
    """Rows and the order in which they are to be read (None: as they are);
    `dropped` lists those that came twice.
    """

    rows: pa.RecordBatch
    order: Order | None
    dropped: Order | None = None

    @property
    def num_rows(self) -> int:
        """The number of rows read."""
        return len(self.order) if self.order is not None else int(self.rows.num_rows)

    def batch(self, first: int = 0, count: int | None = None) -> pa.RecordBatch:
        """`count` rows (None: all) from `first` on."""
        if self.order is None:
            return self.rows.slice(first, count)
        return self.rows.take(
            pa.array(self.order[first : None if count is None else first + count])
        )

    def pieces(self, size: int) -> Iterator[pa.RecordBatch]:
        """All rows in batches of `size` to twice as many bytes;
        so a copy of all is never in memory.
        """
        step = -(-self.num_rows // max(min(self.rows.nbytes // size, self.num_rows), 1))
        for first in range(0, self.num_rows, step):
            yield self.batch(first, step)


def arrange(batches: Sequence[pa.RecordBatch], *, unique: bool = True) -> Sorted:
    """Sort one or more batches, given in the order of their arrival; `unique`: without duplicates.

    Duplicates that stay are in the order of their arrival.
    """
    rows = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
    timestamps = commit_ts(rows)
    # Most batches come sorted, as a store sends a scan or a log its transactions: no copy then.
    if _ascending(timestamps) or (
        np.all(timestamps[1:] >= timestamps[:-1]) and _strictly_sorted(rows)
    ):
        return Sorted(rows, None)
    # Where no commit_ts comes twice, one column of numbers decides: Arrow's sort of four columns,
    # one of them bytes, is needed only where it does.
    order = np.argsort(timestamps)
    if _ascending(timestamps[order]):
        return Sorted(rows, order)
    # Stable, so copies of a row stay in the order of their arrival: the last one is to win.
    order = pc.sort_indices(rows, sort_keys=SORT_KEYS).to_numpy()
    return _without_duplicates(rows, order) if unique else Sorted(rows, order)


def sort(batches: Sequence[pa.RecordBatch], *, unique: bool = True) -> pa.RecordBatch:
    """One sorted batch; see `arrange`."""
    return arrange(batches, unique=unique).batch()


def row_key(batch: pa.RecordBatch, row: int) -> SortKey:
    """The sort key of one row."""
    commit, start, op, key = (batch.column(column)[row].as_py() for column in range(4))
    return commit, start, op, key


def count_up_to(batch: pa.RecordBatch, bound: SortKey) -> int:
    """The number of rows of a sorted batch that have a key <= `bound`."""
    low, high = 0, batch.num_rows
    for column, value in enumerate(bound[:3]):
        low, high = _equal(_numbers(batch, column), value, low, high)
    # By hand: to search in them, NumPy would first make Python objects of all keys of the batch.
    keys = batch.column(3)
    while low < high:
        middle = (low + high) // 2
        if keys[middle].as_py() <= bound[3]:
            low = middle + 1
        else:
            high = middle
    return low


def clip(batch: pa.RecordBatch, lower: Position, upper: Position) -> pa.RecordBatch:
    """The rows of a sorted batch within `[lower, upper]`, without a copy."""
    first = _position_rank(batch, lower, "left")
    return batch.slice(first, max(_position_rank(batch, upper, "right") - first, 0))


def clip_ts(timestamps: Timestamps, lower_ts: int, upper_ts: int) -> Timestamps:
    """The values of a sorted array within `[lower_ts, upper_ts]`."""
    return timestamps[_rank(timestamps, lower_ts, "left") : _rank(timestamps, upper_ts, "right")]


def split(batch: pa.RecordBatch, upper_ts: int) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """An unsorted batch as (rows with commit_ts <= `upper_ts`, the others);
    each keeps its order.
    """
    below = pa.array(commit_ts(batch) <= np.uint64(upper_ts))
    return batch.filter(below), batch.filter(pc.invert(below))


def _numbers(batch: pa.RecordBatch, column: int) -> Any:
    return batch.column(column).to_numpy(zero_copy_only=True)


def _ascending(timestamps: Timestamps) -> bool:
    return bool(np.all(timestamps[1:] > timestamps[:-1]))


def _strictly_sorted(rows: pa.RecordBatch) -> bool:
    """Whether each row's key is above that of the row before; the commit_ts must be ascending."""
    equal = np.ones(rows.num_rows - 1, np.bool_)
    for column in range(3):
        values = _numbers(rows, column)
        if np.any(equal & (values[1:] < values[:-1])):
            return False
        equal &= values[1:] == values[:-1]
    if not equal.any():
        return True
    keys = rows.column(3)
    rising = pc.less(keys.slice(0, len(equal)), keys.slice(1)).to_numpy(zero_copy_only=False)
    return bool(np.all(rising | ~equal))


def _rank(timestamps: Timestamps, ts: int, side: Side) -> int:
    # NumPy compares uint64 with a Python int as float64, which cannot tell neighbouring timestamps
    # apart.
    return int(np.searchsorted(timestamps, np.uint64(min(ts, MAX_TS)), side))


def _equal(values: Any, value: int, low: int, high: int) -> tuple[int, int]:
    """The begin and end of those in the sorted `values[low:high]` that equal `value`."""
    part, number = values[low:high], values.dtype.type(value)
    begin = int(np.searchsorted(part, number, "left"))
    end = int(np.searchsorted(part, number, "right"))
    return low + begin, low + end


def _position_rank(batch: pa.RecordBatch, position: Position, side: Side) -> int:
    timestamps = commit_ts(batch)
    first = _rank(timestamps, position.commit_ts, "left")
    end = _rank(timestamps, position.commit_ts, "right")
    if first == end:
        return first
    # start_ts ascends only among rows of one commit_ts.
    return first + _rank(start_ts(batch)[first:end], position.start_ts, side)


def _without_duplicates(rows: pa.RecordBatch, order: Any) -> Sorted:
    commit, start, op = commit_ts(rows)[order], start_ts(rows)[order], _numbers(rows, 2)[order]
    twins = np.flatnonzero(
        (commit[1:] == commit[:-1]) & (start[1:] == start[:-1]) & (op[1:] == op[:-1])
    )
    if not len(twins):
        return Sorted(rows, order)
    # Only keys of rows whose numbers are all equal are looked at: few, or none.
    keys = rows.column(3)
    one, other = keys.take(pa.array(order[twins])), keys.take(pa.array(order[twins + 1]))
    earlier = twins[pc.equal(one, other).to_numpy(zero_copy_only=False)]
    if not len(earlier):
        return Sorted(rows, order)
    return Sorted(rows, np.delete(order, earlier), order[earlier])
