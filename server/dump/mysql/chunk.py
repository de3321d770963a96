"""The SELECT of a chunk: the next rows of a table in the order of its key,
in the server's own collation.

Keys are compared by the server only: a cursor is the server's own bytes, bound again as they came.
Text is bound as bytes and read in the column's character set and collation: no conversion, no
client's order comes in between. A session that runs it has `time_zone = '+00:00'` and
`character_set_results = NULL`. Pure.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from server.dump.progress import Cell, Cursor, Range
from storage.model.errors import InvalidError
from storage.mysql.binary_row import NUMBER_BYTES, BinaryShape
from storage.mysql.buffer import Bytes
from storage.mysql.charset import BINARY
from storage.mysql.schema import INTEGERS, Column, Table, Type

UNSIGNED: Final = 0x8000
_LONGLONG, _BLOB = 8, 252
_BOUND_AS: Final = {
    Type.YEAR: 2,
    Type.INT24: 3,
    Type.ENUM: _LONGLONG | UNSIGNED,
    Type.SET: _LONGLONG | UNSIGNED,
    Type.DATETIME2: Type.DATETIME,
    Type.TIMESTAMP2: Type.TIMESTAMP,
    Type.TIME2: Type.TIME,
    Type.VARCHAR: _BLOB,
    Type.STRING: _BLOB,
    Type.BIT: _LONGLONG | UNSIGNED,
}
_NULL: Final = 6
_COMES_AS: Final = {
    **{kind: int(kind) for kind in (Type.TINY, Type.SHORT, Type.LONG, Type.LONGLONG)},
    **{kind: int(kind) for kind in (Type.FLOAT, Type.DOUBLE, Type.INT24, Type.YEAR)},
    **{kind: int(kind) for kind in (Type.NEWDECIMAL, Type.BIT, Type.DATE)},
    Type.NEWDATE: Type.DATE,
    Type.ENUM: _LONGLONG,
    Type.SET: _LONGLONG,
    **dict.fromkeys((Type.DATETIME, Type.DATETIME2), int(Type.DATETIME)),
    **dict.fromkeys((Type.TIMESTAMP, Type.TIMESTAMP2), int(Type.TIMESTAMP)),
    **dict.fromkeys((Type.TIME, Type.TIME2), int(Type.TIME)),
}
"""The protocol's type of a column's values in a result (of the SQL of `selected`), by the column's
type; all others are some kind of bytes.
"""
# The first chunk is small: rows of 16 MiB exist, and how large a table's are is known only when
# some are read.
_ROWS_FIRST, _ROWS_MAX = 64, 65_536
_TARGET_S = 0.25
TARGET_BYTES = 512 << 10
_SHOWN_AS_TEXT: Final = frozenset({4, 16})
"""The sizes of MariaDB's INET4, and of UUID and INET6: the log has them as BINARY, a SELECT gives
them as text.
"""


class TableDiffersError(InvalidError):
    """The server's table differs from the table of the log so far; the chunk is read again when the
    log is further.
    """

    code = "ErrDumpTableDiffers"


@dataclass(frozen=True)
class ChunkQuery:
    """The statements that read one table; `collations` are the names of its key columns'
    collations.
    """

    schema: str
    table: Table
    collations: Mapping[str, str]
    where: str = ""
    left_out: frozenset[str] = frozenset()
    """Columns that the changefeed does not take: they are read as NULL,
    so rows keep their shape.
    """
    by_bytes: frozenset[str] = frozenset()
    """Key columns that are compared and ordered by their bytes, as the server compares their values
    in another order than its index has. That is slow, because no index orders bytes.
    """

    def sql(self, *, after: bool, until: bool) -> str:
        """The SELECT of a chunk. `after`: it begins behind a cursor; `until`: it ends at a last
        key. The limit is its last parameter.
        """
        columns = [
            "NULL" if each.name in self.left_out else selected(each) for each in self.table.columns
        ]
        key = ", ".join(name for name, _ in self._key)
        return (
            f"SELECT {', '.join(columns)} {self.of(after=after, until=until)} ORDER BY {key} "
            "LIMIT ?"
        )

    def of(self, *, after: bool, until: bool) -> str:
        """The rest of any query over a range: FROM, and WHERE if there is a condition."""
        conditions = [f"({self.where})"] if self.where else []
        conditions += [_beyond(self._key, ">", ">")] if after else []
        conditions += [_beyond(self._key, "<", "<=")] if until else []
        table = f"FROM {quote_identifier(self.schema)}.{quote_identifier(self.table.name)}"
        return " ".join([table, "WHERE", " AND ".join(conditions)]) if conditions else table

    def check(self, kinds: Sequence[int]) -> None:
        """Compare the types of a result's columns with those of the table.

        Raises:
            TableDiffersError: a column has another type, so rows cannot be decoded as this table's.
        """
        for column, kind in zip(self.table.columns, kinds, strict=True):
            comes_as = kind if kind in _COMES_AS.values() else _BLOB
            if kind != _NULL and comes_as != _COMES_AS.get(column.type, _BLOB):
                raise self.differs(column.name)

    def differs(self, column: str) -> TableDiffersError:
        """The error for a column whose type on the server is another one than in the log."""
        return TableDiffersError(
            f"column {column} of {self.schema}.{self.table.name} is another one on the server than "
            "the log has told so far"
        )

    def bounds(self, part: Range) -> list[Cell]:
        """The cells to bind for `of`."""
        return [
            cell
            for cursor in (part.after, part.until)
            if cursor is not None
            for cell in _repeated(cursor)
        ]

    @property
    def _key(self) -> list[tuple[str, str]]:
        return [self._side(place) for place in self.table.key_places]

    def parameters(self, part: Range, limit: int) -> list[Cell]:
        """The values to bind, for the rows of a range."""
        return [*self.bounds(part), integer(limit)]

    def cursor(self, row: bytes) -> Cursor:
        """The key of a row, which is behind its format byte."""
        data, columns = Bytes.padded(row), self.table.columns
        cells = BinaryShape.of(columns).find(data, np.ones(1, np.int64), set(self.table.key_places))
        values = []
        for place in self.table.key_places:
            content = row[int(cells[place].begin[0]) : int(cells[place].end[0])]
            values.append(_cell(columns[place], content))
        return tuple(values)

    def _side(self, place: int) -> tuple[str, str]:
        """A key column, and what a value of it is compared as."""
        column = self.table.columns[place]
        name = quote_identifier(column.name)
        if column.is_text:
            collation = self.collations[column.name]
            return name, f"CONVERT(? USING {column.charset}) COLLATE {collation}"
        return stored(column) if column.name in self.by_bytes else name, "?"


@dataclass(slots=True)
class ChunkSize:
    """Decides how many rows to request: as many as take about `_TARGET_S` and `TARGET_BYTES`; it
    changes by a factor of two.
    """

    rows: int = _ROWS_FIRST

    def took(self, rows: int, size_bytes: int, seconds: float) -> None:
        """Adapt the size, by the cost of the last chunk."""
        if rows == 0:
            return
        # A slow server does not get faster by smaller chunks, so time alone never reduces a chunk
        # below the first size.
        in_time = max(rows * _TARGET_S / max(seconds, 1e-4), _ROWS_FIRST)
        target_rows = min(in_time, rows * TARGET_BYTES / max(size_bytes, 1))
        self.rows = int(min(max(target_rows, self.rows / 2, 1), self.rows * 2, _ROWS_MAX))

    def halve(self) -> None:
        """Halve the size after a lost chunk: its window had too many changes, or a read failed."""
        self.rows = max(self.rows // 2, 1)


def split_ranges(column: Column, least: int, most: int, parts: int) -> tuple[Range, ...]:
    """The key space of a table with one integer key,
    in equal steps between its least and greatest key.
    """
    assert column.type in INTEGERS, "only integers have equal steps"
    steps = sorted({least + (most - least) * part // parts for part in range(1, parts)})
    cursors = [None, *((integer(step, unsigned=column.unsigned),) for step in steps), None]
    return tuple(Range(after, until) for after, until in itertools.pairwise(cursors))


def integer(number: int, *, unsigned: bool = False) -> Cell:
    """A number to bind."""
    data = number.to_bytes(8, "little", signed=not unsigned)
    return Cell(_LONGLONG | (UNSIGNED if unsigned else 0), data)


def quote_identifier(name: str) -> str:
    """A name as an identifier."""
    return "`" + name.replace("`", "``") + "`"


def last_row(rows: pa.Array) -> bytes:
    """The last one."""
    row: bytes = rows[len(rows) - 1].as_py()
    return row


def _beyond(key: Sequence[tuple[str, str]], strict: str, last: str) -> str:
    """The condition for keys on one side of a cursor; `last` is `strict`, or also allows the
    cursor's own key. The server can use an index for the first key column.
    """
    # Not `(a, b) > (?, ?)`: MySQL's optimizer reads a row comparison without the index's range. The
    # first column alone, with `>=`, gives it one.
    (name, value), rest = key[0], key[1:]
    if not rest:
        return f"{name} {last} {value}"
    behind = f"{name} {strict} {value} OR ({name} = {value} AND {_beyond(rest, strict, last)})"
    return f"({name} {strict}= {value} AND ({behind}))"


def _repeated(cursor: Cursor) -> list[Cell]:
    """The cells as `_beyond` asks for them: three times each but for the last one."""
    return [cell for cell in cursor[:-1] for _ in range(3)] + [cursor[-1]]


def selected(column: Column) -> str:
    """Return the SQL that selects a column (docs/format/mysql-rows.md): ENUM and SET as numbers,
    and values that the log has as bytes as bytes.
    """
    return (
        f"{quote_identifier(column.name)} | 0"
        if column.type in {Type.ENUM, Type.SET}
        else stored(column)
    )


def stored(column: Column) -> str:
    """A column's stored bytes, where its name may give text: UUID,
    INET6 and INET4 look like BINARY in a log.
    """
    name = quote_identifier(column.name)
    may_be_text = (
        column.type is Type.STRING and column.charset == BINARY and column.meta in _SHOWN_AS_TEXT
    )
    return f"CAST({name} AS BINARY({column.meta}))" if may_be_text else name


def _cell(column: Column, content: bytes) -> Cell:
    kind = int(_BOUND_AS.get(column.type, column.type))
    if column.type in INTEGERS:
        return Cell(kind | (UNSIGNED if column.unsigned else 0), content)
    if column.type is Type.BIT:
        return integer(int.from_bytes(content, "big"), unsigned=True)
    return Cell(kind, content if column.type in NUMBER_BYTES else _sized(content))


def _sized(content: bytes) -> bytes:
    size = len(content)
    if size < 0xFB:
        return bytes((size,)) + content
    return (
        b"\xfc" + size.to_bytes(2, "little")
        if size < 1 << 16
        else b"\xfd" + size.to_bytes(3, "little")
    ) + content
