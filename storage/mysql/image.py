"""Row images: where the cells of each row lie, for many rows at once (NumPy) and for one (plain
Python); and the keys by which rows are known.

    image    = null bitmap, cell of each column that is not null; both in the table's order
    cell     = value of fixed size | length u8 … u32, value

All columns are present (binlog_row_image=FULL). Both ways give the same; the plain one is for few
rows, where NumPy's price per call, not per row, is what counts.

A key is canonical: the same for a row's images in the log and for what SELECT gives of it.

    key      = cell of each key column, in the key's order
    cell     = the bytes of a row image, of fixed size | size u32, bytes | bytes, at the end only

Its bytes are the stored ones, whatever the collation: 'a' and 'A' are two keys, and an update of
one to the other in a case-insensitive key is a delete and an insert. CHAR and BINARY come without
what pads them, as a log has them. Source: the traps of DBLog on MySQL, seen on MariaDB 10.11.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from storage.mysql.buffer import Bytes, Mask, Offsets
from storage.mysql.charset import pad_of
from storage.mysql.schema import Column, Table, Type, fixed_bytes, length_bytes


@dataclass(frozen=True, slots=True)
class Cells:
    """One column's values in many rows: `[begin, end)` without a length in front;
    present None: none is null.
    """

    begin: Offsets
    end: Offsets
    present: Mask | None


@dataclass(frozen=True, slots=True)
class Shape:
    """The layout of a table's row images: for each column (fixed size or 0, bytes of the length or
    0, nullable).
    """

    columns: tuple[tuple[int, int, bool], ...]

    @classmethod
    def of(cls, columns: Sequence[Column]) -> "Shape":
        """The shape of these columns."""
        shapes = []
        for column in columns:
            size = fixed_bytes(column.type, column.meta)
            before = 0 if size is not None else length_bytes(column.type, column.meta)
            shapes.append((size or 0, before, column.nullable))
        return cls(tuple(shapes))

    @property
    def bitmap_bytes(self) -> int:
        """The size of a null bitmap."""
        return (len(self.columns) + 7) // 8

    def find(self, data: Bytes, at: Offsets, places: Collection[int]) -> dict[int, Cells]:
        """The cells of the columns in `places`, by place, in the images that begin at `at`."""
        return self._walk(data, at, places, max(places, default=-1) + 1)[1]

    def ends(self, data: Bytes, at: Offsets) -> Offsets:
        """Return where the images that begin at `at` end."""
        return self._walk(data, at, (), len(self.columns))[0]

    def _walk(
        self, data: Bytes, at: Offsets, places: Collection[int], count: int
    ) -> tuple[Offsets, dict[int, Cells]]:
        """Go over the first `count` columns; gives the offset behind them,
        and the cells of those in `places`.
        """
        nulls = Nulls(data, at)
        cells: dict[int, Cells] = {}
        # The next cell is at `at + ahead`: columns of fixed size only raise a plain number, and no
        # array is added to until one of varying size comes.
        at, ahead = at + self.bitmap_bytes, 0
        for place, (size, before, nullable) in enumerate(self.columns[:count]):
            null = nulls.of(place) if nullable else None
            if before:
                lengths, begin = data.number(at + ahead, before), at + (ahead + before)
                if null is not None:
                    lengths, begin = np.where(null, 0, lengths), np.where(null, at + ahead, begin)
                at, ahead = begin + lengths, 0
            elif null is None:
                begin, ahead = at + ahead, ahead + size
            else:
                begin, at, ahead = at + ahead, at + (np.where(null, 0, size) + ahead), 0
            if place in places:
                cells[place] = Cells(begin, at + ahead, None if null is None else ~null)
        return at + ahead, cells

    def step(self, data: memoryview, at: int) -> int:
        """Return where the one image that begins at `at` ends.

        Raises:
            IndexError: it reaches beyond the end of `data`.
        """
        nulls = int.from_bytes(data[at : at + self.bitmap_bytes], "little")
        at += self.bitmap_bytes
        for place, (size, before, _) in enumerate(self.columns):
            if nulls >> place & 1:
                continue
            if not before:
                at += size
            elif before == 1:
                at += 1 + data[at]
            else:
                at += before + int.from_bytes(data[at : at + before], "little")
        return at

    def cells(self, data: memoryview, at: int) -> list[bytes | None]:
        """The cells of the one image that begins at `at`, without their lengths;
        None where null.
        """
        nulls = int.from_bytes(data[at : at + self.bitmap_bytes], "little")
        at += self.bitmap_bytes
        cells: list[bytes | None] = []
        for place, (fixed, before, _) in enumerate(self.columns):
            if nulls >> place & 1:
                cells.append(None)
                continue
            begin = at + before
            at = begin + (int.from_bytes(data[at:begin], "little") if before else fixed)
            cells.append(bytes(data[begin:at]))
        return cells


class Nulls:
    """The null bitmaps of many rows; a byte of them is read when a column that it tells of is asked
    for.
    """

    def __init__(self, data: Bytes, at: Offsets) -> None:
        self._data = data
        self._at = at
        self._bytes: dict[int, tuple[np.ndarray, int]] = {}

    def of(self, place: int) -> Mask | None:
        """Return the rows in which the column is null; None: in none."""
        number = place >> 3
        if number not in self._bytes:
            flags = self._data.u8(self._at + number)
            self._bytes[number] = flags, int(np.bitwise_or.reduce(flags)) if len(flags) else 0
        flags, seen = self._bytes[number]
        bit = 1 << (place & 7)
        return (flags & np.uint8(bit)) != 0 if seen & bit else None


@dataclass(frozen=True, slots=True)
class KeyColumn:
    """One column of a key: where it is in the table, and its fixed size, or 0."""

    place: int
    size: int
    pad: bytes
    """Padding that may end a value without meaning; empty for all but CHAR and BINARY."""

    @classmethod
    def of(cls, place: int, column: Column) -> "KeyColumn":
        """Return the form of the column in a key."""
        pad = pad_of(column.charset) if column.type is Type.STRING else b""
        return cls(place, fixed_bytes(column.type, column.meta) or 0, pad)


def key_columns(table: Table) -> tuple[KeyColumn, ...]:
    """The columns of the table's key."""
    return tuple(KeyColumn.of(place, table.columns[place]) for place in table.key_places)


def image_keys(data: Bytes, at: Offsets, shape: Shape, columns: tuple[KeyColumn, ...]) -> pa.Array:
    """The keys of the images that begin at `at`, which ascend."""
    cells = shape.find(data, at, {column.place for column in columns})
    if all(column.size for column in columns):
        return fixed_keys(
            [data.matrix(cells[column.place].begin, column.size) for column in columns], len(at)
        )
    *firsts, last = columns
    pieces = [_inner(data, column, cells[column.place]) for column in firsts]
    return join_pieces([*pieces, _piece(data, last, cells[last.place])])


def _inner(data: Bytes, column: KeyColumn, cells: Cells) -> pa.Array:
    piece = _piece(data, column, cells)
    return piece if column.size else sized(piece)


def _piece(data: Bytes, column: KeyColumn, cells: Cells) -> pa.Array:
    if column.size:
        return fixed_keys([data.matrix(cells.begin, column.size)], len(cells.begin))
    return data.slices(cells.begin, without_pad(data, cells.begin, cells.end, column.pad))


def fixed_keys(cells: list[npt.NDArray[np.uint8]], count: int) -> pa.Array:
    """Keys of cells that all have a fixed size: one matrix each,
    a line for each of the `count` rows.
    """
    if cells:
        lines = np.ascontiguousarray(np.hstack(cells) if len(cells) > 1 else cells[0])
    else:
        lines = np.zeros((count, 0), np.uint8)
    ends = np.arange(count + 1, dtype=np.int32) * np.int32(lines.shape[1])
    return pa.Array.from_buffers(
        pa.binary(), count, [None, pa.py_buffer(ends), pa.py_buffer(lines)]
    )


def join_pieces(pieces: list[pa.Array]) -> pa.Array:
    """Keys of pieces that stand one after another."""
    if len(pieces) == 1:
        return pieces[0]
    return pc.binary_join_element_wise(*pieces, pa.scalar(b"", pa.binary()))


def sized(piece: pa.Array) -> pa.Array:
    """The same bytes behind their size."""
    sizes = np.asarray(pc.binary_length(piece)).astype("<u4")
    return join_pieces([fixed_keys([sizes.view(np.uint8).reshape(-1, 4)], len(piece)), piece])


def without_pad(data: Bytes, begin: Offsets, end: Offsets, pad: bytes) -> Offsets:
    """Return the ends of the values without their padding."""
    width, pad_number = len(pad), int.from_bytes(pad, "little")
    end = end.copy()
    padded = np.arange(len(end)) if width else np.zeros(0, np.int64)
    while len(padded):
        padded = padded[end[padded] - begin[padded] >= width]
        padded = padded[data.number(end[padded] - width, width) == pad_number]
        end[padded] -= width
    return end
