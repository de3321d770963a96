"""Rows of the binary protocol (COM_STMT_EXECUTE), as a dump's SELECT gives them:
where their cells lie, and their keys.

    row    = 0 u8, bitmap, cell of each column that is not null
    bitmap = (columns + 9) / 8 bytes; from its third bit on the columns that are null
    cell   = value of fixed size | size n, value; n: length-encoded number

docs/format/mysql-rows.md says how the columns are selected. Source: MySQL's protocol documentation,
binary resultsets.
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.model.errors import CorruptError
from storage.mysql.buffer import Bytes, Offsets, reading
from storage.mysql.image import Cells, KeyColumn, Nulls, fixed_keys, join_pieces, sized, without_pad
from storage.mysql.moment import binary_micros, binary_packed
from storage.mysql.schema import DATES, Column, Type, fraction_bytes
from storage.tidb.number import encode_decimal
from storage.tidb.time import unpack_micros

NUMBER_BYTES: Final = {
    Type.TINY: 1,
    Type.SHORT: 2,
    Type.YEAR: 2,
    Type.INT24: 4,
    Type.LONG: 4,
    Type.LONGLONG: 8,
    Type.FLOAT: 4,
    Type.DOUBLE: 8,
    Type.ENUM: 8,
    Type.SET: 8,
}
"""The types with cells of fixed size; ENUM and SET are selected as BIGINT UNSIGNED."""
_HEAD_BYTES = 1
_NULLS_FROM_BIT = 2
_SIZES: Final = ((0xFC, 2), (0xFD, 3), (0xFE, 8))
_MICRO = 1_000_000
_DECIMAL = re.compile(rb"-?\d{1,99}(\.\d{1,99})?")

Lines = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class BinaryShape:
    """The layout of a table's binary rows: the fixed size of each column's cells, or 0."""

    columns: tuple[int, ...]

    @classmethod
    def of(cls, columns: Sequence[Column]) -> "BinaryShape":
        """The shape of these columns, all selected in their order."""
        return cls(tuple(NUMBER_BYTES.get(column.type, 0) for column in columns))

    def find(self, data: Bytes, at: Offsets, places: Collection[int]) -> dict[int, Cells]:
        """The cells of the columns in `places`, by place, in the rows that begin at `at`."""
        return self._walk(data, at, places, max(places, default=-1) + 1)[1]

    def ends(self, data: Bytes, at: Offsets) -> Offsets:
        """Return where the rows that begin at `at` end."""
        return self._walk(data, at, (), len(self.columns))[0]

    def _walk(
        self, data: Bytes, at: Offsets, places: Collection[int], count: int
    ) -> tuple[Offsets, dict[int, Cells]]:
        nulls = Nulls(data, at + _HEAD_BYTES)
        cells: dict[int, Cells] = {}
        at = at + (_HEAD_BYTES + (len(self.columns) + _NULLS_FROM_BIT + 7) // 8)
        for place, size in enumerate(self.columns[:count]):
            null = nulls.of(place + _NULLS_FROM_BIT)
            begin, end = (at, at + size) if size else _sized_cells(data, at)
            if null is not None:
                begin, end = np.where(null, at, begin), np.where(null, at, end)
            if place in places:
                cells[place] = Cells(begin, end, None if null is None else ~null)
            at = end
        return at, cells


def binary_keys(
    data: Bytes, at: Offsets, columns: Sequence[Column], key: tuple[KeyColumn, ...]
) -> pa.Array:
    """The keys of the binary rows that begin at `at`, which ascend:
    equal to those of the rows' images.

    Raises:
        CorruptError: a row is not one of this table.
    """
    with reading("a binary row"):
        cells = BinaryShape.of(columns).find(data, at, {column.place for column in key})
        if any(cells[column.place].present is not None for column in key):
            raise CorruptError("a key column is NULL: the table's key is not that of its record")
        pieces = [
            _piece(columns[column.place], column, data, cells[column.place]) for column in key
        ]
    inner = [
        piece if column.size else sized(piece)
        for column, piece in zip(key[:-1], pieces[:-1], strict=True)
    ]
    return join_pieces([*inner, pieces[-1]])


def _sized_cells(data: Bytes, at: Offsets) -> tuple[Offsets, Offsets]:
    size: Offsets = data.u8(at).astype(np.int64)
    begin = at + 1
    # Up to 0xFA the first byte is the size itself, which is so for nearly all cells.
    if bool((size > 0xFA).any()):
        for first, width in _SIZES:
            mine = data.u8(at) == first
            size[mine] = data.number(at[mine] + 1, width).astype(np.int64)
            begin[mine] += width
    return begin, begin + size


def _piece(column: Column, key: KeyColumn, data: Bytes, cells: Cells) -> pa.Array:
    if not key.size:
        return data.slices(cells.begin, without_pad(data, cells.begin, cells.end, key.pad))
    lines = _LINES.get(column.type, _same_bytes)(column, key.size, data, cells)
    return fixed_keys([np.ascontiguousarray(lines)], len(lines))


def _same_bytes(column: Column, size: int, data: Bytes, cells: Cells) -> Lines:
    if bool((cells.end - cells.begin < size).any()):
        raise CorruptError(f"column {column.name}: a value of less than {size} bytes")
    return data.matrix(cells.begin, size)


def _years(_: Column, size: int, data: Bytes, cells: Cells) -> Lines:
    years = data.number(cells.begin, 2).astype(np.int64)
    # An image has years since 1900, and 0 for 0000.
    return _little(np.where(years, years - 1900, 0), size)


def _decimals(column: Column, size: int, data: Bytes, cells: Cells) -> Lines:
    texts = data.slices(cells.begin, cells.end).to_pylist()
    for text in texts:
        if not _DECIMAL.fullmatch(text):
            raise CorruptError(f"column {column.name}: {text[:99]!r} is no DECIMAL")
    shape = column.meta >> 8, column.meta & 0xFF
    encoded = b"".join(encode_decimal(Decimal(text.decode()), *shape)[2:] for text in texts)
    return np.frombuffer(encoded, np.uint8).reshape(-1, size)


def _moments(column: Column, size: int, data: Bytes, cells: Cells) -> Lines:
    packed = binary_packed(data, cells)
    micros = (packed & np.uint64(0xFFFFFF)).astype(np.int64)
    whole = (packed >> np.uint64(24)).astype(np.int64)
    if column.type is Type.DATETIME2:
        return _with_fraction(column, whole + 0x8000000000, 5, micros)
    if column.type in {Type.TIMESTAMP, Type.TIMESTAMP2}:
        since_1970, valid = unpack_micros(packed)
        seconds = np.where(valid, since_1970 // _MICRO, 0)
        return (
            _little(seconds, 4)
            if column.type is Type.TIMESTAMP
            else _with_fraction(column, seconds, 4, micros)
        )
    date, clock = whole >> 17, whole & 0x1FFFF
    year, month, day = (date >> 5) // 13, (date >> 5) % 13, date & 31
    if column.type is Type.DATE:
        return _little(year << 9 | month << 5 | day, size)
    digits = ((year * 100 + month) * 100 + day) * 1_000_000
    return _little(digits + (clock >> 12) * 10_000 + (clock >> 6 & 63) * 100 + (clock & 63), size)


def _times(column: Column, size: int, data: Bytes, cells: Cells) -> Lines:
    micros = binary_micros(data, cells)
    second, fraction = np.divmod(np.abs(micros), _MICRO)
    hour, minute, second = second // 3600, second // 60 % 60, second % 60
    if column.type is Type.TIME:
        return _little(np.sign(micros) * (hour * 10_000 + minute * 100 + second), size)
    width = fraction_bytes(column.meta)
    packed = (hour << 12 | minute << 6 | second) << 8 * width | fraction // 100 ** (3 - width)
    return _big(np.sign(micros) * packed + (0x800000 << 8 * width), size)


def _with_fraction(
    column: Column, whole: npt.NDArray[np.int64], size: int, micros: npt.NDArray[np.int64]
) -> Lines:
    width = fraction_bytes(column.meta)
    lines = _big(whole, size)
    return np.hstack([lines, _big(micros // 100 ** (3 - width), width)]) if width else lines


def _little(numbers: npt.NDArray[np.int64], size: int) -> Lines:
    return numbers.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :size]


def _big(numbers: npt.NDArray[np.int64], size: int) -> Lines:
    return numbers.astype(">i8").view(np.uint8).reshape(-1, 8)[:, 8 - size :]


_LINES: dict[Type, Callable[[Column, int, Bytes, Cells], Lines]] = {
    Type.YEAR: _years,
    Type.NEWDECIMAL: _decimals,
    Type.TIME: _times,
    Type.TIME2: _times,
    **dict.fromkeys(DATES, _moments),
}
