"""TiDB's column types as Arrow's, and cells as Arrow arrays: the types Spark reads,
with no value changed on the way.

DECIMAL cells that all have their column's shape, and whose digits 64 bits hold, are decoded all at
once.
"""

from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.model.errors import CorruptError
from storage.tidb.binary import BinaryColumn, Mask, Offsets
from storage.tidb.cell import Value, decode_cell, decode_text, of_integer
from storage.tidb.cells import Cells
from storage.tidb.decimal import digit_groups
from storage.tidb.field_type import DATES, INTEGERS, TEXTS, Type
from storage.tidb.schema import Column
from storage.tidb.time import CoreTime, duration_text, moment_texts, unpack_days, unpack_micros

DECIMAL_PRECISION_MAX = 38
_BIGINT_UNSIGNED = pa.decimal128(20, 0)
_SIGNED = {
    Type.TINY: pa.int8(),
    Type.SHORT: pa.int16(),
    Type.INT24: pa.int32(),
    Type.LONG: pa.int32(),
    Type.LONGLONG: pa.int64(),
}
_UNSIGNED = {
    Type.TINY: pa.int16(),
    Type.SHORT: pa.int32(),
    Type.INT24: pa.int32(),
    Type.LONG: pa.int64(),
    Type.LONGLONG: _BIGINT_UNSIGNED,
}
_OTHERS = {
    Type.YEAR: pa.int16(),
    Type.FLOAT: pa.float32(),
    Type.DOUBLE: pa.float64(),
    Type.DATE: pa.date32(),
    Type.DATETIME: pa.timestamp("us"),
    Type.TIMESTAMP: pa.timestamp("us", tz="UTC"),
    Type.BIT: pa.binary(),
}
_SIGN = np.uint64(1 << 63)
_WORD_DIGITS: Final = 18
"""Of a DECIMAL that 64 bits hold."""
_SHAPE_BYTES = 2
_POSITIVE = np.uint8(0x80)


def arrow_type(column: Column) -> pa.DataType:
    """The Arrow type in which the column's values reach Spark."""
    if column.as_text:
        return pa.string()
    if column.type in INTEGERS:
        return (_UNSIGNED if column.unsigned else _SIGNED)[column.type]
    if column.type is Type.NEWDECIMAL and column.flen <= DECIMAL_PRECISION_MAX:
        return pa.decimal128(column.flen, max(column.decimal, 0))
    if column.type in TEXTS and not column.is_text:
        return pa.binary()
    return _OTHERS.get(column.type, pa.string())


def arrow_value(column: Column, value: Value) -> Any:
    """What `pa.array(..., arrow_type(column))` takes for `value`."""
    if isinstance(value, CoreTime):
        return _moment(column, value)
    if column.type is Type.TIME and isinstance(value, int):
        return duration_text(value, column.decimal)
    if isinstance(value, Decimal) and column.flen > DECIMAL_PRECISION_MAX:
        return f"{value:.{column.decimal}f}"
    return value


def arrow_array(column: Column, cells: Cells) -> pa.Array:
    """The column's values, null where `cells` has none."""
    kind = column.type
    if kind in TEXTS:
        return _texts(column, cells)
    if kind in {Type.FLOAT, Type.DOUBLE}:
        return _floats(column, cells)
    if kind is Type.NEWDECIMAL and column.flen <= _WORD_DIGITS:
        decimals = decode_decimals(column, cells)
        return decimals if decimals is not None else _scalars(column, cells)
    if kind in {Type.NEWDECIMAL, Type.JSON}:
        return _scalars(column, cells)
    if kind in INTEGERS or kind is Type.YEAR:
        return arrow_integers(
            column, cells.uint64() if column.unsigned else cells.int64(), cells.present
        )
    if kind in DATES:
        return _moments(column, cells)
    numbers = cells.int64() if kind is Type.TIME else cells.uint64()
    return _distinct(column, numbers, cells.present)


def arrow_integers(column: Column, numbers: npt.NDArray[Any], present: Mask) -> pa.Array:
    """An integer column's values from 64-bit numbers, signed as the column is.

    Raises:
        CorruptError: a number is too large for the column.
    """
    target = arrow_type(column)
    if target == _BIGINT_UNSIGNED:
        return decimal128(numbers.view(np.int64), np.zeros(len(numbers), np.int64), present, target)
    try:
        return pa.array(numbers, mask=~present).cast(target)
    except pa.ArrowInvalid as err:
        raise CorruptError(
            f"column {column.name}: {err}; its schema may be older than the row"
        ) from err


def _moments(column: Column, cells: Cells) -> pa.Array:
    packed = cells.uint64()
    if column.as_text:
        distinct, places = np.unique(
            np.where(cells.present, packed, np.uint64(0)), return_inverse=True
        )
        texts = moment_texts(distinct.tolist(), column.decimal, is_date=column.type is Type.DATE)
        return pa.array(texts, pa.string()).take(pa.array(places, mask=~cells.present))
    if column.type is Type.DATE:
        days, is_moment = unpack_days(packed)
        return pa.array(days.astype(np.int32), mask=~(is_moment & cells.present)).cast(pa.date32())
    micros, is_moment = unpack_micros(packed)
    return pa.array(micros, mask=~(is_moment & cells.present)).cast(arrow_type(column))


def _floats(column: Column, cells: Cells) -> pa.Array:
    bits = cells.uint64_be()
    values = np.where(bits & _SIGN, bits & ~_SIGN, ~bits).view(np.float64)
    target = arrow_type(column)
    return pa.array(values, mask=~cells.present).cast(target)


def _texts(column: Column, cells: Cells) -> pa.Array:
    cells_as_bytes = cells.binary()
    if not column.is_text:
        return cells_as_bytes
    try:
        return cells_as_bytes.cast(pa.string())
    except pa.ArrowInvalid:  # not UTF-8 somewhere: find the nearest text, value by value
        texts = [
            None if data is None else decode_text(column, data)
            for data in cells_as_bytes.to_pylist()
        ]
        return pa.array(texts, pa.string())


def _scalars(column: Column, cells: Cells) -> pa.Array:
    raw_cells = cells.binary().to_pylist()
    return _array(
        column, [None if cell is None else decode_cell(column, cell) for cell in raw_cells]
    )


def _distinct(column: Column, numbers: npt.NDArray[Any], present: Mask) -> pa.Array:
    """Decode each distinct number once: times, enums, sets and bits repeat, or decode slowly."""
    distinct, places = np.unique(np.where(present, numbers, 0), return_inverse=True)
    used = np.isin(distinct, numbers[present])
    values = [
        of_integer(column, int(number)) if is_used else None
        for number, is_used in zip(distinct, used, strict=True)
    ]
    return _array(column, values).take(pa.array(places, mask=~present))


def _array(column: Column, values: Sequence[Value]) -> pa.Array:
    return pa.array([arrow_value(column, value) for value in values], arrow_type(column))


def _moment(column: Column, value: CoreTime) -> date | datetime | str | None:
    if column.as_text:
        return value.date_text() if column.type is Type.DATE else value.text(column.decimal)
    moment = value.to_datetime()
    if moment is None or column.type is Type.DATETIME:
        return moment
    return moment.date() if column.type is Type.DATE else moment.replace(tzinfo=UTC)


def decode_decimals(column: Column, cells: Cells) -> pa.Array | None:
    """The column's values as decimal128, or None if a cell has another shape than the column."""
    begin, end = cells.begin[cells.present], cells.end[cells.present]
    head = np.uint16(column.flen | column.decimal << 8)
    size = _SHAPE_BYTES + sum(width for _, width in digit_groups(column.flen, column.decimal))
    if not bool(np.all((end - begin == size) & (cells.rows.u16(begin) == head))):
        return None
    unscaled = np.zeros(len(cells.present), np.int64)
    unscaled[cells.present] = _unscaled(column, cells.rows, begin + _SHAPE_BYTES)
    return decimal128(
        unscaled, unscaled >> 63, cells.present, pa.decimal128(column.flen, column.decimal)
    )


def decimal128(
    low: npt.NDArray[np.int64], high: npt.NDArray[np.int64], present: Mask, target: pa.DataType
) -> pa.Array:
    """Arrow's decimals: unscaled two's complement numbers of 16 little-endian bytes."""
    words = np.stack((low, high), axis=1)
    return pa.Array.from_buffers(
        target, len(words), [pa.array(present).buffers()[1], pa.py_buffer(words)]
    )


def _unscaled(column: Column, rows: BinaryColumn, at: Offsets) -> npt.NDArray[np.int64]:
    negative = (rows.u8(at) & _POSITIVE) == 0
    value = np.zeros(len(at), np.uint64)
    flipped = _POSITIVE  # the first bit of the first group
    for digits, width in digit_groups(column.flen, column.decimal):
        ones = np.uint64((1 << 8 * width) - 1)
        group = (rows.u64_be(at) >> np.uint64(64 - 8 * width)) ^ np.where(
            negative, ones, np.uint64(0)
        )
        group ^= np.uint64(int(flipped) << 8 * (width - 1))
        value = value * np.uint64(10**digits) + group
        flipped, at = np.uint8(0), at + width
    return np.where(negative, -value.view(np.int64), value.view(np.int64))
