"""The grammar of columns: a name, a type with its length, sign and character set, attributes, a
default. Pure.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, Final

from server.puller.mysql.ddl.grammar.table_elements import KeyReader
from server.puller.mysql.ddl.tokens import (
    NotUnderstoodError,
    Sort,
    TokenReader,
    shown,
)
from server.puller.mysql.ddl.tree import ColumnDef, Expression, Key, KeyPart, Literal, TypeSpec

_NOW: Final = frozenset({"CURRENT_TIMESTAMP", "NOW", "LOCALTIME", "LOCALTIMESTAMP"})
_BARE_FUNCTIONS: Final = _NOW | {
    "CURRENT_DATE",
    "CURRENT_TIME",
    "CURRENT_USER",
    "CURRENT_ROLE",
    "CURDATE",
    "CURTIME",
}
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
_TYPE_SCHEMAS: Final = ("MARIADB_SCHEMA", "ORACLE_SCHEMA", "MAXDB_SCHEMA")
_TIMES_OF_SCHEMAS: Final = (("DATE", "ORACLE_SCHEMA"), ("TIMESTAMP", "MAXDB_SCHEMA"))
"""The words that mean DATETIME in these schemas."""
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
    """Reads column types."""

    def type_spec(self) -> TypeSpec:
        """A type, with what belongs to it: length, sign, members, character set.

        Raises:
            NotUnderstoodError: it is another type than is known.
        """
        schema = self._type_schema()
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
        base = self._in_schema(base, word, schema, has_size=length is not None)
        return self._finished(base, word, length, scale, is_text=is_text)

    def _type_schema(self) -> str:
        """Whose type it is, of MariaDB's: `oracle_schema.DATE`; mostly nobody says."""
        token, dot = self.peek(), self.peek(1)
        if token is None or dot is None or dot.text != "." or not token.is_word(*_TYPE_SCHEMAS):
            return ""
        self.at += 2
        return token.text.upper()

    def _in_schema(self, base: str, word: str, schema: str, *, has_size: bool) -> str:
        """The type behind a word that has several meanings."""
        of_session = self.dialect.type_schema
        if (word, schema or of_session) in _TIMES_OF_SCHEMAS:
            return "datetime"
        if of_session != "ORACLE_SCHEMA" or has_size:
            return base
        return {"NUMBER": "double", "BLOB": "longblob"}.get(word, base)

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


class ColumnReader(TypeReader, KeyReader):
    """Reads column definitions."""

    def column(self) -> ColumnDef:
        """A name, a type and attributes."""
        column = ColumnDef(self.column_name(), self.type_spec())
        if column.type.base == "serial":
            column = _as_serial(column)
        while (read := self._attribute()) is not None:
            column = read(self, column)
        return column

    # Attributes

    def _attribute(self) -> Callable[["ColumnReader", ColumnDef], ColumnDef] | None:
        """The function that reads the next attribute; None: the column ends here."""
        token = self.peek()
        if token is None or token.sort is not Sort.WORD:
            return None
        return self._ATTRIBUTES.get(token.text.upper())

    def _null(self, column: ColumnDef) -> ColumnDef:
        self.expect("NULL")
        return replace(column, nullable=True)

    def _not(self, column: ColumnDef) -> ColumnDef:
        self.expect("NOT")
        if self.skip("NULL"):
            self.skip_any("ENABLE")
            return replace(column, nullable=False)
        if not self.skip("SECONDARY"):
            self.expect("INVISIBLE")
        return column

    def _default(self, column: ColumnDef) -> ColumnDef:
        self.expect("DEFAULT")
        return replace(column, default=self.default())

    def _on_update(self, column: ColumnDef) -> ColumnDef:
        self.expect("ON", "UPDATE")
        word = self.next()
        if word.text.upper() not in _NOW:
            raise NotUnderstoodError("ON UPDATE of something else than the time")
        if self.sees("("):
            self.parentheses()
        return column

    def _auto_increment(self, column: ColumnDef) -> ColumnDef:
        self.next()
        return replace(column, auto_increment=True)

    def _primary(self, column: ColumnDef) -> ColumnDef:
        if self.skip("PRIMARY"):
            self.skip("KEY")
        else:
            self.expect("KEY")
        return _with_key(column, Key("primary", parts=(KeyPart(column.name),)))

    def _unique(self, column: ColumnDef) -> ColumnDef:
        self.expect("UNIQUE")
        self.skip("KEY")
        return _with_key(column, Key("unique", parts=(KeyPart(column.name),)))

    def _with_value(self, column: ColumnDef) -> ColumnDef:
        """An attribute with a value that changes no data, as COMMENT."""
        self.next()
        self.skip("=")
        self.next()
        return column

    def _comment(self, column: ColumnDef) -> ColumnDef:
        self.expect("COMMENT")
        self.skip("=")
        self.string()
        return column

    def _word(self, column: ColumnDef) -> ColumnDef:
        """A keyword by itself that changes no data, as INVISIBLE."""
        self.next()
        return column

    def _collate(self, column: ColumnDef) -> ColumnDef:
        self.expect("COLLATE")
        return replace(column, type=replace(column.type, collation=self.charset()))

    def _generated(self, column: ColumnDef) -> ColumnDef:
        if self.skip("GENERATED", "ALWAYS", "AS", "ROW"):
            return self._row_period(column)
        self.skip("GENERATED", "ALWAYS")
        self.expect("AS")
        if self.skip("ROW"):
            return self._row_period(column)
        expression = self.parentheses()
        kind = self.skip_any("VIRTUAL", "STORED", "PERSISTENT")
        return replace(column, generated=expression, stored=kind in ("STORED", "PERSISTENT"))

    def _row_period(self, column: ColumnDef) -> ColumnDef:
        if not self.skip_any("START", "END"):
            raise NotUnderstoodError("a row's period has a START and an END")
        return replace(column, row_period=True)

    def _references(self, column: ColumnDef) -> ColumnDef:
        key = Key("foreign", changes_rows=self.references())
        return _with_key(column, key) if self.dialect.keeps_references else column

    def _constraint(self, column: ColumnDef) -> ColumnDef:
        """CHECK, perhaps with a name."""
        if self.skip("CONSTRAINT") and not self.sees("CHECK"):
            self.name()
        self.check()
        return column

    def _versioned(self, column: ColumnDef) -> ColumnDef:
        if self.skip("WITH", "SYSTEM", "VERSIONING"):
            return replace(column, versioned=True)
        if not self.skip("WITHOUT", "SYSTEM", "VERSIONING"):
            raise NotUnderstoodError("WITH is of system versioning")
        return column

    # Defaults

    def default(self) -> Literal | Expression:
        """Read the literal or expression behind DEFAULT."""
        if self.sees("("):
            inner = type(self)(self.in_parentheses(), self.schema, self.dialect)
            try:
                constant = inner.default()
            except NotUnderstoodError:
                return Expression(shown(inner.tokens))
            return constant if inner.ended else Expression(shown(inner.tokens))
        sign = self.skip_any("-", "+")
        literal = self._literal()
        if literal is not None:
            if sign and literal.sort != "number":
                return Expression(f"{sign} {literal.text}")
            return Literal(literal.sort, sign.strip("+") + literal.text, literal.charset)
        return self._function()

    def _literal(self) -> Literal | None:
        token = self.peek()
        if token is None:
            raise NotUnderstoodError("a default is missing")
        introducer = ""
        after = self.peek(1)
        introduces = after is not None and after.sort in (Sort.STRING, Sort.HEX, Sort.BITS)
        if (
            introduces
            and after is not None
            and token.sort is Sort.WORD
            and token.text.startswith("_")
        ):
            introducer, token = token.text[1:].lower(), after
            self.at += 1
        if token.sort is Sort.STRING:
            text = self.string()
            is_null = not text and not introducer and self.dialect.empty_is_null
            return Literal("null") if is_null else Literal("string", text, introducer)
        if token.sort in (Sort.NUMBER, Sort.HEX, Sort.BITS):
            self.at += 1
            if token.sort is Sort.HEX and token.is_quoted and self.dialect.mariadb:
                # X'31' is the text '1' to a MariaDB, also where a number is wanted; 0x31 is 49
                introducer = introducer or "binary"
            return Literal(token.sort.value, token.text, introducer)
        if token.is_word("NULL", "TRUE", "FALSE"):
            self.at += 1
            word = token.text.upper()
            return (
                Literal("null") if word == "NULL" else Literal("number", str(int(word == "TRUE")))
            )
        following = self.peek(1)
        if (
            token.is_word("DATE", "TIME", "TIMESTAMP")
            and following is not None
            and following.sort is Sort.STRING
        ):
            self.at += 1
            return Literal("string", self.string())
        return None

    def _function(self) -> Expression:
        token = self.next()
        if token.sort is not Sort.WORD:
            raise NotUnderstoodError(f"{token.text!r} is no default")
        word = token.text.upper()
        if word == "NEXT":
            self.expect("VALUE", "FOR")
            self.table_name()
            return Expression("next value")
        if self.sees("("):
            return Expression(f"{word.lower()} ( {self.parentheses()} )")
        if word not in _BARE_FUNCTIONS:
            raise NotUnderstoodError(f"{token.text!r} is no default")
        return Expression(word.lower())

    _ATTRIBUTES: ClassVar[dict[str, Callable[["ColumnReader", ColumnDef], ColumnDef]]] = {
        "NULL": _null,
        "NOT": _not,
        "DEFAULT": _default,
        "ON": _on_update,
        "AUTO_INCREMENT": _auto_increment,
        "PRIMARY": _primary,
        "KEY": _primary,
        "UNIQUE": _unique,
        "COMMENT": _comment,
        "COLLATE": _collate,
        "GENERATED": _generated,
        "AS": _generated,
        "REFERENCES": _references,
        "CONSTRAINT": _constraint,
        "CHECK": _constraint,
        "WITH": _versioned,
        "WITHOUT": _versioned,
        "COLUMN_FORMAT": _with_value,
        "STORAGE": _with_value,
        "ENGINE_ATTRIBUTE": _with_value,
        "SECONDARY_ENGINE_ATTRIBUTE": _with_value,
        "SRID": _with_value,
        "REF_SYSTEM_ID": _with_value,
        "INVISIBLE": _word,
        "VISIBLE": _word,
    }


def _as_serial(column: ColumnDef) -> ColumnDef:
    """SERIAL is short for BIGINT UNSIGNED NOT NULL AUTO_INCREMENT UNIQUE."""
    column = replace(
        column, type=TypeSpec("bigint", unsigned=True), nullable=False, auto_increment=True
    )
    return _with_key(column, Key("unique", parts=(KeyPart(column.name),)))


def _with_key(column: ColumnDef, key: Key) -> ColumnDef:
    return replace(column, keys=(*column.keys, key))
