"""Dates and times of many rows at once, from row images, the old forms in them,
and binary-protocol rows.

What lies between a cell and Arrow is TiDB's packed integer (storage/tidb/time.py), whose upper part
is that of MySQL's DATETIME2, and for TIME a signed number of microseconds. Dates that no calendar
has become null, unless the column is shown as text.
"""

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.mysql.buffer import Bytes, Mask, Offsets
from storage.mysql.image import Cells
from storage.mysql.number import masked
from storage.mysql.schema import Column, Type, fraction_bytes
from storage.tidb.time import (
    NANOS_PER_MICRO,
    duration_text,
    moment_texts,
    pack_micros,
    unpack_days,
    unpack_micros,
)

Packed = npt.NDArray[np.uint64]
Micros = npt.NDArray[np.int64]

MOMENT_TYPES: Final = {
    Type.DATE: pa.date32(),
    Type.DATETIME: pa.timestamp("us"),
    Type.DATETIME2: pa.timestamp("us"),
    Type.TIMESTAMP: pa.timestamp("us", tz="UTC"),
    Type.TIMESTAMP2: pa.timestamp("us", tz="UTC"),
}
_DATETIME_BIAS = np.uint64(0x8000000000)
_TIME_BIAS: Final = 0x800000
_MICRO = 1_000_000
_DATE_AT, _CLOCK_AT = np.uint64(41), np.uint64(24)


def moments(column: Column, data: Bytes, cells: Cells) -> pa.Array:
    """DATE, DATETIME and TIMESTAMP in a row image, in any form."""
    if column.type in {Type.TIMESTAMP, Type.TIMESTAMP2}:
        micros = _timestamps(column, data, cells.begin)
        if column.as_text:
            return _written(column, pack_micros(micros), cells)
        return _array(column, micros, micros != 0, cells)
    return _unpacked(column, _PACKED[column.type](column, data, cells.begin), cells)


def binary_moments(column: Column, data: Bytes, cells: Cells) -> pa.Array:
    """DATE, DATETIME and TIMESTAMP (the session's time zone is UTC) in a binary-protocol row."""
    return _unpacked(column, binary_packed(data, cells), cells)


def times(column: Column, data: Bytes, cells: Cells) -> pa.Array:
    """TIME in a row image, in either form, as text."""
    micros = (
        _old_times(data, cells.begin)
        if column.type is Type.TIME
        else _times2(column, data, cells.begin)
    )
    return _texts(column, micros, cells)


def binary_times(column: Column, data: Bytes, cells: Cells) -> pa.Array:
    """TIME in a binary-protocol row, as text."""
    return _texts(column, binary_micros(data, cells), cells)


def binary_packed(data: Bytes, cells: Cells) -> Packed:
    """`year u16, month u8, day u8, hour u8, minute u8, second u8, micros u32`,
    cut off behind what is not zero.
    """
    date, clock = data.u64(cells.begin), data.u8(cells.begin + 6).astype(np.uint64)
    # 0, 4, 7 or 11 bytes are sent; what was read beyond them is the next cell's.
    length = cells.end - cells.begin
    date = np.where(
        length >= 7, date, np.where(length >= 4, date & np.uint64(0xFFFFFFFF), np.uint64(0))
    )
    year, month, day = date & np.uint64(0xFFFF), _byte(date, 2), _byte(date, 3)
    second = np.where(length >= 7, clock, np.uint64(0))
    micros = np.where(
        length >= 11, data.number(np.where(length >= 11, cells.begin + 7, 0), 4), 0
    ).astype(np.uint64)
    return _pack(year, month, day, _byte(date, 4), _byte(date, 5), second) | micros


def binary_micros(data: Bytes, cells: Cells) -> Micros:
    """`negative u8, days u32, hour u8, minute u8, second u8, micros u32`,
    cut off behind what is not zero.
    """
    head = data.u64(cells.begin)
    length = cells.end - cells.begin
    days = (head >> np.uint64(8)) & np.uint64(0xFFFFFFFF)
    seconds = ((days * 24 + _byte(head, 5)) * 60 + _byte(head, 6)) * 60 + _byte(head, 7)
    micros = np.where(length >= 12, data.number(np.where(length >= 12, cells.begin + 8, 0), 4), 0)
    total = np.where(length >= 8, seconds.astype(np.int64) * _MICRO + micros.astype(np.int64), 0)
    return np.where((head & np.uint64(1)) != 0, -total, total)


def _pack(
    year: Packed, month: Packed, day: Packed, hour: Packed, minute: Packed, second: Packed
) -> Packed:
    date = (year * np.uint64(13) + month) << np.uint64(5) | day
    clock = hour << np.uint64(12) | minute << np.uint64(6) | second
    packed: Packed = date << _DATE_AT | clock << _CLOCK_AT
    return packed


def _byte(word: Packed, number: int) -> Packed:
    value: Packed = word >> np.uint64(8 * number) & np.uint64(0xFF)
    return value


def _fraction(column: Column, data: Bytes, at: Offsets) -> npt.NDArray[np.uint64]:
    """Microseconds from the fraction that stands at each offset."""
    width = fraction_bytes(column.meta)
    if not width:
        return np.zeros(len(at), np.uint64)
    return data.number_be(at, width) * np.uint64(100 ** (3 - width))


def _dates(_: Column, data: Bytes, at: Offsets) -> Packed:
    number = data.number(at, 3).astype(np.uint64)
    year, month, day = (
        number >> np.uint64(9),
        number >> np.uint64(5) & np.uint64(15),
        number & np.uint64(31),
    )
    packed: Packed = ((year * np.uint64(13) + month) << np.uint64(5) | day) << _DATE_AT
    return packed


def _datetimes2(column: Column, data: Bytes, at: Offsets) -> Packed:
    whole = data.number_be(at, 5) - _DATETIME_BIAS
    packed: Packed = whole << _CLOCK_AT | _fraction(column, data, at + 5)
    return packed


def _old_datetimes(_: Column, data: Bytes, at: Offsets) -> Packed:
    # Before MySQL 5.6: the decimal number YYYYMMDDhhmmss.
    parts = []
    number = data.u64(at)
    for _digits in range(5):
        number, part = np.divmod(number, np.uint64(100))
        parts.append(part)
    second, minute, hour, day, month = parts
    return _pack(number, month, day, hour, minute, second)


_PACKED = {Type.DATE: _dates, Type.DATETIME2: _datetimes2, Type.DATETIME: _old_datetimes}


def _timestamps(column: Column, data: Bytes, at: Offsets) -> Micros:
    """Microseconds since 1970; 0 is what 0000-00-00 is stored as."""
    if column.type is Type.TIMESTAMP:
        return data.number(at, 4).astype(np.int64) * _MICRO
    return (data.number_be(at, 4) * np.uint64(_MICRO) + _fraction(column, data, at + 4)).astype(
        np.int64
    )


def _times2(column: Column, data: Bytes, at: Offsets) -> Micros:
    width = fraction_bytes(column.meta)
    # Whole and fraction are one biased number: of a negative time the fraction alone would be the
    # complement, so the sign is taken before the parts.
    number = data.number_be(at, 3 + width).astype(np.int64) - (_TIME_BIAS << 8 * width)
    size, sign = np.abs(number), np.sign(number)
    clock, fraction = size >> 8 * width, size & ((1 << 8 * width) - 1)
    seconds = ((clock >> 12 & 0x3FF) * 60 + (clock >> 6 & 63)) * 60 + (clock & 63)
    micros: Micros = sign * (seconds * _MICRO + fraction * 100 ** (3 - width))
    return micros


def _old_times(data: Bytes, at: Offsets) -> Micros:
    # 24 bits with a sign: shifted to the top of the word and back, which repeats the sign.
    number = (data.number(at, 3).astype(np.int64) << 40) >> 40
    size = np.abs(number)
    seconds = (size // 10_000 * 60 + size // 100 % 100) * 60 + size % 100
    micros: Micros = np.sign(number) * seconds * _MICRO
    return micros


def _unpacked(column: Column, packed: Packed, cells: Cells) -> pa.Array:
    if column.as_text:
        return _written(column, packed, cells)
    if column.type is Type.DATE:
        days, valid = unpack_days(packed)
        return _array(column, days.astype(np.int32), valid, cells)
    return _array(column, *unpack_micros(packed), cells)


def _array(
    column: Column, values: npt.NDArray[np.int64 | np.int32], valid: Mask, cells: Cells
) -> pa.Array:
    present = valid if cells.present is None else valid & cells.present
    return pa.array(values, mask=~present).cast(MOMENT_TYPES[column.type])


def _written(column: Column, packed: Packed, cells: Cells) -> pa.Array:
    """Format the values as the server prints them in UTC; each distinct moment is
    formatted once.
    """
    distinct, places = np.unique(packed, return_inverse=True)
    texts = moment_texts(distinct.tolist(), column.meta, is_date=column.type is Type.DATE)
    return pa.array(texts, pa.string()).take(masked(places, cells))


def _texts(column: Column, micros: Micros, cells: Cells) -> pa.Array:
    """Each distinct time is written once."""
    distinct, places = np.unique(micros, return_inverse=True)
    digits = column.meta if column.type is Type.TIME2 else 0
    texts = [duration_text(number * NANOS_PER_MICRO, digits) for number in distinct.tolist()]
    return pa.array(texts, pa.string()).take(masked(places, cells))
