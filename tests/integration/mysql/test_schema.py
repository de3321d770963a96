"""Schemas by place in the log: DDL are barriers,
and rows get the columns that were true when they were written.
"""

import asyncio
from typing import Any

import pytest
from pyspark_tidemark.column_metadata import defaults_of, scalar

from server.capture.source.mysql import MySqlSource
from server.changefeed.source import SourceUri
from server.changefeed.table import TableIneligibleError
from server.puller.mysql.session.errors import DdlUnknownError, RowsMovedError, StatementLoggedError
from server.puller.mysql.session.options import MySqlOptions
from storage.meta.client import EtcdMeta
from storage.model.errors import TidemarkError
from tests.integration.mysql.replica import Feed, Row, following
from tests.mariadb import MariaDb, mariadb_only


async def test_a_ddl_read_late_still_gives_rows_their_columns(
    mariadb: MariaDb, meta: EtcdMeta
) -> None:
    """All is written before the log is read: the catalogue is three ALTERs ahead."""
    name = mariadb.database()
    mariadb.execute("CREATE TABLE t (id INT PRIMARY KEY, a INT)", database=name)
    async with following(mariadb.uri, meta, f"{name}.*") as feed:
        await feed.until(lambda: bool(feed.target.resolved) or True)
        start_ts, tables = (
            feed.start_ts,
            [each for versions in feed.target.versions.values() for _, each in versions],
        )
    mariadb.execute(
        *(
            "INSERT INTO t VALUES (1, 10)",
            "ALTER TABLE t ADD COLUMN b VARCHAR(9) FIRST",
            "INSERT INTO t VALUES ('x', 2, 20)",
        ),
        *("ALTER TABLE t CHANGE a c BIGINT UNSIGNED", "INSERT INTO t VALUES ('y', 3, 30)"),
        *(
            "ALTER TABLE t ADD COLUMN d DATE",
            "ALTER TABLE t DROP COLUMN b",
            "INSERT INTO t VALUES (4, 40, '2026-01-02')",
        ),
        *(
            "CREATE TABLE u (k VARCHAR(5) PRIMARY KEY)",
            "RENAME TABLE u TO w",
            "ALTER TABLE w ADD COLUMN n INT",
        ),
        *("INSERT INTO w VALUES ('a', 1)", "RENAME TABLE w TO v", "INSERT INTO v VALUES ('b', 2)"),
        *(
            "ALTER TABLE v DROP COLUMN n",
            "CREATE TABLE gone (id INT PRIMARY KEY)",
            "DROP TABLE gone",
        ),
        database=name,
    )
    async with following(mariadb.uri, meta, f"{name}.*", start_ts=start_ts, tables=tables) as feed:
        rows = [user_columns(row) for row in await feed.seen(f"{name}.t", 4)]
        others = [user_columns(row) for row in await feed.seen(f"{name}.v", 2)]
        await feed.until(lambda: last_columns(feed, f"{name}.v") == ["k"])
    assert [{key: str(value) for key, value in row.items()} for row in rows] == [
        {"id": "1", "a": "10"},
        {"b": "x", "id": "2", "a": "20"},
        {"b": "y", "id": "3", "c": "30"},
        {"id": "4", "c": "40", "d": "2026-01-02"},
    ]
    assert others == [{"k": "a", "n": 1}, {"k": "b", "n": 2}]


async def test_a_table_that_is_found_under_a_later_name_has_its_own_until_then(
    mariadb: MariaDb, meta: EtcdMeta
) -> None:
    """A statement that does not tell the columns, then names that change places, read late."""
    name = mariadb.database()
    tables = (
        "CREATE TABLE a (id INT PRIMARY KEY, v INT)",
        "CREATE TABLE b (id INT PRIMARY KEY, v VARCHAR(9))",
    )
    mariadb.execute(*tables, "INSERT INTO b VALUES (10, 'x')", database=name)
    async with following(mariadb.uri, meta, f"{name}.*") as feed:
        start_ts, begun = (
            feed.start_ts,
            [each for versions in feed.target.versions.values() for _, each in versions],
        )
    mariadb.execute(
        "ALTER TABLE b CONVERT TO CHARACTER SET latin1, MODIFY v VARCHAR(30)",
        *("INSERT INTO a VALUES (1, 1)", "RENAME TABLE a TO tmp, b TO a, tmp TO b"),
        *("INSERT INTO a VALUES (2, 'y')", "INSERT INTO b VALUES (3, 3)"),
        database=name,
    )
    async with following(mariadb.uri, meta, f"{name}.*", start_ts=start_ts, tables=begun) as feed:
        assert {row["id"] for row in await feed.seen(f"{name}.b", 2)} == {1, 3}
        assert {row["id"] for row in await feed.seen(f"{name}.a", 1)} <= {2, 10}
        assert [
            sorted(table.name for table in change.tables) for change in feed.target.changes
        ] == [
            [f"{name}.b"],
            [f"{name}.a", f"{name}.b"],
        ]


async def test_renames_truncations_and_drops_are_told_by_name(
    mariadb: MariaDb, meta: EtcdMeta
) -> None:
    name = mariadb.database()
    mariadb.execute(
        "CREATE TABLE a (id INT PRIMARY KEY)", "CREATE TABLE b (id INT PRIMARY KEY)", database=name
    )
    async with following(mariadb.uri, meta, f"{name}.*") as feed:
        mariadb.execute(
            *(
                "RENAME TABLE a TO tmp, b TO a, tmp TO b",
                "TRUNCATE TABLE a",
                "ALTER TABLE b RENAME TO c",
                "DROP TABLE a",
            ),
            *(
                "CREATE TABLE a LIKE c",
                "INSERT INTO a VALUES (1)",
                "CREATE OR REPLACE TABLE a (k INT PRIMARY KEY)",
            ),
            *("CREATE TABLE s AS SELECT 1 AS x", "CREATE TABLE r (PRIMARY KEY (x)) SELECT 2 AS x"),
            *("CREATE TABLE IF NOT EXISTS c (other INT)", "ALTER TABLE c COMMENT 'as it was'"),
            database=name,
        )
        await feed.seen(f"{name}.r", 1)
        told = [
            (
                sorted(table.name.split(".")[1] for table in change.tables),
                names(change.dropped),
                names(change.truncated),
            )
            for change in feed.target.changes
        ]
    assert told == [
        (["a", "b"], [], []),
        ([], [], ["a"]),
        (["c"], ["b"], []),
        ([], ["a"], []),
        (["a"], [], []),
        (["a"], ["a"], ["a"]),
        (["r"], [], []),
    ]
    spans = {
        span.table_id: [table.name.split(".")[1] for _, table in it]
        for span, it in feed.target.versions.items()
    }
    assert sorted(spans.values()) == [["a"], ["a"], ["a", "b", "c"], ["b", "a"], ["r"]]


async def test_without_tables_the_changefeed_goes_on_with_the_log(
    mariadb: MariaDb, meta: EtcdMeta
) -> None:
    """Else its checkpoint would stay where its last table was dropped,
    until the log is purged there.
    """
    name = mariadb.database()
    mariadb.execute(
        "CREATE TABLE t (id INT PRIMARY KEY)",
        "CREATE TABLE other (id INT PRIMARY KEY)",
        database=name,
    )
    async with following(mariadb.uri, meta, f"{name}.t*") as feed:
        mariadb.execute("INSERT INTO t VALUES (1)", database=name)
        await feed.seen(f"{name}.t", 1)
        assert feed.target.barrier_ts == 0, "tables tell for themselves"
        mariadb.execute("DROP TABLE t", database=name)
        await feed.until(lambda: len(feed.target.changes) == 1)
        dropped_ts = feed.target.changes[0].commit_ts
        await feed.until(lambda: feed.target.barrier_ts > dropped_ts)
        without_ts = feed.target.barrier_ts
        mariadb.execute("INSERT INTO other VALUES (1)", database=name)
        await feed.until(lambda: feed.target.barrier_ts > without_ts)
        mariadb.execute(
            "CREATE TABLE t2 (id INT PRIMARY KEY)", "INSERT INTO t2 VALUES (7)", database=name
        )
        (row,) = await feed.seen(f"{name}.t2", 1)
        await feed.until(lambda: feed.target.barrier_ts >= row["_commit_ts"])
        start_ts = feed.target.barrier_ts
    async with following(
        mariadb.uri, meta, f"{name}.nothing", start_ts=start_ts, tables=[]
    ) as feed:
        await feed.until(lambda: feed.target.barrier_ts >= start_ts)


@pytest.mark.parametrize("captured_ghost", [False, True])
async def test_an_online_schema_change_by_a_ghost_table_keeps_the_table(
    mariadb: MariaDb, meta: EtcdMeta, captured_ghost: bool
) -> None:
    name = mariadb.database()
    mariadb.execute("CREATE TABLE t (id INT PRIMARY KEY, a INT)", database=name)
    rules = [f"{name}.*"] if captured_ghost else [f"{name}.t"]
    async with following(mariadb.uri, meta, *rules) as feed:
        (before,) = feed.target.versions
        mariadb.execute(
            *(
                "INSERT INTO t VALUES (1, 1)",
                "CREATE TABLE _t_gho LIKE t",
                "ALTER TABLE _t_gho ADD COLUMN b INT",
            ),
            *(
                "INSERT INTO _t_gho SELECT id, a, 7 FROM t",
                "UPDATE t SET a = 2",
                "REPLACE INTO _t_gho VALUES (1, 2, 7)",
            ),
            *(
                "rename /* gh-ost */ table t to _t_del, _t_gho to t",
                "INSERT INTO t VALUES (2, 2, 2)",
                "DROP TABLE _t_del",
            ),
            *("UPDATE t SET a = 9 WHERE id = 2",),
            database=name,
        )
        rows = await feed.seen(f"{name}.t", 4)
    assert user_columns(rows[-1]) == {"id": 2, "a": 9, "b": 2}
    (after,) = [
        span
        for span, versions in feed.target.versions.items()
        if versions[-1][1].name == f"{name}.t"
    ]
    assert (after == before) is not captured_ghost, (
        "the table is what it was, or what the ghost was"
    )


async def test_columns_that_no_statement_told_of_are_taken_from_the_rows(
    mariadb: MariaDb, meta: EtcdMeta
) -> None:
    name = mariadb.database()
    mariadb.execute("CREATE TABLE t (id INT PRIMARY KEY)", database=name)
    async with following(mariadb.uri, meta, f"{name}.*") as feed:
        hidden = [
            "SET sql_log_bin=0",
            "ALTER TABLE t ADD COLUMN a INT",
            "CREATE TABLE n (id INT PRIMARY KEY, x INT)",
        ]
        mariadb.execute("INSERT INTO t VALUES (1)", database=name)
        mariadb.execute(*hidden, database=name)
        mariadb.execute("INSERT INTO t VALUES (2, 3)", "INSERT INTO n VALUES (1, 5)", database=name)
        rows = [user_columns(row) for row in await feed.seen(f"{name}.t", 2)]
        (other,) = await feed.seen(f"{name}.n", 1)
    assert rows == [{"id": 1}, {"id": 2, "a": 3}]
    assert user_columns(other) == {"id": 1, "x": 5}


@pytest.mark.parametrize(
    ("statements", "expected"),
    [
        (["SET SESSION binlog_format=STATEMENT", "INSERT INTO t VALUES (5)"], StatementLoggedError),
        (["ALTER TABLE t TRUNCATE PARTITION p0"], RowsMovedError),
    ],
)
async def test_what_would_lose_rows_stops_with_its_name(
    mariadb: MariaDb, meta: EtcdMeta, statements: list[str], expected: type[TidemarkError]
) -> None:
    name = mariadb.database()
    partitions = (
        "PARTITION BY RANGE (id) (PARTITION p0 VALUES LESS THAN (10), PARTITION p1 VALUES LESS "
        "THAN MAXVALUE)"
    )
    mariadb.execute(f"CREATE TABLE t (id INT PRIMARY KEY) {partitions}", database=name)
    with pytest.RaisesGroup(
        pytest.RaisesExc(expected, match="binlog\\.|partitions"), flatten_subgroups=True
    ):
        async with following(f"{mariadb.uri}?on-unclear-ddl=stop", meta, f"{name}.*") as feed:
            mariadb.execute("INSERT INTO t VALUES (1), (11)", *statements, database=name)
            await asyncio.wait_for(asyncio.wait([feed.task]), 200)


def test_a_statement_nobody_understands_is_refused_if_it_names_a_table_of_ours() -> None:
    from server.puller.mysql.ddl.statement import Kind, read_statement
    from server.puller.mysql.tables import Tables

    statement = read_statement("FROBNICATE TABLE `x`", "db")
    assert statement.kind is Kind.UNKNOWN
    Tables([]).check(statement, "FROBNICATE TABLE `x`", "here", 1)
    with pytest.raises(DdlUnknownError, match="FROBNICATE"):
        tables_named("x").check(statement, "FROBNICATE TABLE `x`", "here", 1)


_ADDED = """ALTER TABLE t ADD COLUMN status ENUM('new','it''s') DEFAULT 'new',
ADD (n INT NOT NULL, small TINYINT UNSIGNED DEFAULT 7), ADD price DECIMAL(10,2) DEFAULT 1.5,
ADD name VARCHAR(20) DEFAULT 'é ''x''', ADD code CHAR(4) DEFAULT 'a ',
ADD raw VARBINARY(9) DEFAULT 'abc', ADD day DATE DEFAULT '2024-02-29', ADD at DATETIME DEFAULT '2024-02-29 01:02:03',
ADD clock TIME(2) DEFAULT '-01:02:03', ADD flags SET('a','b','c') DEFAULT 'c,a', ADD made YEAR DEFAULT 24,
ADD ratio DOUBLE DEFAULT 1e-3, ADD never DATE NOT NULL, ADD note TEXT, ADD words TEXT NOT NULL, ADD later INT"""


async def test_what_older_rows_hold_in_added_columns_is_what_the_server_shows(
    mariadb: MariaDb, meta: EtcdMeta
) -> None:
    """An update of a row from before gives its image with all columns,
    after the default was changed.
    """
    name = mariadb.database()
    mariadb.execute(
        "CREATE TABLE t (id INT PRIMARY KEY, a INT)", "INSERT INTO t VALUES (1, 1)", database=name
    )
    async with following(mariadb.uri, meta, f"{name}.*") as feed:
        mariadb.execute(
            *(
                "SET sql_mode=''",
                _ADDED,
                "ALTER TABLE t ALTER status SET DEFAULT 'it''s'",
                "UPDATE t SET a = 2",
            ),
            database=name,
        )
        row = (await feed.seen(f"{name}.t", 1))[-1]
        schema = last_schema(feed, f"{name}.t")
    told = defaults_of(schema)
    shown = {
        column: scalar(value, schema.field(column).type).as_py() for column, value in told.items()
    }
    added = {
        column: value for column, value in user_columns(row).items() if column not in ("id", "a")
    }
    assert added == dict.fromkeys(added) | shown
    assert {column for column, value in added.items() if value is None} == {
        "never",
        "note",
        "later",
    }


def tables_named(name: str) -> Any:
    from server.capture.source.mysql import mysql_table
    from server.changefeed.table import TableRecord
    from server.puller.mysql.tables import Tables
    from storage.mysql.schema import Column, Table, Type

    table = Table(1, name, (Column(name="id", type=Type.LONG, nullable=False),), ("id",))
    return Tables([mysql_table(TableRecord("db", table.to_doc()))])


def user_columns(row: Row) -> Row:
    return {key: value for key, value in row.items() if not key.startswith("_")}


def last_schema(feed: Feed, name: str) -> Any:
    (versions,) = [each for each in feed.target.versions.values() if each[-1][1].name == name]
    return versions[-1][1].mounter.schema


def last_columns(feed: Feed, name: str) -> list[str]:
    return [column for column in last_schema(feed, name).names if not column.startswith("_")]


def names(qualified: tuple[str, ...]) -> list[str]:
    return [each.split(".")[1] for each in qualified]


async def test_rows_that_a_foreign_key_changes_are_refused_by_name_as_no_event_has_them(
    mariadb: MariaDb, meta: EtcdMeta
) -> None:
    """No event of the log has the rows that a foreign key changes."""
    name = mariadb.database()
    key = "CONSTRAINT ours FOREIGN KEY (p) REFERENCES p (id)"
    mariadb.execute(
        "CREATE TABLE p (id INT PRIMARY KEY)",
        f"CREATE TABLE child (id INT PRIMARY KEY, p INT, {key} ON DELETE CASCADE)",
        "CREATE TABLE kept (id INT PRIMARY KEY, p INT, CONSTRAINT theirs FOREIGN KEY (p) "
        "REFERENCES p (id))",
        database=name,
    )
    source = MySqlSource("feed", MySqlOptions.of(SourceUri.parse(mariadb.uri)), meta)
    records = {
        record.table_name: record
        for record in await source.snapshot(0)
        if record.schema_name == name
    }
    with pytest.raises(
        TableIneligibleError,
        match=r"child cannot be replicated: .*ours \(ON DELETE CASCADE .*RESTRICT",
    ):
        source.table(records["child"])
    assert source.table(records["kept"]).name == f"{name}.kept"
    kept = (
        "ALTER TABLE kept DROP FOREIGN KEY theirs, ADD CONSTRAINT other FOREIGN KEY (p) "
        "REFERENCES p (id)"
    )
    with pytest.RaisesGroup(
        pytest.RaisesExc(TableIneligibleError, match="ON UPDATE SET NULL"), flatten_subgroups=True
    ):
        async with following(mariadb.uri, meta, f"{name}.kept") as feed:
            feed.target.table = source.table  # type: ignore[method-assign]  # as without --ignore-ineligible-table
            mariadb.execute(
                f"{kept} ON UPDATE SET NULL", "INSERT INTO kept VALUES (1, NULL)", database=name
            )
            await asyncio.wait_for(asyncio.wait([feed.task]), 200)


@mariadb_only("makes tables with times as MariaDB 5.3 had them")
async def test_fractions_of_seconds_of_mariadb_5_3_are_refused_by_name(
    mariadb: MariaDb, meta: EtcdMeta
) -> None:
    name = mariadb.database()
    made = "(id INT PRIMARY KEY, d DATETIME(6))"
    old, today = (f"SET GLOBAL mysql56_temporal_format={value}" for value in ("OFF", "ON"))
    mariadb.execute(old, f"CREATE TABLE a {made}", today, database=name)
    source = MySqlSource("feed", MySqlOptions.of(SourceUri.parse(mariadb.uri)), meta)
    records = await source.snapshot(await source.now())
    (record,) = [each for each in records if each.schema_name == name]
    with pytest.raises(TableIneligibleError, match="column d has fractions of a second"):
        source.table(record)
    async with following(mariadb.uri, meta, f"{name}.*") as feed:
        made_later = f"CREATE TABLE b {made}"
        mariadb.execute(old, made_later, today, "INSERT INTO b VALUES (1, NOW(6))", database=name)
        mariadb.execute(
            "CREATE TABLE c (id INT PRIMARY KEY)", "INSERT INTO c VALUES (1)", database=name
        )
        await feed.seen(f"{name}.c", 1)
        spans = {
            span
            for span, versions in feed.target.versions.items()
            if versions[-1][1].name == f"{name}.b"
        }
        assert not any(feed.rows_of(span) for span in spans), "rows that cannot be read"
