"""Verification of a chunk against its table: the server computes sums over the chunk's keys, and we
over the decoded rows.

    digest of a row  = CRC32(texts of its columns, joined by commas) * 2654435761, as u64
    total of a range = COUNT(*), BIT_XOR(digest)

A chunk is read, then its range is summed, both between the two watermarks of
its window. Equal totals: it is right. Else digests are asked for row by row, which gives the keys
that differ, and what the log changed in the window tells which of them may: any other key had one
and the same row all the time (`window.py`). Nothing waits for quiet. Pure.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from server.dump.mysql.chunk import UNSIGNED, ChunkQuery, selected, stored
from server.dump.progress import Cell, Cursor, Range
from storage.model.errors import CorruptError
from storage.mysql.arrow import arrow_columns
from storage.mysql.binary_row import BinaryShape, binary_keys
from storage.mysql.buffer import PAD_BYTES, Bytes
from storage.mysql.charset import UTF8
from storage.mysql.image import key_columns
from storage.mysql.number import DECIMAL_DIGITS_MAX
from storage.mysql.schema import INTEGERS, STRINGS, Column, Table, Type

# CRC-32 is linear: without a factor the exclusive-or of two rows stays the same when they swap
# values of one column.
FACTOR: Final = 2_654_435_761
_DIGEST: Final = Column(name="digest", type=Type.LONGLONG, unsigned=True, nullable=False)
_PAIR: Final = (_DIGEST, _DIGEST)
_CHARSETS: Final = UTF8 | {
    *(
        "latin1",
        "latin2",
        "latin5",
        "latin7",
        "cp850",
        "cp852",
        "cp1250",
        "cp1251",
        "koi8r",
        "macce",
        "macroman",
    ),
    *("gb2312", "gbk", "ucs2", "utf16", "utf16le", "utf32"),
}
"""Character sets whose every character we decode as the server does; for others some differ."""
_LONG_FROM: Final = 3
"""Bytes of the length before a value: MEDIUMTEXT,
LONGTEXT and the like are summed by themselves.
"""
_SRID_BYTES: Final = 4
_FLOAT_BYTES: Final = 8
Text = Callable[[pa.Array], pa.Array]


@dataclass(frozen=True, slots=True)
class Total:
    """The sums of a range's rows."""

    rows: int
    digest: int

    def __str__(self) -> str:
        """The text for messages."""
        return f"{self.rows} rows, {self.digest:016x}"


@dataclass(frozen=True, slots=True)
class Digests:
    """Digests of rows, by their canonical keys."""

    keys: pa.Array
    digests: npt.NDArray[np.uint64]

    @property
    def total(self) -> Total:
        """The sums of all these rows."""
        return Total(
            len(self.keys), int(np.bitwise_xor.reduce(self.digests)) if len(self.digests) else 0
        )

    def differing(self, other: "Digests") -> pa.Array:
        """The keys that not both have, or with another digest."""
        place = pc.index_in(other.keys, value_set=self.keys)
        present = np.asarray(place.is_valid())
        mine = np.zeros(len(other.keys), np.uint64)
        mine[present] = self.digests[np.asarray(place.drop_null())]
        theirs = other.keys.filter(pa.array(~present | (mine != other.digests)))
        return pa.concat_arrays(
            [theirs, self.keys.filter(pc.invert(pc.is_in(self.keys, value_set=other.keys)))]
        )


@dataclass(frozen=True, slots=True)
class ChunkMismatch:
    """The keys of a range whose rows are not the server's; those that changed meanwhile may be."""

    part: Range
    keys: pa.Array
    ours: Total
    theirs: Total


class Check:
    """The comparison of one table's chunks."""

    def __init__(self, query: ChunkQuery) -> None:
        self._query = query
        self._table = query.table
        self._taken = [
            each for each in enumerate(query.table.columns) if each[1].name not in query.left_out
        ]
        candidates = [(place, canonical(column, stored(column))) for place, column in self._taken]
        self._columns: list[tuple[int, Canonical]] = [
            (place, each) for place, each in candidates if each is not None
        ]
        texts = (
            ", ".join(["','", *(each.sql for _, each in self._columns)])
            if self._columns
            else "',', ''"
        )
        self._digest = f"CRC32(CONCAT_WS({texts})) * {FACTOR}"

    @property
    def unchecked(self) -> tuple[str, ...]:
        """The names of columns that cannot be compared,
        as the server and we write them differently.
        """
        places = {place for place, _ in self._columns}
        return tuple(column.name for place, column in self._taken if place not in places)

    def total_sql(self, part: Range) -> str:
        """Asks for the total of a range; `ChunkQuery.bounds` are its parameters."""
        return f"SELECT COUNT(*), BIT_XOR({self._digest}) {self._of(part)}"

    def rows_sql(self, part: Range) -> str:
        """Asks for the keys and digests of a range, as `total_sql`."""
        keys = ", ".join(selected(self._table.columns[place]) for place in self._table.key_places)
        return f"SELECT {keys}, {self._digest} {self._of(part)}"

    def ours(self, keys: pa.Array, rows: pa.Array) -> Digests:
        """The digests of rows behind their format byte, as their readers decode them.

        Raises:
            CorruptError: they are not of this table.
        """
        columns = arrow_columns(self._table, rows)
        texts = [each.text(columns[place]) for place, each in self._columns]
        joined = (
            pc.binary_join_element_wise(*texts, b",")
            if texts
            else pa.array([b""] * len(rows), pa.binary())
        )
        return Digests(keys, crc32s(joined).astype(np.uint64) * np.uint64(FACTOR))

    def total(self, rows: pa.Array) -> Total:
        """The answer to `total_sql`."""
        data, at = _content(rows)
        cells = BinaryShape.of(_PAIR).find(data, at, (0, 1))
        count, digest = (int(data.number(cells[place].begin, 8)[0]) for place in (0, 1))
        return Total(count, digest)

    def theirs(self, rows: pa.Array) -> Digests:
        """The answer to `rows_sql`."""
        if not len(rows):
            return Digests(pa.array([], pa.binary()), np.zeros(0, np.uint64))
        data, at = _content(rows)
        columns = [*(self._table.columns[place] for place in self._table.key_places), _DIGEST]
        answer = Table(self._table.id, self._table.name, tuple(columns), self._table.primary_key)
        keys = binary_keys(data, at, columns, key_columns(answer))
        last = len(columns) - 1
        digests = data.number(BinaryShape.of(columns).find(data, at, (last,))[last].begin, 8)
        return Digests(keys, digests.astype(np.uint64))

    def _of(self, part: Range) -> str:
        return self._query.of(after=part.after is not None, until=part.until is not None)


class DumpChunkDiffersError(CorruptError):
    """A chunk was decoded twice, and both times differs from what the server has."""

    code = "ErrDumpChunkDiffers"

    @classmethod
    def of(cls, table: str, mismatch: ChunkMismatch, keys: pa.Array) -> "DumpChunkDiffersError":
        """The chunk of a mismatch, with the keys that nothing explains."""
        shown = ", ".join(key.hex() for key in keys.slice(0, 3).to_pylist())
        after, until = (shown_cursor(each) for each in (mismatch.part.after, mismatch.part.until))
        return cls(
            f"rows of {table} with keys in ({after}, {until}] are not as the server has them, "
            f"also when read again: read {mismatch.ours}; the server has {mismatch.theirs}; {len(keys)} "
            f"keys differ: {shown}, … (stored bytes). Nothing of it was delivered. If a condition "
            "depends on more than the row, correct it; else report this, and dump the table "
            "without --verify, or leave it out"
        )


class Repairs:
    """Which keys of a table's chunks differed: such a chunk is read again once. Pure."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()

    def again(self, keys: pa.Array) -> bool:
        """A chunk differs at these keys; returns whether reading it again may help:
        not if one of them did before.
        """
        new_keys = set(keys.to_pylist())
        helps = not new_keys & self._keys
        self._keys |= new_keys
        return helps


def _content(rows: pa.Array) -> tuple[Bytes, npt.NDArray[np.int64]]:
    """The bytes of rows behind their format byte, and where each row begins."""
    _, offsets, content = rows.buffers()
    begin = np.frombuffer(offsets, np.int32)[rows.offset : rows.offset + len(rows)].astype(np.int64)
    return Bytes(
        np.concatenate([np.frombuffer(content, np.uint8), np.zeros(PAD_BYTES, np.uint8)])
    ), begin + 1


def shown_cursor(cursor: Cursor | None) -> str:
    """The values of a key as messages show them."""
    return "" if cursor is None else ", ".join(map(_shown_cell, cursor))


def _shown_cell(cell: Cell) -> str:
    kind = cell.type & ~UNSIGNED
    if kind in INTEGERS:
        return str(int.from_bytes(cell.data, "little", signed=kind == cell.type))
    return f"x'{cell.data.hex()}'"


def unexplained(mismatch: ChunkMismatch | None, changed: Sequence[pa.Array]) -> pa.Array | None:
    """The keys of a mismatch that the log did not change in the window; None if there are none."""
    if mismatch is None or not changed:
        return None if mismatch is None else mismatch.keys
    keys = mismatch.keys.filter(
        pc.invert(pc.is_in(mismatch.keys, value_set=pa.concat_arrays(changed)))
    )
    return keys if len(keys) else None


@dataclass(frozen=True, slots=True)
class Canonical:
    """The canonical form of a column: `sql` is never NULL, `text` gives a binary array without
    nulls.
    """

    sql: str
    text: Text


def canonical(column: Column, name: str) -> Canonical | None:
    """Return the canonical form of a column by its quoted name; None: it cannot be compared, as the
    two sides write it differently.
    """
    rule = _of_type(column, name)
    if rule is None:
        return None
    sql, text = rule
    return Canonical(f"IFNULL({sql}, '-')", lambda values: pc.fill_null(text(values), b"-"))


def crc32s(texts: pa.Array) -> np.ndarray:
    """The CRC-32 of each text, 0 for null: zlib, called from C;
    as arithmetic on columns of bytes it takes no less.
    """
    _, offsets, content = texts.buffers()
    if content is None or not len(texts):
        return np.full(len(texts), zlib.crc32(b""), np.uint32)
    bounds = np.frombuffer(offsets, np.int32)[texts.offset : texts.offset + len(texts) + 1].tolist()
    parts = map(memoryview(content).__getitem__, map(slice, bounds[:-1], bounds[1:]))
    return np.fromiter(map(zlib.crc32, parts), np.uint32, len(texts))


def _of_type(column: Column, name: str) -> tuple[str, Text] | None:
    kind = column.type
    if column.as_text:
        return _bytes(_ASCII.format(name), is_long=False)
    if kind in INTEGERS or kind is Type.YEAR:
        return f"{name} + 0", _numbers  # without ZEROFILL
    if kind in _OTHERS:
        return _OTHERS[kind][0].format(name), _OTHERS[kind][1]
    if kind is Type.NEWDECIMAL:
        precision, scale = column.meta >> 8, column.meta & 0xFF
        return f"CAST({name} AS DECIMAL({precision},{scale}))", _decimals(precision, scale)
    if kind in STRINGS and not column.is_text:
        return _bytes(name, is_long=_is_long(column))
    if kind in STRINGS or kind in {Type.ENUM, Type.SET, Type.JSON}:
        return _characters(column, name)
    if kind is Type.GEOMETRY:
        return _bytes(f"SUBSTRING(CAST({name} AS BINARY), {_SRID_BYTES + 1})", is_long=True)
    return None


def _is_long(column: Column) -> bool:
    return column.type is Type.JSON or (column.type is Type.BLOB and column.meta >= _LONG_FROM)


def _bytes(sql: str, *, is_long: bool) -> tuple[str, Text]:
    shown = f"CRC32({sql})" if is_long else sql
    return f"CONCAT(LENGTH({sql}), ':', {shown})", lambda values: _sized(
        values, pc.binary_length, is_long=is_long
    )


def _characters(column: Column, name: str) -> tuple[str, Text] | None:
    if column.type is not Type.JSON and column.charset not in _CHARSETS:
        return None
    is_long = _is_long(column)
    utf8 = f"CAST(CONVERT({name} USING utf8mb4) AS BINARY)"
    shown = f"CRC32({utf8})" if is_long else utf8
    return f"CONCAT(CHAR_LENGTH({name}), ':', {shown})", lambda values: _sized(
        values, pc.utf8_length, is_long=is_long
    )


def _sized(values: pa.Array, length: Callable[[pa.Array], pa.Array], *, is_long: bool) -> pa.Array:
    content = values.cast(pa.binary())
    if is_long:
        content = _numbers(pa.array(crc32s(content), mask=np.asarray(content.is_null())))
    return pc.binary_join_element_wise(_numbers(length(values)), content, b":")


def _numbers(values: pa.Array) -> pa.Array:
    return values.cast(pa.string()).cast(pa.binary())


def _days(values: pa.Array) -> pa.Array:
    return _numbers(values.cast(pa.int32()))


def _micros(values: pa.Array) -> pa.Array:
    return _numbers(values.cast(pa.int64()))


def _texts(values: pa.Array) -> pa.Array:
    return values.cast(pa.binary())


def _bits(values: pa.Array) -> pa.Array:
    """Big-endian bytes, of which all values have as many."""
    present = np.asarray(values.is_valid())
    content = values.drop_null()
    if not len(content):
        return pa.nulls(len(values), pa.binary())
    data = np.frombuffer(b"".join(content.to_pylist()), np.uint8).reshape(len(content), -1)
    wide = np.zeros((len(content), 8), np.uint8)
    wide[:, 8 - data.shape[1] :] = data
    numbers = np.zeros(len(values), np.uint64)
    numbers[present] = wide.view(">u8")[:, 0]
    return _numbers(pa.array(numbers, mask=~present))


def _floats(values: pa.Array) -> pa.Array:
    numbers = np.asarray(values.cast(pa.float64()).fill_null(0.0), "<f8")
    marked = np.hstack(
        [
            np.full((len(numbers), 1), ord("="), np.uint8),
            numbers.view(np.uint8).reshape(-1, _FLOAT_BYTES),
        ]
    )
    ends = pa.py_buffer(np.arange(len(numbers) + 1, dtype=np.int32) * np.int32(_FLOAT_BYTES + 1))
    content = pa.py_buffer(np.ascontiguousarray(marked))
    cells = pa.Array.from_buffers(pa.binary(), len(numbers), [None, ends, content])
    return pc.if_else(values.is_valid(), cells, None)


def _decimals(precision: int, scale: int) -> Text:
    """With all digits behind the point, which Arrow leaves out of some."""

    def text(values: pa.Array) -> pa.Array:
        if precision > DECIMAL_DIGITS_MAX:
            return values.cast(pa.binary())
        if not scale:
            return _numbers(values)
        whole = pa.Array.from_buffers(
            pa.decimal128(DECIMAL_DIGITS_MAX, 0),
            len(values),
            values.buffers(),
            offset=values.offset,
        )
        signed = whole.cast(pa.string())
        digits = pc.utf8_lpad(pc.utf8_ltrim(signed, "-"), scale + 1, "0")
        pointed = pc.utf8_replace_slice(digits, -scale, -scale, ".")
        sign = pc.if_else(pc.starts_with(signed, "-"), "-", "")
        return pc.binary_join_element_wise(sign, pointed, "").cast(pa.binary())

    return text


_ASCII: Final = "CAST(CAST({0} AS CHAR) AS BINARY)"
"""Characters beside a float's bytes would make the row's text one of characters,
with `?` for bytes that are none.
"""
_IS_DAY: Final = "YEAR({0}) > 0 AND DAYOFMONTH({0}) <= DAYOFMONTH(LAST_DAY({0}))"
_SINCE: Final = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {0})"
_OTHERS: Final[dict[Type, tuple[str, Text]]] = {
    Type.BIT: ("{0} + 0", _bits),
    Type.FLOAT: ("CONCAT('=', SUBSTRING(ST_AsBinary(POINT({0}, 0)), 6, 8))", _floats),
    Type.DOUBLE: ("CONCAT('=', SUBSTRING(ST_AsBinary(POINT({0}, 0)), 6, 8))", _floats),
    Type.DATE: (f"IF({_IS_DAY}, DATEDIFF({{0}}, '1970-01-01'), NULL)", _days),
    Type.DATETIME: (f"IF({_IS_DAY}, {_SINCE}, NULL)", _micros),
    Type.DATETIME2: (f"IF({_IS_DAY}, {_SINCE}, NULL)", _micros),
    Type.TIMESTAMP: (_SINCE, _micros),
    Type.TIMESTAMP2: (_SINCE, _micros),
    Type.TIME: (_ASCII, _texts),
    Type.TIME2: (_ASCII, _texts),
}
