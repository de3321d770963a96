"""A table as its row images need it, and the JSON document in which the metadata keeps it: docs/format/mysql-rows.md.

Each TABLE_MAP that differs is a version of its own: rows name their columns by place only.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from storage.model.errors import InvalidError
from storage.mysql.charset import BINARY, charset_of, codec_of
from storage.mysql.errors import ColumnUnsupportedError
from storage.mysql.types import STRINGS, Type

_READ = frozenset(Type) - {Type.NEWDATE, Type.BLOB_COMPRESSED, Type.VARCHAR_COMPRESSED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column, by place; `storage.mysql.types` says what `meta` means for each type."""

    name: str
    type: Type
    meta: int = 0
    unsigned: bool = False
    nullable: bool = True
    collation: int = 63
    """The number of its collation; 63 is `binary`."""
    elems: tuple[str, ...] = ()
    """The names of an ENUM's or SET's members."""
    held: str | int | float | None = field(default=None, compare=False)
    """What rows hold that are older than the column, as JSON (`sink.defaults`); None: null, or not known."""

    @property
    def charset(self) -> str:
        """The character set; `binary` for bytes and for what has no characters."""
        return charset_of(self.collation) or "unknown"

    @property
    def is_text(self) -> bool:
        """Whether the values are characters, not bytes."""
        return self.type in STRINGS and self.charset != BINARY


@dataclass(frozen=True)
class Table:
    """One table in one version; its name is without the schema's."""

    id: int
    name: str
    columns: tuple[Column, ...]
    primary_key: tuple[str, ...]
    """What identifies a row: the columns of the primary key, or of another unique key over NOT NULL columns."""

    @cached_property
    def key_places(self) -> tuple[int, ...]:
        """The places of the key's columns, in the key's order."""
        places = {column.name: place for place, column in enumerate(self.columns)}
        return tuple(places[name] for name in self.primary_key)

    def check(self) -> None:
        """See that each row can be read.

        Raises:
            ColumnUnsupportedError: a column cannot; the message says which and why.
        """
        for column in self.columns:
            if column.type not in _READ:
                raise ColumnUnsupportedError(
                    f"column {column.name} of {self.name} is of type {column.type.name}, which cannot be read from "
                    f"the log; store it without COMPRESSED, or leave the table out"
                )
            if column.is_text and codec_of(column.charset) is None:
                raise ColumnUnsupportedError(
                    f"column {column.name} of {self.name} has the character set {column.charset} (collation "
                    f"{column.collation}), which cannot be read; convert it to utf8mb4, or leave the table out"
                )

    @classmethod
    def parse(cls, doc: Mapping[str, Any]) -> "Table":
        """Read the document `to_doc` makes; unknown members are ignored.

        Raises:
            InvalidError: it is not one.
        """
        try:
            columns = tuple(map(_column, doc["columns"]))
            table = cls(int(doc["id"]), str(doc["name"]), columns, tuple(map(str, doc["primary_key"])))
            _ = table.key_places
        except (AttributeError, KeyError, TypeError, ValueError) as err:
            raise InvalidError(f"not the record of a MySQL table: {err!r}; create the changefeed anew") from err
        return table

    def to_doc(self) -> dict[str, Any]:
        """The document, as `TableRecord.table_info`."""
        return {
            "id": self.id,
            "name": self.name,
            "columns": [_column_doc(column) for column in self.columns],
            "primary_key": list(self.primary_key),
        }

    def to_json(self) -> str:
        """The document as text."""
        return json.dumps(self.to_doc(), separators=(",", ":"), ensure_ascii=False)


def _column(doc: Mapping[str, Any]) -> Column:
    return Column(
        name=str(doc["name"]),
        type=Type[doc["type"]],
        meta=int(doc.get("meta", 0)),
        unsigned=bool(doc.get("unsigned", False)),
        nullable=bool(doc.get("nullable", True)),
        collation=int(doc.get("collation", 63)),
        elems=tuple(doc.get("elems", ())),
        held=doc.get("held"),
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
    if column.elems:
        doc["elems"] = list(column.elems)
    return doc if column.held is None else doc | {"held": column.held}
