"""Column types, columns and tables: what a row image needs to be read, and the JSON document in
which the metadata keeps it (docs/format/mysql-rows.md).

Each TABLE_MAP that differs is a version of its own: rows name their columns by place only.

What a column's `meta` means for each type:

FLOAT, DOUBLE         bytes                    VARCHAR, STRING   the most bytes a value can have
NEWDECIMAL            precision << 8 | digits after the point
BIT                   bits                     ENUM, SET         bytes
TIME2, DATETIME2, TIMESTAMP2                   digits of the second's fraction
BLOB, JSON, GEOMETRY, VECTOR                   bytes of the length before a value

CHAR and BINARY are STRING, TEXT is BLOB; ENUM and SET, which a TABLE_MAP event hides behind STRING,
have their own type here. Source: MySQL's binary_log_types.h and Table_map_log_event, MariaDB's
rpl_utility.
"""

import enum
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

from storage.model.errors import InvalidError
from storage.mysql.charset import BINARY, charset_of, codec_of
from storage.tidb.field_type import ZERO_DATES, dates_as_text


class ColumnUnsupportedError(InvalidError):
    """A column's type, or its character set, is not one we can read."""

    code = "ErrColumnUnsupported"


class Type(enum.IntEnum):
    """A column's type code."""

    TINY = 1
    SHORT = 2
    LONG = 3
    FLOAT = 4
    DOUBLE = 5
    TIMESTAMP = 7
    LONGLONG = 8
    INT24 = 9
    DATE = 10
    TIME = 11
    DATETIME = 12
    YEAR = 13
    NEWDATE = 14
    VARCHAR = 15
    BIT = 16
    TIMESTAMP2 = 17
    DATETIME2 = 18
    TIME2 = 19
    BLOB_COMPRESSED = 140
    VARCHAR_COMPRESSED = 141
    VECTOR = 242
    JSON = 245
    NEWDECIMAL = 246
    ENUM = 247
    SET = 248
    TINY_BLOB = 249
    MEDIUM_BLOB = 250
    LONG_BLOB = 251
    BLOB = 252
    VAR_STRING = 253
    STRING = 254
    GEOMETRY = 255


INTEGERS: Final = frozenset({Type.TINY, Type.SHORT, Type.INT24, Type.LONG, Type.LONGLONG})
NUMERIC: Final = INTEGERS | {Type.NEWDECIMAL, Type.FLOAT, Type.DOUBLE}
STRINGS: Final = frozenset({Type.VARCHAR, Type.STRING, Type.BLOB})
"""The types whose values are characters, or bytes where the character set is `binary`."""
SINCE_5_6: Final = {
    Type.TIMESTAMP: Type.TIMESTAMP2,
    Type.DATETIME: Type.DATETIME2,
    Type.TIME: Type.TIME2,
}
"""The types of times that old servers had, and those that came in their place."""
DATES: Final = frozenset(
    {Type.DATE, Type.DATETIME, Type.DATETIME2, Type.TIMESTAMP, Type.TIMESTAMP2}
)
LENGTH_FIRST: Final = frozenset({Type.BLOB, Type.JSON, Type.GEOMETRY, Type.VECTOR})
INTEGER_BYTES: Final = {Type.TINY: 1, Type.SHORT: 2, Type.INT24: 3, Type.LONG: 4, Type.LONGLONG: 8}
FIXED_BYTES: Final = INTEGER_BYTES | {
    Type.FLOAT: 4,
    Type.DOUBLE: 8,
    Type.TIMESTAMP: 4,
    Type.DATE: 3,
    Type.TIME: 3,
    Type.DATETIME: 8,
    Type.YEAR: 1,
}
_WHOLE_BYTES = {Type.TIMESTAMP2: 4, Type.DATETIME2: 5, Type.TIME2: 3}
_DIGITS_BYTES: Final = (0, 1, 1, 2, 2, 3, 3, 4, 4)
_GROUP_DIGITS = 9
_INT64_MAX = (1 << 63) - 1
_READ = frozenset(Type) - {Type.NEWDATE, Type.BLOB_COMPRESSED, Type.VARCHAR_COMPRESSED}


def fraction_bytes(digits: int) -> int:
    """Return how many bytes hold so many digits of a second's fraction."""
    return (digits + 1) // 2


def decimal_bytes(precision: int, scale: int) -> int:
    """Return the size of a DECIMAL(precision, scale) in bytes."""
    whole = precision - scale
    groups = whole // _GROUP_DIGITS + scale // _GROUP_DIGITS
    return 4 * groups + _DIGITS_BYTES[whole % _GROUP_DIGITS] + _DIGITS_BYTES[scale % _GROUP_DIGITS]


def fixed_bytes(kind: Type, meta: int) -> int | None:
    """Return the size of the type's values in a row image; None: each value has its own length."""
    if kind in FIXED_BYTES:
        return FIXED_BYTES[kind]
    if kind in _WHOLE_BYTES:
        return _WHOLE_BYTES[kind] + fraction_bytes(meta)
    if kind is Type.NEWDECIMAL:
        return decimal_bytes(meta >> 8, meta & 0xFF)
    if kind is Type.BIT:
        return (meta + 7) // 8
    return meta if kind in {Type.ENUM, Type.SET} else None


def length_bytes(kind: Type, meta: int) -> int:
    """Return how many bytes hold the length of a value of a type without fixed size."""
    if kind in LENGTH_FIRST:
        return meta
    return 1 if meta < 256 else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column, by place; `storage.mysql.schema` says what `meta` means for each type."""

    name: str
    type: Type
    meta: int = 0
    unsigned: bool = False
    nullable: bool = True
    collation: int = 63
    """The number of its collation; 63 is `binary`."""
    elems: tuple[str, ...] = ()
    """The names of an ENUM's or SET's members."""
    initial_default: str | int | float | None = field(default=None, compare=False)
    """The value as JSON of rows that are older than the column (`sink.mounter`); None: null, or not
    known.
    """
    id: int = field(default=0, compare=False)
    """Its identity within the table: it stays through renames and changes of type,
    and is never given out again.
    """
    generated: str = field(default="", compare=False)
    """The expression of a generated column."""
    auto_increment: bool = field(default=False, compare=False)
    as_text: bool = field(default=False, compare=False)
    """Whether a DATE, DATETIME or TIMESTAMP is delivered as text, so that dates that no calendar
    has stay values.
    """

    @property
    def charset(self) -> str:
        """The character set; `binary` for bytes and for what has no characters."""
        return charset_of(self.collation) or "unknown"

    @property
    def is_text(self) -> bool:
        """Whether the values are characters, not bytes."""
        return self.type in STRINGS and self.charset != BINARY


@dataclass(frozen=True, slots=True)
class Index:
    """A key of a table: `kind` is primary, unique or plain;
    a part that is an expression has no name.
    """

    name: str
    kind: str
    columns: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """One table in one version; its name is without the schema's."""

    id: int
    name: str
    columns: tuple[Column, ...]
    primary_key: tuple[str, ...]
    """The columns that identify a row: those of the primary key, or of another unique key over NOT
    NULL columns.
    """
    next_column_id: int = 0
    """The id of the next column that is added; 0: one more than the greatest there is."""
    collation: int = 0
    """The collation of text columns that name none; 0: not known."""
    indexes: tuple[Index, ...] | None = None
    """All its keys; None: not known."""

    @property
    def free_column_id(self) -> int:
        """The least id that no column has had."""
        return self.next_column_id or 1 + max((column.id for column in self.columns), default=0)

    @cached_property
    def key_places(self) -> tuple[int, ...]:
        """The places of the key's columns, in the key's order."""
        places = {column.name: place for place, column in enumerate(self.columns)}
        return tuple(places[name] for name in self.primary_key)

    def check(self) -> None:
        """Check that each row can be read.

        Raises:
            ColumnUnsupportedError: a column cannot; the message says which and why.
        """
        for column in self.columns:
            if column.type not in _READ:
                raise ColumnUnsupportedError(
                    f"column {column.name} of {self.name} is of type {column.type.name}, which "
                    "cannot be read from "
                    f"the log; store it without COMPRESSED, or leave the table out"
                )
            if column.is_text and codec_of(column.charset) is None:
                raise ColumnUnsupportedError(
                    f"column {column.name} of {self.name} has the character set {column.charset} "
                    f"(collation {column.collation}), which cannot be read; convert it to "
                    "utf8mb4, or leave the table out"
                )

    @classmethod
    def parse(cls, doc: Mapping[str, Any]) -> "Table":
        """Read the document `to_doc` makes; unknown members are ignored.

        Raises:
            InvalidError: it is not one.
        """
        try:
            key, zero_dates = tuple(map(str, doc["primary_key"])), doc.get(ZERO_DATES)
            columns = tuple(_column(each, place + 1) for place, each in enumerate(doc["columns"]))
            columns = tuple(_shown(column, zero_dates, key) for column in columns)
            indexes = doc.get("indexes")
            table = cls(
                int(doc["id"]),
                str(doc["name"]),
                columns,
                key,
                int(doc.get("next_column_id", 0)),
                int(doc.get("collation", 0)),
                None if indexes is None else tuple(map(_index, indexes)),
            )
            _ = table.key_places
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as err:
            raise InvalidError(
                f"not the record of a MySQL table: {err!r}; create the changefeed anew"
            ) from err
        names = [column.name for column in columns]
        if not 0 < table.id <= _INT64_MAX or len({*names}) < len(names):
            raise InvalidError(
                f"not the record of a MySQL table: the id {table.id}, or a column's name twice"
            )
        return table

    def to_doc(self) -> dict[str, Any]:
        """The document, as `TableRecord.table_info`."""
        doc: dict[str, Any] = {
            "id": self.id,
            "name": self.name,
            "columns": [_column_doc(column) for column in self.columns],
            "primary_key": list(self.primary_key),
        }
        if self.next_column_id:
            doc["next_column_id"] = self.next_column_id
        if self.collation:
            doc["collation"] = self.collation
        if self.indexes is not None:
            doc["indexes"] = [
                {"name": each.name, "kind": each.kind, "columns": list(each.columns)}
                for each in self.indexes
            ]
        return doc

    def to_json(self) -> str:
        """The document as text."""
        return json.dumps(self.to_doc(), separators=(",", ":"), ensure_ascii=False)


def _shown(column: Column, zero_dates: Any, key: Collection[str]) -> Column:
    as_text = column.type in DATES and dates_as_text(zero_dates, in_key=column.name in key)
    return replace(column, as_text=True) if as_text else column


def _index(doc: Mapping[str, Any]) -> Index:
    return Index(str(doc["name"]), str(doc["kind"]), tuple(map(str, doc["columns"])))


def _column(doc: Mapping[str, Any], place: int) -> Column:
    """Columns of records that were written before columns had ids are numbered by their place."""
    return Column(
        name=str(doc["name"]),
        type=Type[doc["type"]],
        meta=int(doc.get("meta", 0)),
        unsigned=bool(doc.get("unsigned", False)),
        nullable=bool(doc.get("nullable", True)),
        collation=int(doc.get("collation", 63)),
        elems=tuple(doc.get("elems", ())),
        initial_default=doc.get("held"),
        id=int(doc.get("id", place)),
        generated=str(doc.get("generated", "")),
        auto_increment=bool(doc.get("auto_increment", False)),
    )


def _column_doc(column: Column) -> dict[str, Any]:
    doc: dict[str, Any] = {
        "name": column.name,
        "type": column.type.name,
        "meta": column.meta,
        "unsigned": column.unsigned,
        "nullable": column.nullable,
        "charset": column.charset,
        "collation": column.collation,
    }
    if column.id:
        doc["id"] = column.id
    if column.elems:
        doc["elems"] = list(column.elems)
    if column.generated:
        doc["generated"] = column.generated
    if column.auto_increment:
        doc["auto_increment"] = True
    return doc if column.initial_default is None else doc | {"held": column.initial_default}
