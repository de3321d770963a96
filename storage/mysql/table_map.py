"""The TABLE_MAP event, which goes before a table's row events;
with binlog_row_metadata=FULL it tells all of it.

    body = table_id u48, flags u16, size u8, schema, 0, size u8, table, 0,
           columns n, type u8 * columns, meta size n, meta, nullable bitmap,
           (kind u8, size n, value)*; n: length-encoded number

Source: MySQL's Table_map_log_event and Table_map_event::Optional_metadata_field.
"""

import enum
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from storage.model.errors import CorruptError, InvalidError
from storage.mysql.buffer import Reader
from storage.mysql.charset import charset_of, decode_text
from storage.mysql.schema import (
    LENGTH_FIRST,
    NUMERIC,
    STRINGS,
    Column,
    ColumnUnsupportedError,
    Table,
    Type,
)

ID_BYTES = 6
_META_BYTES = dict.fromkeys(
    (Type.VARCHAR, Type.VARCHAR_COMPRESSED, Type.STRING, Type.VAR_STRING), 2
) | dict.fromkeys((Type.NEWDECIMAL, Type.BIT, Type.ENUM, Type.SET), 2)
_META_BYTES |= dict.fromkeys(
    (Type.FLOAT, Type.DOUBLE, Type.TIME2, Type.DATETIME2, Type.TIMESTAMP2), 1
)
_META_BYTES |= dict.fromkeys(
    (Type.BLOB, Type.BLOB_COMPRESSED, Type.JSON, Type.GEOMETRY, Type.VECTOR), 1
)
_BLOB_BYTES = {Type.TINY_BLOB: 1, Type.MEDIUM_BLOB: 3, Type.LONG_BLOB: 4}
_META_BOUNDS = (
    dict.fromkeys(LENGTH_FIRST, (1, 4))
    | dict.fromkeys((Type.TIME2, Type.DATETIME2, Type.TIMESTAMP2), (0, 6))
    | {Type.BIT: (1, 64), Type.ENUM: (1, 2), Type.SET: (1, 8)}
)
_DECIMAL_DIGITS_MAX = 65
_WITH_COLLATION = STRINGS | {Type.VARCHAR_COMPRESSED, Type.BLOB_COMPRESSED}
"""The columns of which both servers tell a collation; each of them tells one of another type."""
_STRING_FLAGS = 0x30


class RowMetadataError(InvalidError):
    """A TABLE_MAP event does not tell the names, signs and key of its columns."""

    code = "ErrRowMetadataNotFull"


class _Kind(enum.IntEnum):
    SIGNEDNESS = 1
    DEFAULT_CHARSET = 2
    COLUMN_CHARSET = 3
    COLUMN_NAME = 4
    SET_STR_VALUE = 5
    ENUM_STR_VALUE = 6
    SIMPLE_PRIMARY_KEY = 8
    PRIMARY_KEY_WITH_PREFIX = 9
    ENUM_AND_SET_DEFAULT_CHARSET = 10
    ENUM_AND_SET_COLUMN_CHARSET = 11


@dataclass(frozen=True)
class TableMap:
    """One table as a log describes it.

    Columns without metadata have empty names and count as signed bytes.
    """

    schema: str
    table: str
    columns: tuple[Column, ...]
    primary_key: tuple[str, ...]
    """Empty if the table has none, or the log does not tell."""
    refusal: str = ""
    """Why its rows cannot be read: a column is of a type that is not known. It has no columns then,
    and is refused where somebody wants its rows.
    """

    @classmethod
    def parse(cls, body: bytes, *, mariadb: bool) -> "TableMap":
        """Read the body of a TABLE_MAP event; the two servers count different types as characters.

        Raises:
            CorruptError: it is not one.
        """
        reader = Reader(body)
        reader.take(ID_BYTES + 2)
        schema, table = (_name(reader) for _ in range(2))
        types = reader.take(reader.packed())
        metas = Reader(reader.string())
        try:
            columns = [_column(code, metas, f"{schema}.{table}") for code in types]
        except ColumnUnsupportedError as err:
            # Not raised here: the log tells of all tables of the server, and this one may be none
            # of the changefeed's.
            return cls(schema, table, (), (), err.message)
        nullable = reader.bits(len(columns))
        columns = [
            replace(column, nullable=null) for column, null in zip(columns, nullable, strict=True)
        ]
        columns, key = _with_metadata(columns, dict(_fields(reader)), mariadb=mariadb)
        return cls(schema, table, tuple(columns), key)

    @staticmethod
    def names(body: bytes) -> tuple[str, str]:
        """Schema and table of the body of a TABLE_MAP event.

        Raises:
            CorruptError: it is not one.
        """
        reader = Reader(body)
        reader.take(ID_BYTES + 2)
        return _name(reader), _name(reader)

    @property
    def name(self) -> str:
        """`schema.table`."""
        return f"{self.schema}.{self.table}"

    @cached_property
    def is_full(self) -> bool:
        """Whether the log has all metadata of the table (binlog_row_metadata=FULL)."""
        return not self.refusal and all(column.name for column in self.columns)

    def check_full(self) -> None:
        """Refuse a table that the log does not tell as a whole.

        Raises:
            RowMetadataError: names of columns are missing.
            ColumnUnsupportedError: a column is of a type that is not known.
        """
        if self.refusal:
            raise ColumnUnsupportedError(self.refusal)
        if not self.is_full:
            raise RowMetadataError(
                f"the log does not tell the columns of {self.name}: SET GLOBAL"
                " binlog_row_metadata='FULL' on the server, and begin the changefeed after that"
            )

    def to_table(self, table_id: int, primary_key: Sequence[str] | None = None) -> Table:
        """The table's record, under an id of our own; `primary_key` where the log tells of none.

        Raises:
            RowMetadataError: the log does not tell enough.
            ColumnUnsupportedError: a column is of a type that is not known.
        """
        self.check_full()
        return Table(table_id, self.table, self.columns, tuple(primary_key or self.primary_key))


def _name(reader: Reader) -> str:
    name = reader.take(reader.number(1)).decode(errors="replace")
    reader.take(1)
    return name


def _column(code: int, metas: Reader, table: str) -> Column:
    try:
        kind = Type(code)
    except ValueError as err:
        raise ColumnUnsupportedError(
            f"a column of {table} is of type {code}, which is not known; leave the table out"
        ) from err
    raw = metas.take(_META_BYTES.get(kind, 0))
    meta = int.from_bytes(raw, "little")
    # Most metas are little-endian numbers; a DECIMAL has two, and a BIT has bits, then whole bytes.
    if kind is Type.NEWDECIMAL:
        meta = raw[0] << 8 | raw[1]
    elif kind is Type.BIT:
        meta = raw[0] + 8 * raw[1]
    elif kind in {Type.STRING, Type.VAR_STRING, Type.ENUM, Type.SET}:
        kind, meta = _string(raw[0], raw[1])
    elif kind in _BLOB_BYTES:
        kind, meta = Type.BLOB, _BLOB_BYTES[kind]
    if not _is_possible(kind, meta):
        raise CorruptError(f"a {kind.name} column of {table} cannot have the metadata {meta}")
    return Column(name="", type=kind, meta=meta)


def _is_possible(kind: Type, meta: int) -> bool:
    """Whether rows can be read with it; see `storage.mysql.schema`."""
    if kind is Type.NEWDECIMAL:
        return (meta & 0xFF) <= meta >> 8 <= _DECIMAL_DIGITS_MAX and meta >> 8 > 0
    least, most = _META_BOUNDS.get(kind, (0, meta))
    return least <= meta <= most


def _string(code: int, size: int) -> tuple[Type, int]:
    """Return the actual type behind STRING: ENUM, SET, or a CHAR, whose size has two more bits
    among those of the type.
    """
    # The size of a CHAR may take ten bits. The upper two stand inverted in bits that are set in all
    # types behind STRING.
    if code & _STRING_FLAGS != _STRING_FLAGS:
        return Type.STRING, size | ((code & _STRING_FLAGS) ^ _STRING_FLAGS) << 4
    return (Type(code) if code in {Type.ENUM, Type.SET} else Type.STRING), size


def _fields(reader: Reader) -> Iterator[tuple[int, bytes]]:
    while reader.rest:
        yield reader.number(1), reader.string()


def _with_metadata(
    columns: list[Column], fields: dict[int, bytes], *, mariadb: bool
) -> tuple[list[Column], tuple[str, ...]]:
    numeric = _places(columns, NUMERIC | {Type.YEAR})
    strings = _places(columns, _WITH_COLLATION | {Type.GEOMETRY if mariadb else Type.VECTOR})
    names = _places(columns, {Type.ENUM, Type.SET})
    if _Kind.SIGNEDNESS in fields:
        # YEAR has a bit among the signs, too, and counts as unsigned: it says nothing about it.
        signs = Reader(fields[_Kind.SIGNEDNESS]).bits_be(len(numeric))
        for place, unsigned in zip(numeric, signs, strict=True):
            columns[place] = replace(
                columns[place], unsigned=unsigned and columns[place].type is not Type.YEAR
            )
    _set_collations(columns, strings, fields, _Kind.DEFAULT_CHARSET, _Kind.COLUMN_CHARSET)
    _set_collations(
        columns,
        names,
        fields,
        _Kind.ENUM_AND_SET_DEFAULT_CHARSET,
        _Kind.ENUM_AND_SET_COLUMN_CHARSET,
    )
    _set_elems(columns, fields)
    if _Kind.COLUMN_NAME in fields:
        reader = Reader(fields[_Kind.COLUMN_NAME])
        for place, column in enumerate(columns):
            columns[place] = replace(column, name=reader.string().decode(errors="replace"))
    return columns, _key(columns, fields)


def _places(columns: list[Column], types: Collection[Type]) -> list[int]:
    return [place for place, column in enumerate(columns) if column.type in types]


def _set_collations(
    columns: list[Column], places: list[int], fields: dict[int, bytes], default: _Kind, each: _Kind
) -> None:
    if each in fields:
        collations = Reader(fields[each]).packed_list()
    elif default in fields:
        # One collation for all, then pairs (number among such columns, its own collation).
        numbers = Reader(fields[default]).packed_list()
        if len(numbers) % 2 == 0:
            raise CorruptError(
                f"a TABLE_MAP event has {len(numbers)} numbers for a collation and pairs"
            )
        usual, *others = numbers
        exceptions = dict(zip(others[0::2], others[1::2], strict=True))
        collations = [exceptions.get(number, usual) for number in range(len(places))]
    else:
        return
    if len(collations) != len(places):
        raise CorruptError(
            f"a TABLE_MAP event has {len(collations)} collations for {len(places)} columns"
        )
    for place, collation in zip(places, collations, strict=True):
        columns[place] = replace(columns[place], collation=collation)


def _set_elems(columns: list[Column], fields: dict[int, bytes]) -> None:
    for kind, field in ((Type.ENUM, _Kind.ENUM_STR_VALUE), (Type.SET, _Kind.SET_STR_VALUE)):
        reader = Reader(fields.get(field, b""))
        for place, column in enumerate(columns):
            if column.type is kind and field in fields:
                charset = charset_of(column.collation) or "utf8mb4"
                elems = tuple(decode_text(charset, reader.string()) for _ in range(reader.packed()))
                columns[place] = replace(column, elems=elems)


def _key(columns: list[Column], fields: dict[int, bytes]) -> tuple[str, ...]:
    places = Reader(fields.get(_Kind.SIMPLE_PRIMARY_KEY, b"")).packed_list()
    if _Kind.PRIMARY_KEY_WITH_PREFIX in fields:
        # Pairs (place, length of the prefix): a row is known by whole values, so lengths are left.
        places = Reader(fields[_Kind.PRIMARY_KEY_WITH_PREFIX]).packed_list()[0::2]
    if any(place >= len(columns) for place in places):
        raise CorruptError("the primary key of a TABLE_MAP event names a column it does not have")
    return tuple(columns[place].name for place in places if columns[place].name)
