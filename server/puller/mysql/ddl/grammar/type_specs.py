"""The grammar of types: what stands behind a column's name. Pure."""

from dataclasses import replace
from typing import Final

from server.puller.mysql.ddl.tokens import ORACLE, NotUnderstoodError, Sort, TokenReader
from server.puller.mysql.ddl.tree import TypeSpec

_PLAIN: Final = {
    "TINYINT": "tinyint", "INT1": "tinyint", "SMALLINT": "smallint", "INT2": "smallint", "MEDIUMINT": "mediumint",
    "INT3": "mediumint", "MIDDLEINT": "mediumint", "INT": "int", "INTEGER": "int", "INT4": "int", "BIGINT": "bigint",
    "INT8": "bigint", "DECIMAL": "decimal", "DEC": "decimal", "NUMERIC": "decimal", "FIXED": "decimal",
    "NUMBER": "decimal", "FLOAT": "float", "FLOAT4": "float", "FLOAT8": "double", "REAL": "double", "BIT": "bit",
    "DATE": "date", "TIME": "time", "DATETIME": "datetime", "TIMESTAMP": "timestamp", "YEAR": "year",
    "BINARY": "binary", "VARBINARY": "varbinary", "TINYBLOB": "tinyblob", "BLOB": "blob", "MEDIUMBLOB": "mediumblob",
    "LONGBLOB": "longblob", "JSON": "json", "UUID": "uuid", "INET6": "inet6", "INET4": "inet4", "VECTOR": "vector",
    "GEOMETRY": "geometry", "POINT": "point", "LINESTRING": "linestring", "POLYGON": "polygon",
    "MULTIPOINT": "multipoint", "MULTILINESTRING": "multilinestring", "MULTIPOLYGON": "multipolygon",
    "GEOMETRYCOLLECTION": "geometrycollection", "GEOMCOLLECTION": "geomcollection", "RAW": "varbinary",
}  # fmt: skip
_TEXTS: Final = {
    "CHAR": "char", "VARCHAR": "varchar", "VARCHARACTER": "varchar", "VARCHAR2": "varchar", "TINYTEXT": "tinytext",
    "TEXT": "text", "MEDIUMTEXT": "mediumtext", "LONGTEXT": "longtext", "ENUM": "enum", "SET": "set",
    "CHARACTER": "char", "CLOB": "longtext", "NCHAR": "char", "NVARCHAR": "varchar",
}  # fmt: skip
_NUMBERS: Final = frozenset(
    {
        "tinyint",
        "smallint",
        "mediumint",
        "int",
        "bigint",
        "decimal",
        "float",
        "double",
        "year",
        "bit",
    }
)


class TypeReader(TokenReader):
    """Reads types."""

    def type_spec(self) -> TypeSpec:
        """A type, with what belongs to it: length, sign, members, character set.

        Raises:
            NotUnderstoodError: it is another type than is known, or sql_mode ORACLE is on.
        """
        if self.dialect.sql_mode & ORACLE:
            raise NotUnderstoodError("types have other meanings in sql_mode ORACLE")
        word = self._type_word()
        if word == "SERIAL":
            return TypeSpec("serial")
        if word in ("ENUM", "SET"):
            self.expect("(")
            elems = tuple(elem.rstrip(" ") for elem in self.listed(self._elem))
            self.expect(")")
            return self._text_attributes(TypeSpec(word.lower(), elems=elems))
        if word in ("BOOL", "BOOLEAN"):
            return TypeSpec("tinyint", length=1)
        base = _PLAIN.get(word)
        is_text = base is None
        base = _TEXTS.get(word) if base is None else base
        if base is None:
            raise NotUnderstoodError(f"{word} is no type that is known")
        if word == "REAL" and self.dialect.real_as_float:
            base = "float"
        length, scale = self._size()
        return self._finished(base, word, length, scale, is_text=is_text)

    def _type_word(self) -> str:
        token = self.next()
        if token.sort is not Sort.WORD:
            raise NotUnderstoodError(f"{token.text!r} is no type")
        word = token.text.upper()
        if word == "DOUBLE":
            self.skip("PRECISION")
            return "FLOAT8"
        if word in ("NATIONAL", "NCHAR", "NVARCHAR"):
            return self._national(word)
        if word in ("CHAR", "CHARACTER"):
            return self._varying("CHAR", "VARCHAR")
        if word == "BINARY" and self.skip("VARYING"):
            return "VARBINARY"
        if word == "LONG":
            if self.skip("VARBINARY"):
                return "MEDIUMBLOB"
            if not self.skip("VARCHAR") and self.skip_any("CHAR", "CHARACTER"):
                self.expect("VARYING")
            return "MEDIUMTEXT"
        return word

    def _varying(self, plain: str, varying: str) -> str:
        return varying if self.skip("VARYING") else plain

    def _national(self, word: str) -> str:
        if word == "NVARCHAR":
            return "NVARCHAR"
        if word == "NCHAR":
            if self.skip("VARCHAR") or self.skip("VARCHARACTER"):
                return "NVARCHAR"
            return self._varying("NCHAR", "NVARCHAR")
        if self.skip_any("VARCHAR", "VARCHARACTER"):
            return "NVARCHAR"
        if not self.skip_any("CHAR", "CHARACTER"):
            raise NotUnderstoodError("NATIONAL is of CHAR or VARCHAR")
        return self._varying("NCHAR", "NVARCHAR")

    def _elem(self) -> str:
        """A member of an ENUM or SET; in hex it would be bytes of its own character set."""
        token = self.peek()
        if token is not None and token.sort is Sort.WORD and token.text.startswith("_"):
            raise NotUnderstoodError("a member in a character set of its own")
        return self.string()

    def _size(self) -> tuple[int | None, int | None]:
        if not self.skip("("):
            return None, None
        length, scale = self.number(), None
        if self.skip(","):
            scale = self.number()
        self.expect(")")
        return length, scale

    def _finished(
        self, base: str, word: str, length: int | None, scale: int | None, *, is_text: bool
    ) -> TypeSpec:
        if base == "float" and length is not None and scale is None:
            base, length = ("double" if length > 24 else "float"), None
        if base in ("varchar", "varbinary") and length is None:
            raise NotUnderstoodError(f"{base} without a length")
        if is_text:
            spec = TypeSpec(
                base, length, charset="utf8mb3" if word in ("NCHAR", "NVARCHAR") else ""
            )
            return self._text_attributes(spec)
        if base in ("tinyblob", "blob", "mediumblob", "longblob", "varbinary"):
            return TypeSpec(base, length, compressed=self._compressed())
        unsigned = False
        while base in _NUMBERS and (sign := self.skip_any("UNSIGNED", "SIGNED", "ZEROFILL")):
            unsigned |= sign != "SIGNED"
        return TypeSpec(base, length, scale, unsigned=unsigned)

    def _compressed(self) -> bool:
        if not self.skip("COMPRESSED"):
            return False
        if self.skip("="):
            self.name()
        return True

    def _text_attributes(self, spec: TypeSpec) -> TypeSpec:
        charset, collation, binary, compressed = spec.charset, "", False, False
        while True:
            if self.skip("CHARACTER", "SET") or self.skip("CHARSET") or self.skip("CHAR", "SET"):
                charset = self.charset()
            elif self.skip("COLLATE"):
                collation = self.charset()
            elif self.skip("BINARY"):
                binary = True
            elif self.skip("ASCII"):
                charset = "latin1"
            elif self.skip("UNICODE"):
                charset = "ucs2"
            elif self.skip("BYTE"):
                charset = "binary"
            elif self.sees("COMPRESSED"):
                compressed = self._compressed()
            else:
                break
        return replace(
            spec, charset=charset, collation=collation, bin=binary, compressed=compressed
        )
