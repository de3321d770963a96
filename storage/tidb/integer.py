"""Integer cells of row format v2: the fewest of 1, 2, 4, 8 little-endian bytes that hold the number."""

from storage.model.errors import InvalidError

WIDTHS = (1, 2, 4, 8)


def signed_cell(number: int) -> bytes:
    """Encode `-2^63 <= number < 2^63`.

    Raises:
        InvalidError: the number is outside.
    """
    return number.to_bytes(_width(number, (number if number >= 0 else ~number).bit_length() + 1), "little", signed=True)


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
