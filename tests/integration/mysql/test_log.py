"""Rows of a real server's log reach the sorter's side as SELECT gives them,
in commits of their transactions.
"""

import datetime as dt
import itertools
from decimal import Decimal
from typing import Any

import pytest

from server.puller.mysql.log import opening
from server.puller.mysql.session.connection import Session
from server.puller.mysql.session.errors import XaUnknownError
from storage.meta.client import EtcdMeta
from tests.integration.mysql.replica import Row, following
from tests.mariadb import MariaDb, running_mariadb

ALL_TYPES = """
CREATE TABLE t (id BIGINT UNSIGNED PRIMARY KEY, t1 TINYINT, t2 TINYINT UNSIGNED, s1 SMALLINT, m1 MEDIUMINT UNSIGNED,
i1 INT, b1 BIGINT, f FLOAT, d DOUBLE, d1 DECIMAL(12,2), d2 DECIMAL(65,30), y YEAR, da DATE, dt DATETIME,
dt6 DATETIME(6), ts TIMESTAMP(3) NULL, c CHAR(10), cl CHAR(255) CHARACTER SET latin1, cb BINARY(8), v VARCHAR(300),
vb VARBINARY(30), te TEXT, lt LONGTEXT, bl BLOB, j JSON, e ENUM('a','b''c'), gs INT AS (i1 + 1) STORED, i6 INET6,
inv INT INVISIBLE DEFAULT 3)
"""
VALUES = """
(18446744073709551615, -128, 255, -32768, 16777215, -2147483648, -9223372036854775808, 1.5, -2.5e300, -1234567890.12,
 12345678901234567890123456789012345.123456789012345678901234567890, 2155, '9999-12-31', '1000-01-01 00:00:00',
 '2026-11-21 12:34:56.789012', '2038-01-19 03:14:07.999', 'pad', 'ä', 'ab', 'é漢字', x'00ff00', 'text',
 REPEAT('x', 70000), x'0001', '{"a": [1, 2]}', 'b''c', DEFAULT, '2001:db8::1')
"""


async def test_every_type_comes_as_select_gives_it(mariadb: MariaDb, meta: EtcdMeta) -> None:
    name = mariadb.database()
    mariadb.execute(ALL_TYPES, database=name)
    async with following(mariadb.uri, meta, f"{name}.*") as feed:
        mariadb.execute(
            f"INSERT INTO t VALUES {VALUES}", "INSERT INTO t (id) VALUES (7)", database=name
        )
        changes = await feed.seen(f"{name}.t", 2)
    columns = [column for column in changes[0] if not column.startswith("_")]
    assert columns[-1] == "inv", "invisible columns are in the log, too"
    quoted = ", ".join(f"`{column}`" for column in columns)
    rows = mariadb.execute(
        "SET time_zone='+00:00'", f"SELECT {quoted} FROM t ORDER BY id DESC", database=name
    )
    for change, row in zip(changes, rows, strict=True):
        for column, wanted in zip(columns, row, strict=True):
            assert plain(column, change[column]) == wanted, column


def plain(column: str, value: Any) -> Any:
    """An Arrow value as PyMySQL gives it."""
    if isinstance(value, dt.datetime):
        return value.replace(tzinfo=None)
    if column == "d2" and isinstance(value, str):
        return Decimal(value)
    if column == "i6" and value is not None:
        return "2001:db8::1"
    return value.ljust(8, b"\0") if column == "cb" and value is not None else value


async def test_a_transaction_is_one_commit_and_its_order_is_that_of_the_log(
    mariadb: MariaDb, meta: EtcdMeta
) -> None:
    name = mariadb.database()
    mariadb.execute("CREATE TABLE t (id INT PRIMARY KEY, v INT)", database=name)
    async with following(mariadb.uri, meta, f"{name}.*") as feed:
        mariadb.execute(
            *(
                "BEGIN",
                "INSERT INTO t VALUES (1, 1)",
                "SAVEPOINT a",
                "INSERT INTO t VALUES (2, 2)",
                "ROLLBACK TO a",
            ),
            *("INSERT INTO t VALUES (3, 3)", "UPDATE t SET v = 30 WHERE id = 3", "COMMIT"),
            *(
                "BEGIN",
                "INSERT INTO t VALUES (4, 4)",
                "ROLLBACK",
                "UPDATE t SET id = 5 WHERE id = 1",
            ),
            database=name,
        )
        changes = await feed.seen(f"{name}.t", 4)
    assert brief(changes) == [
        ("insert", 1, 1),
        ("insert", 3, 30),
        ("delete", 1, 1),
        ("insert", 5, 1),
    ]
    first, second, third, fourth = (change["_commit_ts"] for change in changes)
    assert first == second < third == fourth


async def test_rows_of_xa_transactions_come_when_they_are_committed(
    mariadb: MariaDb, meta: EtcdMeta
) -> None:
    name = mariadb.database()
    mariadb.execute("CREATE TABLE t (id INT PRIMARY KEY, v INT)", database=name)
    async with following(mariadb.uri, meta, f"{name}.*") as feed:
        mariadb.execute(
            "XA START 'a b','1'",
            "INSERT INTO t VALUES (1, 1)",
            "XA END 'a b','1'",
            "XA PREPARE 'a b','1'",
            database=name,
        )
        mariadb.execute(
            "XA START 'r'",
            "INSERT INTO t VALUES (2, 2)",
            "XA END 'r'",
            "XA PREPARE 'r'",
            database=name,
        )
        mariadb.execute(
            "INSERT INTO t VALUES (3, 3)", "XA ROLLBACK 'r'", "XA COMMIT 'a b','1'", database=name
        )
        mariadb.execute(
            "XA START 'o'",
            "INSERT INTO t VALUES (4, 4)",
            "XA END 'o'",
            "XA COMMIT 'o' ONE PHASE",
            database=name,
        )
        changes = await feed.seen(f"{name}.t", 3)
    assert brief(changes) == [("insert", 3, 3), ("insert", 1, 1), ("insert", 4, 4)]


async def test_compressed_events_are_read(meta: EtcdMeta) -> None:
    with running_mariadb("--log-bin-compress=ON", "--log-bin-compress-min-len=10") as server:
        server.execute("CREATE DATABASE a", "CREATE TABLE a.t (id INT PRIMARY KEY, v VARCHAR(200))")
        async with following(server.uri, meta, "a.*") as feed:
            server.execute(
                "INSERT INTO a.t SELECT seq, REPEAT('x', 100) FROM seq_1_to_50",
                "ALTER TABLE a.t ADD COLUMN w INT COMMENT 'a comment that is long enough to be "
                "compressed'",
                "UPDATE a.t SET w = id",
                "DELETE FROM a.t WHERE id > 10",
                database="a",
            )
            changes = await feed.seen("a.t", 140)
        assert [change["_op"] for change in changes] == ["insert"] * 50 + ["update"] * 50 + [
            "delete"
        ] * 40
        assert changes[60]["w"] == 11
        assert [change.query[:11] for change in feed.target.changes] == ["ALTER TABLE"]


async def test_checksums_come_and_go_with_the_files_of_a_log(meta: EtcdMeta) -> None:
    """While it is read, and when it is read late: what was agreed is of no file."""
    with running_mariadb() as server:
        server.execute("CREATE DATABASE d", "CREATE TABLE d.t (id MEDIUMINT PRIMARY KEY)")
        async with following(server.uri, meta, "d.*") as feed:
            tables = [each for versions in feed.target.versions.values() for _, each in versions]
            # MariaDB's log has seconds: who reads it from its beginning knows no rows of the second
            # in which the first changefeed started from those before it.
            server.execute("DO SLEEP(1)")
            for number, algorithm in enumerate(("CRC32", "NONE", "CRC32", "NONE")):
                server.execute(
                    f"SET GLOBAL binlog_checksum={algorithm}",
                    f"INSERT INTO d.t VALUES ({2 * number})",
                    f"INSERT INTO d.t VALUES ({2 * number + 1})",
                )
                await feed.seen("d.t", 2 * number + 2)
            start_ts = feed.start_ts
        async with following(
            server.uri, meta, "d.*", start_ts=start_ts, tables=tables, name="late"
        ) as late:
            rows = await late.seen("d.t", 8)
    assert [row["id"] for row in rows] == list(range(8))


async def test_an_event_beyond_16_mb_and_many_columns_are_read(meta: EtcdMeta) -> None:
    wide = ", ".join(f"c{number} INT" for number in range(300))
    with running_mariadb("--max-allowed-packet=64M") as server:
        server.execute("CREATE DATABASE a", "CREATE TABLE a.t (id INT PRIMARY KEY, v LONGBLOB)")
        server.execute(f"CREATE TABLE a.w (id INT PRIMARY KEY, {wide})")
        async with following(server.uri, meta, "a.*") as feed:
            server.execute("INSERT INTO a.w (id, c299) VALUES (1, 2)")
            server.execute(
                "INSERT INTO a.t VALUES (1, REPEAT('a', 16777216)), (2, REPEAT('b', 17000000))"
            )
            changes = await feed.seen("a.t", 2)
            (row,) = await feed.seen("a.w", 1)
    assert [(len(change["v"]), change["v"][-1:]) for change in changes] == [
        (16777216, b"a"),
        (17000000, b"b"),
    ]
    assert row["c299"] == 2


async def test_keys_that_differ_in_case_or_blanks_only_are_a_delete_and_an_insert(
    mariadb: MariaDb, meta: EtcdMeta
) -> None:
    name = mariadb.database()
    mariadb.execute(
        "CREATE TABLE t (k VARCHAR(10) COLLATE utf8mb4_general_ci PRIMARY KEY, v INT)",
        database=name,
    )
    async with following(mariadb.uri, meta, f"{name}.*") as feed:
        mariadb.execute(
            *(
                "INSERT INTO t VALUES ('Abc', 1)",
                "REPLACE INTO t VALUES ('aBC ', 2)",
                "UPDATE t SET k = 'abc'",
            ),
            database=name,
        )
        changes = await feed.seen(f"{name}.t", 5)
    assert [(change["_op"], change["k"]) for change in changes] == [
        *(
            ("insert", "Abc"),
            ("delete", "Abc"),
            ("insert", "aBC "),
            ("delete", "aBC "),
            ("insert", "abc"),
        )
    ]


async def test_other_tables_pass_by(mariadb: MariaDb, meta: EtcdMeta) -> None:
    name = mariadb.database()
    mariadb.execute(
        "CREATE TABLE t (id INT PRIMARY KEY)",
        "CREATE TABLE other (id INT)",
        "CREATE SEQUENCE s",
        database=name,
    )
    async with following(mariadb.uri, meta, f"{name}.*", f"!{name}.other*") as feed:
        mariadb.execute(
            *(
                "INSERT INTO other VALUES (1)",
                "SELECT NEXTVAL(s)",
                "ALTER TABLE other ADD COLUMN x INT",
            ),
            *(
                "CREATE TABLE other2 (id INT PRIMARY KEY)",
                "INSERT INTO other2 VALUES (1)",
                "INSERT INTO t VALUES (1)",
            ),
            database=name,
        )
        await feed.seen(f"{name}.t", 1)
    assert feed.target.changes == []
    assert len(feed.target.versions) == 1


def brief(changes: list[Row]) -> list[tuple[str, Any, Any]]:
    """Operation, key and value of each."""
    return [(change["_op"], change["id"], change["v"]) for change in changes]


async def test_no_xa_transaction_is_prepared_before_the_start_and_committed_after_it(
    mariadb: MariaDb, meta: EtcdMeta, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are in the log before the place where the changefeed was made:
    the start waits for its end.
    """
    name = mariadb.database()
    mariadb.execute("CREATE TABLE t (id INT PRIMARY KEY, v INT)", database=name)
    mariadb.execute(
        "XA START 'a'", "INSERT INTO t VALUES (1, 1)", "XA END 'a'", "XA PREPARE 'a'", database=name
    )
    looks, prepared = itertools.count(), opening.prepared_xids

    def look(session: Session) -> frozenset[str]:
        found = prepared(session)
        if next(looks) == 0:
            assert "61," in found, "it is prepared when the place is taken"
            mariadb.execute("INSERT INTO t VALUES (10, 1)", "XA COMMIT 'a'", database=name)
        return found

    monkeypatch.setattr(opening, "prepared_xids", look)
    async with following(mariadb.uri, meta, f"{name}.*") as feed:
        mariadb.execute("INSERT INTO t VALUES (2, 2)", database=name)
        changes = await feed.seen(f"{name}.t", 1)
    assert brief(changes) == [("insert", 2, 2)]


async def test_what_is_prepared_for_long_before_the_start_is_told_when_it_commits(
    mariadb: MariaDb, meta: EtcdMeta, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "_XA_WAIT_S", 0.2)
    name = mariadb.database()
    mariadb.execute("CREATE TABLE t (id INT PRIMARY KEY, v INT)", database=name)
    mariadb.execute(
        "XA START 'b'", "INSERT INTO t VALUES (1, 1)", "XA END 'b'", "XA PREPARE 'b'", database=name
    )

    async def follow() -> None:
        async with following(mariadb.uri, meta, f"{name}.*") as feed:
            mariadb.execute("XA COMMIT 'b'")
            await feed.seen(f"{name}.t", 1)

    with pytest.raises(ExceptionGroup) as raised:
        await follow()
    assert raised.group_contains(XaUnknownError, match="copy the tables by")
