"""A table's definition in the server's catalogue, as the columns its log will have. Pure.

The types and `meta` are those of TABLE_MAP events, so that a definition can be compared with what
the log says.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from server.puller.mysql.ddl.column_types import BINARY, PLAIN, TIMES
from server.puller.mysql.ddl.tree import TableName
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
_SET_BYTES = (1, 1, 2, 3, 4, 8, 8, 8, 8)
_COMPRESSED = {Type.VARCHAR: Type.VARCHAR_COMPRESSED, Type.BLOB: Type.BLOB_COMPRESSED}


@dataclass(frozen=True, slots=True)
class Definition:
    """One table of the catalogue."""

    name: TableName
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    """The primary key, else a unique key over NOT NULL columns, else empty."""
    engine: str = ""
    faults: tuple[str, ...] = ()
    """Columns of types that are not known."""
    indexes: tuple[Index, ...] | None = None
    """All its keys; None: not known."""
    collation: int = 0
    """That of text columns that name none; 0: not known."""
    next_column_id: int = 0
    """Of columns that have ids; 0: they have none yet."""

    def table(self, table_id: int) -> Table:
        """Its record's content, under an id of ours."""
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
                columns.append(replace(column, id=free, held=None))
                free += 1
            else:
                held = was.held if was == column else None
                generated = column.generated or (was.generated if self.indexes is None else "")
                columns.append(replace(column, id=was.id, held=held, generated=generated))
        return replace(self, columns=tuple(columns), next_column_id=free)


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
    return tuple(elem.replace("''", "'") for elem in _ELEM.findall(declared))
