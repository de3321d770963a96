"""One cell of a row: its bytes and, by the column's type, the value they mean.

integers, YEAR   int              DECIMAL            decimal.Decimal
FLOAT, DOUBLE    float            DATE, DATETIME, TIMESTAMP (UTC)   CoreTime
characters       str              TIME               int, nanoseconds
binary, BLOB     bytes            ENUM, SET          str, the names; a SET's joined by commas
BIT              bytes, big-endian, as wide as the column           JSON   str, the JSON text
"""

import struct
from decimal import Decimal

from storage.model.errors import CorruptError, InvalidError
from storage.tidb.decimal import decode_decimal, encode_decimal
from storage.tidb.field_type import DATES, INTEGERS, TEXTS, Type
from storage.tidb.integer import WIDTHS, signed_cell, unsigned_cell
from storage.tidb.json import decode_json, encode_json
from storage.tidb.schema import Column
from storage.tidb.time import CoreTime, parse_duration

Value = int | float | str | bytes | Decimal | CoreTime | None

_F64 = struct.Struct(">d")
_SIGN = 1 << 63
_MASK = (1 << 64) - 1
_NUMBERS = INTEGERS | {Type.YEAR, Type.TIME}


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
    return ((~bits & _MASK) if bits & _SIGN else bits | _SIGN).to_bytes(8, "big")


def decode_float(data: bytes) -> float:
    """Read what `encode_float` wrote.

    Raises:
        CorruptError: there are not eight bytes.
    """
    if len(data) != _F64.size:
        raise CorruptError(f"a floating point cell of {len(data)} bytes")
    bits = int.from_bytes(data, "big")
    return float(
        _F64.unpack(((bits & ~_SIGN) if bits & _SIGN else ~bits & _MASK).to_bytes(8, "big"))[0]
    )


def of_integer(column: Column, number: int) -> Value:
    """The value of a column whose type is stored as an integer.

    Raises:
        CorruptError: an ENUM or SET has no such member.
    """
    kind = column.type
    if kind in DATES:
        return CoreTime.unpack(number)
    if kind is Type.BIT:
        return number.to_bytes(max((column.flen + 7) // 8, (number.bit_length() + 7) // 8), "big")
    if kind is Type.ENUM:
        return _enum_name(column, number)
    if kind is Type.SET:
        return _set_names(column, number)
    return number


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


def parse_default(column: Column) -> Value:
    """What rows older than the column hold: its `origin_default` as a value.

    Raises:
        InvalidError: the schema's text is not a value of the column's type.
    """
    default = column.origin_default
    if default is None or isinstance(default, bytes):
        return default
    try:
        return _parse(column, default)
    except (ValueError, ArithmeticError) as err:
        raise InvalidError(f"column {column.name}: bad default {default!r}") from err


def _parse(column: Column, text: str) -> Value:
    kind = column.type
    if kind in _NUMBERS - {Type.TIME}:
        return int(text)
    if kind in {Type.FLOAT, Type.DOUBLE}:
        return float(text)
    if kind in DATES:
        return CoreTime.parse(text)
    if kind is Type.NEWDECIMAL:
        return Decimal(text)
    if kind is Type.TIME:
        return parse_duration(text)
    return text if kind not in TEXTS or column.is_text else text.encode()


def _enum_name(column: Column, number: int) -> str:
    if number > len(column.elems):
        raise CorruptError(f"column {column.name}: ENUM has no member {number}")
    return column.elems[number - 1] if number else ""


def _set_names(column: Column, number: int) -> str:
    if number >> len(column.elems):
        raise CorruptError(f"column {column.name}: SET has no members {number:#x}")
    return ",".join(name for bit, name in enumerate(column.elems) if number >> bit & 1)
