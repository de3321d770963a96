"""Numbers in TiDB's rows: integer cells, variable-length integers, and DECIMAL.

A cell of row format v2 holds an integer in the fewest of 1, 2, 4, 8 little-endian bytes. A
variable-length integer, of keys, datums and rows of format v1, has seven bits a byte, least first;
signed ones are zigzag (Go's encoding/binary). `decode_uvarints` reads many at once.

DECIMAL is `precision scale digits`: big-endian groups of nine digits in four bytes. The integer
part's leading group and the fraction's last one take only the bytes their digits need. The first
bit is flipped and negative numbers are inverted, so that equally shaped values sort as their bytes.
Source: MyDecimal.ToBin.
"""

from collections.abc import Iterator
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import Final

import numpy as np
import numpy.typing as npt

from storage.model.errors import CorruptError, InvalidError
from storage.tidb.binary import BinaryColumn, Mask, Offsets

WIDTHS = (1, 2, 4, 8)
Words = npt.NDArray[np.uint64]
_MASK = (1 << 64) - 1
_LIMIT_BYTES: Final = 10
_WORD: Final = 8
_MORE: Final = np.uint64(0x8080808080808080)
_GROUPS: Final = tuple(
    (np.uint64(low), np.uint64(low << shift), np.uint64(shift - width))
    for low, shift, width in (
        (0x007F007F007F007F, 8, 7),
        (0x00003FFF00003FFF, 16, 14),
        (0x000000000FFFFFFF, 32, 28),
    )
)
"""Neighbours that are joined in each round: the lower ones, the upper ones,
and by how many bits these move down.
"""
_GROUP_DIGITS: Final = 9
_GROUP_BYTES: Final = 4
_POWERS: Final[tuple[int, ...]] = tuple(10**digits for digits in range(_GROUP_DIGITS + 1))
_BYTES_OF_DIGITS: Final[tuple[int, ...]] = (0, 1, 1, 2, 2, 3, 3, 4, 4, 4)
# TiDB's arithmetic may exceed the 65 digits a column can have
PRECISION_MAX: Final = 81
_EXACT = Context(prec=2 * PRECISION_MAX)


def signed_cell(number: int) -> bytes:
    """Encode `-2^63 <= number < 2^63`.

    Raises:
        InvalidError: the number is outside.
    """
    magnitude = number if number >= 0 else ~number
    width = _width(number, magnitude.bit_length() + 1)
    return number.to_bytes(width, "little", signed=True)


def unsigned_cell(number: int) -> bytes:
    """Encode `0 <= number < 2^64`.

    Raises:
        InvalidError: the number is outside.
    """
    return number.to_bytes(_width(number, number.bit_length() if number >= 0 else 65), "little")


def _width(number: int, bits: int) -> int:
    for width in WIDTHS:
        if bits <= 8 * width:
            return width
    raise InvalidError(f"{number} does not fit the 64 bits of an integer column")


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


def decode_uvarints(column: BinaryColumn, at: Offsets, present: Mask) -> tuple[Words, Offsets]:
    """The number at each offset and the offset after it; undefined where not `present`.

    Raises:
        CorruptError: one that is present exceeds 64 bits.
    """
    word = column.u64(at)
    # A byte without its top bit is the last one: the lowest such bit, isolated by x & -x.
    stops = ~word & _MORE
    lowest = stops & (~stops + np.uint64(1))
    # Up to that bit the word is the number; no such bit means a ninth byte at least.
    numbers = _joined(word & ((lowest << np.uint64(1)) - np.uint64(1)))
    sizes = (np.bitwise_count(lowest - np.uint64(1)).astype(np.int64) + 1) // _WORD
    long = (lowest == 0) & present
    if bool(long.any()):
        numbers, sizes = _long(column, at, long, numbers, sizes)
    return numbers, at + sizes


def zigzag(numbers: Words) -> npt.NDArray[np.int64]:
    """Signed numbers of unsigned ones, of which the lowest bit is the sign."""
    folded = (numbers >> np.uint64(1)) ^ (~(numbers & np.uint64(1)) + np.uint64(1))
    return folded.view(np.int64)


def _joined(word: Words) -> Words:
    """The seven low bits of each byte, side by side."""
    word = word & np.uint64(0x7F7F7F7F7F7F7F7F)
    for low, high, shift in _GROUPS:
        word = (word & low) | ((word & high) >> shift)
    return word


def _long(
    column: BinaryColumn, at: Offsets, long: Mask, numbers: Words, sizes: Offsets
) -> tuple[Words, Offsets]:
    """Numbers of nine or ten bytes."""
    # What stands at the very end of the buffer is padding, read where a number is cut off.
    last = len(column.data) - 2
    tail = np.minimum(at[long] + _WORD, last)
    ninth, tenth = column.u8(tail).astype(np.uint64), column.u8(tail + 1).astype(np.uint64)
    has_tenth = ninth > 0x7F
    # Nine bytes carry 63 bits: the tenth may only bring one.
    if bool(np.any(has_tenth & (tenth > 1))):
        raise CorruptError(f"a number of more than 64 bits at offset {int(at[long][0])}")
    high = (ninth & np.uint64(0x7F)) << np.uint64(56) | np.where(
        has_tenth, tenth << np.uint64(63), np.uint64(0)
    )
    numbers, sizes = numbers.copy(), sizes.copy()
    numbers[long] = _joined(column.u64(at[long])) | high
    sizes[long] = np.where(has_tenth, _LIMIT_BYTES, _LIMIT_BYTES - 1)
    return numbers, sizes


def encode_decimal(value: Decimal, precision: int, scale: int) -> bytes:
    """Encode as DECIMAL(precision, scale), rounding half up as MySQL does.

    Raises:
        InvalidError: the value has too many digits.
    """
    unscaled = int(value.scaleb(scale, _EXACT).to_integral_value(ROUND_HALF_UP))
    rest, digits = abs(unscaled), b""
    for count, width in reversed(list(digit_groups(precision, scale))):
        rest, group = divmod(rest, _POWERS[count])
        digits = group.to_bytes(width, "big") + digits
    if rest:
        raise InvalidError(f"{value} does not fit DECIMAL({precision},{scale})")
    return bytes((precision, scale)) + _flipped(digits, negative=unscaled < 0)


def decimal_size(data: bytes, offset: int = 0) -> int:
    """Return the size in bytes of the value at `offset`.

    Raises:
        CorruptError: there is no precision and scale.
    """
    head = data[offset : offset + 2]
    if len(head) != 2 or not 0 < head[0] <= PRECISION_MAX or head[1] > head[0]:
        raise CorruptError(f"decimal with a bad precision and scale: {head.hex()}")
    return 2 + sum(width for _, width in digit_groups(*head))


def decode_decimal(data: bytes, offset: int = 0) -> tuple[Decimal, int]:
    """Decode one value at `offset`; returns it and the offset after it.

    Raises:
        CorruptError: the bytes are not an encoded decimal.
    """
    begin, end = offset + 2, offset + decimal_size(data, offset)
    precision, scale = data[offset], data[offset + 1]
    if end > len(data):
        raise CorruptError(f"decimal({precision},{scale}) ends early at offset {offset}")
    negative = not data[begin] & 0x80
    digits = _flipped(data[begin:end], negative=negative)
    unscaled = at = 0
    for count, width in digit_groups(precision, scale):
        unscaled = unscaled * _POWERS[count] + int.from_bytes(digits[at : at + width], "big")
        at += width
    return Decimal(-unscaled if negative else unscaled).scaleb(-scale, _EXACT), end


def _flipped(digits: bytes, *, negative: bool) -> bytes:
    """Between numbers and their sortable form; the same both ways."""
    mask = 0xFF if negative else 0
    return bytes((digits[0] ^ mask ^ 0x80,)) + bytes(byte ^ mask for byte in digits[1:])


def digit_groups(precision: int, scale: int) -> Iterator[tuple[int, int]]:
    """(digits, bytes) of each group of a DECIMAL(precision, scale),
    in the order in which they stand.
    """
    lead, groups = (precision - scale) % _GROUP_DIGITS, (precision - scale) // _GROUP_DIGITS
    if lead:
        yield lead, _BYTES_OF_DIGITS[lead]
    yield from [(_GROUP_DIGITS, _GROUP_BYTES)] * (groups + scale // _GROUP_DIGITS)
    if scale % _GROUP_DIGITS:
        yield scale % _GROUP_DIGITS, _BYTES_OF_DIGITS[scale % _GROUP_DIGITS]
