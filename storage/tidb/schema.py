"""Table schemas: TiDB's model.TableInfo and ColumnInfo, read from JSON into values,
and built for tables of our own.

`storage.tidb.document` checks the JSON as a whole before this module looks at it.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from storage.model.errors import InvalidError
from storage.tidb.document import (
    PUBLIC,
    ColumnDocument,
    IndexDocument,
    TableDocument,
    table_document,
)
from storage.tidb.field_type import DATES, INTEGERS, NO_FLAGS, TEXTS, Flag, Type, dates_as_text

UNSPECIFIED = -1
_BINARY = "binary"
_KEY_FLAGS = Flag.PRIMARY_KEY | Flag.NOT_NULL | Flag.NO_DEFAULT


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column: `model.ColumnInfo` with its `FieldType`."""

    name: str
    type: Type
    id: int = 0
    offset: int = 0
    flags: Flag = NO_FLAGS
    flen: int = UNSPECIFIED
    """Display width in digits, characters or bits."""
    decimal: int = UNSPECIFIED
    """Digits after the point; fractional second digits for times."""
    charset: str = _BINARY
    collate: str = _BINARY
    elems: tuple[str, ...] = ()
    """The names of an ENUM's or SET's members."""
    origin_default: str | bytes | None = None
    """The value of rows written before the column was added; a BIT's are bytes."""
    default: str | bytes | None = None
    generated: str = ""
    generated_stored: bool = False
    hidden: bool = False
    state: int = PUBLIC
    as_text: bool = False
    """Whether a DATE, DATETIME or TIMESTAMP is delivered as text, so that dates that no calendar
    has stay values.
    """

    @classmethod
    def bigint(cls, name: str, flags: Flag = NO_FLAGS) -> "Column":
        """A BIGINT column of a table of our own."""
        return cls(name=name, type=Type.LONGLONG, flags=flags, flen=20, decimal=0)

    @classmethod
    def varchar(cls, name: str, flen: int) -> "Column":
        """A VARCHAR column of `flen` UTF-8 characters."""
        return cls(
            name=name,
            type=Type.VARCHAR,
            flen=flen,
            decimal=0,
            charset="utf8mb4",
            collate="utf8mb4_bin",
        )

    @property
    def unsigned(self) -> bool:
        """Whether the type is UNSIGNED; for the stored form see `stores_signed`."""
        return Flag.UNSIGNED in self.flags

    @property
    def stores_signed(self) -> bool:
        """Whether cells are signed integers."""
        return self.type in {Type.YEAR, Type.TIME} or (self.type in INTEGERS and not self.unsigned)

    @property
    def is_text(self) -> bool:
        """Whether the values are characters, not bytes."""
        return self.type in TEXTS and self.charset != _BINARY

    @property
    def is_stored(self) -> bool:
        """Whether rows have the column and readers may see it."""
        return (
            self.state == PUBLIC
            and not self.hidden
            and (not self.generated or self.generated_stored)
        )


def _column(document: ColumnDocument) -> Column:
    """The column that a checked document describes."""
    field = document.type
    return Column(
        id=document.id,
        name=document.name.text,
        type=Type(field.tp),
        offset=document.offset,
        flags=Flag(field.flag),
        flen=field.flen,
        decimal=field.decimal,
        charset=field.charset,
        collate=field.collate,
        elems=field.elems or (),
        origin_default=_default(document.origin_default, document.origin_default_bit),
        default=_default(document.default, document.default_bit),
        generated=document.generated_expr_string,
        generated_stored=document.generated_stored,
        hidden=document.hidden,
        state=document.state,
    )


def _default(value: Any, bits: bytes | None) -> str | bytes | None:
    if bits is not None:
        return bits
    return None if value is None else str(value)


def _name_json(name: str) -> dict[str, str]:
    """A model.CIStr."""
    return {"O": name, "L": name.lower()}


def _column_json(column: Column) -> dict[str, Any]:
    """The model.ColumnInfo, in the shape TiDB writes."""
    return {
        "id": column.id,
        "name": _name_json(column.name),
        "offset": column.offset,
        **_default_json("origin_default", column.origin_default),
        **_default_json("default", column.default),
        "default_is_expr": False,
        "generated_expr_string": column.generated,
        "generated_stored": column.generated_stored,
        "dependences": None,
        "type": {
            "Tp": int(column.type),
            "Flag": int(column.flags),
            "Flen": column.flen,
            "Decimal": column.decimal,
            "Charset": column.charset,
            "Collate": column.collate,
            "Elems": list(column.elems) or None,
            "ElemsIsBinaryLit": None,
            "Array": False,
        },
        "state": column.state,
        "comment": "",
        "hidden": column.hidden,
        "change_state_info": None,
        "version": 2,
    }


def _default_json(member: str, value: str | bytes | None) -> dict[str, Any]:
    bits = base64.b64encode(value).decode() if isinstance(value, bytes) else None
    return {member: value if isinstance(value, str) else None, f"{member}_bit": bits}


@dataclass(frozen=True, slots=True)
class Index:
    """One index: `model.IndexInfo`."""

    id: int
    name: str
    column_offsets: tuple[int, ...]
    unique: bool
    primary: bool
    public: bool
    whole: bool
    """Whether no column is indexed by a prefix only."""


@dataclass(frozen=True)
class TableInfo:
    """One table's schema: `model.TableInfo`."""

    id: int
    name: str
    columns: tuple[Column, ...]
    indices: tuple[Index, ...] = ()
    pk_is_handle: bool = False
    is_common_handle: bool = False
    partition_ids: tuple[int, ...] = ()
    is_view: bool = False
    """A view, as a sequence, has no rows: its columns are not read."""
    is_sequence: bool = False
    deletes_softly: bool = False
    """Whether a DELETE keeps the row and sets a column to the time of the deletion."""

    @cached_property
    def stored_columns(self) -> tuple[Column, ...]:
        """The columns a row can give, in the table's order."""
        return tuple(column for column in self.columns if column.is_stored)

    @cached_property
    def handle_column(self) -> Column | None:
        """The integer primary key whose value is the handle and not in the row,
        if the table has one.
        """
        keys = (
            column
            for column in self.columns
            if self.pk_is_handle and Flag.PRIMARY_KEY in column.flags
        )
        return next(keys, None)

    @cached_property
    def common_handle_columns(self) -> tuple[Column, ...]:
        """The columns of the clustered primary key, in key order; empty without one."""
        return self._columns_of(self._primary) if self.is_common_handle and self._primary else ()

    @property
    def handle_is_whole(self) -> bool:
        """Whether the clustered primary key has no column that is indexed by a prefix only."""
        return self._primary is not None and self._primary.whole

    @cached_property
    def key_columns(self) -> tuple[Column, ...]:
        """Return the columns that identify a row: the primary key, else the first unique key over
        NOT NULL columns, else none.
        """
        if self.handle_column:
            return (self.handle_column,)
        # In a fixed order: readers and captures must agree on the key, whatever order TiDB lists.
        for index in sorted(self.indices, key=lambda index: (not index.primary, index.id)):
            columns = self._columns_of(index)
            required = all(column.is_stored and Flag.NOT_NULL in column.flags for column in columns)
            if index.public and index.unique and index.whole and required:
                return columns
        return ()

    @property
    def handle_is_key(self) -> bool:
        """Whether rows with other key columns always have another record key.

        Not so for characters, of which a record key holds the collation's sort key: `ABC` and `abc`
        may share one.
        """
        texts = any(column.is_text for column in self.common_handle_columns)
        return self.pk_is_handle or (self.is_common_handle and self.handle_is_whole and not texts)

    def showing_dates(self, zero_dates: Any) -> "TableInfo":
        """The same table, with the columns as text that `zero_dates` says
        (`storage.tidb.field_type.dates_as_text`).
        """
        key = {column.id for column in self.key_columns}
        columns = (
            replace(column, as_text=True)
            if column.type in DATES and dates_as_text(zero_dates, in_key=column.id in key)
            else column
            for column in self.columns
        )
        return replace(self, columns=tuple(columns))

    @property
    def physical_ids(self) -> tuple[int, ...]:
        """The ids under which rows are stored: the partitions' ids, or the table's own."""
        return self.partition_ids or (self.id,)

    def column(self, name: str) -> Column:
        """The column called `name`, whatever its case.

        Raises:
            InvalidError: there is none.
        """
        for column in self.columns:
            if column.name.lower() == name.lower():
                return column
        raise InvalidError(f"table {self.name} has no column {name!r}")

    @cached_property
    def _primary(self) -> Index | None:
        return next((index for index in self.indices if index.primary and index.public), None)

    def _columns_of(self, index: Index) -> tuple[Column, ...]:
        return tuple(self.columns[offset] for offset in index.column_offsets)

    @classmethod
    def parse(cls, source: str | bytes | Mapping[str, Any]) -> "TableInfo":
        """Read model.TableInfo, as JSON text or as its value;
        members that are not needed here are ignored.

        Raises:
            TableInfoError: it is none, or one that no row could be read with; the message names the
                bad member.
        """
        return _table(table_document(source))

    @classmethod
    def build(cls, table_id: int, name: str, columns: Sequence[Column]) -> "TableInfo":
        """A table of our own: columns get ids and offsets in order; the first one, an integer,
        is its primary key.

        Raises:
            InvalidError: the first column cannot be a handle.
        """
        if not columns or columns[0].type not in INTEGERS:
            raise InvalidError(
                f"the first column of {name} must be an integer: it is the primary key"
            )
        numbered = [
            replace(column, id=number + 1, offset=number) for number, column in enumerate(columns)
        ]
        numbered[0] = replace(numbered[0], flags=numbered[0].flags | _KEY_FLAGS)
        return cls(table_id, name, tuple(numbered), pk_is_handle=True)

    def to_json(self) -> str:
        """The model.TableInfo JSON of this table, in the shape TiDB writes and `parse` reads."""
        return json.dumps(_table_json(self), separators=(",", ":"))


def _table(document: TableDocument) -> TableInfo:
    columns = map(_column, document.cols or ()) if document.has_rows else ()
    indices = map(_index, document.index_info or ()) if document.has_rows else ()
    return TableInfo(
        id=document.id,
        name=document.name.text,
        columns=tuple(sorted(columns, key=lambda column: column.offset)),
        indices=tuple(indices),
        pk_is_handle=document.pk_is_handle,
        is_common_handle=document.is_common_handle,
        partition_ids=document.partition_ids,
        is_view=document.view is not None,
        is_sequence=document.sequence is not None,
        deletes_softly=document.softdelete_info is not None,
    )


def _index(document: IndexDocument) -> Index:
    return Index(
        id=document.id,
        name=document.idx_name.text,
        column_offsets=tuple(column.offset for column in document.idx_cols),
        unique=document.is_unique,
        primary=document.is_primary,
        public=document.state == PUBLIC,
        whole=all(column.length == UNSPECIFIED for column in document.idx_cols),
    )


def _table_json(table: TableInfo) -> dict[str, Any]:
    definitions = [
        {"id": number, "name": _name_json(f"p{number}")} for number in table.partition_ids
    ]
    return {
        "id": table.id,
        "name": _name_json(table.name),
        "charset": "utf8mb4",
        "collate": "utf8mb4_bin",
        "cols": [_column_json(column) for column in table.columns],
        "index_info": [_index_json(index, table) for index in table.indices] or None,
        "state": PUBLIC,
        "pk_is_handle": table.pk_is_handle,
        "is_common_handle": table.is_common_handle,
        "common_handle_version": int(table.is_common_handle),
        "max_col_id": max((column.id for column in table.columns), default=0),
        "max_idx_id": max((index.id for index in table.indices), default=0),
        "partition": {"enable": True, "definitions": definitions} if definitions else None,
        "view": {} if table.is_view else None,
        "sequence": {} if table.is_sequence else None,
        "version": 5,
    }


def _index_json(index: Index, table: TableInfo) -> dict[str, Any]:
    columns = [table.columns[offset] for offset in index.column_offsets]
    length = UNSPECIFIED if index.whole else 1
    return {
        "id": index.id,
        "idx_name": _name_json(index.name),
        "tbl_name": _name_json(""),
        "idx_cols": [
            {"name": _name_json(column.name), "offset": column.offset, "length": length}
            for column in columns
        ],
        "state": PUBLIC if index.public else 0,
        "comment": "",
        "index_type": 1,
        "is_unique": index.unique,
        "is_primary": index.primary,
        "is_invisible": False,
    }
