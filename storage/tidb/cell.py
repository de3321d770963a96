"""Cells and what they mean by their column's type: one as a Python value, many as an Arrow array.

integers, YEAR   int              DECIMAL            decimal.Decimal
FLOAT, DOUBLE    float            DATE, DATETIME, TIMESTAMP (UTC)   CoreTime
characters       str              TIME               int, nanoseconds
binary, BLOB     bytes            ENUM, SET          str, the names; a SET's joined by commas
BIT              bytes, big-endian, as wide as the column           JSON   str, the JSON text

`decode_cell` and `encode_cell` are for one. `arrow_array` gives the same values for a column of
many rows, in the Arrow types that Spark reads (`arrow_type`). DECIMAL cells that all have their
column's shape, and whose digits 64 bits hold, are decoded all at once.
"""

import struct
from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.model.errors import CorruptError, InvalidError
from storage.tidb.binary import BinaryColumn, Mask, Offsets
from storage.tidb.field_type import DATES, INTEGERS, TEXTS, Type
from storage.tidb.json import decode_json, encode_json
from storage.tidb.number import (
    WIDTHS,
    decode_decimal,
    digit_groups,
    encode_decimal,
    signed_cell,
    unsigned_cell,
)
from storage.tidb.row_layout import Cells
from storage.tidb.schema import Column
from storage.tidb.time import (
    CoreTime,
    duration_text,
    moment_texts,
    parse_duration,
    unpack_days,
    unpack_micros,
)

Value = int | float | str | bytes | Decimal | CoreTime | None
DECIMAL_PRECISION_MAX = 38
_F64 = struct.Struct(">d")
_SIGN = 1 << 63
_MASK = (1 << 64) - 1
_NUMBERS = INTEGERS | {Type.YEAR, Type.TIME}
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
_SIGN_BIT = np.uint64(1 << 63)
_WORD_DIGITS: Final = 18
"""The greatest precision of a DECIMAL that 64 bits hold."""
_SHAPE_BYTES = 2
_POSITIVE = np.uint8(0x80)
_EXACT: Final = Context(prec=200)
_CENTURY: Final = 100
_FIRST_OF_1900S: Final = 70
"""The least of two digits that are a year of the 20th century."""
_YEAR_DIGITS = 4


def decode_cell(column: Column, cell: bytes) -> Value:
    """The value of a non-null cell.

    Raises:
        CorruptError: the bytes are not a value of the column's type.
    """
    kind = column.type
    if kind in TEXTS:
        return decode_text(column, cell) if column.is_text else cell
    if kind in {Type.FLOAT, Type.DOUBLE}:
        return decode_float(cell)
    if kind is Type.NEWDECIMAL:
        return decode_decimal(cell)[0]
    if kind is Type.JSON:
        return decode_json(cell)
    if len(cell) not in WIDTHS:
        raise CorruptError(f"column {column.name}: an integer cell of {len(cell)} bytes")
    return of_integer(column, int.from_bytes(cell, "little", signed=column.stores_signed))


def encode_cell(column: Column, value: Value) -> bytes:
    """The cell of a non-null value; accepts what `decode_cell` returns.

    Raises:
        InvalidError: the value is not of the column's type.
    """
    match column.type, value:
        case kind, str() | bytes() if kind in TEXTS:
            return value.encode() if isinstance(value, str) else value
        case ((Type.FLOAT | Type.DOUBLE), float() | int()):
            return encode_float(value)
        case Type.NEWDECIMAL, Decimal() | int():
            return encode_decimal(Decimal(value), column.flen, column.decimal)
        case Type.JSON, str():
            return encode_json(value)
    number = to_integer(column, value)
    return signed_cell(number) if column.stores_signed else unsigned_cell(number)


def decode_text(column: Column, data: bytes) -> str:
    """Characters: UTF-8, whatever the column's charset; where a client stored something else,
    the nearest text.
    """
    try:
        return data.decode()
    except UnicodeDecodeError:
        return (
            data.decode("latin1") if column.charset == "latin1" else data.decode(errors="replace")
        )


def encode_float(value: float) -> bytes:
    """Eight bytes in the order of the numbers: negative ones inverted,
    the others with the sign bit set.
    """
    bits = int.from_bytes(_F64.pack(value), "big")
    ordered = ~bits & _MASK if bits & _SIGN else bits | _SIGN
    return ordered.to_bytes(8, "big")


def decode_float(data: bytes) -> float:
    """Read what `encode_float` wrote.

    Raises:
        CorruptError: there are not eight bytes.
    """
    if len(data) != _F64.size:
        raise CorruptError(f"a floating point cell of {len(data)} bytes")
    ordered = int.from_bytes(data, "big")
    bits = ordered & ~_SIGN if ordered & _SIGN else ~ordered & _MASK
    return float(_F64.unpack(bits.to_bytes(8, "big"))[0])


def of_integer(column: Column, number: int) -> Value:
    """The value of a column whose type is stored as an integer.

    Raises:
        CorruptError: an ENUM or SET has no such member.
    """
    kind = column.type
    if kind in DATES:
        return CoreTime.unpack(number)
    if kind is Type.BIT:
        return number.to_bytes(max(bit_bytes(column), (number.bit_length() + 7) // 8), "big")
    if kind is Type.ENUM:
        return _enum_name(column, number)
    if kind is Type.SET:
        return _set_names(column, number)
    return number


def bit_bytes(column: Column) -> int:
    """Return how many bytes a value of a BIT column has."""
    return (column.flen + 7) // 8


def to_integer(column: Column, value: Value) -> int:
    """The integer a column stores for `value`.

    Raises:
        InvalidError: the value is not of the column's type.
    """
    match column.type, value:
        case kind, CoreTime() if kind in DATES:
            return value.pack()
        case Type.BIT, bytes():
            return int.from_bytes(value, "big")
        case Type.ENUM, str() if not value or value in column.elems:
            return column.elems.index(value) + 1 if value else 0
        case Type.SET, str() if set(filter(None, value.split(","))) <= set(column.elems):
            return sum(1 << column.elems.index(name) for name in filter(None, value.split(",")))
        case kind, int() if kind in _NUMBERS:
            return value
    raise InvalidError(f"column {column.name}: {value!r} is not a value of {column.type.name}")


def _enum_name(column: Column, number: int) -> str:
    if number > len(column.elems):
        raise CorruptError(f"column {column.name}: ENUM has no member {number}")
    return column.elems[number - 1] if number else ""


def _set_names(column: Column, number: int) -> str:
    if number >> len(column.elems):
        raise CorruptError(f"column {column.name}: SET has no members {number:#x}")
    return ",".join(name for bit, name in enumerate(column.elems) if number >> bit & 1)


def parse_default(column: Column) -> Value:
    """Return the value of rows that are older than the column: its parsed `origin_default`.

    Raises:
        InvalidError: the schema's text is not a value of the column's type.
    """
    default = column.origin_default
    if isinstance(default, bytes):
        # TiDB keeps it without the zeros in front, and NOT NULL without DEFAULT as no byte at all.
        return default.rjust(bit_bytes(column), b"\0") if column.type is Type.BIT else default
    if default is None:
        return None
    try:
        return _parse(column, default)
    except (ValueError, ArithmeticError) as err:
        raise InvalidError(f"column {column.name}: bad default {default!r}") from err


def _parse(column: Column, text: str) -> Value:
    kind = column.type
    # TiDB keeps the text of the statement for many types, and reads it as a value of the column.
    if kind is Type.YEAR:
        return _year(text)
    if kind in INTEGERS:
        return int(Decimal(text).to_integral_value(ROUND_HALF_UP))
    if kind in {Type.FLOAT, Type.DOUBLE}:
        return float(text)
    if kind in DATES:
        return CoreTime.parse(text)
    if kind is Type.NEWDECIMAL:
        scale = max(column.decimal, 0)
        unscaled = Decimal(text).scaleb(scale, _EXACT).to_integral_value(ROUND_HALF_UP)
        return unscaled.scaleb(-scale, _EXACT)
    if kind is Type.TIME:
        return parse_duration(text)
    return text if kind not in TEXTS or column.is_text else text.encode()


def _year(text: str) -> int:
    """A YEAR of two digits is one from 1970 to 2069; so is a zero, except in four digits: TiDB
    writes 0 for NOT NULL without DEFAULT, and shows 2000.
    """
    year = int(text)
    if year >= _CENTURY or (not year and len(text) == _YEAR_DIGITS):
        return year
    return year + (1900 if year >= _FIRST_OF_1900S else 2000)


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
    """Return the value in the form that `pa.array(..., arrow_type(column))` takes."""
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
    # Stored in the order of the numbers: the sign bit of positive ones set, negative ones inverted.
    bits = cells.uint64_be()
    values = np.where(bits & _SIGN_BIT, bits & ~_SIGN_BIT, ~bits).view(np.float64)
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
    # Each cell names its own precision and scale; one of another shape has its digits elsewhere.
    if not bool(np.all((end - begin == size) & (cells.rows.u16(begin) == head))):
        return None
    unscaled = np.zeros(len(cells.present), np.int64)
    unscaled[cells.present] = _unscaled(column, cells.rows, begin + _SHAPE_BYTES)
    return decimal128(
        unscaled, unscaled >> 63, cells.present, pa.decimal128(column.flen, column.decimal)
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


def decimal128(
    low: npt.NDArray[np.int64], high: npt.NDArray[np.int64], present: Mask, target: pa.DataType
) -> pa.Array:
    """Arrow's decimals: unscaled two's complement numbers of 16 little-endian bytes."""
    words = np.stack((low, high), axis=1)
    return pa.Array.from_buffers(
        target, len(words), [pa.array(present).buffers()[1], pa.py_buffer(words)]
    )
