"""Where the cells of one column lie in a batch of rows: many rows of format v2 taken apart at once.

Rows whose header bytes are equal (same columns present, same width of offsets) form a layout; its ids are decoded once,
and each column's bounds are one gather per layout. A column costs no Python object per row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.model.errors import CorruptError
from storage.tidb.binary import BinaryColumn, Mask, Offsets
from storage.tidb.row import HEAD_BYTES, LARGE, VERSION
from storage.tidb.row_v1 import as_v2

_HEAD_MASK = np.uint64((1 << 8 * HEAD_BYTES) - 1)
_WORD = 8


@dataclass(frozen=True, slots=True)
class Cells:
    """One column of all rows: `data[begin:end]` where `present`; `missing` where the row does not know the column."""

    rows: BinaryColumn
    begin: Offsets
    end: Offsets
    present: Mask
    missing: Mask

    @property
    def unknown(self) -> Mask:
        """Where the column is missing, or the whole row."""
        unknown: Mask = self.missing | ~self.rows.valid
        return unknown

    @classmethod
    def of(cls, cells: Sequence[bytes | None]) -> "Cells":
        """Cells that do not come from rows; None is missing."""
        margin = bytes(_WORD)  # numbers are read as the eight bytes that end with the cell
        rows = BinaryColumn(pa.array([margin, *cells, margin], pa.binary()).slice(1, len(cells)))
        return cls(rows, rows.begin, rows.end, rows.valid, ~rows.valid)

    def binary(self) -> pa.Array:
        """The cells' bytes, null where absent."""
        return self.rows.slices(self.begin, self.end, self.present)

    def uint64(self) -> npt.NDArray[np.uint64]:
        """The cells as unsigned numbers of 1, 2, 4 or 8 bytes; undefined where absent."""
        return self._last_word() >> self._spare_bits()

    def int64(self) -> npt.NDArray[np.int64]:
        """The cells as signed numbers of 1, 2, 4 or 8 bytes; undefined where absent."""
        return self._last_word().view(np.int64) >> self._spare_bits().view(np.int64)

    def uint64_be(self) -> npt.NDArray[np.uint64]:
        """The cells as big-endian numbers of exactly 8 bytes; undefined where absent."""
        if bool(np.any((self.end - self.begin != _WORD) & self.present)):
            raise CorruptError("a cell that must have 8 bytes has another size")
        return self._last_word().byteswap()

    def _last_word(self) -> npt.NDArray[np.uint64]:
        # The eight bytes that end with the cell: a row's header alone is longer, so they never begin before the row.
        return self.rows.u64(np.where(self.present, self.end - _WORD, 0))

    def _spare_bits(self) -> npt.NDArray[np.uint64]:
        width = self.end - self.begin
        if not bool(np.all(((width == 1) | (width == 2) | (width == 4) | (width == _WORD)) | ~self.present)):
            raise CorruptError("an integer cell is not 1, 2, 4 or 8 bytes wide")
        return (64 - 8 * width).astype(np.uint64)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Rows (by number) whose header is the same, and what it says."""

    at: Offsets
    ids: tuple[int, ...]
    null_ids: frozenset[int]
    large: bool

    @property
    def ends_at(self) -> int:
        return HEAD_BYTES + (len(self.ids) + len(self.null_ids)) * (4 if self.large else 1)

    @property
    def data_at(self) -> int:
        return self.ends_at + len(self.ids) * (4 if self.large else 2)


class RowBlock:
    """A batch of rows; null entries are rows whose columns are all NULL. Rows of format v1 are translated first."""

    def __init__(self, rows: pa.Array) -> None:
        """Read the layouts.

        Raises:
            CorruptError: an entry is not a row.
        """
        self._rows = _as_v2(BinaryColumn(rows), rows)
        self._layouts = list(_layouts(self._rows))
        for layout in self._layouts:
            _check(self._rows, layout)

    def __len__(self) -> int:
        return len(self._rows)

    def cells(self, column_id: int) -> Cells:
        """Find the column's cells in every row."""
        found = [(layout, self._bounds(layout, column_id)) for layout in self._layouts]
        if len(found) == 1 and found[0][1] is not None and len(found[0][0].at) == len(self):
            begin, end = found[0][1]
            return Cells(self._rows, begin, end, np.ones(len(self), np.bool_), np.zeros(len(self), np.bool_))
        begin, end = self._rows.begin.copy(), self._rows.begin.copy()
        present, missing = np.zeros(len(self), np.bool_), np.zeros(len(self), np.bool_)
        for layout, bounds in found:
            if bounds is not None:
                begin[layout.at], end[layout.at] = bounds
                present[layout.at] = True
            elif column_id not in layout.null_ids:
                missing[layout.at] = True
        return Cells(self._rows, begin, end, present, missing)

    def _bounds(self, layout: _Layout, column_id: int) -> tuple[Offsets, Offsets] | None:
        if column_id not in layout.ids:
            return None
        number = layout.ids.index(column_id)
        data = self._rows.begin[layout.at] + layout.data_at
        begin = data + _end(self._rows, layout, number - 1) if number else data
        return begin, data + _end(self._rows, layout, number)


def _as_v2(column: BinaryColumn, rows: pa.Array) -> BinaryColumn:
    """Translate a batch with rows of format v1, which only old clusters have."""
    if bool(np.all((column.u8(column.begin) == VERSION) | ~column.valid)):
        return column
    return BinaryColumn(pa.array([None if row is None else as_v2(row) for row in rows.to_pylist()], pa.binary()))


def _end(rows: BinaryColumn, layout: _Layout, number: int) -> Offsets:
    at = rows.begin[layout.at] + layout.ends_at
    ends = rows.u32(at + 4 * number) if layout.large else rows.u16(at + 2 * number)
    return ends.astype(np.int64)


def _check(rows: BinaryColumn, layout: _Layout) -> None:
    """Refuse rows whose cells would reach outside of them, so that gathers need no checks of their own."""
    size = (rows.end - rows.begin)[layout.at]
    if bool(np.any(size < layout.data_at)):
        raise CorruptError("a row ends within its header")
    before = np.zeros(len(layout.at), np.int64)
    for number in range(len(layout.ids)):
        after = _end(rows, layout, number)
        if bool(np.any(after < before)):
            raise CorruptError("the cell offsets of a row do not ascend")
        before = after
    if bool(np.any(before > size - layout.data_at)):
        raise CorruptError("a row's cells reach beyond its end")


def _layouts(rows: BinaryColumn) -> Iterator[_Layout]:
    at = np.flatnonzero(rows.valid)
    if bool(np.any((rows.end - rows.begin)[at] < HEAD_BYTES)):
        raise CorruptError("a row is shorter than its header")
    for head, members in _groups(at, rows.u64(rows.begin[at]) & _HEAD_MASK):
        version, flags = head & 0xFF, head >> 8 & 0xFF
        not_null, null = head >> 16 & 0xFFFF, head >> 32
        if version != VERSION:
            raise CorruptError(f"a row begins with {version}, not {VERSION}: it is not of format v2")
        width = 4 if flags & LARGE else 1
        ids_bytes = width * (not_null + null)
        if bool(np.any((rows.end - rows.begin)[members] < HEAD_BYTES + ids_bytes)):
            raise CorruptError("a row ends within its column ids")
        yield from _by_ids(rows, members, not_null, ids_bytes, large=bool(flags & LARGE))


def _by_ids(rows: BinaryColumn, members: Offsets, not_null: int, ids_bytes: int, *, large: bool) -> Iterator[_Layout]:
    """Split rows with equally many columns by which ones they are."""
    classes = [members]
    for word in range(0, ids_bytes, _WORD):
        mask = np.uint64((1 << 8 * min(_WORD, ids_bytes - word)) - 1)
        split = [_groups(part, rows.u64(rows.begin[part] + HEAD_BYTES + word) & mask) for part in classes]
        classes = [part for groups in split for _, part in groups]
    for part in classes:
        begin = int(rows.begin[part[0]]) + HEAD_BYTES
        ids = np.frombuffer(rows.data[begin : begin + ids_bytes].tobytes(), "<u4" if large else "u1").tolist()
        yield _Layout(part, tuple(ids[:not_null]), frozenset(ids[not_null:]), large)


def _groups(at: Offsets, keys: npt.NDArray[np.uint64]) -> list[tuple[int, Offsets]]:
    """Row numbers by key, ascending within each; the common case of one key is found without sorting."""
    if not len(keys):
        return []
    if bool(np.all(keys == keys[0])):
        return [(int(keys[0]), at)]
    distinct, group = np.unique(keys, return_inverse=True)
    order = np.argsort(group, kind="stable")
    parts = np.split(at[order], np.cumsum(np.bincount(group))[:-1])
    return list(zip(map(int, distinct), parts, strict=True))
