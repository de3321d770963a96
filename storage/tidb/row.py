"""The value of a record key: a row in format v2, or in v1 if an old TiDB wrote it; and many rows of
format v1 and of binlogs at once.

v2 is `128 flags u16 not_null u16 null, ids, end offsets, cells`. Ids are one byte and offsets two,
or four bytes each in a large row; ids of non-null columns come first, ascending, then those of null
columns. A column in neither list was added later, or is NULL and has no default.

v1 is pairs of datums, column id then value; one nil byte stands for no pairs. It is translated to
v2, so that there is one way to read a row. See docs/format/tidb-rows.md.

`encode_row`, `decode_row` and `as_v2` are for one row. For many, `Pairs` holds what was read as
matrices (row, place), and `encode_rows` writes rows of format v2: a row is a run of slices (header,
column ids, cell ends, cells); all of them are laid into one byte buffer, and gathered. Many rows of
format v2 are read by `storage.tidb.row_layout`.
"""

import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.model.errors import CorruptError
from storage.tidb.binary import BinaryColumn, Mask, Offsets
from storage.tidb.datum import NIL, Datums, decode_datum, decode_datums

VERSION: Final = 128
LARGE: Final = 1
"""Flag: ids and offsets are four bytes wide. Other flags announce a checksum after the cells;
it is not read.
"""
HEAD_BYTES: Final = 6
COLUMN_ID_MAX: Final = 0xFFFFFFFF
SMALL_ID_MAX: Final = 0xFF
SMALL_BYTES_MAX: Final = 0xFFFF
"""Above either of them a row is large."""
GATHER_BYTES: Final = 4 << 20
"""Rows are written in runs of about this size: a gather takes eight times as much memory."""
_HEAD = struct.Struct("<BBHH")
_HEAD_TYPE: Final = np.dtype(
    [("version", "u1"), ("flags", "u1"), ("not_null", "<u2"), ("null", "<u2")]
)
_NUMBER_BYTES: Final = 8
_NO_ID: Final = 1 << 50
_MATRICES: Final = ("used", "ids", "null", "number", "is_number", "is_signed", "begin", "size")
_Numbers = npt.NDArray[np.int64]


def encode_row(cells: Mapping[int, bytes | None]) -> bytes:
    """Encode cells by column id; None is NULL. The form is large only if an id or the size demands
    it.
    """
    present = sorted((column_id, cell) for column_id, cell in cells.items() if cell is not None)
    nulls = sorted(column_id for column_id, cell in cells.items() if cell is None)
    ids = [column_id for column_id, _ in present] + nulls
    ends, size = [], 0
    for _, cell in present:
        size += len(cell)
        ends.append(size)
    large = size > SMALL_BYTES_MAX or max(ids, default=0) > SMALL_ID_MAX
    head = _HEAD.pack(VERSION, LARGE if large else 0, len(present), len(nulls))
    id_form, end_form = ("I", "I") if large else ("B", "H")
    index = struct.pack(f"<{len(ids)}{id_form}", *ids) + struct.pack(
        f"<{len(ends)}{end_form}", *ends
    )
    return b"".join((head, index, *(cell for _, cell in present)))


def decode_row(row: bytes) -> dict[int, bytes | None]:
    """The cells by column id, None for NULL.

    Raises:
        CorruptError: `row` is not a whole row of format v2.
    """
    try:
        version, flags, not_null, null = _HEAD.unpack_from(row)
        id_form, end_form = ("I", "I") if flags & LARGE else ("B", "H")
        ids = struct.unpack_from(f"<{not_null + null}{id_form}", row, HEAD_BYTES)
        ends_at = HEAD_BYTES + len(ids) * struct.calcsize(id_form)
        ends = struct.unpack_from(f"<{not_null}{end_form}", row, ends_at)
    except struct.error as err:
        raise CorruptError(f"row of {len(row)} bytes ends within its header") from err
    data = ends_at + not_null * struct.calcsize(end_form)
    bounds = (0, *ends)
    if version != VERSION or data + bounds[-1] > len(row) or list(bounds) != sorted(bounds):
        raise CorruptError(f"row of {len(row)} bytes is not of format v2: {row[:HEAD_BYTES].hex()}")
    # An id that is listed twice has its first cell: so `RowBlock` reads it, too.
    cells: dict[int, bytes | None] = {}
    for column_id, begin, end in zip(ids, bounds, ends, strict=False):
        cells.setdefault(column_id, row[data + begin : data + end])
    for column_id in ids[not_null:]:
        cells.setdefault(column_id, None)
    return cells


def as_v2(row: bytes) -> bytes:
    """The same row in format v2; a row of that format is returned as it is.

    Raises:
        CorruptError: `row` is of neither format.
    """
    if row[:1] == bytes((VERSION,)):
        return row
    return encode_row(decode_pairs(row) if row != bytes((NIL,)) else {})


def decode_pairs(data: bytes, offset: int = 0) -> dict[int, bytes | None]:
    """Cells by column id; ends at the end of `data`.

    Raises:
        CorruptError: the bytes are not pairs of column id and value, each id once.
    """
    cells: dict[int, bytes | None] = {}
    if offset >= len(data):
        raise CorruptError("a row of format v1 is empty")
    while offset < len(data):
        column, offset = decode_datum(data, offset)
        column_id = int.from_bytes(column or b"", "little", signed=True)
        if column is None or column_id in cells or not 0 < column_id <= COLUMN_ID_MAX:
            raise CorruptError(
                f"a row of format v1 has no column id, or one twice, before offset {offset}"
            )
        cells[column_id], offset = decode_datum(data, offset)
    return cells


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
        """Parse rows, from `begin` (else from their first byte) to their end.

        `leading` are values that the key tells, by column id; they count where the row itself does
        not have the column.

        Raises:
            UncommonDatumError: there is something else than the datums that rows have.
            CorruptError: a row ends within a pair, or a number is too large.
        """
        at = column.begin if begin is None else begin
        if bool(np.any(at >= column.end)):
            raise CorruptError("a row without pairs, and without the byte that says so")
        # One nil byte is a row without pairs.
        at = np.where((at + 1 == column.end) & (column.u8(at) == NIL), column.end, at)
        places: list[tuple[Mask, Datums, Datums]] = []
        while bool((used := at < column.end).any()):
            ids = decode_datums(column, at, used)
            if not bool(np.all(ids.is_number | ~used)):
                raise CorruptError("a row has a value where a column id belongs")
            values = decode_datums(column, ids.end, used & (ids.end < column.end))
            at = np.where(used, values.end, at)
            # All rows lie in one buffer: a datum that is cut off would go on in the next row.
            if bool(np.any(used & ((at > column.end) | (ids.end >= column.end)))):
                raise CorruptError("a row ends within a pair of column id and value")
            places.append((used, ids, values))
        pairs = cls(column, *_matrices(len(column), places))
        for column_id, values in reversed(list((leading or {}).items())):
            pairs = pairs._with_leading(column_id, values)
        return pairs

    def old_and_new(self) -> "tuple[Pairs, Pairs]":
        """The old and the new row of updates, which follow one another: the new one begins where
        the id of the first column is repeated.

        Raises:
            CorruptError: it is not repeated.
        """
        again = self.used[:, 1:] & (self.ids[:, 1:] == self.ids[:, :1])
        if not bool(again.any(axis=1).all()):
            raise CorruptError("an update without its new row")
        cut = again.argmax(axis=1) + 1
        places = np.arange(self.ids.shape[1])
        is_old = places < cut[:, None]
        return self._restricted_to(self.used & is_old), self._restricted_to(self.used & ~is_old)

    def numbers(self, column_id: int) -> tuple[_Numbers, Mask]:
        """The column's integers, and which rows have one."""
        hits = self.used & self.is_number & (self.ids == column_id)
        has_number = hits.any(axis=1)
        if not len(has_number) or not hits.shape[1]:
            return np.zeros(len(has_number), np.int64), has_number
        first_hit = hits.argmax(axis=1)[:, None]
        return np.take_along_axis(self.number, first_hit, axis=1)[:, 0], has_number

    def without(self, column_ids: Collection[int]) -> "Pairs":
        """The pairs of other columns."""
        return self._restricted_to(self.used & ~np.isin(self.ids, list(column_ids)))

    def sorted(self) -> "Pairs":
        """Each row's pairs as format v2 has them: values by column id,
        then NULLs by column id, then nothing.

        Raises:
            CorruptError: a row has a column twice, or one that cannot be.
        """
        self._check_ids()
        # An id has 32 bits, so NULLs (bit 40) sort behind all values, unused places behind both.
        null_rank = self.null.astype(np.int64) << 40
        unused_rank = (~self.used).astype(np.int64) << 41
        ranks = self.ids + null_rank + unused_rank
        if bool(np.all(ranks[:, 1:] >= ranks[:, :-1])):
            return self
        order = np.argsort(ranks, axis=1, kind="stable")
        return self._each(lambda matrix: np.take_along_axis(matrix, order, axis=1))

    def _with_leading(self, column_id: int, values: Datums) -> "Pairs":
        """The same pairs, with a value of the column in front in rows that do not have it."""
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
        # Unused places get ids of their own, so that only real ones can be equal.
        ids = np.sort(np.where(self.used, self.ids, _NO_ID + np.arange(self.ids.shape[1])), axis=1)
        if bool(np.any(ids[:, 1:] == ids[:, :-1])):
            raise CorruptError("a row has a column twice")

    def _restricted_to(self, used: Mask) -> "Pairs":
        """The pairs at the places in `used`; places that no row uses any more are removed."""
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


def binary_column(rows: list[bytes]) -> BinaryColumn:
    """Rows as they come from messages."""
    return BinaryColumn(pa.array(rows, pa.binary()))


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
    """The place of each cell in `source`: the rows' own bytes, followed by eight bytes for each
    number.
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
    head = np.empty(len(rows), _HEAD_TYPE)
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
    # For each byte of the result, where it is in `source`: one gather instead of a copy a slice.
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
