"""DECIMAL in TiDB's binary form: `precision scale digits`,
big-endian groups of nine digits in four bytes.

The integer part's leading group and the fraction's last one take only the bytes their digits need.
The first bit is flipped and negative numbers are inverted, so that equally shaped values sort as
their bytes. Source: MyDecimal.ToBin.
"""

from collections.abc import Iterator
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import Final

from storage.model.errors import CorruptError, InvalidError

_GROUP_DIGITS: Final = 9
_GROUP_BYTES: Final = 4
_POWERS: Final[tuple[int, ...]] = tuple(10**digits for digits in range(_GROUP_DIGITS + 1))
_BYTES_OF_DIGITS: Final[tuple[int, ...]] = (0, 1, 1, 2, 2, 3, 3, 4, 4, 4)
# TiDB's arithmetic may exceed the 65 digits a column can have
PRECISION_MAX: Final = 81
_EXACT = Context(prec=2 * PRECISION_MAX)


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
    """How many bytes the value at `offset` takes.

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
