"""Many DECIMAL cells of one shape at once, where 64 bits hold their digits; `storage.tidb.decimal` gives the form."""

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.tidb.binary import BinaryColumn, Mask, Offsets
from storage.tidb.cells import Cells
from storage.tidb.column import Column
from storage.tidb.decimal import digit_groups

PRECISION_MAX: Final = 18
_HEAD_BYTES = 2
_POSITIVE = np.uint8(0x80)


def decode_decimals(column: Column, cells: Cells) -> pa.Array | None:
    """The column's values as decimal128, or None if a cell has another shape than the column."""
    begin, end = cells.begin[cells.present], cells.end[cells.present]
    head = np.uint16(column.flen | column.decimal << 8)
    size = _HEAD_BYTES + sum(width for _, width in digit_groups(column.flen, column.decimal))
    if not bool(np.all((end - begin == size) & (cells.rows.u16(begin) == head))):
        return None
    unscaled = np.zeros(len(cells.present), np.int64)
    unscaled[cells.present] = _unscaled(column, cells.rows, begin + _HEAD_BYTES)
    return decimal128(unscaled, unscaled >> 63, cells.present, pa.decimal128(column.flen, column.decimal))


def decimal128(low: npt.NDArray[np.int64], high: npt.NDArray[np.int64], present: Mask, target: pa.DataType) -> pa.Array:
    """Arrow's decimals: unscaled two's complement numbers of 16 little-endian bytes."""
    words = np.stack((low, high), axis=1)
    return pa.Array.from_buffers(target, len(words), [pa.array(present).buffers()[1], pa.py_buffer(words)])


def _unscaled(column: Column, rows: BinaryColumn, at: Offsets) -> npt.NDArray[np.int64]:
    negative = (rows.u8(at) & _POSITIVE) == 0
    value = np.zeros(len(at), np.uint64)
    flipped = _POSITIVE  # the first bit of the first group
    for digits, width in digit_groups(column.flen, column.decimal):
        ones = np.uint64((1 << 8 * width) - 1)
        group = (rows.u64_be(at) >> np.uint64(64 - 8 * width)) ^ np.where(negative, ones, np.uint64(0))
        group ^= np.uint64(int(flipped) << 8 * (width - 1))
        value = value * np.uint64(10**digits) + group
        flipped, at = np.uint8(0), at + width
    return np.where(negative, -value.view(np.int64), value.view(np.int64))
