"""Binary JSON, TiDB's value format of JSON columns: a type byte, then the value;
decoded to the text TiDB prints.

MySQL's binary form and its numbers differ (`storage.mysql.json`); strings and opaque values are
printed alike, by `quoted`, `opaque` and `content`.
"""

import base64
import json
import math
import struct
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any, Final

from storage.model.errors import CorruptError
from storage.tidb.number import decode_uvarint, encode_uvarint
from storage.tidb.time import CoreTime, duration_text

OBJECT: Final = 0x01
ARRAY: Final = 0x03
LITERAL: Final = 0x04
INT64: Final = 0x09
UINT64: Final = 0x0A
FLOAT64: Final = 0x0B
STRING: Final = 0x0C
OPAQUE: Final = 0x0D
DATE: Final = 0x0E
DATETIME: Final = 0x0F
TIMESTAMP: Final = 0x10
DURATION: Final = 0x11

_LITERALS = ("null", "true", "false")
_HEAD = struct.Struct("<II")
_KEY = struct.Struct("<IH")
_ENTRY = struct.Struct("<BI")
_U64 = struct.Struct("<Q")
_I64 = struct.Struct("<q")
_F64 = struct.Struct("<d")
FIXED_BYTES: Final = {
    LITERAL: 1,
    INT64: 8,
    UINT64: 8,
    FLOAT64: 8,
    DATE: 8,
    DATETIME: 8,
    TIMESTAMP: 8,
    DURATION: 12,
}
_FSP_MAX = 6
_DEPTH_MAX = 100
# Go's encoding/json writes floats outside of [min, max) with an exponent.
_PLAIN_MIN, _PLAIN_MAX = 1e-6, 1e21


def decode_json(data: bytes) -> str:
    """The JSON text of a cell, as TiDB prints it.

    Raises:
        CorruptError: the bytes are not binary JSON.
    """
    try:
        return _text(data[0], JsonBytes(data), 1, _DEPTH_MAX)
    except (IndexError, struct.error, UnicodeDecodeError, ValueError) as err:
        raise CorruptError(f"binary JSON of {len(data)} bytes is broken: {err}") from err


def json_size(data: bytes, offset: int = 0) -> int:
    """Return the size in bytes of the value at `offset`, its type byte included.

    Raises:
        CorruptError: there is no value.
    """
    try:
        code, at = data[offset], offset + 1
        if code in FIXED_BYTES:
            return 1 + FIXED_BYTES[code]
        if code in {OBJECT, ARRAY}:
            return 1 + int(_HEAD.unpack_from(data, at)[1])
        size, end = decode_uvarint(data, at + 1 if code == OPAQUE else at)
    except (IndexError, struct.error) as err:
        raise CorruptError(f"binary JSON ends early at offset {offset}") from err
    if code not in {STRING, OPAQUE}:
        raise CorruptError(f"binary JSON has an unknown type {code}")
    return end + size - offset


def encode_json(text: str) -> bytes:
    """Binary JSON of `text`; numbers without point or exponent become 64-bit integers if they fit,
    else floats.
    """
    code, value = _encode(json.loads(text))
    return bytes((code,)) + value


class JsonBytes:
    """The bytes of a cell, each of which belongs to one value at most.

    Every reader calls `take` before it reads. In a damaged cell offsets may point backwards, or to
    one place many times; their values would have more bytes than the cell, so `take` refuses them
    before they cost more time and memory than a cell of that size can.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._unread = len(data)

    def take(self, size: int) -> None:
        """Read so many bytes.

        Raises:
            CorruptError: fewer are left, so that some would be read twice.
        """
        self._unread -= size
        if self._unread < 0:
            raise CorruptError(
                f"binary JSON of {len(self.data)} bytes has values that overlap, or ends within one"
            )

    def content(self, at: int, size: int) -> bytes:
        """The `size` bytes of a value at `at`.

        Raises:
            CorruptError: it is longer than the cell, or overlaps others.
        """
        self.take(size)
        if at + size > len(self.data):
            raise CorruptError(f"binary JSON of {len(self.data)} bytes ends within a value at {at}")
        return self.data[at : at + size]


def _text(code: int, json_bytes: JsonBytes, at: int, depth: int) -> str:
    if depth == 0:
        raise CorruptError(f"binary JSON is nested deeper than {_DEPTH_MAX}")
    if code == OBJECT:
        return "{" + ", ".join(_members(json_bytes, at, depth)) + "}"
    if code == ARRAY:
        count, _ = _HEAD.unpack_from(json_bytes.data, at)
        json_bytes.take(_HEAD.size + count * _ENTRY.size)
        entries = range(at + _HEAD.size, at + _HEAD.size + count * _ENTRY.size, _ENTRY.size)
        return "[" + ", ".join(_entry(json_bytes, at, entry, depth) for entry in entries) + "]"
    if code in FIXED_BYTES:
        json_bytes.take(FIXED_BYTES[code])
        return _FIXED[code](json_bytes.data, at)
    if code == STRING:
        return _string(json_bytes, at)
    if code == OPAQUE:
        return _opaque(json_bytes, at)
    raise CorruptError(f"binary JSON has an unknown type {code}")


def _members(json_bytes: JsonBytes, at: int, depth: int) -> Iterator[str]:
    count, _ = _HEAD.unpack_from(json_bytes.data, at)
    json_bytes.take(_HEAD.size + count * (_KEY.size + _ENTRY.size))
    keys = at + _HEAD.size
    entries = keys + count * _KEY.size
    for number in range(count):
        key_at, size = _KEY.unpack_from(json_bytes.data, keys + number * _KEY.size)
        key = json_bytes.content(at + key_at, size).decode()
        yield f"{quoted(key)}: {_entry(json_bytes, at, entries + number * _ENTRY.size, depth)}"


def _entry(json_bytes: JsonBytes, container: int, at: int, depth: int) -> str:
    code, offset = _ENTRY.unpack_from(json_bytes.data, at)
    if code == LITERAL:
        return _literal(json_bytes.data, at + 1)  # stands in place of the offset
    return _text(code, json_bytes, container + offset, depth - 1)


def _literal(data: bytes, at: int) -> str:
    return _LITERALS[data[at]]


def _float(data: bytes, at: int) -> str:
    return _float_text(_F64.unpack_from(data, at)[0])


def _float_text(value: float) -> str:
    if not math.isfinite(value):
        raise CorruptError(f"binary JSON holds the number {value}")
    text = repr(value)
    if value != 0 and not _PLAIN_MIN <= abs(value) < _PLAIN_MAX:
        return text.replace("e-0", "e-")
    return f"{Decimal(text):f}".removesuffix(".0")


def _string(json_bytes: JsonBytes, at: int) -> str:
    size, begin = decode_uvarint(json_bytes.data, at)
    json_bytes.take(begin - at)
    return quoted(json_bytes.content(begin, size).decode())


def _opaque(json_bytes: JsonBytes, at: int) -> str:
    size, begin = decode_uvarint(json_bytes.data, at + 1)
    json_bytes.take(begin - at)
    return opaque(json_bytes.data[at], json_bytes.content(begin, size))


def _moment(data: bytes, at: int) -> str:
    return f'"{CoreTime.from_bits(_U64.unpack_from(data, at)[0]).text(_FSP_MAX)}"'


_FIXED: dict[int, Callable[[bytes, int], str]] = {
    LITERAL: _literal,
    INT64: lambda data, at: str(_I64.unpack_from(data, at)[0]),
    UINT64: lambda data, at: str(_U64.unpack_from(data, at)[0]),
    FLOAT64: _float,
    DATE: lambda data, at: f'"{CoreTime.from_bits(_U64.unpack_from(data, at)[0]).date_text()}"',
    DATETIME: _moment,
    TIMESTAMP: _moment,
    DURATION: lambda data, at: f'"{duration_text(_I64.unpack_from(data, at)[0], _FSP_MAX)}"',
}


def _encode(value: Any) -> tuple[int, bytes]:
    match value:
        case None | True | False:
            return LITERAL, bytes((_LITERALS.index(json.dumps(value)),))
        case int() if -(1 << 63) <= value < 1 << 63:
            return INT64, _I64.pack(value)
        case int() if 0 <= value < 1 << 64:
            return UINT64, _U64.pack(value)
        case int() | float():
            return FLOAT64, _F64.pack(value)
        case str():
            return STRING, encode_uvarint(len(value.encode())) + value.encode()
        case list():
            return ARRAY, _encode_container([], value)
        case _:
            members = sorted((key.encode(), member) for key, member in value.items())
            members.sort(key=lambda member: len(member[0]))
            return OBJECT, _encode_container(
                [key for key, _ in members], [member for _, member in members]
            )


def _encode_container(keys: list[bytes], values: list[Any]) -> bytes:
    at = _HEAD.size + len(keys) * _KEY.size + len(values) * _ENTRY.size
    index, bodies = bytearray(), bytearray()
    for key in keys:
        index += _KEY.pack(at + len(bodies), len(key))
        bodies += key
    for code, body in map(_encode, values):
        if code == LITERAL:
            index += bytes((code,)) + body.ljust(4, b"\0")
            continue
        index += _ENTRY.pack(code, at + len(bodies))
        bodies += body
    return _HEAD.pack(len(values), at + len(bodies)) + bytes(index) + bytes(bodies)


def quoted(text: str) -> str:
    """A string."""
    return json.dumps(text, ensure_ascii=False)


def opaque(kind: int, content: bytes) -> str:
    """A value of the column type `kind` that JSON does not have."""
    return f'"base64:type{kind}:{base64.b64encode(content).decode()}"'
