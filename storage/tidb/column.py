"""Columns of a table: TiDB's model.ColumnInfo, read from JSON and written as such.

A default that is a BIT's has its bytes in a member of its own, in base64.
"""

import base64
from dataclasses import dataclass
from typing import Any

from storage.tidb.document import PUBLIC, ColumnDocument
from storage.tidb.mysql import INTEGERS, NO_FLAGS, TEXTS, Flag, Type

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
    as_text: bool = False
    """Whether a DATE, DATETIME or TIMESTAMP is delivered as text, so that dates which no calendar has stay values."""

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


def column_of(document: ColumnDocument) -> Column:
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
