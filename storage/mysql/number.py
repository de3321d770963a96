"""Numbers of many rows at once: integers, YEAR, floating point, DECIMAL;
from row images and binary-protocol rows.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.model.errors import CorruptError
from storage.mysql.buffer import Bytes, Mask, Offsets
from storage.mysql.image import Cells
from storage.mysql.schema import INTEGER_BYTES, Column, Type
from storage.tidb.cell import decimal128
from storage.tidb.number import decode_decimal, digit_groups

DECIMAL_DIGITS_MAX: Final = 38
"""More than these do not fit Arrow's 128 bits: such columns are text."""
_INT64_DIGITS_MAX = 18
_YEAR_ZERO = 1900
_BIGINT_UNSIGNED = pa.decimal128(20, 0)
_SIGNED = {1: pa.int8(), 2: pa.int16(), 3: pa.int32(), 4: pa.int32(), 8: pa.int64()}
_UNSIGNED = {1: pa.int16(), 2: pa.int32(), 3: pa.int32(), 4: pa.int64(), 8: _BIGINT_UNSIGNED}
_LIMB_BITS = np.uint64(32)
_LIMB_MASK = np.uint64(0xFFFFFFFF)
_WORDS_OF_128_BITS = 4


def integer_type(column: Column) -> pa.DataType:
    """Return the Arrow type of an integer column: unsigned columns get the next wider type, since
    Spark has only signed ones.
    """
    return (_UNSIGNED if column.unsigned else _SIGNED)[INTEGER_BYTES[column.type]]


def decimal_type(column: Column) -> pa.DataType:
    """Return the Arrow type of a DECIMAL column."""
    precision, scale = column.meta >> 8, column.meta & 0xFF
    return pa.decimal128(precision, scale) if precision <= DECIMAL_DIGITS_MAX else pa.string()


def integers(column: Column, data: Bytes, cells: Cells, width: int) -> pa.Array:
    """Integers whose cells have `width` bytes."""
    numbers = data.number(cells.begin, width)
    target = integer_type(column)
    if target == _BIGINT_UNSIGNED:
        return decimal128(
            numbers.view(np.int64), np.zeros(len(numbers), np.int64), _all(cells), target
        )
    if not column.unsigned:
        # A MEDIUMINT's sign is bit 23: shifted to the top and back.
        numbers = numbers.view(np.int32) << 8 >> 8 if width == 3 else numbers.view(f"<i{width}")
    try:
        return masked(numbers, cells).cast(target)
    except pa.ArrowInvalid as err:
        raise CorruptError(
            f"column {column.name}: {err}; its schema is not that of the row"
        ) from err


def floats(column: Column, data: Bytes, cells: Cells) -> pa.Array:
    """FLOAT and DOUBLE."""
    width = 4 if column.type is Type.FLOAT else 8
    return masked(data.number(cells.begin, width).view(f"<f{width}"), cells)


def years(data: Bytes, cells: Cells) -> pa.Array:
    """YEAR in a row image: years since 1900, 0 for 0000."""
    numbers = data.u8(cells.begin).astype(np.int16)
    return masked(np.where(numbers, numbers + np.int16(_YEAR_ZERO), numbers), cells)


def full_years(data: Bytes, cells: Cells) -> pa.Array:
    """YEAR in a binary-protocol row: the year."""
    return masked(data.number(cells.begin, 2).view(np.int16), cells)


def decimals(column: Column, data: Bytes, cells: Cells) -> pa.Array:
    """DECIMAL in a row image."""
    precision, scale = column.meta >> 8, column.meta & 0xFF
    if precision > DECIMAL_DIGITS_MAX:
        return _long_decimals(column, data, cells)
    negative, groups = _groups(precision, scale, data, cells.begin)
    if precision <= _INT64_DIGITS_MAX:
        low = np.zeros(len(cells.begin), np.int64)
        for digits, group in groups:
            low = low * 10**digits + group.view(np.int64)
        low = np.where(negative, -low, low)
        return decimal128(low, low >> 63, _all(cells), decimal_type(column))
    return decimal128(*_wide(negative, groups), _all(cells), decimal_type(column))


def decimal_texts(column: Column, data: Bytes, cells: Cells) -> pa.Array:
    """DECIMAL in a binary-protocol row, which is text."""
    texts = data.slices(cells.begin, cells.end, cells.present)
    try:
        return texts.cast(pa.string()).cast(decimal_type(column))
    except pa.ArrowInvalid as err:
        raise CorruptError(f"column {column.name}: {err}") from err


def masked(values: npt.NDArray[Any], cells: Cells) -> pa.Array:
    """The values as an Arrow array, null where the cells are."""
    return pa.array(values, mask=None if cells.present is None else ~cells.present)


def _all(cells: Cells) -> Mask:
    return np.ones(len(cells.begin), np.bool_) if cells.present is None else cells.present


_Groups = list[tuple[int, npt.NDArray[np.uint64]]]


def _groups(precision: int, scale: int, data: Bytes, at: Offsets) -> tuple[Mask, _Groups]:
    """Which values are negative, and each group's digits: as the first bit is flipped,
    it is set in positive ones.
    """
    negative = (data.u8(at) & np.uint8(0x80)) == 0
    groups: _Groups = []
    flipped = 0x80
    for digits, width in digit_groups(precision, scale):
        ones = np.uint64((1 << 8 * width) - 1)
        group = data.number_be(at, width) ^ np.where(negative, ones, np.uint64(0))
        groups.append((digits, group ^ np.uint64(flipped << 8 * (width - 1))))
        flipped, at = 0, at + width
    return negative, groups


def _wide(negative: Mask, groups: _Groups) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The low and high halves of 128-bit numbers,
    reckoned in words of 32 bits so that nothing overflows.
    """
    limbs = [np.zeros(len(negative), np.uint64) for _ in range(_WORDS_OF_128_BITS)]
    for digits, group in groups:
        carry = group
        for place, limb in enumerate(limbs):
            product = limb * np.uint64(10**digits) + carry
            limbs[place], carry = product & _LIMB_MASK, product >> _LIMB_BITS
    low, high = limbs[0] | limbs[1] << _LIMB_BITS, limbs[2] | limbs[3] << _LIMB_BITS
    high = np.where(negative, ~high + (low == 0), high)
    low = np.where(negative, ~low + np.uint64(1), low)
    return low.view(np.int64), high.view(np.int64)


def _long_decimals(column: Column, data: Bytes, cells: Cells) -> pa.Array:
    head, scale = bytes((column.meta >> 8, column.meta & 0xFF)), column.meta & 0xFF
    contents = data.slices(cells.begin, cells.end, cells.present).to_pylist()
    texts = [
        None if cell is None else f"{decode_decimal(head + cell)[0]:.{scale}f}" for cell in contents
    ]
    return pa.array(texts, pa.string())
