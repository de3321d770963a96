"""A text of each value that SQL and our decoder make alike, so that chunks can be compared by
checksums.

    text = '-'                            null; so are dates that no calendar has
         | number                         integers, BIT, YEAR; days of a DATE;
                                          microseconds of DATETIME and TIMESTAMP
         | digits, with all of the scale  DECIMAL
         | '=', 8 bytes                   FLOAT, DOUBLE: IEEE 754, in SQL the WKB of a point
         | clock                          TIME
         | length, ':', bytes             others: characters of UTF-8, or bytes
         | length, ':', CRC-32            those that may be long, so that a row's text is short

A value's text tells where it ends, so texts joined by commas are equal only if the values are.
Pure.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.mysql.charset import UTF8
from storage.mysql.number import DECIMAL_DIGITS_MAX
from storage.mysql.schema import INTEGERS, STRINGS, Column, Type

_CHARSETS: Final = UTF8 | {
    *(
        "latin1",
        "latin2",
        "latin5",
        "latin7",
        "cp850",
        "cp852",
        "cp1250",
        "cp1251",
        "koi8r",
        "macce",
        "macroman",
    ),
    *("gb2312", "gbk", "ucs2", "utf16", "utf16le", "utf32"),
}
"""Character sets of which every character maps to Unicode here as it does at the server."""
_LONG_FROM: Final = 3
"""Bytes of the length before a value: MEDIUMTEXT,
LONGTEXT and the like are summed by themselves.
"""
_SRID_BYTES: Final = 4
_FLOAT_BYTES: Final = 8

Text = Callable[[pa.Array], pa.Array]


@dataclass(frozen=True, slots=True)
class Canonical:
    """One column's: `sql` is never NULL, `text` gives a binary array without nulls."""

    sql: str
    text: Text


def canonical(column: Column, name: str) -> Canonical | None:
    """How a column, by its quoted name, is compared; None: it cannot be,
    as both sides write it differently.
    """
    rule = _of_type(column, name)
    if rule is None:
        return None
    sql, text = rule
    return Canonical(f"IFNULL({sql}, '-')", lambda values: pc.fill_null(text(values), b"-"))


def crc32s(texts: pa.Array) -> np.ndarray:
    """The CRC-32 of each text, 0 for null: by zlib for each value, as NumPy is no faster."""
    _, offsets, content = texts.buffers()
    if content is None or not len(texts):
        return np.full(len(texts), zlib.crc32(b""), np.uint32)
    bounds = np.frombuffer(offsets, np.int32)[texts.offset : texts.offset + len(texts) + 1].tolist()
    parts = map(memoryview(content).__getitem__, map(slice, bounds[:-1], bounds[1:]))
    return np.fromiter(map(zlib.crc32, parts), np.uint32, len(texts))


def _of_type(column: Column, name: str) -> tuple[str, Text] | None:
    kind = column.type
    if column.as_text:
        return _bytes(_ASCII.format(name), is_long=False)
    if kind in INTEGERS or kind is Type.YEAR:
        return f"{name} + 0", _numbers  # without ZEROFILL
    if kind in _OTHERS:
        return _OTHERS[kind][0].format(name), _OTHERS[kind][1]
    if kind is Type.NEWDECIMAL:
        precision, scale = column.meta >> 8, column.meta & 0xFF
        return f"CAST({name} AS DECIMAL({precision},{scale}))", _decimals(precision, scale)
    if kind in STRINGS and not column.is_text:
        return _bytes(name, is_long=_is_long(column))
    if kind in STRINGS or kind in {Type.ENUM, Type.SET, Type.JSON}:
        return _characters(column, name)
    if kind is Type.GEOMETRY:
        return _bytes(f"SUBSTRING(CAST({name} AS BINARY), {_SRID_BYTES + 1})", is_long=True)
    return None


def _is_long(column: Column) -> bool:
    return column.type is Type.JSON or (column.type is Type.BLOB and column.meta >= _LONG_FROM)


def _bytes(sql: str, *, is_long: bool) -> tuple[str, Text]:
    shown = f"CRC32({sql})" if is_long else sql
    return f"CONCAT(LENGTH({sql}), ':', {shown})", lambda values: _sized(
        values, pc.binary_length, is_long=is_long
    )


def _characters(column: Column, name: str) -> tuple[str, Text] | None:
    if column.type is not Type.JSON and column.charset not in _CHARSETS:
        return None
    is_long = _is_long(column)
    utf8 = f"CAST(CONVERT({name} USING utf8mb4) AS BINARY)"
    shown = f"CRC32({utf8})" if is_long else utf8
    return f"CONCAT(CHAR_LENGTH({name}), ':', {shown})", lambda values: _sized(
        values, pc.utf8_length, is_long=is_long
    )


def _sized(values: pa.Array, length: Callable[[pa.Array], pa.Array], *, is_long: bool) -> pa.Array:
    content = values.cast(pa.binary())
    if is_long:
        content = _numbers(pa.array(crc32s(content), mask=np.asarray(content.is_null())))
    return pc.binary_join_element_wise(_numbers(length(values)), content, b":")


def _numbers(values: pa.Array) -> pa.Array:
    return values.cast(pa.string()).cast(pa.binary())


def _days(values: pa.Array) -> pa.Array:
    return _numbers(values.cast(pa.int32()))


def _micros(values: pa.Array) -> pa.Array:
    return _numbers(values.cast(pa.int64()))


def _texts(values: pa.Array) -> pa.Array:
    return values.cast(pa.binary())


def _bits(values: pa.Array) -> pa.Array:
    """Big-endian bytes, of which all values have as many."""
    present = np.asarray(values.is_valid())
    content = values.drop_null()
    if not len(content):
        return pa.nulls(len(values), pa.binary())
    data = np.frombuffer(b"".join(content.to_pylist()), np.uint8).reshape(len(content), -1)
    wide = np.zeros((len(content), 8), np.uint8)
    wide[:, 8 - data.shape[1] :] = data
    numbers = np.zeros(len(values), np.uint64)
    numbers[present] = wide.view(">u8")[:, 0]
    return _numbers(pa.array(numbers, mask=~present))


def _floats(values: pa.Array) -> pa.Array:
    numbers = np.asarray(values.cast(pa.float64()).fill_null(0.0), "<f8")
    marked = np.hstack(
        [
            np.full((len(numbers), 1), ord("="), np.uint8),
            numbers.view(np.uint8).reshape(-1, _FLOAT_BYTES),
        ]
    )
    ends = pa.py_buffer(np.arange(len(numbers) + 1, dtype=np.int32) * np.int32(_FLOAT_BYTES + 1))
    content = pa.py_buffer(np.ascontiguousarray(marked))
    cells = pa.Array.from_buffers(pa.binary(), len(numbers), [None, ends, content])
    return pc.if_else(values.is_valid(), cells, None)


def _decimals(precision: int, scale: int) -> Text:
    """With all digits behind the point, which Arrow leaves out of some."""

    def text(values: pa.Array) -> pa.Array:
        if precision > DECIMAL_DIGITS_MAX:
            return values.cast(pa.binary())
        if not scale:
            return _numbers(values)
        whole = pa.Array.from_buffers(
            pa.decimal128(DECIMAL_DIGITS_MAX, 0),
            len(values),
            values.buffers(),
            offset=values.offset,
        )
        signed = whole.cast(pa.string())
        digits = pc.utf8_lpad(pc.utf8_ltrim(signed, "-"), scale + 1, "0")
        pointed = pc.utf8_replace_slice(digits, -scale, -scale, ".")
        sign = pc.if_else(pc.starts_with(signed, "-"), "-", "")
        return pc.binary_join_element_wise(sign, pointed, "").cast(pa.binary())

    return text


_ASCII: Final = "CAST(CAST({0} AS CHAR) AS BINARY)"
"""Characters beside a float's bytes would make the row's text one of characters,
with `?` for bytes that are none.
"""
_IS_DAY: Final = "YEAR({0}) > 0 AND DAYOFMONTH({0}) <= DAYOFMONTH(LAST_DAY({0}))"
_SINCE: Final = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {0})"
_OTHERS: Final[dict[Type, tuple[str, Text]]] = {
    Type.BIT: ("{0} + 0", _bits),
    Type.FLOAT: ("CONCAT('=', SUBSTRING(ST_AsBinary(POINT({0}, 0)), 6, 8))", _floats),
    Type.DOUBLE: ("CONCAT('=', SUBSTRING(ST_AsBinary(POINT({0}, 0)), 6, 8))", _floats),
    Type.DATE: (f"IF({_IS_DAY}, DATEDIFF({{0}}, '1970-01-01'), NULL)", _days),
    Type.DATETIME: (f"IF({_IS_DAY}, {_SINCE}, NULL)", _micros),
    Type.DATETIME2: (f"IF({_IS_DAY}, {_SINCE}, NULL)", _micros),
    Type.TIMESTAMP: (_SINCE, _micros),
    Type.TIMESTAMP2: (_SINCE, _micros),
    Type.TIME: (_ASCII, _texts),
    Type.TIME2: (_ASCII, _texts),
}
