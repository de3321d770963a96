"""Row images: where the cells of each row lie, for many rows at once (NumPy) and for one (plain
Python).

    image    = null bitmap, cell of each column that is not null; both in the table's order
    cell     = value of fixed size | length u8 … u32, value

All columns are present (binlog_row_image=FULL). Both ways give the same; the plain one is for few
rows, where NumPy's price per call, not per row, is what counts.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from storage.mysql.buffer import Bytes, Mask, Offsets
from storage.mysql.schema import Column
from storage.mysql.types import fixed_bytes, length_bytes


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
    """How the images of a table lie: for each column (fixed size or 0,
    bytes of the length or 0, nullable).
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
        """The cells of the columns `wanted`, by place, in the images that begin at `at`."""
        return self._walk(data, at, places, max(places, default=-1) + 1)[1]

    def ends(self, data: Bytes, at: Offsets) -> Offsets:
        """Where the images that begin at `at` end."""
        return self._walk(data, at, (), len(self.columns))[0]

    def _walk(
        self, data: Bytes, at: Offsets, places: Collection[int], count: int
    ) -> tuple[Offsets, dict[int, Cells]]:
        """Go over the first `count` columns; gives the offset behind them,
        and the cells `wanted`.
        """
        nulls = Nulls(data, at)
        cells: dict[int, Cells] = {}
        # the next cell is at `at + ahead`
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
        """Where the one image that begins at `at` ends.

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
        """In which rows the column is null; None if in none."""
        number = place >> 3
        if number not in self._bytes:
            flags = self._data.u8(self._at + number)
            self._bytes[number] = flags, int(np.bitwise_or.reduce(flags)) if len(flags) else 0
        flags, seen = self._bytes[number]
        bit = 1 << (place & 7)
        return (flags & np.uint8(bit)) != 0 if seen & bit else None
