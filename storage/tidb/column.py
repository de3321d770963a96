"""Columns of a table: TiDB's model.ColumnInfo, read from JSON and written as such.

A default that is a BIT's has its bytes in a member of its own, in base64.
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from storage.tidb.mysql import INTEGERS, NO_FLAGS, TEXTS, Flag, Type

PUBLIC = 5  # model.StatePublic
UNSPECIFIED = -1
_BINARY = "binary"


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
    """What rows written before the column was added hold; a BIT's are bytes."""
    default: str | bytes | None = None
    generated: str = ""
    generated_stored: bool = False
    hidden: bool = False
    state: int = PUBLIC

    @classmethod
    def bigint(cls, name: str, flags: Flag = NO_FLAGS) -> "Column":
        """A BIGINT column of a table of our own."""
        return cls(name=name, type=Type.LONGLONG, flags=flags, flen=20, decimal=0)

    @classmethod
    def varchar(cls, name: str, flen: int) -> "Column":
        """A VARCHAR column of `flen` UTF-8 characters."""
        return cls(name=name, type=Type.VARCHAR, flen=flen, decimal=0, charset="utf8mb4", collate="utf8mb4_bin")

    @property
    def unsigned(self) -> bool:
        """Whether the type is UNSIGNED (what is stored: `stores_signed`)."""
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
        """Whether rows hold the column and readers may see it."""
        return self.state == PUBLIC and not self.hidden and (not self.generated or self.generated_stored)


def parse_column(doc: Mapping[str, Any]) -> Column:
    """Read a model.ColumnInfo; raises as its members are missing or of other types."""
    field = doc["type"]
    return Column(
        id=int(doc["id"]),
        name=doc["name"]["O"],
        type=Type(field["Tp"]),
        offset=int(doc["offset"]),
        flags=Flag(field["Flag"]),
        flen=int(field["Flen"]),
        decimal=int(field["Decimal"]),
        charset=field["Charset"],
        collate=field["Collate"],
        elems=tuple(field.get("Elems") or ()),
        origin_default=_default(doc, "origin_default"),
        default=_default(doc, "default"),
        generated=doc.get("generated_expr_string") or "",
        generated_stored=bool(doc.get("generated_stored")),
        hidden=bool(doc.get("hidden")),
        state=int(doc["state"]),
    )


def _default(doc: Mapping[str, Any], member: str) -> str | bytes | None:
    bits = doc.get(f"{member}_bit")
    return base64.b64decode(bits) if bits is not None else doc.get(member)


def name_json(name: str) -> dict[str, str]:
    """A model.CIStr."""
    return {"O": name, "L": name.lower()}


def column_json(column: Column) -> dict[str, Any]:
    """The model.ColumnInfo, in the shape TiDB writes."""
    return {
        "id": column.id,
        "name": name_json(column.name),
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
