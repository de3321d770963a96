"""Memory-comparable encodings: byte order of the encoded form equals order of the values.

Source: TiDB util/codec (EncodeBytes: groups of 8 bytes, padded with zeros, followed by 0xFF minus
the padding).
"""

import struct

from storage.model.errors import CorruptError

_GROUP = 8
_MARKER = 0xFF
_FULL_MARKER = bytes([_MARKER])
_LAST_PADDING = [bytes(_GROUP - rest) + bytes([_MARKER - _GROUP + rest]) for rest in range(_GROUP)]
_U64 = struct.Struct(">Q")
_SIGN = 1 << 63
_MASK = (1 << 64) - 1


def encode_bytes(data: bytes) -> bytes:
    """Encode so that a shorter key sorts before any longer key it is a prefix of,
    whatever follows.
    """
    rest = len(data) % _GROUP
    full = len(data) - rest
    groups = [data[start : start + _GROUP] for start in range(0, full, _GROUP)]
    groups.append(data[full:] + _LAST_PADDING[rest])
    return _FULL_MARKER.join(groups)


def decode_bytes(encoded: bytes, offset: int = 0) -> tuple[bytes, int]:
    """Decode one value at `offset`; returns it and the offset after it.

    Raises:
        CorruptError: the bytes are not an encoded value.
    """
    out = bytearray()
    while True:
        group = encoded[offset : offset + _GROUP + 1]
        if len(group) != _GROUP + 1:
            raise CorruptError(f"memcomparable bytes end early at offset {offset}")
        offset += _GROUP + 1
        pad = _MARKER - group[_GROUP]
        if pad > _GROUP or any(group[_GROUP - pad : _GROUP]):
            raise CorruptError(f"memcomparable bytes have a bad group before offset {offset}")
        out += group[: _GROUP - pad]
        if pad:
            return bytes(out), offset


def encode_u64(value: int) -> bytes:
    """Eight bytes, ascending."""
    return _U64.pack(value)


def encode_u64_desc(value: int) -> bytes:
    """Eight bytes, descending: the newest timestamp sorts first."""
    return _U64.pack(~value & _MASK)


def decode_u64(encoded: bytes, offset: int = 0) -> int:
    """Read what `encode_u64` wrote."""
    return int(_U64.unpack_from(encoded, offset)[0])


def decode_u64_desc(encoded: bytes, offset: int = 0) -> int:
    """Read what `encode_u64_desc` wrote."""
    value: int = _U64.unpack_from(encoded, offset)[0]
    return value ^ _MASK


def encode_i64(value: int) -> bytes:
    """Eight bytes, ascending, negative values first (TiDB's EncodeInt)."""
    return _U64.pack((value + _SIGN) & _MASK)


def decode_i64(encoded: bytes, offset: int = 0) -> int:
    """Read what `encode_i64` wrote."""
    return decode_u64(encoded, offset) - _SIGN


def prefix_end(prefix: bytes) -> bytes:
    """The smallest key greater than every key that starts with `prefix`;
    `b""` when there is none.
    """
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else b""
