"""What servers do wrong: die, lose their log, refuse us, hand over to a replica.

Rows and commit_ts stay the same.
"""

import asyncio
import itertools
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pymysql
import pytest

from server.capture.source.mysql import MySqlSource
from server.changefeed.source import SourceUri, SourceUriError
from server.changefeed.table import SourceTable
from server.puller.mysql import puller
from server.puller.mysql.session.connection import Session, log_in
from server.puller.mysql.session.errors import (
    BarrierInterruptedError,
    LogBehindError,
    LogPurgedError,
    MySqlLoginError,
    MySqlPrivilegeError,
    MySqlTlsError,
    MySqlUnavailableError,
)
from server.puller.mysql.session.options import MySqlOptions
from storage.meta.client import EtcdMeta
from storage.model.ts import compose
from tests.integration.mysql.replica import Feed, following
from tests.mariadb import MariaDb, mariadb_only, running_mariadb

ROWS = (
    "INSERT INTO t VALUES (%d, 1)",
    "UPDATE t SET v = v + 1 WHERE id = %d",
    "UPDATE t SET id = id + 1000 WHERE id = %d",
)


async def test_a_restart_at_any_checkpoint_gives_the_same_rows_with_the_same_commit_ts(
    mariadb: MariaDb, meta: EtcdMeta
) -> None:
    name = mariadb.database()
    mariadb.execute("CREATE TABLE t (id INT PRIMARY KEY, v INT)", database=name)
    async with following(mariadb.uri, meta, f"{name}.*") as feed:
        tables = all_tables(feed)
        for key in range(1, 6):
            mariadb.execute(*(statement % key for statement in ROWS), database=name)
        mariadb.execute(
            "XA START 'x'",
            "INSERT INTO t VALUES (50, 1)",
            "XA END 'x'",
            "XA PREPARE 'x'",
            database=name,
        )
        mariadb.execute(
            "INSERT INTO t VALUES (60, 1)",
            "XA COMMIT 'x'",
            "BEGIN",
            "INSERT INTO t VALUES (61, 1)",
            database=name,
        )
        whole = await feed.seen(f"{name}.t", 22)
    for checkpoint in sorted({feed.start_ts, *(row["_commit_ts"] for row in whole[:-1])}):
        async with following(
            mariadb.uri, meta, f"{name}.*", start_ts=checkpoint, tables=tables
        ) as again:
            wanted = [
                {**row, "_from": checkpoint} for row in whole if row["_commit_ts"] > checkpoint
            ]
            assert await again.seen(f"{name}.t", len(wanted)) == wanted


async def test_a_server_killed_and_started_again_is_read_on(meta: EtcdMeta) -> None:
    with running_mariadb() as server:
        server.execute("CREATE DATABASE a", "CREATE TABLE a.t (id INT PRIMARY KEY, v INT)")
        async with following(server.uri, meta, "a.*") as feed:
            server.execute("INSERT INTO a.t VALUES (1, 1)")
            await feed.seen("a.t", 1)
            server.kill()
            server.start()
            server.execute(
                "INSERT INTO a.t VALUES (2, 2)", "FLUSH LOGS", "INSERT INTO a.t VALUES (3, 3)"
            )
            rows = await feed.seen("a.t", 3)
    assert [row["id"] for row in rows] == [1, 2, 3]


async def test_a_replica_takes_over_with_the_same_commit_ts(meta: EtcdMeta) -> None:
    with running_mariadb() as primary, running_mariadb(server_id=2, primary=primary) as replica:
        primary.execute("CREATE DATABASE a", "CREATE TABLE a.t (id INT PRIMARY KEY, v INT)")
        replica.caught_up(primary)
        uri = f"mysql://root@127.0.0.1:{primary.port},127.0.0.1:{replica.port}?idle-row-ms=0"
        async with following(uri, meta, "a.*") as feed:
            tables = all_tables(feed)
            for key in range(1, 4):
                primary.execute(*(statement.replace(" t ", " a.t ") % key for statement in ROWS))
            before = await feed.seen("a.t", 12)
            replica.caught_up(primary)
            primary.kill()
            replica.execute(
                "STOP SLAVE", "SET GLOBAL read_only=OFF", "INSERT INTO a.t VALUES (9, 9)"
            )
            after = await feed.seen("a.t", 13)
            assert after[:12] == before
        async with following(uri, meta, "a.*", start_ts=feed.start_ts, tables=tables) as again:
            assert await again.seen("a.t", 13) == after, "read from the replica alone"


async def test_a_server_without_the_transactions_read_is_refused_and_nothing_is_rewound(
    meta: EtcdMeta,
) -> None:
    with running_mariadb() as primary, running_mariadb(server_id=2, primary=primary) as replica:
        primary.execute("CREATE DATABASE a", "CREATE TABLE a.t (id INT PRIMARY KEY)")
        replica.caught_up(primary)
        replica.execute("STOP SLAVE")
        primary.execute("INSERT INTO a.t VALUES (1)")
        async with following(primary.uri, meta, "a.*") as feed:
            tables = all_tables(feed)
        with pytest.RaisesGroup(
            pytest.RaisesExc(LogBehindError, match="nothing is rewound"), flatten_subgroups=True
        ):
            async with following(
                replica.uri, meta, "a.*", start_ts=feed.start_ts, tables=tables
            ) as again:
                await ended(again)


async def test_a_purged_log_is_a_named_state_with_the_way_out(meta: EtcdMeta) -> None:
    with running_mariadb() as server:
        server.execute("CREATE DATABASE a", "CREATE TABLE a.t (id INT PRIMARY KEY)")
        async with following(server.uri, meta, "a.*") as feed:
            tables = all_tables(feed)
        server.execute(
            "INSERT INTO a.t VALUES (1)", "FLUSH LOGS", "INSERT INTO a.t VALUES (2)", "FLUSH LOGS"
        )
        await asyncio.to_thread(purge, server, "binlog.000003")
        with pytest.RaisesGroup(
            pytest.RaisesExc(LogPurgedError, match="dump its tables"), flatten_subgroups=True
        ):
            async with following(
                server.uri, meta, "a.*", start_ts=feed.start_ts, tables=tables
            ) as again:
                await ended(again)


async def test_a_start_in_the_past_of_which_nothing_is_known_begins_with_the_oldest_log(
    meta: EtcdMeta,
) -> None:
    with running_mariadb() as server:
        server.execute(
            "CREATE DATABASE a",
            "CREATE TABLE a.t (id INT PRIMARY KEY)",
            "INSERT INTO a.t VALUES (1)",
        )
        ((second,),) = server.execute(
            "SELECT FLOOR(UNIX_TIMESTAMP(SYSDATE(6))) + 2 FROM (SELECT SLEEP(1.1)) AS later"
        )
        server.execute(
            f"SET timestamp={second}",
            "INSERT INTO a.t VALUES (2)",
            "ALTER TABLE a.t ADD COLUMN x INT",
        )
        server.execute(f"SET timestamp={second}", "INSERT INTO a.t VALUES (3, 3)")
        start_ts = compose((int(second) - 1) * 1000)
        async with following(server.uri, meta, "a.*", start_ts=start_ts) as feed:
            rows = await feed.seen("a.t", 2)
        assert [row["id"] for row in rows] == [2, 3]
        await feed.source.check_start(start_ts)
        long_ago = start_ts - compose(3_600_000)
        other = MySqlSource("other", MySqlOptions.of(SourceUri.parse(server.uri)), meta)
        with pytest.raises(LogPurgedError, match=f"after the start {long_ago}"):
            await other.check_start(long_ago)
        with pytest.RaisesGroup(
            pytest.RaisesExc(LogPurgedError, match="leave the start out"), flatten_subgroups=True
        ):
            async with following(server.uri, meta, "a.*", name="other", start_ts=long_ago) as feed:
                await ended(feed)


@mariadb_only("a torn log that it goes on with; MySQL takes the GTID for purged")
async def test_a_transaction_that_the_server_never_ended_is_never_seen(meta: EtcdMeta) -> None:
    """The server dies while it writes a transaction into its log; InnoDB rolls it back,
    the log's end is torn.
    """
    with running_mariadb() as server:
        server.execute(
            "CREATE DATABASE a",
            "CREATE TABLE a.t (id INT PRIMARY KEY, v INT)",
            "INSERT INTO a.t VALUES (1, 1)",
        )
        async with following(server.uri, meta, "a.*") as feed:
            tables = all_tables(feed)
        _die_before_commit(server, "INSERT INTO a.t VALUES (2, 2)")
        log = server.directory / "data" / "binlog.000001"
        log.write_bytes(
            log.read_bytes()[:-31]
        )  # the XID event, and with it the end of the transaction
        server.start()
        there = server.execute("INSERT INTO a.t VALUES (3, 3)", "SELECT id FROM a.t ORDER BY id")
        async with following(
            server.uri, meta, "a.*", start_ts=feed.start_ts, tables=tables
        ) as again:
            rows = await again.seen("a.t", 1)
    assert [(row["id"],) for row in rows] == [row for row in there if row != (1,)] == [(3,)]


def _die_before_commit(server: MariaDb, statement: str) -> None:
    """Kill the server when a transaction is in its log, but not committed:
    it waits for a replica that is not there.
    """
    server.execute(
        "SET GLOBAL rpl_semi_sync_master_wait_point = 'AFTER_SYNC'",
        "SET GLOBAL rpl_semi_sync_master_timeout = 600000",
        "SET GLOBAL rpl_semi_sync_master_enabled = ON",
    )

    with ThreadPoolExecutor(1) as thread:
        dying = thread.submit(server.execute, statement)
        deadline = time.monotonic() + 60
        while not server.execute(
            "SELECT id FROM information_schema.processlist WHERE state LIKE '%semi-sync ACK%'"
        ):
            assert time.monotonic() < deadline
        server.kill()
        with pytest.raises(pymysql.OperationalError):
            dying.result()


async def test_wrong_credentials_and_missing_privileges_are_named(
    mariadb: MariaDb, meta: EtcdMeta, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("right\n")
    name = mariadb.database("u")
    mariadb.execute(f"CREATE USER {name} IDENTIFIED BY 'right'", f"GRANT SELECT ON *.* TO {name}")
    uri = f"mysql://{name}@127.0.0.1:{mariadb.port}?password-file={secret}"
    with pytest.raises(MySqlPrivilegeError, match=r"BINLOG MONITOR|REPLICATION CLIENT"):
        async with following(uri, meta, "x.*"):
            pass
    mariadb.execute(f"GRANT BINLOG MONITOR ON *.* TO {name}")
    with pytest.RaisesGroup(
        pytest.RaisesExc(MySqlPrivilegeError, match="REPLICATION SLAVE"), flatten_subgroups=True
    ):
        async with following(uri, meta, "x.*") as feed:
            await ended(feed)
    secret.write_text("wrong\n")
    with pytest.raises(
        MySqlLoginError, match=r"check user, host and password|asks for the password"
    ):
        log_in(MySqlOptions.of(SourceUri.parse(uri)))
    with pytest.raises(SourceUriError, match="password-file"):
        SourceUri.parse("mysql://u:secret@h")
    with pytest.raises(MySqlUnavailableError, match="no server answers"):
        log_in(MySqlOptions.of(SourceUri.parse("mysql://u@127.0.0.1:1")))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tls")
    for arguments in (
        "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=ca -keyout ca.key -out ca.pem",
        (
            "req -newkey rsa:2048 -nodes -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1 "
            "-keyout s.key -out s.csr"
        ),
        (
            "x509 -req -in s.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -copy_extensions "
            "copy -out s.pem"
        ),
        "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=other -keyout o.key -out other.pem",
    ):
        subprocess.run(
            ["openssl", *arguments.split()], cwd=directory, check=True, capture_output=True
        )
    return directory


async def test_the_log_comes_by_tls_from_the_server_that_was_meant(
    certificates: Path, meta: EtcdMeta
) -> None:
    files = (
        f"--ssl-ca={certificates}/ca.pem",
        f"--ssl-cert={certificates}/s.pem",
        f"--ssl-key={certificates}/s.key",
    )
    with running_mariadb(*files) as server:
        server.execute("CREATE DATABASE a", "CREATE TABLE a.t (id INT PRIMARY KEY, v LONGBLOB)")
        server.execute("CREATE USER tls REQUIRE SSL", "GRANT ALL ON *.* TO tls")
        uri = f"mysql://tls@127.0.0.1:{server.port}?ca={certificates}/ca.pem"
        async with following(uri, meta, "a.*") as feed:
            server.execute("INSERT INTO a.t VALUES (1, REPEAT('x', 3000000))")
            (row,) = await feed.seen("a.t", 1)
        assert len(row["v"]) == 3000000
        for options, expected in (
            (f"ca={certificates}/other.pem", MySqlTlsError),
            ("tls=off", MySqlLoginError),
        ):
            with pytest.raises(expected):
                log_in(
                    MySqlOptions.of(
                        SourceUri.parse(f"mysql://tls@127.0.0.1:{server.port}?{options}")
                    )
                )


async def test_two_readers_with_one_server_id_find_another(
    mariadb: MariaDb, meta: EtcdMeta
) -> None:
    name = mariadb.database()
    mariadb.execute("CREATE TABLE t (id INT PRIMARY KEY)", database=name)
    async with (
        following(mariadb.uri, meta, f"{name}.*", name="one") as one,
        following(mariadb.uri, meta, f"{name}.*", name="two") as two,
    ):
        mariadb.execute("INSERT INTO t VALUES (1)", database=name)
        assert len(await one.seen(f"{name}.t", 1)) == len(await two.seen(f"{name}.t", 1)) == 1


async def test_a_server_lost_while_a_schema_change_is_looked_at_costs_no_row(
    mariadb: MariaDb, meta: EtcdMeta, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The position is behind what was read with the statement:
    going on from there would leave the rest of it out.
    """
    name, looks, look = mariadb.database(), itertools.count(), puller.read_collations

    def lost_once(session: Session) -> Any:
        if next(looks) == 0:
            raise MySqlUnavailableError("the server is gone")
        return look(session)

    monkeypatch.setattr(puller, "read_collations", lost_once)
    mariadb.execute("CREATE TABLE t (id INT PRIMARY KEY)", database=name)
    statements = (
        "INSERT INTO t VALUES (1)",
        "ALTER TABLE t ADD x INT",
        "INSERT INTO t VALUES (2, 2)",
    )
    feed = None
    with pytest.RaisesGroup(BarrierInterruptedError, flatten_subgroups=True):
        async with following(mariadb.uri, meta, f"{name}.*") as feed:
            tables = all_tables(feed)
            await asyncio.to_thread(mariadb.execute, *statements, database=name)
            await ended(feed)
    assert feed is not None
    async with following(
        mariadb.uri, meta, f"{name}.*", start_ts=feed.start_ts, tables=tables
    ) as again:
        rows = await again.seen(f"{name}.t", 2)
    assert [(row["id"], row.get("x")) for row in rows] == [(1, None), (2, 2)]


def all_tables(feed: Feed) -> list[SourceTable]:
    """As they were at the start."""
    return [versions[0][1] for versions in feed.target.versions.values()]


def purge(server: MariaDb, to: str) -> None:
    """Delete the logs before this one; the engine may need them for a moment."""
    while server.execute(f"PURGE BINARY LOGS TO '{to}'", "SHOW BINARY LOGS")[0][0] != to:
        time.sleep(0.1)


async def ended(feed: Feed) -> None:
    """Wait until the puller has failed."""
    await asyncio.wait_for(asyncio.wait([feed.task]), 200)
