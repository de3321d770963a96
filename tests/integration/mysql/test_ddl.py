"""What DDL and other statements of a real log do, at the puller's output:
tables by column identity, stops by name.

Each line was followed wrongly, in silence, while statements were read by verbs and names only.
"""

# ruff: noqa: E501 (statements are shown on one line)

import asyncio
from collections.abc import Sequence
from typing import Any

import pymysql
import pytest

from server.puller.mysql.ddl.statement import read_statement
from server.puller.mysql.session.errors import DdlUnknownError, RowsMovedError, StatementLoggedError
from server.puller.mysql.transaction import scanner
from server.puller.mysql.transaction.scanner import LogAhead
from server.puller.source import TableChange
from sink.mounter import COLUMN_ID, DEFAULT
from storage.meta.client import EtcdMeta
from storage.model.errors import TidemarkError
from tests.integration.mysql.replica import Feed, following
from tests.integration.mysql.test_schema import tables_named
from tests.mariadb import MariaDb, mariadb_only, running_mariadb

T = "CREATE TABLE t (id INT PRIMARY KEY, v INT)"
IN_STATEMENT = "SET STATEMENT lock_wait_timeout=5 FOR "


def columns_of(change: TableChange) -> dict[str, tuple[int, str | None]]:
    """By name: identity, and what older rows hold."""
    (table,) = change.tables
    found = {}
    for field in table.mounter.schema:
        if not field.name.startswith("_"):
            told = field.metadata.get(DEFAULT)
            found[field.name] = int(field.metadata[COLUMN_ID]), told.decode() if told else None
    return found


async def told(feed: Feed, database: str, server: MariaDb) -> Sequence[TableChange]:
    """All changes so far: a table of the end is awaited."""
    server.execute(
        "CREATE TABLE the_end (id INT PRIMARY KEY)",
        "INSERT INTO the_end VALUES (1)",
        database=database,
    )
    await feed.seen(f"{database}.the_end", 1)
    return feed.target.changes[:-1]


@pytest.mark.parametrize(
    ("statements", "expected"),
    [
        (["ALTER TABLE t ADD x INT DEFAULT 3", "ALTER TABLE t ADD y INT DEFAULT 4"],
         [{"id": (1, None), "v": (2, None), "x": (3, "3")},
          {"id": (1, None), "v": (2, None), "x": (3, "3"), "y": (4, "4")}]),
        (["ALTER TABLE t RENAME COLUMN v TO w", "ALTER TABLE t RENAME COLUMN w TO z"],
         [{"id": (1, None), "w": (2, None)}, {"id": (1, None), "z": (2, None)}]),
        (["ALTER TABLE t ADD n INT DEFAULT 5", "ALTER TABLE t RENAME COLUMN n TO m"],
         [{"id": (1, None), "v": (2, None), "n": (3, "5")}, {"id": (1, None), "v": (2, None), "m": (3, "5")}]),
        (["ALTER TABLE t DROP COLUMN v", "ALTER TABLE t ADD COLUMN v INT DEFAULT 9"],
         [{"id": (1, None)}, {"id": (1, None), "v": (3, "9")}]),
        (["ALTER TABLE t DROP v, ADD v INT DEFAULT 5"], [{"id": (1, None), "v": (3, "5")}]),
        ([IN_STATEMENT + "ALTER TABLE t ADD w INT DEFAULT 5"], [{"id": (1, None), "v": (2, None), "w": (3, "5")}]),
        ([IN_STATEMENT + "ALTER TABLE t RENAME COLUMN v TO w"], [{"id": (1, None), "w": (2, None)}]),
        (["/* app:1 */ ALTER TABLE t RENAME /* x */ COLUMN`V`TO`w`"], [{"id": (1, None), "w": (2, None)}]),
        (["SET sql_mode='ANSI_QUOTES'", 'ALTER TABLE "t" RENAME COLUMN "v" TO "w"'], [{"id": (1, None), "w": (2, None)}]),
    ],
)  # fmt: skip
async def test_columns_are_followed_by_their_identity(
    mariadb: MariaDb, meta: EtcdMeta, statements: list[str], expected: Any
) -> None:
    """All is written before the log is read: the catalogue is at the end."""
    name = mariadb.database()
    mariadb.execute(T, "INSERT INTO t VALUES (1, 1)", database=name)
    async with following(mariadb.uri, meta, f"{name}.*") as feed:
        start_ts, tables = (
            feed.start_ts,
            [each for versions in feed.target.versions.values() for _, each in versions],
        )
    mariadb.execute(*statements, database=name)
    async with following(mariadb.uri, meta, f"{name}.*", start_ts=start_ts, tables=tables) as feed:
        changes = await told(feed, name, mariadb)
    assert [columns_of(change) for change in changes] == expected


@pytest.mark.parametrize(
    ("statement", "dropped", "truncated"),
    [
        (IN_STATEMENT + "TRUNCATE TABLE t", [], ["t"]),
        ("CREATE OR REPLACE TABLE t (id INT PRIMARY KEY, v INT)", ["t"], ["t"]),
        (IN_STATEMENT + "CREATE OR REPLACE TABLE t (id INT PRIMARY KEY, v INT)", ["t"], ["t"]),
        ("CREATE OR REPLACE TABLE t LIKE u", ["t"], ["t"]),
        ("CREATE OR REPLACE TABLE t LIKE {elsewhere}.other", ["t"], ["t"]),
        ("CREATE OR REPLACE TABLE t (PRIMARY KEY (id)) AS SELECT * FROM u", ["t"], ["t"]),
        (IN_STATEMENT + "RENAME TABLE t TO t2", ["t"], []),
        (IN_STATEMENT + "DROP TABLE t", ["t"], []),
    ],
)
async def test_tables_that_end_or_are_replaced_are_told(
    mariadb: MariaDb, meta: EtcdMeta, statement: str, dropped: list[str], truncated: list[str]
) -> None:
    name, elsewhere = mariadb.database(), mariadb.database()
    mariadb.execute(f"CREATE TABLE {elsewhere}.other (k INT PRIMARY KEY)")
    mariadb.execute(T, "CREATE TABLE u (id INT PRIMARY KEY, v INT)", database=name)
    async with following(mariadb.uri, meta, f"{name}.*") as feed:
        before = {
            table.name: table.span
            for versions in feed.target.versions.values()
            for _, table in versions
        }
        mariadb.execute(statement.format(elsewhere=elsewhere), database=name)
        (change,) = await told(feed, name, mariadb)
    assert [change.dropped, change.truncated] == [
        tuple(f"{name}.{each}" for each in part) for part in (dropped, truncated)
    ]
    if "t" in dropped and "t" in truncated:
        assert change.tables[0].span != before[f"{name}.t"], (
            "rows of the old table are in the span of the new one"
        )
        assert min(number for number, _ in columns_of(change).values()) > 2, (
            "ids of the old table are given out again"
        )


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE OR REPLACE TABLE t (id INT PRIMARY KEY, c INT DEFAULT 'x')",
        "CREATE OR REPLACE TABLE t (PRIMARY KEY (id)) AS SELECT * FROM u, missing",
        "CREATE OR REPLACE TABLE t (PRIMARY KEY (id)) AS SELECT 1 AS id FROM u",
        "DROP TABLE t, missing",
    ],
)
async def test_what_a_statement_did_before_it_failed_is_followed(
    mariadb: MariaDb, meta: EtcdMeta, statement: str
) -> None:
    """A CREATE OR REPLACE that fails is in the log with its error, and its table is gone."""
    name = mariadb.database()
    mariadb.execute(
        T, "CREATE TABLE u (id INT PRIMARY KEY)", "INSERT INTO u VALUES (1), (2)", database=name
    )
    async with following(mariadb.uri, meta, f"{name}.*") as feed:
        with pytest.raises(pymysql.Error):
            mariadb.execute(statement, database=name)
        changes = await told(feed, name, mariadb)
    there = [table for (table,) in mariadb.execute("SHOW TABLES LIKE 't'", database=name)]
    assert [change.dropped for change in changes] == ([] if there else [(f"{name}.t",)])
    assert not [table for change in changes for table in change.tables]


@pytest.mark.parametrize(
    ("statement", "expected", "message"),
    [
        pytest.param("SET STATEMENT binlog_format=STATEMENT FOR UPDATE t SET v = 50", StatementLoggedError, "binlog_format", marks=mariadb_only("SET STATEMENT")),
        ("SET sql_mode=''; ALTER TABLE t MODIFY v INT NOT NULL", RowsMovedError, "NULL becomes a value"),
        ("SET sql_mode=''; ALTER TABLE t MODIFY b VARCHAR(3)", RowsMovedError, "may be cut"),
        ("ALTER TABLE t MODIFY d DATETIME", RowsMovedError, "fractions"),
        ("ALTER TABLE t MODIFY s SET('y','x')", RowsMovedError, "members"),
        ("ALTER TABLE t CONVERT TO CHARACTER SET latin1", RowsMovedError, "character set"),
        pytest.param("ALTER IGNORE TABLE t MODIFY b VARCHAR(20), ADD UNIQUE (b)", RowsMovedError, "rows move", marks=mariadb_only("ALTER IGNORE")),
        ("ALTER TABLE t ADD n INT NOT NULL AUTO_INCREMENT UNIQUE", RowsMovedError, "computed for each row"),
        ("ALTER TABLE t ADD g INT AS (v * 2) STORED", RowsMovedError, "computed for each row"),
        pytest.param("ALTER TABLE t ADD u UUID DEFAULT uuid()", RowsMovedError, "not known", marks=mariadb_only("the type UUID")),
        ("SET binlog_format=MIXED; CREATE TABLE w (PRIMARY KEY (id)) AS SELECT * FROM t", RowsMovedError, "no event"),
        ("SET binlog_format=MIXED; UPDATE vw SET v = 9", StatementLoggedError, "binlog_format"),
        ("SET binlog_format=MIXED; INSERT INTO other VALUES (1)", StatementLoggedError, "have triggers"),
        ("SET binlog_format=STATEMENT; INSERT INTO plain VALUES (fn())", StatementLoggedError, "binlog_format"),
        ("SET binlog_format=STATEMENT; LOAD DATA LOCAL INFILE '{file}' INTO TABLE t (id, v)", StatementLoggedError, "LOAD"),
    ],
)  # fmt: skip
async def test_what_no_event_tells_stops_by_name(
    mariadb: MariaDb,
    meta: EtcdMeta,
    tmp_path: Any,
    statement: str,
    expected: type[TidemarkError],
    message: str,
) -> None:
    name, elsewhere = mariadb.database(), mariadb.database()
    mariadb.execute(
        "CREATE TABLE t (id INT PRIMARY KEY, v INT, b VARCHAR(9), d DATETIME(6), s SET('x','y'))",
        "INSERT INTO t VALUES (1, NULL, 'abcdef', '2024-01-01 10:00:00.654321', 'x,y')",
        f"CREATE TABLE {elsewhere}.other (id INT PRIMARY KEY)",
        f"CREATE TABLE {elsewhere}.plain (id INT PRIMARY KEY)",
        f"CREATE VIEW {elsewhere}.vw AS SELECT * FROM t",
        f"CREATE TRIGGER {elsewhere}.tr AFTER INSERT ON {elsewhere}.other FOR EACH ROW UPDATE "
        f"{name}.t SET v = 9",
        f"CREATE FUNCTION {elsewhere}.fn() RETURNS INT DETERMINISTIC BEGIN UPDATE {name}.t SET v "
        "= 9; RETURN 1; END",
        database=name,
    )
    (tmp_path / "rows").write_text("7\t7\n")
    begun, written = statement.format(file=tmp_path / "rows").rpartition("; ")[::2]
    outside = any(word in statement for word in ("vw", "other", "plain"))
    with pytest.RaisesGroup(pytest.RaisesExc(expected, match=message), flatten_subgroups=True):
        async with following(f"{mariadb.uri}?on-unclear-ddl=stop", meta, f"{name}.*") as feed:
            await asyncio.to_thread(
                _run,
                mariadb,
                elsewhere if outside else name,
                [begun, written] if begun else [written],
            )
            await asyncio.wait_for(asyncio.wait([feed.task]), 200)


def _run(server: MariaDb, database: str, statements: list[str]) -> None:
    connection = pymysql.connect(
        host="127.0.0.1",
        port=server.port,
        user="root",
        database=database,
        autocommit=True,
        local_infile=True,
    )
    try:
        with connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
    finally:
        connection.close()


async def test_rows_of_other_tables_as_statements_stop_nothing(
    mariadb: MariaDb, meta: EtcdMeta
) -> None:
    name, elsewhere = mariadb.database(), mariadb.database()
    mariadb.execute(T, f"CREATE TABLE {elsewhere}.plain (id INT PRIMARY KEY, v INT)", database=name)
    async with following(mariadb.uri, meta, f"{name}.*") as feed:
        mariadb.execute(
            "SET binlog_format=STATEMENT",
            "INSERT INTO plain (id, v) VALUES (1, ABS(-2))",
            "UPDATE plain SET v = 3 WHERE id = 1",
            "DELETE FROM plain",
            database=elsewhere,
        )
        assert not await told(feed, name, mariadb)


@mariadb_only("MIXED logs the statement and not its rows")
async def test_a_trigger_that_is_gone_when_the_log_is_read_still_stops_by_name(
    mariadb: MariaDb, meta: EtcdMeta
) -> None:
    name, elsewhere = mariadb.database(), mariadb.database()
    mariadb.execute(T, f"CREATE TABLE {elsewhere}.other (id INT PRIMARY KEY)", database=name)
    async with following(mariadb.uri, meta, f"{name}.*") as feed:
        start_ts, tables = (
            feed.start_ts,
            [each for versions in feed.target.versions.values() for _, each in versions],
        )
    mariadb.execute(
        f"CREATE TRIGGER {elsewhere}.tr AFTER INSERT ON {elsewhere}.other FOR EACH ROW UPDATE "
        f"{name}.t SET v = 9",
        "SET binlog_format=MIXED",
        f"INSERT INTO {elsewhere}.other VALUES (1)",
        f"DROP TRIGGER {elsewhere}.tr",
    )
    with pytest.RaisesGroup(
        pytest.RaisesExc(StatementLoggedError, match="have triggers"), flatten_subgroups=True
    ):
        async with following(
            mariadb.uri, meta, f"{name}.*", start_ts=start_ts, tables=tables
        ) as feed:
            await asyncio.wait_for(asyncio.wait([feed.task]), 200)


async def test_an_alter_of_two_phases_that_fails_changes_nothing(meta: EtcdMeta) -> None:
    with running_mariadb("--binlog-alter-two-phase=ON") as server:
        name = server.database()
        server.execute(
            "CREATE TABLE t (id INT PRIMARY KEY, a INT)",
            "INSERT INTO t VALUES (1,5),(2,5)",
            database=name,
        )
        async with following(server.uri, meta, f"{name}.*") as feed:
            with pytest.raises(Exception, match="Duplicate"):
                server.execute("ALTER TABLE t RENAME TO t2, ADD UNIQUE KEY (a)", database=name)
            server.execute(
                "ALTER TABLE t ADD b INT DEFAULT 7", "INSERT INTO t VALUES (3, 6, 8)", database=name
            )
            changes = await told(feed, name, server)
            rows = await feed.seen(f"{name}.t", 1)
    assert [columns_of(change) for change in changes] == [
        {"id": (1, None), "a": (2, None), "b": (3, "7")}
    ]
    assert [(row["id"], row["b"]) for row in rows] == [(3, 8)]


def test_a_statement_that_is_not_understood_stops_if_it_names_a_schema_of_ours() -> None:
    query = "FROBNICATE SCHEMA `db`"
    with pytest.raises(DdlUnknownError, match="db"):
        tables_named("t").check(read_statement(query, "x"), query, "here", 1)


async def test_a_table_that_is_there_already_is_not_looked_for_in_the_log(
    mariadb: MariaDb, meta: EtcdMeta, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Services create all their tables IF NOT EXISTS when they start: to look each of them up would
    read the rest of the log as often.
    """
    name, looked = mariadb.database(), list[tuple[str, str]]()
    mariadb.execute(T, "CREATE TABLE u (id INT PRIMARY KEY, w INT)", database=name)
    look = LogAhead.definitions

    def noted(ahead: LogAhead, session: Any, names: Any, place: Any) -> Any:
        looked.extend(names)
        return look(ahead, session, names, place)

    monkeypatch.setattr(LogAhead, "definitions", noted)
    async with following(mariadb.uri, meta, f"{name}.*") as feed:
        mariadb.execute(
            "CREATE TABLE IF NOT EXISTS t (other INT)",
            "CREATE TABLE IF NOT EXISTS t LIKE u",
            "INSERT INTO t VALUES (1, 2)",
            database=name,
        )
        assert [row["v"] for row in await feed.seen(f"{name}.t", 1)] == [2]
        assert not await told(feed, name, mariadb)
    assert looked == [(name, "the_end")]


async def test_many_tables_without_rows_are_looked_for_in_the_log_once(
    mariadb: MariaDb, meta: EtcdMeta, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind, each of them would read the rest of the log."""
    name, begins = mariadb.database(), list[Any]()
    mariadb.execute(T, database=name)
    async with following(mariadb.uri, meta, f"{name}.*") as feed:
        start_ts, tables = (
            feed.start_ts,
            [each for versions in feed.target.versions.values() for _, each in versions],
        )
    mariadb.execute(
        *(f"CREATE TABLE t{each} (id INT PRIMARY KEY, c VARCHAR(9))" for each in range(30)),
        "INSERT INTO t7 VALUES (1, 'é')",
        "ALTER TABLE t8 ADD x INT DEFAULT 3",
        "INSERT INTO t8 VALUES (1, 'é', 4)",
        database=name,
    )
    opens = scanner.open_stream

    def noted(session: Any, place: Any, *rest: Any, **named: Any) -> Any:
        begins.append(place)
        return opens(session, place, *rest, **named)

    monkeypatch.setattr(scanner, "open_stream", noted)
    async with following(mariadb.uri, meta, f"{name}.*", start_ts=start_ts, tables=tables) as feed:
        (row,) = await feed.seen(f"{name}.t8", 1)
        changes = [change for change in feed.target.changes if change.tables]
    assert (row["c"], row["x"]) == ("é", 4)
    assert len(changes) == 31
    # Other tests write to this log, too.
    assert len(begins) < 15
