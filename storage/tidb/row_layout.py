"""The places of one column's cells in a batch of rows: parses many rows of format v2 at once.

Rows with equally many NULL and other columns form a layout: their offsets stand at the same places.
Mostly they list the same column ids, too, which are then read once. A column costs a few gathers
per layout, no Python object per row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.model.errors import CorruptError
from storage.tidb.binary import BinaryColumn, Mask, Offsets
from storage.tidb.datum import UncommonDatumError
from storage.tidb.row import HEAD_BYTES, LARGE, VERSION, Pairs, as_v2, encode_rows

_HEAD_MASK = np.uint64((1 << 8 * HEAD_BYTES) - 1)
_WORD = 8


@dataclass(frozen=True, slots=True)
class Cells:
    """One column of all rows: `data[begin:end]` where `present`;
    `missing` where the row does not know the column.
    """

    rows: BinaryColumn
    begin: Offsets
    end: Offsets
    present: Mask
    missing: Mask

    @property
    def unknown(self) -> Mask:
        """Return the rows without the column, and those without any value."""
        unknown: Mask = self.missing | ~self.rows.valid
        return unknown

    @classmethod
    def of(cls, cells: Sequence[bytes | None]) -> "Cells":
        """Cells that do not come from rows; None is missing."""
        # numbers are read as the eight bytes that end with the cell
        margin = bytes(_WORD)
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
        # The eight bytes that end with the cell: a row's header alone is longer, so they never
        # begin before the row.
        return self.rows.u64(np.where(self.present, self.end - _WORD, 0))

    def _spare_bits(self) -> npt.NDArray[np.uint64]:
        width = self.end - self.begin
        is_integer = (width == 1) | (width == 2) | (width == 4) | (width == _WORD)
        if not bool(np.all(is_integer | ~self.present)):
            raise CorruptError("an integer cell is not 1, 2, 4 or 8 bytes wide")
        return (64 - 8 * width).astype(np.uint64)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Rows (by number) whose ids and offsets have the same count and width."""

    at: Offsets
    ids: npt.NDArray[np.uint32]
    """The column ids of each row, or of all rows alike in one line."""
    not_null: int
    large: bool

    @property
    def ends_at(self) -> int:
        return HEAD_BYTES + int(self.ids.shape[1]) * (4 if self.large else 1)

    @property
    def data_at(self) -> int:
        return self.ends_at + self.not_null * (4 if self.large else 2)

    def having(self, column_id: int) -> tuple[Offsets, Offsets]:
        """The rows in which the column is not null, and its place among the offsets there (in one
        item if alike).
        """
        hits = self.ids[:, : self.not_null] == column_id
        has_value = hits.any(axis=1)
        at = self.at
        if not bool(has_value.all()):
            at = at[np.broadcast_to(has_value, at.shape)]
        if not self.not_null:
            return at, np.zeros(np.count_nonzero(has_value), np.int64)  # argmax takes no empty axis
        return at, hits[has_value].argmax(axis=1)

    def missing(self, column_id: int) -> Offsets:
        """The rows that do not list the column."""
        absent = ~(self.ids == column_id).any(axis=1)
        rows: Offsets = self.at[np.broadcast_to(absent, self.at.shape)]
        return rows


class RowBlock:
    """A batch of rows; null entries are rows whose columns are all NULL. Rows of format v1 are
    translated first.
    """

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
        present, missing = np.zeros(len(self), np.bool_), np.zeros(len(self), np.bool_)
        begin, end = self._rows.begin, self._rows.begin
        for layout in self._layouts:
            at, number = layout.having(column_id)
            bounds = self._bounds(layout, at, number)
            present[at] = True
            if len(at) == len(self):
                return Cells(self._rows, *bounds, present, missing)
            begin, end = _put(begin, at, bounds[0]), _put(end, at, bounds[1])
            missing[layout.missing(column_id)] = True
        return Cells(self._rows, begin, end, present, missing)

    def _bounds(self, layout: _Layout, at: Offsets, number: Offsets) -> tuple[Offsets, Offsets]:
        data = self._rows.begin[at] + layout.data_at
        end = data + _end(self._rows, layout, at, number)
        if not bool(number.any()):
            return data, end
        # A cell begins where the one before it ends; the first one has none before it.
        end_before = _end(self._rows, layout, at, np.maximum(number - 1, 0))
        return data + np.where(number > 0, end_before, 0), end


def _as_v2(column: BinaryColumn, rows: pa.Array) -> BinaryColumn:
    """Translate the rows of format v1, which only old clusters have."""
    old = np.flatnonzero((column.u8(column.begin) != VERSION) & column.valid)
    if not len(old):
        return column
    old_rows = rows.take(pa.array(old))
    try:
        translated = encode_rows(Pairs.scan(BinaryColumn(old_rows)))
    except UncommonDatumError:
        translated = pa.array([as_v2(row) for row in old_rows.to_pylist()], pa.binary())
    index = np.arange(len(rows))
    index[old] = len(rows) + np.arange(len(old))
    return BinaryColumn(pa.concat_arrays([rows, translated]).take(pa.array(index)))


def _put(offsets: Offsets, at: Offsets, new: Offsets) -> Offsets:
    changed = offsets.copy()
    changed[at] = new
    return changed


def _end(rows: BinaryColumn, layout: _Layout, at: Offsets, number: Offsets | int) -> Offsets:
    """Return where the cell of that number ends, counted from the row's first cell."""
    ends = rows.begin[at] + layout.ends_at
    if layout.large:
        return rows.u32(ends + 4 * number).astype(np.int64)
    return rows.u16(ends + 2 * number).astype(np.int64)


def _check(rows: BinaryColumn, layout: _Layout) -> None:
    """Refuse rows whose cells would reach outside of them,
    so that gathers need no checks of their own.
    """
    size = (rows.end - rows.begin)[layout.at]
    if bool(np.any(size < layout.data_at)):
        raise CorruptError("a row ends within its header")
    before = np.zeros(len(layout.at), np.int64)
    for number in range(layout.not_null):
        after = _end(rows, layout, layout.at, number)
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
            raise CorruptError(
                f"a row begins with {version}, not {VERSION}: it is not of format v2"
            )
        width = 4 if flags & LARGE else 1
        if bool(np.any((rows.end - rows.begin)[members] < HEAD_BYTES + width * (not_null + null))):
            raise CorruptError("a row ends within its column ids")
        yield _Layout(
            members,
            _ids(rows, members, not_null + null, width),
            not_null,
            large=bool(flags & LARGE),
        )


def _ids(rows: BinaryColumn, members: Offsets, count: int, width: int) -> npt.NDArray[np.uint32]:
    """The column ids of each member; of the first one only, if all are alike."""
    begin = rows.begin[members] + HEAD_BYTES
    # Rows of one table mostly list the same ids: then one line stands for all.
    read = members if not _alike(rows, begin, count * width) else members[:1]
    at = rows.begin[read][:, None] + HEAD_BYTES + width * np.arange(count)
    return rows.u32(at) if width > 1 else rows.u8(at).astype(np.uint32)


def _alike(rows: BinaryColumn, begin: Offsets, size: int) -> bool:
    """Whether the `size` bytes at each offset are the same."""
    for word in range(0, size, _WORD):
        mask = np.uint64((1 << 8 * min(_WORD, size - word)) - 1)
        words = rows.u64(begin + word) & mask
        if not bool(np.all(words == words[0])):
            return False
    return True


def _groups(at: Offsets, keys: npt.NDArray[np.uint64]) -> list[tuple[int, Offsets]]:
    """Row numbers by key, ascending within each; the common case of one key is found without
    sorting.
    """
    if not len(keys):
        return []
    if bool(np.all(keys == keys[0])):
        return [(int(keys[0]), at)]
    distinct, group = np.unique(keys, return_inverse=True)
    order = np.argsort(group, kind="stable")
    parts = np.split(at[order], np.cumsum(np.bincount(group))[:-1])
    return list(zip(map(int, distinct), parts, strict=True))
