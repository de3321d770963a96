"""Many rows of format v1 and of binlogs at once: read as pairs of column id and value,
written as rows of format v2.

`Pairs` holds what was read as matrices (row, place). `encode_rows` writes: a row is a run of slices
(header, column ids, cell ends, cells); all of them are laid into one byte buffer, and gathered.
`storage.tidb.row` reads and writes one row.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.model.errors import CorruptError
from storage.tidb.binary import BinaryColumn, Mask, Offsets
from storage.tidb.datum import NIL, Datums, decode_datums
from storage.tidb.row import (
    COLUMN_ID_MAX,
    HEAD_BYTES,
    LARGE,
    SMALL_BYTES_MAX,
    SMALL_ID_MAX,
    VERSION,
)

_Numbers = npt.NDArray[np.int64]
_MATRICES: Final = ("used", "ids", "null", "number", "is_number", "is_signed", "begin", "size")
_NO_ID: Final = 1 << 50
GATHER_BYTES: Final = 4 << 20
"""Rows are written in runs of about this size: a gather takes eight times as much memory."""
_HEAD: Final = np.dtype([("version", "u1"), ("flags", "u1"), ("not_null", "<u2"), ("null", "<u2")])
_NUMBER_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs of many rows; `used` says at which places a row has one."""

    column: BinaryColumn
    used: Mask
    ids: _Numbers
    null: Mask
    number: _Numbers
    is_number: Mask
    is_signed: Mask
    begin: Offsets
    size: Offsets

    @classmethod
    def scan(
        cls,
        column: BinaryColumn,
        begin: Offsets | None = None,
        leading: Mapping[int, Datums] | None = None,
    ) -> "Pairs":
        """Take rows apart, from `begin` (else from their first byte) to their end.

        `leading` are values that stand before the rows, by column id; a row's own value of the
        column goes before.

        Raises:
            UncommonDatumError: there is something else than the datums that rows have.
            CorruptError: a row ends within a pair, or a number is too large.
        """
        at = column.begin if begin is None else begin
        if bool(np.any(at >= column.end)):
            raise CorruptError("a row without pairs, and without the byte that says so")
        at = np.where((at + 1 == column.end) & (column.u8(at) == NIL), column.end, at)
        places: list[tuple[Mask, Datums, Datums]] = []
        while bool((used := at < column.end).any()):
            ids = decode_datums(column, at, used)
            if not bool(np.all(ids.is_number | ~used)):
                raise CorruptError("a row has a value where a column id belongs")
            values = decode_datums(column, ids.end, used & (ids.end < column.end))
            at = np.where(used, values.end, at)
            if bool(np.any(used & ((at > column.end) | (ids.end >= column.end)))):
                raise CorruptError("a row ends within a pair of column id and value")
            places.append((used, ids, values))
        pairs = cls(column, *_matrices(len(column), places))
        for column_id, values in reversed(list((leading or {}).items())):
            pairs = pairs._led_by(column_id, values)
        return pairs

    def halves(self) -> "tuple[Pairs, Pairs]":
        """The old and the new row of updates: the new one begins where the first column's id comes
        again.

        Raises:
            CorruptError: it does not come again.
        """
        again = self.used[:, 1:] & (self.ids[:, 1:] == self.ids[:, :1])
        if not bool(again.any(axis=1).all()):
            raise CorruptError("an update without its new row")
        cut = again.argmax(axis=1) + 1
        places = np.arange(self.ids.shape[1])
        is_old = places < cut[:, None]
        return self._using(self.used & is_old), self._using(self.used & ~is_old)

    def numbers(self, column_id: int) -> tuple[_Numbers, Mask]:
        """The column's integers, and which rows have one."""
        hits = self.used & self.is_number & (self.ids == column_id)
        has_number = hits.any(axis=1)
        if not len(has_number) or not hits.shape[1]:
            return np.zeros(len(has_number), np.int64), has_number
        return np.take_along_axis(self.number, hits.argmax(axis=1)[:, None], axis=1)[
            :, 0
        ], has_number

    def without(self, column_ids: Collection[int]) -> "Pairs":
        """The pairs of other columns."""
        return self._using(self.used & ~np.isin(self.ids, list(column_ids)))

    def sorted(self) -> "Pairs":
        """Each row's pairs as format v2 has them: values by column id,
        then NULLs by column id, then nothing.

        Raises:
            CorruptError: a row has a column twice, or one that cannot be.
        """
        self._check_ids()
        ranks = (
            self.ids + (self.null.astype(np.int64) << 40) + ((~self.used).astype(np.int64) << 41)
        )
        if bool(np.all(ranks[:, 1:] >= ranks[:, :-1])):
            return self
        order = np.argsort(ranks, axis=1, kind="stable")
        return self._each(lambda matrix: np.take_along_axis(matrix, order, axis=1))

    def _led_by(self, column_id: int, values: Datums) -> "Pairs":
        """With one more place before the others, where they do not have the column."""
        ids = Datums.of_number(column_id, len(self.column))
        used = ~(self.used & (self.ids == column_id)).any(axis=1)
        first = _matrices(len(self.column), [(used, ids, values)])
        own = (getattr(self, name) for name in _MATRICES)
        return Pairs(self.column, *(np.hstack(both) for both in zip(first, own, strict=True)))

    def _check_ids(self) -> None:
        if bool(np.any(((self.ids <= 0) | (self.ids > COLUMN_ID_MAX)) & self.used)):
            raise CorruptError("a row has a column id that no column has")
        if bool(np.all((self.ids[:, 1:] > self.ids[:, :-1]) | ~self.used[:, 1:])):
            return
        ids = np.sort(np.where(self.used, self.ids, _NO_ID + np.arange(self.ids.shape[1])), axis=1)
        if bool(np.any(ids[:, 1:] == ids[:, :-1])):
            raise CorruptError("a row has a column twice")

    def _using(self, used: Mask) -> "Pairs":
        """Only those pairs; places that no row uses are left out."""
        kept = used.any(axis=0)
        pairs = self if bool(kept.all()) else self._each(lambda matrix: matrix[:, kept])
        return replace(pairs, used=used[:, kept])

    def _each(self, change: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]) -> "Pairs":
        return Pairs(self.column, *(change(getattr(self, name)) for name in _MATRICES))


def _matrices(rows: int, places: list[tuple[Mask, Datums, Datums]]) -> list[npt.NDArray[Any]]:
    """`_MATRICES`, with a column for each place."""
    parts = [
        (
            used,
            ids.number,
            datums.is_null,
            datums.number,
            datums.is_number,
            datums.is_signed,
            datums.begin,
            datums.size,
        )
        for used, ids, datums in places
    ]
    kinds = (np.bool_, np.int64, np.bool_, np.int64, np.bool_, np.bool_, np.int64, np.int64)
    if not parts:
        return [np.zeros((rows, 0), kind) for kind in kinds]
    return [np.stack(column, axis=1) for column in zip(*parts, strict=True)]


def encode_rows(pairs: Pairs, leave_out: Collection[int] = ()) -> pa.Array:
    """Rows of format v2 with the columns of `pairs` but those of `leave_out`, in the same order.

    Raises:
        CorruptError: a row has a column twice.
    """
    ordered = (pairs.without(leave_out) if leave_out else pairs).sorted()
    valued = ordered.used & ~ordered.null
    cells = _Cells(ordered, valued)
    large = (cells.ends[:, -1:] > SMALL_BYTES_MAX).any(axis=1) | (
        (ordered.ids > SMALL_ID_MAX) & ordered.used
    ).any(axis=1)
    parts, rows = [], []
    for is_large in (False, True):
        at = np.flatnonzero(large == is_large)
        for run in _runs(at, cells.size[at].sum(axis=1)):
            parts.append(_encode(ordered, valued, cells, run, is_large=is_large))
            rows.append(run)
    if len(parts) == 1:
        return parts[0]
    order = np.argsort(np.concatenate(rows)) if rows else np.zeros(0, np.int64)
    return pa.concat_arrays(parts or [pa.array([], pa.binary())]).take(pa.array(order))


class _Cells:
    """Where each cell lies in `source`: the rows' own bytes,
    followed by eight bytes for each number.
    """

    def __init__(self, pairs: Pairs, valued: Mask) -> None:
        numbers = np.ascontiguousarray(pairs.number).view(np.uint8).reshape(-1)
        self.source = np.concatenate([pairs.column.data, numbers])
        places = np.arange(pairs.number.size, dtype=np.int64).reshape(pairs.number.shape)
        self.begin: Offsets = np.where(
            pairs.is_number, len(pairs.column.data) + places * _NUMBER_BYTES, pairs.begin
        )
        size = np.where(pairs.is_number, _widths(pairs.number, pairs.is_signed), pairs.size)
        self.size: Offsets = np.where(valued, size, 0)
        self.ends: Offsets = np.cumsum(self.size, axis=1)


def _encode(
    pairs: Pairs, valued: Mask, cells: _Cells, rows: Offsets, *, is_large: bool
) -> pa.Array:
    """The rows of those numbers, all large or all small."""
    id_type, end_type = ("<u4", "<u4") if is_large else ("u1", "<u2")
    counts, not_null = pairs.used[rows].sum(axis=1), valued[rows].sum(axis=1)
    head = np.empty(len(rows), _HEAD)
    head["version"], head["flags"] = VERSION, LARGE if is_large else 0
    head["not_null"], head["null"] = not_null, counts - not_null
    tables = (head, pairs.ids[rows].astype(id_type), cells.ends[rows].astype(end_type))
    begin, size, sources, base = [], [], [cells.source], len(cells.source)
    used = (
        np.full(len(rows), HEAD_BYTES),
        counts * tables[1].itemsize,
        not_null * tables[2].itemsize,
    )
    for table, length in zip(tables, used, strict=True):
        flat = np.ascontiguousarray(table).view(np.uint8).reshape(-1)
        begin.append(base + np.arange(len(rows), dtype=np.int64) * (len(flat) // max(len(rows), 1)))
        size.append(length)
        sources.append(flat)
        base += len(flat)
    return _gathered(
        np.concatenate(sources),
        np.column_stack([*begin, cells.begin[rows]]),
        np.column_stack([*size, cells.size[rows]]),
    )


def _gathered(source: npt.NDArray[np.uint8], begin: Offsets, size: Offsets) -> pa.Array:
    """One binary value for each line of slices."""
    sizes = size.reshape(-1)
    ends = np.cumsum(sizes)
    at = np.repeat(begin.reshape(-1) - (ends - sizes), sizes)
    at += np.arange(len(at))
    bounds = np.zeros(len(size) + 1, np.int32)
    bounds[1:] = np.cumsum(size.sum(axis=1))
    buffers = [None, pa.py_buffer(bounds), pa.py_buffer(source[at])]
    return pa.Array.from_buffers(pa.binary(), len(size), buffers)


def _runs(rows: Offsets, sizes: npt.NDArray[Any]) -> list[Offsets]:
    """`rows` cut into runs of about GATHER_BYTES."""
    if not len(rows):
        return []
    number = (np.cumsum(sizes) - sizes) // GATHER_BYTES
    return np.split(rows, np.flatnonzero(np.diff(number)) + 1)


def _widths(numbers: npt.NDArray[np.int64], is_signed: Mask) -> npt.NDArray[np.int64]:
    """The fewest of 1, 2, 4, 8 bytes that hold each number."""
    magnitude = np.where(is_signed, (numbers ^ (numbers >> 63)) << 1, numbers).view(np.uint64)
    limits = np.array([0xFF, 0xFFFF, 0xFFFFFFFF], np.uint64)
    return np.array([1, 2, 4, 8])[np.searchsorted(limits, magnitude, "left")]


def binary_column(rows: list[bytes]) -> BinaryColumn:
    """Rows as they come from messages."""
    return BinaryColumn(pa.array(rows, pa.binary()))
