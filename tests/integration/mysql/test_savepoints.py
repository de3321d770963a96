"""Transactions with savepoints on a real server: what readers get equals SELECT,
or the changefeed stops by name.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pymysql
import pytest
from pymysql.cursors import Cursor

from server.puller.mysql.session.errors import SavepointUnclearError
from storage.meta.client import EtcdMeta
from tests.integration.capture.processes import running_cluster
from tests.integration.mysql.lake import Lake
from tests.integration.mysql.replica import Feed, following
from tests.mariadb import MariaDb, mariadb_only, running_mariadb

TABLES = (
    "CREATE TABLE t (id INT PRIMARY KEY, v INT)",
    "CREATE TABLE m (a INT) ENGINE=MyISAM",
    "CREATE TABLE a (a INT) ENGINE=Aria",
    "CREATE TABLE both_kinds (id INT PRIMARY KEY)",
    "CREATE TRIGGER tr AFTER INSERT ON both_kinds FOR EACH ROW INSERT INTO m VALUES (NEW.id)",
    (
        "CREATE PROCEDURE p(x INT) BEGIN SAVEPOINT p1; REPLACE INTO t VALUES (x, 1); ROLLBACK TO p1; "
        "END"
    ),
)
NAMES = ("`s1`", "S1", "`it``s`", "`a b`", '"quoted"', "`select`", "`é`")
REFUSED = (1062, 1305, 1178, 1399, 1231, 1785, 4091)
"""A key that is there, a savepoint that is not, one beside an Aria table,
a statement within an XA transaction; in MySQL a mode of MariaDB's,
a MyISAM table within a transaction that has a GTID, a temporary one within XA.
"""
LOGS_ROLLBACK = mariadb_only("ROLLBACK TO in the log; MySQL leaves the undone rows out of it")
END_ID = 1_000_000


def state_of(feed: Feed) -> dict[Any, Any]:
    (span,) = [
        span
        for span, versions in feed.target.versions.items()
        if versions[-1][1].record.table_name == "t"
    ]
    rows: dict[Any, Any] = {}
    for change in feed.target.changes_of(span):
        if change["_op"] == "delete":
            rows.pop(change["id"], None)
        else:
            rows[change["id"]] = change["v"]
    return rows


async def compare(server: MariaDb, feed: Feed, database: str) -> None:
    """Wait for a last row, then compare all rows with SELECT."""
    server.execute(f"INSERT INTO t VALUES ({END_ID}, 0)", database=database)
    await feed.until(lambda: END_ID in state_of(feed))
    assert state_of(feed) == dict(server.execute("SELECT id, v FROM t", database=database))
    server.execute(f"DELETE FROM t WHERE id = {END_ID}", database=database)


@pytest.mark.parametrize("seed", range(3))
async def test_random_savepoints_equal_select(mariadb: MariaDb, meta: EtcdMeta, seed: int) -> None:
    name, dice = mariadb.database(), random.Random(seed)
    mariadb.execute(*TABLES, database=name)
    async with following(mariadb.uri, meta, f"{name}.t") as feed:
        session = mariadb.connect(name)
        with session, session.cursor() as cursor:
            for number in range(60):
                for statement in transaction(dice, number):
                    run(cursor, statement)
        await compare(mariadb, feed, name)


def run(cursor: Cursor, statement: str) -> None:
    try:
        cursor.execute(statement)
    except pymysql.Error as err:
        if err.args[0] not in REFUSED:
            raise


def transaction(dice: random.Random, number: int) -> Iterator[str]:
    """Rows between savepoints, with what makes the server log ROLLBACK TO: temporary tables,
    MyISAM and Aria tables.
    """
    xid = f"'x{number}'"
    xa = dice.random() < 0.2
    yield dice.choice(
        ("SET sql_mode=DEFAULT", "SET sql_mode='ANSI_QUOTES'", "SET sql_mode='ORACLE'")
    )
    yield f"SET sql_quote_show_create={dice.randrange(2)}"
    yield f"SET binlog_direct_non_transactional_updates={dice.randrange(2)}"
    yield "DROP TEMPORARY TABLE IF EXISTS x"
    if dice.random() < 0.5:
        yield "CREATE TEMPORARY TABLE x (a INT)"
    yield f"XA START {xid}" if xa else "START TRANSACTION"
    for _ in range(dice.randrange(3, 14)):
        yield step(dice)
    if xa:
        yield f"XA END {xid}"
        yield f"XA PREPARE {xid}"
        yield f"XA {dice.choice(('COMMIT', 'COMMIT', 'ROLLBACK'))} {xid}"
    else:
        yield dice.choice(("COMMIT", "COMMIT", "COMMIT", "ROLLBACK"))


def step(dice: random.Random) -> str:
    key, name = dice.randrange(20), dice.choice(NAMES)
    name = name if name != '"quoted"' else "quoted"
    rows = (
        f"REPLACE INTO t VALUES ({key}, {dice.randrange(99)}), ({key + 1}, 5)",
        f"UPDATE t SET v = v + 1 WHERE id > {key}",
        f"UPDATE t SET id = id + 100 WHERE id = {key}",
        f"DELETE FROM t WHERE id = {key}",
        f"INSERT INTO t VALUES ({key}, 1), ({key}, 2)",  # fails, and leaves nothing behind
        f"CALL p({key})",
    )
    others = (
        "CREATE TEMPORARY TABLE IF NOT EXISTS x (a INT)",
        "DROP TEMPORARY TABLE IF EXISTS x",
        "INSERT INTO m VALUES (1)",
        "INSERT INTO a VALUES (1)",
        f"INSERT INTO both_kinds VALUES ({dice.randrange(10000)})",
    )
    kind = dice.random()
    if kind < 0.4:
        return dice.choice(rows)
    if kind < 0.6:
        return dice.choice(others)
    return dice.choice(
        (f"SAVEPOINT {name}", f"ROLLBACK TO {name}", f"ROLLBACK WORK TO SAVEPOINT {name}")
    )


SEEN_WRONG: Sequence[Sequence[str]] = (
    ("CREATE TEMPORARY TABLE x (a INT)", "SAVEPOINT s1", "INSERT INTO t VALUES (12, 2)", "DELETE FROM t WHERE id = 1",
     "ROLLBACK TO s1"),
    ("SAVEPOINT s1", "INSERT INTO t VALUES (12, 2)", "UPDATE t SET v = 99 WHERE id = 1", "INSERT INTO m VALUES (1)",
     "ROLLBACK TO s1", "INSERT INTO t VALUES (13, 3)"),
    ("SAVEPOINT s1", "INSERT INTO t VALUES (12, 2)", "INSERT INTO a VALUES (1)", "ROLLBACK TO s1"),
    ("INSERT INTO m VALUES (1)", "SAVEPOINT s1", "INSERT INTO t VALUES (12, 2)", "ROLLBACK TO s1"),
)  # fmt: skip


@LOGS_ROLLBACK
@pytest.mark.parametrize("statements", SEEN_WRONG)
async def test_rows_that_were_delivered_though_they_were_undone(
    mariadb: MariaDb, meta: EtcdMeta, statements: Sequence[str]
) -> None:
    name = mariadb.database()
    mariadb.execute(*TABLES, database=name)
    async with following(mariadb.uri, meta, f"{name}.t") as feed:
        mariadb.execute("INSERT INTO t VALUES (1, 1), (2, 2)", database=name)
        log, position = mariadb.execute("SHOW MASTER STATUS")[0][
            :2
        ]  # events of other tests may be too large to be shown
        mariadb.execute(
            "BEGIN", "INSERT INTO t VALUES (11, 1)", *statements, "COMMIT", database=name
        )
        events = mariadb.execute(f"SHOW BINLOG EVENTS IN '{log}' FROM {position}")
        assert any("ROLLBACK TO" in event[5] for event in events)
        await compare(mariadb, feed, name)


SET_BY_TRIGGER = (
    "CREATE TABLE a.t (id INT PRIMARY KEY, v INT)",
    "CREATE TABLE a.u (a INT)",
    (
        "CREATE TRIGGER a.tr AFTER INSERT ON a.u FOR EACH ROW BEGIN SAVEPOINT s; INSERT INTO a.t "
        "VALUES (NEW.a, 1); END"
    ),
)
OUTER = (
    "BEGIN", "INSERT INTO t VALUES (11, 1)", "CREATE TEMPORARY TABLE x (a INT)", "SAVEPOINT s",
    "INSERT INTO t VALUES (12, 1)", "INSERT INTO u VALUES (20)", "ROLLBACK TO s", "COMMIT",
)  # fmt: skip


async def follow_for_ever(server: MariaDb, meta: EtcdMeta) -> None:
    async with following(server.uri, meta, "a.t") as feed:
        server.execute(*OUTER, database="a")
        await feed.until(lambda: END_ID in state_of(feed))


@LOGS_ROLLBACK
async def test_a_savepoint_that_a_trigger_may_have_set_stops_the_changefeed_by_name(
    meta: EtcdMeta,
) -> None:
    """The server goes back to its session's savepoint;
    the log has one of the same name behind it.
    """
    with running_mariadb() as server:
        server.execute("CREATE DATABASE a", *SET_BY_TRIGGER)
        with pytest.raises(BaseExceptionGroup) as stopped:
            await follow_for_ever(server, meta)
        assert stopped.group_contains(SavepointUnclearError, match="'s' in the transaction")
        assert server.execute("SELECT id FROM a.t") == [(11,)]


async def test_a_name_that_is_set_twice_moves_where_no_trigger_sets_savepoints(
    meta: EtcdMeta,
) -> None:
    with running_mariadb() as server:
        server.execute("CREATE DATABASE a", *SET_BY_TRIGGER[:2])
        async with following(server.uri, meta, "a.t") as feed:
            server.execute(
                *OUTER[:5], "SAVEPOINT S", "INSERT INTO t VALUES (13, 1)", *OUTER[6:], database="a"
            )
            await compare(server, feed, "a")
        assert server.execute("SELECT id FROM a.t") == [(11,), (12,)]


@LOGS_ROLLBACK
@pytest.mark.timeout(240)
def test_rows_that_were_spilled_are_undone(tmp_path: Path) -> None:
    """The transaction is larger than what is held of it,
    so its rows are at the sorter when they are undone.
    """
    with running_mariadb() as server, running_cluster(tmp_path) as cluster:
        server.execute(
            "CREATE DATABASE a", "CREATE TABLE a.t (id INT PRIMARY KEY, v INT, w LONGTEXT)"
        )
        create = [
            "changefeed",
            "create",
            "-c",
            "f",
            "--sink-uri",
            "parquet:///lake",
            "--filter",
            "a.*",
        ]
        made = cluster.cli(*create, "--source-uri", server.uri)
        assert made["state"] == "normal", made
        lake = Lake(cluster, "f", made["start_ts"])
        server.execute("INSERT INTO a.t VALUES (1, 1, NULL)")
        many = "SELECT seq, 0, REPEAT('x', 1000000) FROM"
        server.execute(
            *(
                "BEGIN",
                "INSERT INTO t VALUES (2, 1, NULL)",
                "CREATE TEMPORARY TABLE x (a INT)",
                "SAVEPOINT s",
            ),
            *(
                "DELETE FROM t WHERE id = 1",
                f"INSERT INTO t {many} seq_100_to_180",
                "SAVEPOINT inner_one",
            ),
            *(
                "INSERT INTO t VALUES (3, 1, NULL)",
                "ROLLBACK TO s",
                "INSERT INTO t VALUES (4, 1, NULL)",
                "COMMIT",
            ),
            *("INSERT INTO t VALUES (9, 1, NULL)",),
            database="a",
        )
        lake.follow(lambda tables: 9 in tables.get("a.t", {}))
        assert sorted(lake.tables["a.t"]) == [1, 2, 4, 9]
        assert "ErrMySQLTransactionTorn" in cluster.capture.log.read_text(), (
            "it was given, and taken back"
        )
