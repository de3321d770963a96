"""Checks against a real MariaDB: each type's text is the server's, byte by byte,
and chunks' totals are equal.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa
import pytest

from server.changefeed.source import SourceUri
from server.dump.mysql.check import Check, canonical
from server.dump.mysql.chunk import ChunkQuery, last_row, stored
from server.dump.mysql.reader import keys_of
from server.dump.mysql.statement import Statement
from server.dump.progress import Range
from server.puller.mysql.session.catalogue import read_definitions
from server.puller.mysql.session.connection import Session, log_in
from server.puller.mysql.session.options import MySqlOptions
from storage.mysql.arrow import arrow_columns
from storage.mysql.schema import Column, Table, Type
from tests.integration.dump.more_types import MORE, MORE_ROWS
from tests.integration.mysql.every_type import COLUMNS, ROWS
from tests.integration.mysql.key_types import KEYS
from tests.mariadb import MariaDb


@pytest.fixture
def session(mariadb: MariaDb) -> Iterator[Session]:
    with log_in(MySqlOptions.of(SourceUri.parse(mariadb.uri))) as session:
        session.execute(
            "SET character_set_results = NULL, sql_mode = "
            "'NO_ENGINE_SUBSTITUTION,ALLOW_INVALID_DATES'"
        )
        yield session


def everything(server: MariaDb, session: Session, database: str) -> ChunkQuery:
    """A table of all column types with odd values."""
    server.execute(f"CREATE TABLE {database}.t (id INT PRIMARY KEY, {COLUMNS}{MORE})")
    known = {column for column, *_ in session.execute(f"SHOW COLUMNS FROM {database}.t")}
    for number, all_values in enumerate([*ROWS, *MORE_ROWS]):
        row = {column: value for column, value in all_values.items() if column in known}
        values = ", ".join(["%s"] * (len(row) + 1))
        session.execute(
            f"INSERT INTO {database}.t ({', '.join(['id', *row])}) VALUES ({values})",
            [number, *row.values()],
        )
    session.execute(
        f"UPDATE {database}.t SET g = LINESTRING(POINT(1, 2), POINT(3, 4)), p = POINT(0.5, -1) "
        "WHERE id = 1"
    )
    return query_of(session, database)


def query_of(session: Session, database: str, where: str = "") -> ChunkQuery:
    definition = read_definitions(session, [(database, "t")])[(database, "t")]
    rows = session.execute(
        "SELECT column_name, collation_name FROM information_schema.columns"
        " WHERE table_schema = %s AND table_name = %s AND collation_name IS NOT NULL",
        (database, "t"),
    )
    return ChunkQuery(database, definition.table(1), dict(rows), where)


def chunk(session: Session, query: ChunkQuery, part: Range, limit: int = 1000) -> pa.Array:
    sql = query.sql(after=part.after is not None, until=part.until is not None)
    return Statement(session, sql).rows(query.parameters(part, limit))


def test_the_text_of_every_column_type_is_the_servers(mariadb: MariaDb, session: Session) -> None:
    query = everything(mariadb, session, mariadb.database())
    columns = query.table.columns
    decoded = arrow_columns(query.table, chunk(session, query, Range()))
    both = [
        (column, array, canonical(column, stored(column)))
        for column, array in zip(columns, decoded, strict=True)
    ]
    assert [column.name for column, _, found in both if found is None] == ["kr"]
    for column, array, found in both:
        if found is None:
            continue
        texts = Statement(
            session,
            f"SELECT CAST({found.sql} AS BINARY) {query.of(after=False, until=False)} ORDER BY id",
        )
        theirs = arrow_columns(Table(1, "x", (BYTES,), ()), texts.rows())[0]
        assert found.text(array).to_pylist() == theirs.to_pylist(), column


BYTES = Column(name="v", type=Type.BLOB, meta=4)


def test_totals_and_digests_of_all_types_are_the_servers(
    mariadb: MariaDb, session: Session
) -> None:
    query = everything(mariadb, session, mariadb.database())
    rows = chunk(session, query, Range())
    check = Check(query)
    ours = check.ours(keys_of(query.table, rows), rows)
    assert check.unchecked == ("kr",)
    assert check.total(Statement(session, check.total_sql(Range())).rows()) == ours.total
    theirs = check.theirs(Statement(session, check.rows_sql(Range())).rows())
    assert not len(ours.differing(theirs))
    session.execute(
        f"UPDATE {query.schema}.t SET ts6 = '2020-01-01', id = IF(id = 3, 33, id) WHERE id IN (1, "
        "3)"
    )
    theirs = check.theirs(Statement(session, check.rows_sql(Range())).rows())
    numbers = [int.from_bytes(key, "little") for key in ours.differing(theirs).to_pylist()]
    assert sorted(numbers) == [1, 3, 33]
    assert (
        check.total(Statement(session, check.total_sql(Range())).rows())
        == theirs.total
        != ours.total
    )


def test_columns_that_are_left_out_are_not_compared(mariadb: MariaDb, session: Session) -> None:
    query = replace(
        everything(mariadb, session, mariadb.database()), left_out=frozenset({"j", "i8", "kr"})
    )
    rows = chunk(session, query, Range())
    check = Check(query)
    assert not check.unchecked
    total = check.ours(keys_of(query.table, rows), rows).total
    assert check.total(Statement(session, check.total_sql(Range())).rows()) == total
    session.execute(f"UPDATE {query.schema}.t SET i8 = 1, j = '[]' WHERE id = 2")
    assert check.total(Statement(session, check.total_sql(Range())).rows()) == total


def test_totals_of_any_two_columns_are_the_servers(mariadb: MariaDb, session: Session) -> None:
    """What one column makes of a row's text must not change how the server writes another:
    bytes stay bytes.
    """
    query = everything(mariadb, session, mariadb.database())
    names = frozenset(column.name for column in query.table.columns) - {"id"}
    one_of_each = {
        column.type: column.name for column in query.table.columns if column.name in names - {"kr"}
    }
    differing = []
    for pair in itertools.combinations(one_of_each.values(), 2):
        of_two = replace(query, left_out=names - {*pair})
        rows, check = chunk(session, of_two, Range()), Check(of_two)
        if (
            check.total(Statement(session, check.total_sql(Range())).rows())
            != check.ours(keys_of(of_two.table, rows), rows).total
        ):
            differing.append(pair)
    assert not differing


@pytest.mark.parametrize("kind", KEYS)
def test_ranges_by_keys_of_every_kind_have_equal_totals(
    mariadb: MariaDb, session: Session, kind: str
) -> None:
    column, values = KEYS[kind]
    database = mariadb.database()
    mariadb.execute(f"CREATE TABLE {database}.t (v INT DEFAULT 7, {column} PRIMARY KEY)")
    session.execute(
        f"INSERT INTO {database}.t (k) VALUES {', '.join(f'({value})' for value in values)}"
    )
    query = query_of(session, database, "v = 7")
    check = Check(query)
    part, seen = Range(), 0
    while True:
        rows = chunk(session, query, part, 2)
        last = query.cursor(last_row(rows)) if len(rows) else None
        checked = Range(part.after, last if len(rows) == 2 else None)
        ours = check.ours(keys_of(query.table, rows), rows)
        bound = query.bounds(checked)
        assert check.total(Statement(session, check.total_sql(checked)).rows(bound)) == ours.total
        assert not len(
            ours.differing(check.theirs(Statement(session, check.rows_sql(checked)).rows(bound)))
        )
        seen += len(rows)
        if len(rows) < 2:
            break
        part = Range(last, None)
    assert seen == len(values)
