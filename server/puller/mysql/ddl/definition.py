"""A table's definition: its columns as the log will have them, its keys, and what tells its rows
apart. Pure.

A definition comes from the server's catalogue; the types and `meta` are those of TABLE_MAP events,
so that it can be compared with what the log says. A statement of the log changes the keys through
`TableKeys`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from server.puller.mysql.ddl.column_types import BINARY, PLAIN, TIMES, LostError
from server.puller.mysql.ddl.tree import DropKey, Key, RenameKey, TableName
from storage.mysql.schema import Column, Index, Table, Type

_LENGTHS: Final = {
    "tinytext": 1,
    "tinyblob": 1,
    "text": 2,
    "blob": 2,
    "mediumtext": 3,
    "mediumblob": 3,
    "longtext": 4,
    "longblob": 4,
}
_OTHERS: Final = {
    "float": (Type.FLOAT, 4),
    "double": (Type.DOUBLE, 8),
    "inet6": (Type.STRING, 16),
    "uuid": (Type.STRING, 16),
    "inet4": (Type.STRING, 4),
    "json": (Type.JSON, 4),
    "vector": (Type.VECTOR, 4),
}
_GEOMETRIES: Final = frozenset(
    {
        "geometry",
        "point",
        "linestring",
        "polygon",
        "multipoint",
        "multilinestring",
        "multipolygon",
        "geometrycollection",
        "geomcollection",
    }
)
_ELEM = re.compile(r"'((?:[^']|'')*)'")
_ESCAPED: Final = re.compile(r"\\.|''", re.S)
_ESCAPES: Final = {r"\0": "\0", r"\n": "\n", r"\r": "\r"}
_SET_BYTES = (1, 1, 2, 3, 4, 8, 8, 8, 8)
UNTOLD: Final = "?"
"""In the place of a column's expression: whether it has one is not known, as the column came with
rows of the log, which do not say it.
"""
_COMPRESSED = {Type.VARCHAR: Type.VARCHAR_COMPRESSED, Type.BLOB: Type.BLOB_COMPRESSED}


@dataclass(frozen=True, slots=True)
class Definition:
    """A table's columns and keys, from the catalogue, a statement or the log."""

    name: TableName
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    """The primary key, else a unique key over NOT NULL columns, else empty."""
    engine: str = ""
    faults: tuple[str, ...] = ()
    """Columns of types that are not known."""
    indexes: tuple[Index, ...] | None = None
    """All keys of the table; None: not known."""
    collation: int = 0
    """The collation of text columns that name none; 0: not known."""
    next_column_id: int = 0
    """The first column id that is free; 0: the columns have no ids yet."""
    matched_by_names: bool = field(default=False, compare=False)
    """See `TableRecord.matched_by_names`."""

    def table(self, table_id: int) -> Table:
        """The table as records have it, under the id `table_id`."""
        columns = tuple(
            replace(column, id=column.id or place + 1) for place, column in enumerate(self.columns)
        )
        free = self.next_column_id or 1 + max((column.id for column in columns), default=0)
        return Table(table_id, self.name[1], columns, self.key, free, self.collation, self.indexes)

    def identified(self, before: Table | None, free: int) -> "Definition":
        """Its columns with the ids that those of their names had;
        `free` is the first that none has had.
        """
        ids = {column.name.lower(): column for column in before.columns} if before else {}
        columns: list[Column] = []
        for column in self.columns:
            was = ids.get(column.name.lower())
            if was is None:
                columns.append(replace(column, id=free, initial_default=None))
                free += 1
            else:
                initial_default = was.initial_default if was == column else None
                untold = column.generated == UNTOLD
                generated = was.generated if untold else column.generated
                columns.append(
                    replace(column, id=was.id, initial_default=initial_default, generated=generated)
                )
        return replace(self, columns=tuple(columns), next_column_id=free, matched_by_names=True)


def column_of(row: Mapping[str, Any], collations: Mapping[str, int]) -> Column | None:
    """A row of information_schema.COLUMNS by lower-case names; None: the type is not known."""
    kind = str(row["data_type"]).lower()
    declared = str(row["column_type"])
    type_and_meta = _type_of(kind, declared, row)
    if type_and_meta is None or (kind == "uuid" and declared.lower() != "uuid"):
        # `uuid /* old */` of a server before 10.11.5 stores its bytes in another order
        return None
    column_type, meta = type_and_meta
    if "COMPRESSED" in declared.upper() and column_type in _COMPRESSED:
        column_type = _COMPRESSED[column_type]
    return Column(
        name=str(row["column_name"]),
        type=column_type,
        meta=meta,
        unsigned="unsigned" in declared.lower().split(),
        nullable=row["is_nullable"] == "YES",
        collation=collations.get(str(row["collation_name"]), BINARY)
        if row["collation_name"]
        else BINARY,
        elems=_elems(declared) if column_type in (Type.ENUM, Type.SET) else (),
        generated=str(row.get("generation_expression") or ""),
        auto_increment="auto_increment" in str(row.get("extra", "")).lower(),
    )


def _type_of(kind: str, declared: str, row: Mapping[str, Any]) -> tuple[Type, int] | None:
    if kind in PLAIN:
        return PLAIN[kind], 0
    if kind in TIMES:
        return TIMES[kind], int(row["datetime_precision"] or 0)
    if kind == "decimal":
        return Type.NEWDECIMAL, int(row["numeric_precision"]) << 8 | int(row["numeric_scale"] or 0)
    if kind == "bit":
        return Type.BIT, int(row["numeric_precision"])
    if kind in ("char", "binary"):
        return Type.STRING, int(row["character_octet_length"])
    if kind in ("varchar", "varbinary"):
        return Type.VARCHAR, int(row["character_octet_length"])
    if kind in _LENGTHS:
        return Type.BLOB, _LENGTHS[kind]
    if kind in ("enum", "set"):
        return _elems_type(kind, len(_elems(declared)))
    return (Type.GEOMETRY, 4) if kind in _GEOMETRIES else _OTHERS.get(kind)


def _elems_type(kind: str, count: int) -> tuple[Type, int]:
    if kind == "enum":
        return Type.ENUM, 1 if count < 256 else 2
    return Type.SET, _SET_BYTES[(count + 7) // 8]


def _elems(declared: str) -> tuple[str, ...]:
    """The members of an ENUM or SET; a catalogue escapes them whatever the sql_mode is."""
    return tuple(_ESCAPED.sub(_unescaped, elem) for elem in _ELEM.findall(declared))


def _unescaped(escaped: re.Match[str]) -> str:
    return _ESCAPES.get(escaped[0], escaped[0][1])


class TableKeys:
    """The keys of a table while a statement changes them."""

    def __init__(self, indexes: Sequence[Index], names: dict[str, str | None]) -> None:
        """Start with the keys before the statement.

        `names` has the new name of each renamed column, and None for a dropped one.
        """
        self._indexes: list[Index] = []
        for index in indexes:
            columns = [names.get(name.lower(), name) if name else "" for name in index.columns]
            left = tuple(name for name in columns if name is not None)
            if left:
                self._indexes.append(replace(index, columns=left))

    @property
    def all(self) -> tuple[Index, ...]:
        """The keys that the table has now."""
        return tuple(self._indexes)

    def drop_and_rename(self, drops: Sequence[DropKey], renames: Sequence[RenameKey]) -> None:
        """Drop and rename keys, all by the names that they had before the statement;
        foreign keys and checks are ignored.
        """
        gone = {
            "primary" if spec.kind == "primary" else spec.name.lower()
            for spec in drops
            if spec.kind not in ("foreign", "check")
        }
        names = {spec.old.lower(): spec.new for spec in renames}
        self._indexes = [
            replace(index, name=names.get(index.name.lower(), index.name))
            for index in self._indexes
            if index.name.lower() not in gone
        ]

    def add_all(self, keys: Sequence[Key]) -> None:
        """Add the keys that are indexes.

        Raises:
            LostError: two have one name, or one is over a period.
        """
        for key in keys:
            if any(part.is_period for part in key.parts):
                raise LostError(f"which columns the period of key {key.name} has is not known")
            if key.kind in ("primary", "unique", "plain"):
                self._add(key)

    def _add(self, key: Key) -> None:
        columns = tuple(part.column for part in key.parts)
        name = "PRIMARY" if key.kind == "primary" else key.name or self._own_name(columns)
        taken = any(index.name.lower() == name.lower() for index in self._indexes)
        if taken and not key.if_not_exists:
            raise LostError(f"two keys have the name {name}")
        if not taken:
            self._indexes.append(Index(name, key.kind, columns))

    def _own_name(self, columns: Sequence[str]) -> str:
        """The name of its first column, with a number where that is taken."""
        first = columns[0] or "functional_index"
        taken = {index.name.lower() for index in self._indexes}
        number, name = 1, first
        while name.lower() in taken or name.lower() == "primary":
            number += 1
            name = f"{first}_{number}"
        return name


def without_present(
    keys: Sequence[Key], of_columns: Sequence[Key], before: Sequence[Index]
) -> list[Key]:
    """The keys that a statement adds: of those with IF NOT EXISTS the ones that are new.

    MariaDB looks at the names before the statement, also of keys that it drops or renames, and at
    the keys that it adds further ahead; a key without a name counts as its first column.

    Raises:
        LostError: it depends on where the definition of a column (`of_columns`) stands.
    """
    present = {index.name.lower() for index in before}
    unclear = {_asked_name(key) for key in of_columns if key.parts}
    added = []
    for key in keys:
        if key.kind in ("foreign", "check"):
            added.append(key)
            continue
        name = _asked_name(key)
        if key.if_not_exists and name in unclear:
            raise LostError(f"whether key {name} is added depends on a column's own key")
        if not (key.if_not_exists and name in present):
            added.append(key)
            present.add(name)
    return added


def _asked_name(key: Key) -> str:
    return "primary" if key.kind == "primary" else (key.name or key.parts[0].column).lower()


def row_key(columns: Sequence[Column], indexes: Sequence[Index]) -> tuple[str, ...]:
    """The key that tells rows apart: the primary key, else the unique key of the fewest columns,
    none of them nullable.
    """
    by_name = {column.name.lower(): column for column in columns}
    usable = []
    for index in indexes:
        parts = [by_name.get(name.lower()) for name in index.columns]
        if index.kind != "plain" and all(part is not None and not part.nullable for part in parts):
            usable.append(
                (
                    index.kind != "primary",
                    len(parts),
                    index.name,
                    [part.name for part in parts if part],
                )
            )
    return tuple(min(usable)[3]) if usable else ()


def with_names_of(
    indexes: tuple[Index, ...] | None, columns: Sequence[Column]
) -> tuple[Index, ...] | None:
    """Keys with their columns' names as the columns spell them.

    Raises:
        LostError: a key is over a column that is not there.
    """
    if indexes is None:
        return None
    names = {column.name.lower(): column.name for column in columns}
    for index in indexes:
        if any(name and name.lower() not in names for name in index.columns):
            raise LostError(f"key {index.name} is over a column that is not there")
    return tuple(
        replace(index, columns=tuple(names[name.lower()] if name else "" for name in index.columns))
        for index in indexes
    )
