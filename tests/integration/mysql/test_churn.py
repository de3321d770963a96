"""Random writers, DDLs and broken log connections: what was told, applied in order,
is what SELECT gives.
"""

import asyncio
import random
from contextlib import suppress
from typing import Any

import pymysql
import pytest

from storage.meta.client import EtcdMeta
from tests.integration.mysql.replica import Feed, following
from tests.mariadb import MariaDb, running_mariadb

STEPS = 120
KEYS = 40


@pytest.mark.parametrize("seed", [1, 2])
async def test_what_was_told_is_what_select_gives(meta: EtcdMeta, seed: int) -> None:
    with running_mariadb("--log-bin-compress=ON") as server:
        server.execute(
            "CREATE DATABASE a",
            "CREATE TABLE a.t (k VARCHAR(20) PRIMARY KEY, v INT, w VARCHAR(300))",
        )
        async with following(server.uri, meta, "a.*") as feed:
            writers = [
                asyncio.to_thread(churn, server, random.Random(f"{seed} {number}"))
                for number in range(3)
            ]
            breaker = asyncio.to_thread(disturb, server, random.Random(seed))
            await asyncio.gather(*writers, breaker)
            server.execute("INSERT INTO a.t (k) VALUES ('the end')")
            await feed.until(lambda: b"the end" in last_values(feed))
            told = applied(feed)
        columns = [row[0] for row in server.execute("SHOW COLUMNS FROM a.t")]
        there = {
            row[0]: dict(zip(columns, row, strict=True))
            for row in server.execute("SELECT * FROM a.t")
        }
    assert {key: dict.fromkeys(columns) | row for key, row in told.items()} == there


def last_values(feed: Feed) -> bytes:
    batches = [batch for _, batch in list(feed.target.batches)[-3:]]
    return b"".join(
        value or b"" for batch in batches for value in batch.column("value").to_pylist()
    )


def applied(feed: Feed) -> dict[str, dict[str, Any]]:
    """The changes of the one table in order; a row that is told twice must be told as it was."""
    (span,) = feed.target.versions
    rows: dict[str, dict[str, Any]] = {}
    seen: dict[tuple[int, str, str], dict[str, Any]] = {}
    for change in feed.target.changes_of(span):
        key = (change["_commit_ts"], change["_op"], change["k"])
        values = {name: value for name, value in change.items() if not name.startswith("_")}
        assert seen.setdefault(key, values) == values
        if change["_op"] == "delete":
            rows.pop(change["k"], None)
        else:
            rows[change["k"]] = values
    dropped = {name for update in feed.target.changes for name in update.dropped}
    assert not dropped
    return rows


def churn(server: MariaDb, dice: random.Random) -> None:
    """Transactions of some statements, keys that differ in case only, and a DDL now and then."""
    connection = server.connect("a")
    with connection.cursor() as cursor:
        for step in range(STEPS):
            try:
                cursor.execute("BEGIN")
                for _ in range(dice.randrange(1, 5)):
                    cursor.execute(statement(dice))
                cursor.execute(dice.choice(["COMMIT", "COMMIT", "COMMIT", "ROLLBACK"]))
                if step % 40 == 20:
                    cursor.execute(f"ALTER TABLE t ADD COLUMN c{dice.randrange(1 << 30)} INT")
            except pymysql.Error:  # deadlocks, and keys that are there
                cursor.execute("ROLLBACK")
    connection.close()


def statement(dice: random.Random) -> str:
    key = dice.choice("aAbBcC") + str(dice.randrange(KEYS))
    other = dice.choice("aAbBcC") + str(dice.randrange(KEYS))
    return dice.choice(
        [
            (
                f"REPLACE INTO t (k, v, w) VALUES ('{key}', {dice.randrange(99)}, REPEAT('{key}', "
                f"{dice.randrange(60)}))"
            ),
            f"INSERT IGNORE INTO t (k, v) VALUES ('{key}', 1), ('{other}', 2)",
            f"UPDATE t SET v = v + 1, w = NULL WHERE k >= '{key}' LIMIT 5",
            f"UPDATE t SET k = '{other}' WHERE k = '{key}'",
            f"DELETE FROM t WHERE k = '{key}'",
        ]
    )


def disturb(server: MariaDb, dice: random.Random) -> None:
    """Kill log connections, and begin new log files."""
    connection = server.connect()
    with connection.cursor() as cursor:
        for _ in range(6):
            cursor.execute("SELECT SLEEP(%s)", (dice.uniform(0.05, 0.3),))
            cursor.execute(
                "SELECT id FROM information_schema.processlist WHERE command LIKE 'Binlog Dump%'"
            )
            for (number,) in cursor.fetchall():
                with suppress(pymysql.OperationalError):  # it has ended by itself
                    cursor.execute(dice.choice([f"KILL {number}", "FLUSH LOGS"]))
    connection.close()
