"""Transactions whose time is far from the clock:
they neither move what follows nor keep a changefeed from resuming.
"""

import json
import time
from pathlib import Path

import pytest

from server.changefeed.source import SourceUri
from server.puller.mysql.log import opening
from server.puller.mysql.log.position import SavedPosition, TimeLimit, TimeLimits
from server.puller.mysql.log.saved_positions import PositionStore, TimeLimitsRecord
from server.puller.mysql.session.options import MySqlOptions
from storage.meta.client import EtcdMeta
from storage.model.errors import UnavailableError
from storage.model.ts import compose, physical_ms
from tests.integration.capture.processes import running_cluster
from tests.integration.mysql.lake import Lake
from tests.integration.mysql.replica import following
from tests.mariadb import MariaDb, running_mariadb

IN_2037 = "SET timestamp=2114380800"
NOW = "SET timestamp=DEFAULT"
HOUR_S = 3600


def now_ms() -> int:
    return int(time.time() * 1000)


@pytest.mark.timeout(240)
def test_one_time_in_the_future_moves_nothing_and_the_changefeed_resumes(tmp_path: Path) -> None:
    with running_mariadb() as server, running_cluster(tmp_path) as cluster:
        server.execute("CREATE DATABASE a", "CREATE TABLE a.t (id INT PRIMARY KEY, v INT)")
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
        server.execute(
            "INSERT INTO a.t VALUES (1, 1)",
            IN_2037,
            "INSERT INTO a.t VALUES (2, 2)",
            "INSERT INTO a.t VALUES (3, 3)",
        )
        server.execute("INSERT INTO a.t VALUES (4, 4)")
        lake.follow(lambda tables: 4 in tables.get("a.t", {}))
        assert physical_ms(lake.at_ts) <= now_ms() + 60_000
        shown = cluster.cli("changefeed", "query", "-c", "f")
        assert "max-clock-skew" in json.dumps(shown["warnings"]), shown
        assert "2037-01-01" in shown["warnings"][0]
        cluster.cli("changefeed", "pause", "-c", "f")
        server.execute(
            IN_2037, "INSERT INTO a.t VALUES (5, 5)", NOW, "INSERT INTO a.t VALUES (6, 6)"
        )
        resumed = cluster.cli("changefeed", "resume", "-c", "f")
        assert "ErrStartTsInFuture" not in json.dumps(resumed), resumed
        lake.follow(lambda tables: 6 in tables.get("a.t", {}))
        cluster.capture.kill()
        cluster.capture.start()
        server.execute("INSERT INTO a.t VALUES (7, 7)")
        lake.follow(lambda tables: 7 in tables.get("a.t", {}))
        assert sorted(lake.tables["a.t"]) == [1, 2, 3, 4, 5, 6, 7]
        assert physical_ms(lake.at_ts) <= now_ms() + 60_000


async def test_a_second_reading_gives_the_same_commit_ts(meta: EtcdMeta) -> None:
    """Behind odd times of all kinds; the second reading is at another present,
    and has what the first one decided.
    """
    with running_mariadb() as server:
        server.execute("CREATE DATABASE a", "CREATE TABLE a.t (id INT PRIMARY KEY, v INT)")
        offsets_s = [0, 3600, 0, 8, 12, 2, 10**7, -3600, 0, 11, 0]
        uri = f"{server.uri}?max-clock-skew=10s"
        async with following(uri, meta, "a.t") as feed:
            for number, offset_s in enumerate(offsets_s):
                server.execute(
                    f"SET timestamp={time.time() + offset_s}",
                    f"INSERT INTO a.t VALUES ({number}, 0)",
                )
                await feed.seen("a.t", number + 1)
            first = {row["id"]: row["_commit_ts"] for row in await feed.seen("a.t", len(offsets_s))}
            tables = [versions[0][1] for versions in feed.target.versions.values()]
        assert list(first.values()) == sorted(set(first.values()))
        assert all(physical_ms(ts) <= now_ms() + 10_000 for ts in first.values())
        for start_ts in (feed.start_ts, first[1], first[6]):
            async with following(
                f"{server.uri}?max-clock-skew=1s", meta, "a.t", start_ts=start_ts, tables=tables
            ) as again:
                behind = {number: ts for number, ts in first.items() if ts > start_ts}
                rows = await again.seen("a.t", len(behind))
            assert {row["id"]: row["_commit_ts"] for row in rows} == behind


async def test_a_log_that_is_hours_old_is_no_odd_log(meta: EtcdMeta) -> None:
    """As a replica's that catches up: its transactions have the primary's times."""
    with running_mariadb() as server:
        server.execute("CREATE DATABASE a", "CREATE TABLE a.t (id INT PRIMARY KEY, v INT)")
        file, position, *_ = server.execute("SHOW MASTER STATUS")[0]
        gtids = server.execute("SELECT @@gtid_binlog_pos")[0][0]
        times_s = [int(time.time()) - 2 * HOUR_S + 60 * number for number in range(5)]
        start_ts = compose(1000 * (times_s[0] - 1))
        await PositionStore(meta, "feed").put(SavedPosition(start_ts, gtids, file, position))
        for number, time_s in enumerate(times_s):
            server.execute(f"SET timestamp={time_s}", f"INSERT INTO a.t VALUES ({number}, 0)")
        async with following(server.uri, meta, "a.t", start_ts=start_ts) as feed:
            rows = await feed.seen("a.t", 5)
            assert feed.source.warnings == ()
        assert [row["_commit_ts"] for row in rows] == [compose(1000 * time_s) for time_s in times_s]


async def test_a_log_file_that_was_begun_in_the_future_is_found_by_its_rows(
    mariadb: MariaDb,
) -> None:
    with running_mariadb() as server:
        server.execute(
            "CREATE DATABASE a",
            IN_2037,
            "FLUSH BINARY LOGS",
            NOW,
            "CREATE TABLE a.t (id INT PRIMARY KEY)",
        )
        (first, *_), *_ = server.execute("SHOW BINARY LOGS")
        last = server.execute("SHOW MASTER STATUS")[0][0]
        server.execute(f"PURGE BINARY LOGS TO '{last}'")
        assert first != last
        saved_position = opening.oldest(
            MySqlOptions.of(SourceUri.parse(server.uri)), compose(now_ms() + 1000)
        )
    assert saved_position.file == last


async def test_a_replica_gives_the_same_commit_ts_behind_odd_times(meta: EtcdMeta) -> None:
    """As after fail-over: another server, with the primary's GTIDs and times in a log of its
    own.
    """
    with running_mariadb() as primary, running_mariadb(server_id=2, primary=primary) as replica:
        primary.execute("CREATE DATABASE a", "CREATE TABLE a.t (id INT PRIMARY KEY, v INT)")
        async with following(primary.uri, meta, "a.t") as feed:
            primary.execute(
                "INSERT INTO a.t VALUES (1, 0)", IN_2037, "INSERT INTO a.t VALUES (2, 0)"
            )
            primary.execute("INSERT INTO a.t VALUES (3, 0)")
            first = [row["_commit_ts"] for row in await feed.seen("a.t", 3)]
            tables = [versions[0][1] for versions in feed.target.versions.values()]
        async with following(
            replica.uri, meta, "a.t", start_ts=feed.start_ts, tables=tables
        ) as again:
            assert [row["_commit_ts"] for row in await again.seen("a.t", 3)] == first
        assert physical_ms(first[-1]) <= now_ms() + 1000


async def test_of_two_captures_only_one_decides(meta: EtcdMeta) -> None:
    one, other = TimeLimitsRecord(meta, "feed"), TimeLimitsRecord(meta, "feed")
    assert await one.load() is None
    assert await other.load() is None
    await one.save(TimeLimits([TimeLimit(0, 5)]))
    with pytest.raises(UnavailableError, match="another capture"):
        await other.save(TimeLimits([TimeLimit(0, 7)]))
    known = await other.load()
    assert known is not None
    assert known.limits == (TimeLimit(0, 5),)
    await other.save(TimeLimits([TimeLimit(0, 7)]))
