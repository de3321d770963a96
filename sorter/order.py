"""The order of a table's row changes, (commit_ts, start_ts, op, key), on whole Arrow batches. Pure.

Two rows equal in all four are the same change sent twice (a restarted region subscription sends again what it cannot
know to have arrived); of those the one that arrived last is kept. TiCDC's sorter does the same by overwriting its key.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from storage.model.event import Position
from storage.model.ts import MAX_TS

SortKey = tuple[int, int, int, bytes]
Side = Literal["left", "right"]
Timestamps = npt.NDArray[np.uint64]

_SORT_KEYS = [("commit_ts", "ascending"), ("start_ts", "ascending"), ("op", "ascending"), ("key", "ascending")]


def commit_ts(batch: pa.RecordBatch) -> Timestamps:
    """The commit_ts column, without a copy."""
    values: Timestamps = _numbers(batch, 0)
    return values


def start_ts(batch: pa.RecordBatch) -> Timestamps:
    """The start_ts column, without a copy."""
    values: Timestamps = _numbers(batch, 1)
    return values


def sort(batches: Sequence[pa.RecordBatch], *, unique: bool = True) -> pa.RecordBatch:
    """One sorted batch out of one or more batches, given in the order of their arrival; `unique`: without duplicates.

    Duplicates that stay are in the order of their arrival.
    """
    rows = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
    timestamps = commit_ts(rows)
    if _ascending(timestamps):
        return rows
    order = np.argsort(timestamps)
    if _ascending(timestamps[order]):
        return rows.take(pa.array(order))
    sorted_rows = rows.take(pc.sort_indices(rows, sort_keys=_SORT_KEYS))
    return _without_duplicates(sorted_rows) if unique else sorted_rows


def row_key(batch: pa.RecordBatch, row: int) -> SortKey:
    """The sort key of one row."""
    commit, start, op, key = (batch.column(column)[row].as_py() for column in range(4))
    return commit, start, op, key


def count_below(batch: pa.RecordBatch, ts: int) -> int:
    """How many rows of a sorted batch have a commit_ts < `ts`."""
    return _rank(commit_ts(batch), ts, "left")


def count_up_to(batch: pa.RecordBatch, bound: SortKey) -> int:
    """How many rows of a sorted batch have a key <= `bound`."""
    low, high = 0, batch.num_rows
    for column, value in enumerate(bound[:3]):
        low, high = _equal(_numbers(batch, column), value, low, high)
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
    """An unsorted batch as (rows with commit_ts <= `upper_ts`, the others); each keeps its order."""
    below = pa.array(commit_ts(batch) <= np.uint64(upper_ts))
    return batch.filter(below), batch.filter(pc.invert(below))


def _numbers(batch: pa.RecordBatch, column: int) -> Any:
    return batch.column(column).to_numpy(zero_copy_only=True)


def _ascending(timestamps: Timestamps) -> bool:
    return bool(np.all(timestamps[1:] > timestamps[:-1]))


def _rank(timestamps: Timestamps, ts: int, side: Side) -> int:
    # NumPy compares uint64 with a Python int as float64, which cannot tell neighbouring timestamps apart.
    return int(np.searchsorted(timestamps, np.uint64(min(ts, MAX_TS)), side))


def _equal(values: Any, value: int, low: int, high: int) -> tuple[int, int]:
    """Where in the sorted `values[low:high]` those equal to `value` begin and end."""
    part, wanted = values[low:high], values.dtype.type(value)
    return low + int(np.searchsorted(part, wanted, "left")), low + int(np.searchsorted(part, wanted, "right"))


def _position_rank(batch: pa.RecordBatch, position: Position, side: Side) -> int:
    timestamps = commit_ts(batch)
    first, end = _rank(timestamps, position.commit_ts, "left"), _rank(timestamps, position.commit_ts, "right")
    return first + _rank(start_ts(batch)[first:end], position.start_ts, side) if first < end else first


def _without_duplicates(rows: pa.RecordBatch) -> pa.RecordBatch:
    commit, start, op = commit_ts(rows), start_ts(rows), _numbers(rows, 2)
    twins = np.flatnonzero((commit[1:] == commit[:-1]) & (start[1:] == start[:-1]) & (op[1:] == op[:-1]))
    if not len(twins):
        return rows
    keys = rows.column(3)
    same_key = pc.equal(keys.take(pa.array(twins)), keys.take(pa.array(twins + 1))).to_numpy(zero_copy_only=False)
    if not same_key.any():
        return rows
    keep = np.ones(rows.num_rows, dtype=bool)
    keep[twins[same_key]] = False
    return rows.filter(pa.array(keep))
