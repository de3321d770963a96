"""DECIMAL in TiDB's binary form: `precision scale digits`, big-endian groups of nine digits in four bytes.

The integer part's leading group and the fraction's last one take only the bytes their digits need. The first bit is
flipped and negative numbers are inverted, so that equally shaped values sort as their bytes. Source: MyDecimal.ToBin.
"""

from decimal import ROUND_HALF_UP, Context, Decimal
from typing import Final

from storage.model.errors import CorruptError, InvalidError

_GROUP_DIGITS: Final = 9
_GROUP_BYTES: Final = 4
_POWERS: Final[tuple[int, ...]] = tuple(10**digits for digits in range(_GROUP_DIGITS + 1))
_GROUP_BASE: Final = _POWERS[_GROUP_DIGITS]
_BYTES_OF_DIGITS: Final[tuple[int, ...]] = (0, 1, 1, 2, 2, 3, 3, 4, 4, 4)
PRECISION_MAX: Final = 81  # TiDB's arithmetic may exceed the 65 digits a column can have
_EXACT = Context(prec=2 * PRECISION_MAX)


def encode_decimal(value: Decimal, precision: int, scale: int) -> bytes:
    """Encode as DECIMAL(precision, scale), rounding half up as MySQL does.

    Raises:
        InvalidError: the value has too many digits.
    """
    unscaled = int(value.scaleb(scale, _EXACT).to_integral_value(ROUND_HALF_UP))
    whole, fraction = divmod(abs(unscaled), 10**scale)
    if whole >= 10 ** (precision - scale):
        raise InvalidError(f"{value} does not fit DECIMAL({precision},{scale})")
    digits = bytearray(_encode_whole(whole, precision - scale) + _encode_fraction(fraction, scale))
    if unscaled < 0:
        digits = bytearray(byte ^ 0xFF for byte in digits)
    digits[0] ^= 0x80
    return bytes((precision, scale)) + bytes(digits)


def decimal_size(data: bytes, offset: int = 0) -> int:
    """How many bytes the value at `offset` takes.

    Raises:
        CorruptError: there is no precision and scale.
    """
    head = data[offset : offset + 2]
    if len(head) != 2 or not 0 < head[0] <= PRECISION_MAX or head[1] > head[0]:
        raise CorruptError(f"decimal with a bad precision and scale: {head.hex()}")
    return 2 + _size(head[0] - head[1]) + _size(head[1])


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
    digits = bytes(byte ^ (0xFF if negative else 0) for byte in data[begin:end])
    digits = bytes((digits[0] ^ 0x80,)) + digits[1:]
    split = _size(precision - scale)
    unscaled = _decode_whole(digits[:split], precision - scale) * 10**scale + _decode_fraction(digits[split:], scale)
    return Decimal(-unscaled if negative else unscaled).scaleb(-scale, _EXACT), end


def _size(digits: int) -> int:
    return digits // _GROUP_DIGITS * _GROUP_BYTES + _BYTES_OF_DIGITS[digits % _GROUP_DIGITS]


def _encode_whole(value: int, digits: int) -> bytes:
    groups: list[bytes] = []
    for _ in range(digits // _GROUP_DIGITS):
        value, group = divmod(value, _GROUP_BASE)
        groups.append(group.to_bytes(_GROUP_BYTES, "big"))
    lead = value.to_bytes(_BYTES_OF_DIGITS[digits % _GROUP_DIGITS], "big")
    return lead + b"".join(reversed(groups))


def _encode_fraction(value: int, digits: int) -> bytes:
    rest = digits % _GROUP_DIGITS
    groups, tail = divmod(value, _POWERS[rest])
    return _encode_whole(groups, digits - rest) + tail.to_bytes(_BYTES_OF_DIGITS[rest], "big")


def _decode_whole(data: bytes, digits: int) -> int:
    lead = _BYTES_OF_DIGITS[digits % _GROUP_DIGITS]
    value = int.from_bytes(data[:lead], "big")
    for at in range(lead, len(data), _GROUP_BYTES):
        value = value * _GROUP_BASE + int.from_bytes(data[at : at + _GROUP_BYTES], "big")
    return value


def _decode_fraction(data: bytes, digits: int) -> int:
    rest = digits % _GROUP_DIGITS
    split = digits // _GROUP_DIGITS * _GROUP_BYTES
    return _decode_whole(data[:split], digits - rest) * _POWERS[rest] + int.from_bytes(data[split:], "big")
