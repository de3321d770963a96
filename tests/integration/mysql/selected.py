"""What a server says of its tables now: types by its catalogue, rows by SELECT as text,
read here and nowhere else.
"""

import datetime as dt
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import pyarrow as pa
from pymysql.connections import Connection
from pymysql.cursors import Cursor

from server.capture.source.mysql import mysql_table
from server.changefeed.source import Address
from server.changefeed.table import SourceTable, TableIneligibleError
from server.puller.mysql.ddl.tree import TableName
from server.puller.mysql.session.catalogue import read_definitions
from server.puller.mysql.session.connection import Session
from server.puller.mysql.tables import record_of

Row = dict[str, Any]
_STORED = {
    **dict.fromkeys(("uuid", "inet6"), "CAST({} AS BINARY(16))"),
    "inet4": "CAST({} AS BINARY(4))",
    "vector": "CAST({} AS BINARY)",
    # behind the four bytes of an SRID
    **dict.fromkeys(("geometry", "point", "linestring"), "SUBSTRING(CAST({} AS BINARY), 5)"),
}


def tables_now(connection: "Connection[Cursor]", port: int, schema: str) -> dict[str, SourceTable]:
    """The tables of a schema that can be replicated, by last name,
    with the types that their columns have.
    """
    session = Session(connection, Address("127.0.0.1", port))
    names: list[TableName] = [
        (schema, str(name))
        for (name,) in session.execute(
            "SELECT table_name FROM information_schema.tables WHERE table_schema = %s AND "
            "table_type = 'BASE TABLE'",
            [schema],
        )
    ]
    tables = {}
    for name, definition in read_definitions(session, names).items():
        try:
            tables[name[1]] = mysql_table(record_of(definition, 1))
        except TableIneligibleError:
            continue
    return tables


def columns_of(schema: Any) -> dict[str, Any]:
    """The types of the upstream's columns, by name, in order."""
    return {field.name: field.type for field in schema if not field.name.startswith("_")}


def rows_now(
    connection: "Connection[Cursor]", table: SourceTable, columns: Mapping[str, Any] | None = None
) -> list[Row]:
    """All rows, each value as a lake should have it,
    by default with the types that the columns have.
    """
    columns = columns or columns_of(table.mounter.schema)
    place = f"`{table.record.schema_name}`.{quoted(table.record.table_name)}"
    decoders = connection.decoders
    connection.decoders = {}  # all values as the server writes them
    try:
        with connection.cursor() as cursor:
            cursor.execute("SET NAMES utf8mb4")
            cursor.execute("SET time_zone='+00:00', sql_mode=''")
            bytes_of = _shown_otherwise(cursor, table)
            exact = [_exact(name, kind, bytes_of.get(name)) for name, kind in columns.items()]
            cursor.execute(f"SELECT {', '.join(exact)} FROM {place}")
            found = cursor.fetchall()
    finally:
        connection.decoders = decoders
    kinds = list(columns.values())
    return [
        {name: value_of(text, kind) for name, kind, text in zip(columns, kinds, row, strict=True)}
        for row in found
    ]


def quoted(name: str) -> str:
    """A name in a statement."""
    return "`" + name.replace("`", "``") + "`"


def _shown_otherwise(cursor: Cursor, table: SourceTable) -> dict[str, str]:
    """The columns that SELECT shows in a form of their own and a log as bytes, and which."""
    record = table.record
    cursor.execute(
        "SELECT column_name, data_type FROM information_schema.columns WHERE table_schema = %s "
        "AND table_name = %s",
        [record.schema_name, record.table_name],
    )
    return {
        _text(name): _STORED[_text(kind)]
        for name, kind in cursor.fetchall()
        if _text(kind) in _STORED
    }


def _exact(name: str, kind: Any, stored: str | None) -> str:
    """FLOAT is shown with six digits; what it really is only a DOUBLE shows."""
    if stored is not None:
        return stored.format(quoted(name))
    return f"CAST({quoted(name)} AS DOUBLE)" if pa.types.is_floating(kind) else quoted(name)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def value_of(text: Any, kind: Any) -> Any:
    """A value that SELECT wrote as text, or bytes, as the Arrow type's Python value."""
    if text is None:
        return None
    if pa.types.is_binary(kind):
        return text if isinstance(text, bytes) else str(text).encode()
    text = _text(text)
    if pa.types.is_integer(kind):
        return int(text)
    if pa.types.is_floating(kind):
        return float(text)
    if pa.types.is_decimal(kind):
        return Decimal(text)
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        return _moment(text, dates=bool(pa.types.is_date(kind)))
    return text


def _moment(text: str, *, dates: bool) -> Any:
    """None: a date that no calendar has, which is null in a lake."""
    try:
        return dt.date.fromisoformat(text) if dates else dt.datetime.fromisoformat(padded(text))
    except ValueError:
        return None


def padded(text: str) -> str:
    """With six digits behind the second, which Python wants."""
    whole, dot, fraction = text.partition(".")
    return f"{whole}.{fraction.ljust(6, '0')}" if dot else whole


def same(mine: Any, theirs: Any) -> bool:
    """Whether two values are the same, and of the same kind."""
    if isinstance(mine, dt.datetime):
        mine = mine.replace(tzinfo=None)
    if isinstance(mine, float) and isinstance(theirs, float):
        return math.isclose(mine, theirs, rel_tol=1e-6) or mine == theirs
    return bool(type(mine) is type(theirs) and mine == theirs)


def difference(lake: list[Row], upstream: list[Row], key: tuple[str, ...]) -> str:
    """The first rows that are not the same, by key; nothing if all are."""
    mine = {_key(row, key): row for row in lake}
    theirs = {_key(row, key): row for row in upstream}
    if len(mine) != len(lake) or len(theirs) != len(upstream):
        return (
            f"a key comes twice: {len(lake)} rows, {len(mine)} keys; upstream {len(upstream)}, "
            f"{len(theirs)}"
        )
    if mine.keys() != theirs.keys():
        lost, ghosts = [
            sorted(map(str, keys))[:3] for keys in (theirs.keys() - mine, mine.keys() - theirs)
        ]
        return f"lost {lost}, ghosts {ghosts}"
    for place, row in theirs.items():
        for name, value in row.items():
            if name not in mine[place] or not same(mine[place][name], value):
                return f"row {place}, {name}: {mine[place].get(name)!r}, not {value!r}"
    return ""


def _key(row: Row, key: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(
        value.replace(tzinfo=None) if isinstance(value, dt.datetime) else value
        for value in map(row.get, key)
    )
