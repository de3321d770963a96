"""MySQL's binary JSON to the text MySQL prints; MariaDB's JSON is text.

    value    = type u8, content
    object   = count s, size s, (key_at s, key_size u16) * count, entry * count, keys, values
    array    = count s, size s, entry * count, values
    entry    = type u8, s: the value itself where it fits, or its offset in its container
    string   = size v, UTF-8                   opaque = column type u8, size v, bytes
    s        = u16 in small containers, u32 in large ones; v: seven bits a byte, the lowest first

Source: MySQL's json_binary.h, json_dom.cc (Json_wrapper::to_string) and dtoa.cc (my_gcvt).
"""

import math
import struct
from collections.abc import Iterator
from decimal import Decimal
from typing import Final

from storage.model.errors import CorruptError
from storage.mysql.schema import Type
from storage.tidb.json import JsonBytes, opaque, quoted
from storage.tidb.number import decode_decimal
from storage.tidb.time import NANOS_PER_MICRO, CoreTime, duration_text

_SMALL_OBJECT, _LARGE_OBJECT, _SMALL_ARRAY, _LARGE_ARRAY = range(4)
_LITERAL, _INT16, _UINT16, _INT32, _UINT32, _INT64, _UINT64, _DOUBLE, _STRING = range(0x04, 0x0D)
_OPAQUE: Final = 0x0F
_LITERALS = ("null", "true", "false")
_NUMBERS = {
    _INT16: struct.Struct("<h"),
    _UINT16: struct.Struct("<H"),
    _INT32: struct.Struct("<i"),
    _UINT32: struct.Struct("<I"),
    _INT64: struct.Struct("<q"),
    _UINT64: struct.Struct("<Q"),
}
_FIXED_BYTES = {
    _LITERAL: 1,
    _DOUBLE: 8,
    **{kind: number.size for kind, number in _NUMBERS.items()},
}
_F64 = struct.Struct("<d")
_I64 = struct.Struct("<q")
_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")
_DEPTH_MAX = 100
# MySQL writes doubles with an exponent beyond these many digits before or behind the point
_PLAIN_DIGITS_MAX = 15
_MICROS = 24


def decode_json(data: bytes) -> str:
    """The text of a JSON cell, as MySQL prints it.

    Raises:
        CorruptError: the bytes are not binary JSON.
    """
    try:
        return _text(data[0], JsonBytes(data), 1, _DEPTH_MAX) if data else _LITERALS[0]
    except (IndexError, struct.error, UnicodeDecodeError, ValueError) as err:
        raise CorruptError(f"binary JSON of {len(data)} bytes is broken: {err}") from err


def _text(kind: int, json_bytes: JsonBytes, at: int, depth: int) -> str:
    if depth == 0:
        raise CorruptError(f"binary JSON is nested deeper than {_DEPTH_MAX}")
    if kind in {_SMALL_OBJECT, _LARGE_OBJECT}:
        return "{" + ", ".join(_members(_Container(kind, json_bytes, at), depth)) + "}"
    if kind in {_SMALL_ARRAY, _LARGE_ARRAY}:
        container = _Container(kind, json_bytes, at)
        return (
            "["
            + ", ".join(container.entry(number, depth) for number in range(container.count))
            + "]"
        )
    if kind in _FIXED_BYTES:
        json_bytes.take(_FIXED_BYTES[kind])
        return _fixed(kind, json_bytes.data, at)
    if kind == _STRING:
        return _string(json_bytes, at)
    if kind == _OPAQUE:
        return _opaque(json_bytes, at)
    raise CorruptError(f"binary JSON has an unknown type {kind}")


def _fixed(kind: int, data: bytes, at: int) -> str:
    """A value whose type says its size."""
    if kind in _NUMBERS:
        return str(_NUMBERS[kind].unpack_from(data, at)[0])
    return _double(data, at) if kind == _DOUBLE else _LITERALS[data[at]]


class _Container:
    """An object or array that begins at `at`."""

    def __init__(self, kind: int, json_bytes: JsonBytes, at: int) -> None:
        self._bytes, self._data, self._at = json_bytes, json_bytes.data, at
        self._large = kind in {_LARGE_OBJECT, _LARGE_ARRAY}
        self._size = _U32 if self._large else _U16
        (self.count,) = self._size.unpack_from(self._data, at)
        self.keys_at = at + 2 * self._size.size
        is_object = kind in {_SMALL_OBJECT, _LARGE_OBJECT}
        self._entries_at = self.keys_at + (
            self.count * (self._size.size + _U16.size) if is_object else 0
        )
        json_bytes.take(self._entries_at + self.count * (1 + self._size.size) - at)

    def key(self, number: int) -> str:
        at = self.keys_at + number * (self._size.size + _U16.size)
        (offset,), (size,) = (
            self._size.unpack_from(self._data, at),
            _U16.unpack_from(self._data, at + self._size.size),
        )
        return self._bytes.content(self._at + offset, size).decode()

    def entry(self, number: int, depth: int) -> str:
        at = self._entries_at + number * (1 + self._size.size)
        kind = self._data[at]
        inline = {_LITERAL, _INT16, _UINT16} | ({_INT32, _UINT32} if self._large else set())
        if kind in inline:
            # It stands in its entry, whose bytes the container has taken.
            return _fixed(kind, self._data, at + 1)
        return _text(
            kind,
            self._bytes,
            self._at + int(self._size.unpack_from(self._data, at + 1)[0]),
            depth - 1,
        )


def _members(container: _Container, depth: int) -> Iterator[str]:
    for number in range(container.count):
        yield f"{quoted(container.key(number))}: {container.entry(number, depth)}"


def _double(data: bytes, at: int) -> str:
    value = float(_F64.unpack_from(data, at)[0])
    if not math.isfinite(value):
        raise CorruptError(f"binary JSON holds the number {value}")
    sign, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    assert isinstance(exponent, int), "finite"
    point = len(digits) + exponent
    if value == 0 or -_PLAIN_DIGITS_MAX < point <= _PLAIN_DIGITS_MAX:
        text = f"{Decimal(repr(value)):f}"
        return text if "." in text else f"{text}.0"
    first, *rest = map(str, digits)
    return f"{'-' * sign}{first}{'.' * bool(rest)}{''.join(rest)}e{point - 1}"


def _string(json_bytes: JsonBytes, at: int) -> str:
    size, begin = _packed(json_bytes.data, at)
    json_bytes.take(begin - at)
    return quoted(json_bytes.content(begin, size).decode())


def _opaque(json_bytes: JsonBytes, at: int) -> str:
    kind = json_bytes.data[at]
    size, begin = _packed(json_bytes.data, at + 1)
    json_bytes.take(begin - at)
    value = json_bytes.content(begin, size)
    if kind == Type.NEWDECIMAL:
        number, _ = decode_decimal(value)
        return f"{number:f}"
    if kind in {Type.DATE, Type.DATETIME, Type.TIMESTAMP, Type.TIME}:
        return f'"{_moment(kind, _I64.unpack(value)[0])}"'
    return opaque(kind, value)


def _moment(kind: int, packed: int) -> str:
    if kind != Type.TIME:
        moment = CoreTime.unpack(packed)
        return moment.date_text() if kind == Type.DATE else moment.text(6)
    clock, micros = divmod(abs(packed), 1 << _MICROS)
    seconds = ((clock >> 12 & 0x3FF) * 60 + (clock >> 6 & 63)) * 60 + (clock & 63)
    nanos = (seconds * 1_000_000 + micros) * NANOS_PER_MICRO
    return duration_text(-nanos if packed < 0 else nanos, 6)


def _packed(data: bytes, at: int) -> tuple[int, int]:
    size = shift = 0
    while True:
        byte = data[at]
        size |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return size, at
        if shift > 28:
            raise CorruptError("binary JSON has a size of more than five bytes")
