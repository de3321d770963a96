"""Many rows of format v2 written at once, from rows of format v1 and of binlogs; `storage.tidb.row` writes one.

A row is a run of slices: header, column ids, cell ends, cells. All of them are laid into one byte buffer, and gathered.
"""

from collections.abc import Collection
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.tidb.binary import BinaryColumn, Mask, Offsets
from storage.tidb.pairs import Pairs
from storage.tidb.row import HEAD_BYTES, LARGE, VERSION

GATHER_BYTES: Final = 4 << 20
"""Rows are written in runs of about this size: a gather takes eight times as much memory."""
_HEAD: Final = np.dtype([("version", "u1"), ("flags", "u1"), ("not_null", "<u2"), ("null", "<u2")])
_SMALL_ID_MAX: Final = 0xFF
_SMALL_BYTES_MAX: Final = 0xFFFF
_NUMBER_BYTES: Final = 8


def encode_rows(pairs: Pairs, leave_out: Collection[int] = ()) -> pa.Array:
    """Rows of format v2 with the columns of `pairs` but those of `leave_out`, in the same order.

    Raises:
        CorruptError: a row has a column twice.
    """
    ordered = (pairs.without(leave_out) if leave_out else pairs).sorted()
    valued = ordered.used & ~ordered.null
    cells = _Cells(ordered, valued)
    large = (cells.ends[:, -1:] > _SMALL_BYTES_MAX).any(axis=1) | ((ordered.ids > _SMALL_ID_MAX) & ordered.used).any(
        axis=1
    )
    parts, rows = [], []
    for is_large in (False, True):
        at = np.flatnonzero(large == is_large)
        for run in _runs(at, cells.size[at].sum(axis=1)):
            parts.append(_encode(ordered, valued, cells, run, is_large=is_large))
            rows.append(run)
    if len(parts) == 1:
        return parts[0]
    order = np.argsort(np.concatenate(rows)) if rows else np.zeros(0, np.int64)
    return pa.concat_arrays(parts or [pa.array([], pa.binary())]).take(pa.array(order))


class _Cells:
    """Where each cell lies in `source`: the rows' own bytes, followed by eight bytes for each number."""

    def __init__(self, pairs: Pairs, valued: Mask) -> None:
        numbers = np.ascontiguousarray(pairs.number).view(np.uint8).reshape(-1)
        self.source = np.concatenate([pairs.column.data, numbers])
        places = np.arange(pairs.number.size, dtype=np.int64).reshape(pairs.number.shape)
        self.begin: Offsets = np.where(pairs.is_number, len(pairs.column.data) + places * _NUMBER_BYTES, pairs.begin)
        size = np.where(pairs.is_number, _widths(pairs.number, pairs.is_signed), pairs.size)
        self.size: Offsets = np.where(valued, size, 0)
        self.ends: Offsets = np.cumsum(self.size, axis=1)


def _encode(pairs: Pairs, valued: Mask, cells: _Cells, rows: Offsets, *, is_large: bool) -> pa.Array:
    """The rows of those numbers, all large or all small."""
    id_type, end_type = ("<u4", "<u4") if is_large else ("u1", "<u2")
    counts, not_null = pairs.used[rows].sum(axis=1), valued[rows].sum(axis=1)
    head = np.empty(len(rows), _HEAD)
    head["version"], head["flags"] = VERSION, LARGE if is_large else 0
    head["not_null"], head["null"] = not_null, counts - not_null
    tables = (head, pairs.ids[rows].astype(id_type), cells.ends[rows].astype(end_type))
    begin, size, sources, base = [], [], [cells.source], len(cells.source)
    used = (np.full(len(rows), HEAD_BYTES), counts * tables[1].itemsize, not_null * tables[2].itemsize)
    for table, length in zip(tables, used, strict=True):
        flat = np.ascontiguousarray(table).view(np.uint8).reshape(-1)
        begin.append(base + np.arange(len(rows), dtype=np.int64) * (len(flat) // max(len(rows), 1)))
        size.append(length)
        sources.append(flat)
        base += len(flat)
    return _gathered(
        np.concatenate(sources),
        np.column_stack([*begin, cells.begin[rows]]),
        np.column_stack([*size, cells.size[rows]]),
    )


def _gathered(source: npt.NDArray[np.uint8], begin: Offsets, size: Offsets) -> pa.Array:
    """One binary value for each line of slices."""
    sizes = size.reshape(-1)
    ends = np.cumsum(sizes)
    at = np.repeat(begin.reshape(-1) - (ends - sizes), sizes)
    at += np.arange(len(at))
    bounds = np.zeros(len(size) + 1, np.int32)
    bounds[1:] = np.cumsum(size.sum(axis=1))
    buffers = [None, pa.py_buffer(bounds), pa.py_buffer(source[at])]
    return pa.Array.from_buffers(pa.binary(), len(size), buffers)


def _runs(rows: Offsets, sizes: npt.NDArray[Any]) -> list[Offsets]:
    """`rows` cut into runs of about GATHER_BYTES."""
    if not len(rows):
        return []
    number = (np.cumsum(sizes) - sizes) // GATHER_BYTES
    return np.split(rows, np.flatnonzero(np.diff(number)) + 1)


def _widths(numbers: npt.NDArray[np.int64], is_signed: Mask) -> npt.NDArray[np.int64]:
    """The fewest of 1, 2, 4, 8 bytes that hold each number."""
    magnitude = np.where(is_signed, (numbers ^ (numbers >> 63)) << 1, numbers).view(np.uint64)
    limits = np.array([0xFF, 0xFFFF, 0xFFFFFFFF], np.uint64)
    return np.array([1, 2, 4, 8])[np.searchsorted(limits, magnitude, "left")]


def column_of(rows: list[bytes]) -> BinaryColumn:
    """Rows as they come from messages."""
    return BinaryColumn(pa.array(rows, pa.binary()))
