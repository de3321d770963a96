"""Variable-length integers: seven bits a byte, least first; signed ones zigzag. Source: Go's encoding/binary."""

from storage.model.errors import CorruptError

_MASK = (1 << 64) - 1


def encode_uvarint(value: int) -> bytes:
    """Encode `0 <= value < 2^64`."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def decode_uvarint(data: bytes, offset: int = 0) -> tuple[int, int]:
    """Decode one number at `offset`; returns it and the offset after it.

    Raises:
        CorruptError: the number ends early or exceeds 64 bits.
    """
    value = shift = 0
    for at in range(offset, min(len(data), offset + 10)):
        byte = data[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80 and value <= _MASK:
            return value, at + 1
        shift += 7
    raise CorruptError(f"no 64-bit varint at offset {offset}: {data[offset : offset + 10].hex()}")


def encode_varint(value: int) -> bytes:
    """Encode `-2^63 <= value < 2^63`."""
    return encode_uvarint((value << 1 ^ value >> 63) & _MASK)


def decode_varint(data: bytes, offset: int = 0) -> tuple[int, int]:
    """Decode one signed number at `offset`; returns it and the offset after it."""
    value, offset = decode_uvarint(data, offset)
    return value >> 1 ^ -(value & 1), offset
