"""Chunks of a real MariaDB: by small steps over keys of every type, each row comes once,
in the server's order.
"""

from collections.abc import Iterator

import pyarrow as pa
import pytest

from server.capture.source.mysql import mysql_table
from server.changefeed.source import SourceUri
from server.changefeed.table import SourceTable
from server.dump.mysql.chunk import ChunkQuery, TableDiffersError, last_row, split_ranges
from server.dump.mysql.pace import Pick
from server.dump.mysql.reader import ChunkReader, chunk_query
from server.dump.mysql.statement import Statement
from server.dump.progress import Range
from server.puller.mysql.ddl.definition import Definition
from server.puller.mysql.session.catalogue import read_definitions
from server.puller.mysql.session.connection import Session, log_in
from server.puller.mysql.session.options import MySqlOptions
from server.puller.mysql.tables import record_of
from sink.mysql_mounter import MysqlMounter
from storage.model.errors import CorruptError
from storage.model.event import snapshot_rows
from tests.integration.mysql.key_types import KEYS
from tests.mariadb import MYSQLD, MariaDb, mariadb_only


@pytest.fixture
def session(mariadb: MariaDb) -> Iterator[Session]:
    with log_in(MySqlOptions.of(SourceUri.parse(mariadb.uri))) as session:
        session.execute("SET character_set_results = NULL, sql_mode = 'NO_ENGINE_SUBSTITUTION'")
        yield session


def query_of(session: Session, database: str, table: str, where: str = "") -> ChunkQuery:
    definition: Definition = read_definitions(session, [(database, table)])[(database, table)]
    rows = session.execute(
        "SELECT column_name, collation_name FROM information_schema.columns"
        " WHERE table_schema = %s AND table_name = %s AND collation_name IS NOT NULL",
        (database, table),
    )
    return ChunkQuery(database, definition.table(1), dict(rows), where)


def walked(session: Session, query: ChunkQuery, part: Range, limit: int) -> pa.Array:
    """The rows of a range, chunk by chunk."""
    found = []
    while True:
        sql = query.sql(after=part.after is not None, until=part.until is not None)
        rows = Statement(session, sql).rows(query.parameters(part, limit))
        found.append(rows)
        if len(rows) < limit:
            return pa.concat_arrays(found)
        part = Range(query.cursor(last_row(rows)), part.until)


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("kind", KEYS)
def test_small_steps_give_each_row_once_in_the_servers_order(
    mariadb: MariaDb, session: Session, kind: str, limit: int
) -> None:
    column, values = KEYS[kind]
    database = mariadb.database()
    mariadb.execute(f"CREATE TABLE {database}.t (v INT, {column} PRIMARY KEY)")
    session.execute(
        f"INSERT INTO {database}.t (k) VALUES {', '.join(f'({value})' for value in values)}"
    )
    query = query_of(session, database, "t")
    whole = Statement(session, query.sql(after=False, until=False)).rows(
        query.parameters(Range(), 100)
    )
    assert len(whole) == len(values)
    assert walked(session, query, Range(), limit).to_pylist() == whole.to_pylist()


def test_composite_keys_are_walked_within_both_ends_and_a_condition(
    mariadb: MariaDb, session: Session
) -> None:
    database = mariadb.database()
    session.execute(
        f"CREATE TABLE {database}.`t``x` (a VARCHAR(5) COLLATE utf8mb4_general_ci, b INT "
        "UNSIGNED, c DATE, `d e` INT,"
        " PRIMARY KEY (b, a, c))"
    )
    values = [(chr(97 + n % 3), n // 9, f"2024-01-0{n // 3 % 3 + 1}", n) for n in range(27)]
    for value in values:
        session.execute(f"INSERT INTO {database}.`t``x` VALUES (%s, %s, %s, %s)", value)
    query = query_of(session, database, "t`x", "`d e` <> 13")
    mounter = MysqlMounter(query.table, database)
    ordered = [
        n for _, _, _, n in sorted(values, key=lambda row: (row[1], row[0], row[2])) if n != 13
    ]
    rows = walked(session, query, Range(), 4)
    assert mounter.mount(snapshot_rows(rows, rows, 5))["d e"].to_pylist() == ordered
    first, middle = query.cursor(rows[3].as_py()), query.cursor(rows[15].as_py())
    part = walked(session, query, Range(first, middle), 5)
    assert mounter.mount(snapshot_rows(part, part, 5))["d e"].to_pylist() == ordered[4:16]


def test_ranges_of_an_integer_key_make_up_the_whole(mariadb: MariaDb, session: Session) -> None:
    database = mariadb.database()
    session.execute(f"CREATE TABLE {database}.t (id BIGINT UNSIGNED PRIMARY KEY)")
    numbers = [0, 1, 7, 1 << 40, (1 << 63) + 5, (1 << 64) - 1]
    session.execute(
        f"INSERT INTO {database}.t VALUES {', '.join(f'({number})' for number in numbers)}"
    )
    query = query_of(session, database, "t")
    ranges = split_ranges(query.table.columns[0], 0, (1 << 64) - 1, 4)
    assert len(ranges) == 4
    rows = pa.concat_arrays([walked(session, query, part, 2) for part in ranges])
    found = (
        MysqlMounter(query.table, database).mount(snapshot_rows(rows, rows, 5))["id"].to_pylist()
    )
    assert [int(number) for number in found] == numbers


ANY_KEY = {
    "TINYINT": "1",
    "BIGINT": "1",
    "FLOAT": "1",
    "DECIMAL(20,5)": "1",
    "VARCHAR(20)": "'1'",
    "VARCHAR(300)": "REPEAT('x', 280)",
    "BINARY(16)": "'1'",
    "UUID": "UUID()",
    "DATETIME(6)": "'2024-01-01 01:02:03.456789'",
    "TIME(3)": "'01:02:03.5'",
    "YEAR": "1",
    "BIT(9)": "1",
}
"""Types of keys, and a value of each."""


@mariadb_only("UUID")
def test_a_table_that_the_log_has_yet_to_tell_of_is_refused_by_name(
    mariadb: MariaDb, session: Session
) -> None:
    """The log may be far behind the server's schema, with any type where there is another one."""
    database, pick = mariadb.database(), Pick(1, 0, Range(), 0)
    tables: dict[str, SourceTable] = {}
    for kind in ANY_KEY:
        tables[kind] = _made(session, database, kind)
    for now in ANY_KEY:
        _made(session, database, now)
        queries = {kind: _query_or_none(session, table) for kind, table in tables.items()}
        accepted = {kind for kind, query in queries.items() if query}
        assert accepted == (SAME_IN_A_LOG if now in SAME_IN_A_LOG else {now})
    for was in ANY_KEY:
        # An ALTER may come behind the look at the columns, too.
        _made(session, database, was)
        query, reader = chunk_query(session, tables[was]), ChunkReader(session)
        for now in ANY_KEY:
            _made(session, database, now)
            for verify in (False, True):
                try:
                    reader.read(pick, 1, query, 1, verify=verify)
                except (TableDiffersError, CorruptError):
                    assert now != was
                else:
                    # 16 bytes are cast to 16 bytes, whatever they are by now.
                    assert was in {now} | SAME_IN_A_LOG or {now, was} <= SAME_IN_A_RESULT


def test_members_of_an_enum_are_those_of_its_rows(mariadb: MariaDb, session: Session) -> None:
    """A catalogue escapes some characters, and MariaDB's shows `?` for those of four bytes."""
    name = mariadb.database()
    emoji = "" if MYSQLD else ",'🎉','x🎊y'"
    session.execute(
        f"CREATE TABLE {name}.`t``t` (id INT AUTO_INCREMENT PRIMARY KEY, "
        f"e ENUM('a','?','no?','d\\\\e','f\\ng',''''{emoji}) COLLATE utf8mb4_bin, "
        f"`s``?` SET('?','b'{emoji}) COLLATE utf8mb4_bin)"
    )
    definition = read_definitions(session, [(name, "t`t")])[name, "t`t"]
    of_enum, of_set = (column.elems for column in definition.columns[1:])
    for column, values in (
        ("e", [place + 1 for place in range(len(of_enum))]),
        ("`s``?`", [1 << place for place in range(len(of_set))]),
    ):
        rows = ", ".join(f"({value})" for value in values)
        session.execute(f"INSERT INTO {name}.`t``t` ({column}) VALUES {rows}")
    read = session.execute(
        f"SELECT HEX(CONVERT(COALESCE(e, `s``?`) USING utf8mb4)) FROM {name}.`t``t` ORDER BY id"
    )
    texts = [bytes.fromhex(str(text)).decode() for (text,) in read]
    assert texts == [*of_enum, *of_set]


SAME_IN_A_LOG = {"BINARY(16)", "UUID"}
SAME_IN_A_RESULT = SAME_IN_A_LOG | {"VARCHAR(20)", "VARCHAR(300)"}


def _made(session: Session, database: str, kind: str) -> SourceTable:
    session.execute(f"CREATE OR REPLACE TABLE {database}.t (k {kind} PRIMARY KEY, v {kind})")
    session.execute(f"INSERT INTO {database}.t VALUES ({ANY_KEY[kind]}, {ANY_KEY[kind]})")
    definition = read_definitions(session, [(database, "t")])[database, "t"]
    return mysql_table(record_of(definition, 1))


def _query_or_none(session: Session, table: SourceTable) -> ChunkQuery | None:
    try:
        return chunk_query(session, table)
    except TableDiffersError:
        return None
