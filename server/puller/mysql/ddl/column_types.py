"""The columns of TABLE_MAP events that declared types give, made of a statement's tree.

Pure.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from server.puller.mysql.ddl.tree import ColumnDef, TypeSpec
from storage.mysql.charset import charset_of
from storage.mysql.schema import Column, Type

BINARY: Final = 63
_UTF8MB4_BIN: Final = 46
_CHARACTER_BYTES: Final = {
    "utf8mb4": 4, "utf8mb3": 3, "utf16": 4, "utf16le": 4, "utf32": 4, "gb18030": 4, "ujis": 3, "eucjpms": 3,
    "ucs2": 2, "gbk": 2, "big5": 2, "sjis": 2, "cp932": 2, "euckr": 2, "gb2312": 2,
}  # fmt: skip
PLAIN: Final = {
    "tinyint": Type.TINY,
    "smallint": Type.SHORT,
    "mediumint": Type.INT24,
    "int": Type.LONG,
    "bigint": Type.LONGLONG,
    "year": Type.YEAR,
    "date": Type.DATE,
}
TIMES: Final = {"time": Type.TIME2, "datetime": Type.DATETIME2, "timestamp": Type.TIMESTAMP2}
_BLOBS: Final = {"tinyblob": 1, "blob": 2, "mediumblob": 3, "longblob": 4}
_TEXTS: Final = {"tinytext": 1, "text": 2, "mediumtext": 3, "longtext": 4}
_FIXED: Final = {"float": (Type.FLOAT, 4), "double": (Type.DOUBLE, 8), "inet4": (Type.STRING, 4)}
_FIXED_MORE: Final = {"uuid": (Type.STRING, 16), "inet6": (Type.STRING, 16)}
_GEOMETRIES: Final = frozenset(
    re.findall(
        r"\w+",
        """
        geometry point linestring polygon multipoint multilinestring multipolygon geometrycollection
        geomcollection
        """,
    )
)
_SET_BYTES: Final = (1, 1, 2, 3, 4, 8, 8, 8, 8)
_VARCHAR_BYTES_MAX: Final = 65535
_COMPRESSED: Final = {Type.VARCHAR: Type.VARCHAR_COMPRESSED, Type.BLOB: Type.BLOB_COMPRESSED}


class LostError(Exception):
    """What a statement makes of a table is not known from the statement;
    the message says what of it.
    """


def character_bytes(collation: int) -> int:
    """The most bytes of a character."""
    return _CHARACTER_BYTES.get(charset_of(collation) or "", 1)


@dataclass(frozen=True, slots=True)
class Collations:
    """A server's collations by name, and those that its character sets have by default as it was
    built, whatever its settings say.
    """

    by_name: Mapping[str, int] = field(default_factory=dict)
    defaults: Mapping[str, int] = field(default_factory=dict)

    def of_session(self, defaults: Mapping[str, int]) -> "Collations":
        """The same in a session that has `defaults` of its own for some character sets."""
        return replace(self, defaults={**self.defaults, **defaults}) if defaults else self

    def of(self, charset: str, collation: str, usual: int, *, binary: bool = False) -> int:
        """The collation that a column or table declares; `usual` where it declares none.

        Raises:
            LostError: the server has no such one.
        """
        if charset == "binary" or collation == "binary":
            return BINARY
        if collation:
            return self._named(collation, charset or charset_of(usual) or "")
        number = self._default(charset) if charset else usual
        if not number:
            raise LostError("the default collation is not known")
        return (
            self._named(f"{charset_of(number)}_bin", "") if binary and number != BINARY else number
        )

    def _default(self, charset: str) -> int:
        charset = "utf8mb3" if charset == "utf8" else charset
        number = self.defaults.get(
            charset, self.defaults.get("utf8" if charset == "utf8mb3" else charset)
        )
        if number is None:
            raise LostError(f"the character set {charset} is not known")
        return number

    def _named(self, collation: str, charset: str) -> int:
        for name in (collation, f"{charset}_{collation}", _renamed(collation)):
            if name in self.by_name:
                return self.by_name[name]
        raise LostError(f"the collation {collation} is not known")


def _renamed(collation: str) -> str:
    """The other name of a utf8mb3 collation."""
    if collation.startswith("utf8_"):
        return "utf8mb3_" + collation.removeprefix("utf8_")
    return "utf8_" + collation.removeprefix("utf8mb3_")


def column_of_definition(
    definition: ColumnDef, usual: int, collations: Collations, *, mariadb: bool
) -> Column:
    """The column, without an id; `usual` is the table's own collation, 0 if that is not known.

    Raises:
        LostError: the type is not known here.
    """
    spec = definition.type
    kind, meta, collation = _type_of(spec, usual, collations, mariadb=mariadb)
    if spec.compressed:
        kind = _COMPRESSED.get(kind, kind)
    return Column(
        name=definition.name,
        type=kind,
        meta=meta,
        unsigned=spec.unsigned and kind not in (Type.YEAR, Type.BIT),
        nullable=definition.nullable is not False,
        collation=collation,
        elems=spec.elems,
        generated=definition.generated,
        auto_increment=definition.auto_increment,
    )


def _type_of(
    spec: TypeSpec, usual: int, collations: Collations, *, mariadb: bool
) -> tuple[Type, int, int]:
    base = spec.base
    if base in PLAIN:
        return PLAIN[base], 0, BINARY
    if base in TIMES:
        return TIMES[base], spec.length or 0, BINARY
    if base == "decimal":
        return Type.NEWDECIMAL, (spec.length or 10) << 8 | (spec.scale or 0), BINARY
    if base == "bit":
        return Type.BIT, spec.length or 1, BINARY
    if base in _GEOMETRIES:
        return Type.GEOMETRY, 4, BINARY
    is_blob = base in _BLOBS
    if is_blob or base in ("binary", "varbinary"):
        if spec.collation not in ("", "binary"):
            raise LostError("bytes that have a collation are texts")
        kind, meta = (Type.BLOB, _blob(_BLOBS[base], spec, 1)) if is_blob else _bytes(spec)
        return kind, meta, BINARY
    if base == "json":
        return (Type.BLOB, 4, _UTF8MB4_BIN) if mariadb else (Type.JSON, 4, BINARY)
    if base == "vector":
        raise LostError("what a VECTOR is in the log depends on the server")
    fixed = _FIXED.get(base) or _FIXED_MORE.get(base)
    if fixed is not None:
        return *fixed, BINARY
    collation = collations.of(spec.charset, spec.collation, usual, binary=spec.bin)
    return *_text(spec, character_bytes(collation)), collation


def _bytes(spec: TypeSpec) -> tuple[Type, int]:
    return (
        (Type.STRING, 1 if spec.length is None else spec.length)
        if spec.base == "binary"
        else varying(spec.length or 0)
    )


def _text(spec: TypeSpec, width: int) -> tuple[Type, int]:
    if spec.base == "enum":
        return Type.ENUM, 1 if len(spec.elems) < 256 else 2
    if spec.base == "set":
        return Type.SET, _SET_BYTES[(len(spec.elems) + 7) // 8]
    if spec.base == "char":
        return Type.STRING, width * (1 if spec.length is None else spec.length)
    if spec.base == "varchar":
        return varying(width * (spec.length or 0))
    return Type.BLOB, _blob(_TEXTS[spec.base], spec, width)


def varying(size: int) -> tuple[Type, int]:
    """The type of a VARCHAR of so many bytes, and its meta; one that is too long becomes a TEXT
    where the session is not strict.
    """
    return (Type.VARCHAR, size) if size <= _VARCHAR_BYTES_MAX else (Type.BLOB, _length_bytes(size))


def _blob(declared: int, spec: TypeSpec, width: int) -> int:
    """How many bytes hold the length: TEXT(n) and BLOB(n) are the least type that n fits into."""
    return (
        _length_bytes(width * spec.length)
        if spec.length and spec.base in ("text", "blob")
        else declared
    )


def _length_bytes(size: int) -> int:
    return next(count for count in (1, 2, 3, 4) if size < 1 << 8 * count or count == 4)
