"""The grammar of columns and keys: types, defaults, attributes, constraints. Pure."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Final

from server.puller.mysql.ddl.tokens import ORACLE, NotUnderstoodError, Sort, TokenReader, shown
from server.puller.mysql.ddl.tree import (
    ColumnDef,
    Default,
    Expression,
    Key,
    KeyPart,
    Literal,
    TypeSpec,
)

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
_CHANGES_ROWS: Final = frozenset({"CASCADE", "SET"})
_NOW: Final = frozenset({"CURRENT_TIMESTAMP", "NOW", "LOCALTIME", "LOCALTIMESTAMP"})
_BARE_FUNCTIONS: Final = _NOW | {
    "CURRENT_DATE",
    "CURRENT_TIME",
    "CURRENT_USER",
    "CURRENT_ROLE",
    "CURDATE",
    "CURTIME",
}


@dataclass(slots=True)
class _Column:
    """What the attributes of a column say, so far."""

    name: str
    type: TypeSpec
    nullable: bool | None = None
    default: Default = None
    generated: str = ""
    stored: bool = False
    auto_increment: bool = False
    keys: list[Key] = field(default_factory=list)
    row_period: bool = False


class ColumnReader(TokenReader):
    """Adds columns and keys to what is read."""

    def column(self) -> ColumnDef:
        """A name, a type and attributes."""
        return self.column_named(self.column_name())

    def column_named(self, name: str) -> ColumnDef:
        """A type and attributes."""
        column = _Column(name, self._type())
        if column.type.base == "serial":
            column.type = TypeSpec("bigint", unsigned=True)
            column.nullable, column.auto_increment = False, True
            column.keys.append(Key("unique", parts=(KeyPart(name),)))
        while self._attribute(column):
            pass
        return ColumnDef(
            column.name, column.type, column.nullable, column.default, column.generated, column.stored,
            column.auto_increment, tuple(column.keys), column.row_period,
        )  # fmt: skip

    # Types

    def _type(self) -> TypeSpec:
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
        return TypeSpec(
            spec.base, spec.length, None, charset=charset, collation=collation, bin=binary, elems=spec.elems,
            compressed=compressed,
        )  # fmt: skip

    # Attributes

    def _attribute(self, column: _Column) -> bool:
        """Take one, if one comes; False: the column ends here."""
        token = self.peek()
        if token is None or token.sort is not Sort.WORD:
            return False
        read = self._ATTRIBUTES.get(token.text.upper())
        return read is not None and read(self, column)

    def _null(self, column: _Column) -> bool:
        self.expect("NULL")
        column.nullable = True
        return True

    def _not(self, column: _Column) -> bool:
        self.expect("NOT")
        if self.skip("NULL"):
            column.nullable = False
            self.skip_any("ENABLE")
        elif not self.skip("SECONDARY"):
            self.expect("INVISIBLE")
        return True

    def _default(self, column: _Column) -> bool:
        self.expect("DEFAULT")
        column.default = self.default()
        return True

    def _on_update(self, column: _Column) -> bool:
        del column
        self.expect("ON", "UPDATE")
        word = self.next()
        if word.text.upper() not in _NOW:
            raise NotUnderstoodError("ON UPDATE of something else than the time")
        if self.sees("("):
            self.parentheses()
        return True

    def _auto_increment(self, column: _Column) -> bool:
        self.next()
        column.auto_increment = True
        return True

    def _primary(self, column: _Column) -> bool:
        if self.skip("PRIMARY"):
            self.skip("KEY")
        else:
            self.expect("KEY")
        column.keys.append(Key("primary", parts=(KeyPart(column.name),)))
        return True

    def _unique(self, column: _Column) -> bool:
        self.expect("UNIQUE")
        self.skip("KEY")
        column.keys.append(Key("unique", parts=(KeyPart(column.name),)))
        return True

    def _with_value(self, column: _Column) -> bool:
        """An attribute with a value that changes no data, as COMMENT."""
        del column
        self.next()
        self.skip("=")
        self.next()
        return True

    def _comment(self, column: _Column) -> bool:
        del column
        self.expect("COMMENT")
        self.skip("=")
        self.string()
        return True

    def _word(self, column: _Column) -> bool:
        """A keyword by itself that changes no data, as INVISIBLE."""
        del column
        self.next()
        return True

    def _collate(self, column: _Column) -> bool:
        self.expect("COLLATE")
        spec = column.type
        column.type = TypeSpec(
            spec.base, spec.length, spec.scale, spec.unsigned, spec.charset, self.charset(), spec.bin, spec.elems,
            spec.compressed,
        )  # fmt: skip
        return True

    def _generated(self, column: _Column) -> bool:
        if self.skip("GENERATED", "ALWAYS", "AS", "ROW"):
            return self._row_period(column)
        self.skip("GENERATED", "ALWAYS")
        self.expect("AS")
        if self.skip("ROW"):
            return self._row_period(column)
        column.generated = self.parentheses()
        kind = self.skip_any("VIRTUAL", "STORED", "PERSISTENT")
        column.stored = kind in ("STORED", "PERSISTENT")
        return True

    def _row_period(self, column: _Column) -> bool:
        if not self.skip_any("START", "END"):
            raise NotUnderstoodError("a row's period has a START and an END")
        column.row_period = True
        return True

    def _references(self, column: _Column) -> bool:
        column.keys.append(Key("foreign", changes_rows=self.references()))
        return True

    def _constraint(self, column: _Column) -> bool:
        """CHECK, perhaps with a name."""
        del column
        if self.skip("CONSTRAINT") and not self.sees("CHECK"):
            self.name()
        self.check()
        return True

    def _versioned(self, column: _Column) -> bool:
        del column
        if not (
            self.skip("WITH", "SYSTEM", "VERSIONING")
            or self.skip("WITHOUT", "SYSTEM", "VERSIONING")
        ):
            raise NotUnderstoodError("WITH is of system versioning")
        return True

    # Defaults

    def default(self) -> Literal | Expression:
        """What stands behind DEFAULT."""
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
            return Literal("string", self.string(), introducer)
        if token.sort in (Sort.NUMBER, Sort.HEX, Sort.BITS):
            self.at += 1
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

    # Keys

    def key(self) -> Key | None:
        """A key or constraint; None: what comes is none."""
        begin, name = self.at, ""
        named = self.skip("CONSTRAINT")
        if named and not self._key_word():
            name = self.name()
        if self.skip("PRIMARY", "KEY"):
            return self._key("primary", "")
        if self.skip("UNIQUE"):
            self.skip_any("KEY", "INDEX")
            return self._key("unique", name)
        if self.skip("FOREIGN", "KEY"):
            return self._foreign(name)
        if self.sees("CHECK"):
            self.check()
            return Key("check", name)
        if named:
            raise NotUnderstoodError("an unknown constraint")
        if self.skip_any("FULLTEXT", "SPATIAL"):
            self.skip_any("KEY", "INDEX")
            return self._key("plain", "")
        if self.sees("INDEX") or self.sees("KEY"):
            self.at += 1
            return self._key("plain", "")
        self.at = begin
        return None

    def _key_word(self) -> bool:
        return any(self.sees(word) for word in ("PRIMARY", "UNIQUE", "FOREIGN", "CHECK"))

    def _key(self, kind: str, name: str) -> Key:
        absent = self.if_not_exists()
        if not self.sees("(") and not self.sees("USING") and not self.sees("TYPE"):
            own = self.new_name()
            name = own if kind != "primary" else ""
        self._using()
        parts = self.key_parts()
        self.key_options()
        return Key(kind, name, parts, if_not_exists=absent)

    def _using(self) -> None:
        while self.skip_any("USING", "TYPE"):
            if not self.skip_any("BTREE", "HASH", "RTREE"):
                raise NotUnderstoodError("an unknown kind of index")

    def key_parts(self) -> tuple[KeyPart, ...]:
        """The columns of a key."""
        self.expect("(")
        parts = self.listed(self._key_part)
        self.expect(")")
        return parts

    def _key_part(self) -> KeyPart:
        if self.sees("("):
            self.parentheses()
            self.skip_any("ASC", "DESC")
            return KeyPart("")
        if self.skip("PERIOD") or self.sees("WITHOUT"):
            raise NotUnderstoodError("a period in a key")
        column, prefix = self.column_name(), None
        if self.skip("("):
            prefix = self.number()
            self.expect(")")
        self.skip_any("ASC", "DESC")
        return KeyPart(column, prefix)

    def key_options(self) -> None:
        """What follows a key's columns; nothing of it changes data."""
        while True:
            if self.skip_any("USING", "TYPE"):
                self.at -= 1
                self._using()
            elif self.skip("WITH", "PARSER"):
                self.name()
            elif self.skip_any("VISIBLE", "INVISIBLE", "IGNORED") or self.skip("NOT", "IGNORED"):
                pass
            elif self.skip("COMMENT"):
                self.skip("=")
                self.string()
            elif self.skip_any(
                "KEY_BLOCK_SIZE", "ENGINE_ATTRIBUTE", "SECONDARY_ENGINE_ATTRIBUTE", "CLUSTERING"
            ):
                self.skip("=")
                self.next()
            else:
                return

    def _foreign(self, name: str) -> Key:
        absent = self.if_not_exists()
        if not self.sees("("):
            name = self.new_name()
        parts = self.key_parts()
        return Key("foreign", name, parts, self.references(), if_not_exists=absent)

    def references(self) -> str:
        """REFERENCES … with its actions; those that change rows."""
        self.expect("REFERENCES")
        self.table_name()
        if self.sees("("):
            self.key_parts()
        changes = []
        while True:
            if self.skip("MATCH"):
                self.next()
            elif self.skip("ON"):
                event = self.skip_any("DELETE", "UPDATE")
                action = self.next().text.upper()
                if not event or action not in ("RESTRICT", "CASCADE", "SET", "NO"):
                    raise NotUnderstoodError("an unknown action of a foreign key")
                if action in ("SET", "NO"):
                    self.next()
                if action in _CHANGES_ROWS:
                    changes.append(f"ON {event} {action}")
            else:
                return " ".join(changes)

    def check(self) -> None:
        """CHECK (…)."""
        self.expect("CHECK")
        self.parentheses()
        if not self.skip("ENFORCED"):
            self.skip("NOT", "ENFORCED")

    _ATTRIBUTES: ClassVar[dict[str, Callable[["ColumnReader", _Column], bool]]] = {
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
