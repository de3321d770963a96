"""A server that begins its log anew gives its GTIDs out again: nothing is silently passed over."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from server.capture.source.mysql import MySqlSource
from server.changefeed.source import SourceUri
from server.puller.mysql import puller
from server.puller.mysql.log.opening import beginning
from server.puller.mysql.log.read_server import ReadServerRecord
from server.puller.mysql.session.connection import log_in
from server.puller.mysql.session.errors import LogBehindError
from server.puller.mysql.session.options import MySqlOptions
from storage.meta.client import EtcdMeta
from tests.integration.mysql.replica import following
from tests.mariadb import MariaDb, mariadb_only, running_mariadb

pytestmark = [pytest.mark.timeout(300), mariadb_only("GTIDs of a place in the log")]
MANY = 300


@pytest.fixture(autouse=True)
def _saved_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(puller, "SAVE_EVERY_S", 0.0)


def _begin_anew(server: MariaDb) -> None:
    """With more than there was before: the GTIDs that were read are in this log, too."""
    rows = (f"INSERT INTO a.t (id) VALUES ({1000 + number})" for number in range(MANY))
    server.execute("RESET MASTER", "SET timestamp = 1000000000", *rows)


async def test_a_log_that_is_begun_anew_while_it_is_read_is_another_one(meta: EtcdMeta) -> None:
    with running_mariadb() as server:
        server.execute("CREATE DATABASE a", "CREATE TABLE a.t (id INT PRIMARY KEY)")
        uri = f"{server.uri}?heartbeat-ms=100&idle-row-ms=500"
        with pytest.RaisesGroup(LogBehindError, flatten_subgroups=True) as raised:
            async with following(uri, meta, "a.*") as feed:
                server.execute(*(f"INSERT INTO a.t VALUES ({number})" for number in range(20)))
                await feed.seen("a.t", 20)
                _begin_anew(server)
                await feed.until(lambda: False)
    assert "another log than was read" in str(raised.value.exceptions)


async def test_a_log_that_was_begun_anew_meanwhile_is_another_one(meta: EtcdMeta) -> None:
    with running_mariadb() as server:
        server.execute("CREATE DATABASE a", "CREATE TABLE a.t (id INT PRIMARY KEY)")
        async with following(server.uri, meta, "a.*") as feed:
            server.execute(*(f"INSERT INTO a.t VALUES ({number})" for number in range(20)))
            await feed.seen("a.t", 20)
            (table,) = (versions[-1][1] for versions in feed.target.versions.values())
            read_ts = max(feed.target.resolved.values())
            await feed.until(lambda: feed.target.resolved[table.span] > read_ts)
        # That the server is another process now, with another log file, is nothing.
        server.kill()
        server.start()
        async with following(server.uri, meta, "a.*", start_ts=read_ts, tables=[table]) as feed:
            server.execute("FLUSH BINARY LOGS", "INSERT INTO a.t VALUES (100)")
            assert [row["id"] for row in await feed.seen("a.t", 1)] == [100]
        _begin_anew(server)
        with pytest.RaisesGroup(LogBehindError, flatten_subgroups=True) as raised:
            async with following(server.uri, meta, "a.*", start_ts=read_ts, tables=[table]) as feed:
                await feed.until(lambda: False)
    assert "another log than was read" in str(raised.value.exceptions)


async def test_a_log_that_was_begun_anew_before_anything_was_read_is_another_one(
    meta: EtcdMeta,
) -> None:
    with running_mariadb() as server:
        server.execute("CREATE DATABASE a", "CREATE TABLE a.t (id INT PRIMARY KEY)")
        start_ts = await MySqlSource("feed", options_of(server), meta).now()
        _begin_anew(server)
        with pytest.RaisesGroup(LogBehindError, flatten_subgroups=True) as raised:
            async with following(server.uri, meta, "a.*", start_ts=start_ts) as feed:
                await feed.until(lambda: False)
    assert "another log than was read" in str(raised.value.exceptions)


async def test_an_event_beyond_max_allowed_packet_does_not_make_it_another_log(
    meta: EtcdMeta,
) -> None:
    """BINLOG_GTID_POS reads no log behind such an event."""
    with running_mariadb() as server:
        server.execute("CREATE DATABASE a", "CREATE TABLE a.t (id INT PRIMARY KEY, b LONGBLOB)")
        server.execute("SET GLOBAL max_allowed_packet = 64 << 20")
        server.execute("INSERT INTO a.t VALUES (1, REPEAT('x', 20 << 20))", "DELETE FROM a.t")
        server.execute("SET GLOBAL max_allowed_packet = 16 << 20")
        start_ts = await MySqlSource("feed", options_of(server), meta).now()
        async with following(server.uri, meta, "a.*", start_ts=start_ts) as feed:
            server.execute("INSERT INTO a.t VALUES (2, 'x')")
            assert [row["id"] for row in await feed.seen("a.t", 1)] == [2]
        _begin_anew(server)
        with pytest.RaisesGroup(LogBehindError, flatten_subgroups=True) as raised:
            async with following(server.uri, meta, "a.*", start_ts=start_ts) as feed:
                await feed.until(lambda: False)
    assert "another log than was read" in str(raised.value.exceptions)


async def test_the_place_of_a_busy_server_has_the_gtids_of_that_place(meta: EtcdMeta) -> None:
    with running_mariadb() as server, ThreadPoolExecutor(1) as writer:
        server.execute("CREATE DATABASE a", "CREATE TABLE a.t (id INT PRIMARY KEY)")
        rows = [f"INSERT INTO a.t VALUES ({number})" for number in range(2000)]
        writing = writer.submit(server.execute, *rows)
        names = []
        while not writing.done():
            begins = await asyncio.to_thread(beginning, options_of(server))
            names.append(begins.server)
            if begins.server:
                place = (begins.saved_position.file, begins.saved_position.position)
                with log_in(options_of(server)) as session:
                    gtids = session.row("SELECT BINLOG_GTID_POS(%s, %s)", place)[0]
                assert gtids == begins.saved_position.gtids
    assert any(names)


def options_of(server: MariaDb) -> MySqlOptions:
    return MySqlOptions.of(SourceUri.parse(server.uri))


async def test_another_log_is_known_behind_a_connection_that_brought_nothing_and_elsewhere(
    meta: EtcdMeta,
) -> None:
    """A server that is asked by GTID begins to send before the place that was reached; of another
    server only the GTIDs count, which are the same for any two that were set up alike.
    """
    with running_mariadb() as server:
        server.execute("CREATE DATABASE a", "CREATE TABLE a.t (id INT PRIMARY KEY)")
        uri = f"{server.uri}?idle-row-ms=0"
        async with following(uri, meta, "a.*") as feed:
            server.execute("INSERT INTO a.t VALUES (1)")
            await feed.seen("a.t", 1)
            for _ in range(2):  # the second one comes after the first one's position was saved
                await asyncio.to_thread(end_readers, server)
            (table,) = (versions[-1][1] for versions in feed.target.versions.values())
            read_ts = max(feed.target.resolved.values())

        async def refusal() -> str:
            with pytest.RaisesGroup(LogBehindError, flatten_subgroups=True) as raised:
                async with following(uri, meta, "a.*", start_ts=read_ts, tables=[table]) as feed:
                    await feed.until(lambda: False)
            return str(raised.value.exceptions)

        _begin_anew(server)
        assert "another log than was read" in await refusal()
        await ReadServerRecord(meta, "feed").note("1@elsewhere:3306", 0)
        assert "was committed at 2001-09-09 01:46:40 UTC there, not 20" in await refusal()
        server.execute("SET GLOBAL gtid_domain_id = 7", "RESET MASTER")
        server.execute("DELETE FROM a.t")
        assert "it has no transactions of domain 0" in await refusal()


def end_readers(server: MariaDb) -> None:
    """End the connections that read the log, and wait until there are others."""

    def readers() -> set[int]:
        return {
            row[0]
            for row in server.execute(
                "SELECT id FROM information_schema.processlist WHERE command = 'Binlog Dump'"
            )
        }

    before = readers()
    for number in before:
        server.execute(f"KILL {number}")
    deadline = time.monotonic() + 60
    while not readers() - before:
        assert time.monotonic() < deadline
        time.sleep(0.05)
