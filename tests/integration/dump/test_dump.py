"""Dumps of a real MariaDB into a running log: what is there comes, changes meanwhile win,
faults lose nothing.
"""

import asyncio
import itertools
import random
from dataclasses import replace

import pytest
from pymysql.cursors import Cursor

from server.changefeed import keys
from server.changefeed.info import status_json
from server.dump.job import DumpRecords
from server.dump.mysql import watermarks
from server.dump.mysql.watermarks import WatermarkWriter
from server.dump.progress import Range, TableProgress, TableState
from storage.meta.client import EtcdMeta
from storage.model.event import UPDATE
from tests.integration.dump.dumping import (
    WAIT_S,
    Rows,
    applied,
    churn,
    dumped_while,
    hurry,
    over,
    progress,
    source,
    start,
    until,
)
from tests.integration.mysql.replica import Feed, following
from tests.mariadb import MariaDb, mariadb_only, running_mariadb


async def test_rows_that_were_there_before_come_and_the_dump_ends(
    mariadb: MariaDb, meta: EtcdMeta
) -> None:
    database = mariadb.database()
    mariadb.execute(
        f"CREATE TABLE {database}.t (id INT PRIMARY KEY, version INT, name VARCHAR(20))",
        f"CREATE TABLE {database}.empty (id INT PRIMARY KEY)",
        f"USE {database}",
        f"INSERT INTO {database}.t SELECT seq, 0, CONCAT('n', seq) FROM seq_1_to_5000",
    )
    async with following(mariadb.uri, meta, f"{database}.*") as feed:
        await start(meta)
        found = await until(meta, feed, over)
        assert {name: each.state for name, each in found.items()} == {
            f"{database}.t": TableState.DONE,
            f"{database}.empty": TableState.DONE,
        }
        assert found[f"{database}.t"].rows == 5000
        assert applied(feed, f"{database}.t") == source(
            mariadb, f"{database}.t", ("id", "version", "name")
        )
        changes = [batch for span, batch in feed.target.batches if batch.num_rows]
        assert {op for batch in changes for op in batch["op"].to_pylist()} == {UPDATE}, (
            "an insert says that its key was not there"
        )


async def test_under_churn_the_target_equals_the_source_and_no_row_goes_back(
    mariadb: MariaDb, meta: EtcdMeta
) -> None:
    database = mariadb.database()
    name = f"{database}.t"
    mariadb.execute(
        f"CREATE TABLE {name} (id INT PRIMARY KEY, version INT, name VARCHAR(300))",
        f"USE {database}",
        f"INSERT INTO {name} SELECT seq, 0, REPEAT('n', 200) FROM seq_0_to_19999",
    )
    async with following(mariadb.uri, meta, f"{database}.*") as feed:
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(churn(mariadb, name, stop, 20000))
            await start(meta)
            found = await until(meta, feed, over)
            stop.set()
        assert found[name].state is TableState.DONE
        await feed.until(
            lambda: applied(feed, name) == source(mariadb, name, ("id", "version", "name"))
        )
        assert found[name].chunks > 3


async def test_ddl_and_faults_meet_their_own_table_only(mariadb: MariaDb, meta: EtcdMeta) -> None:
    database = mariadb.database()
    names = {
        kind: f"{database}.{kind}"
        for kind in ("altered", "truncated", "dropped", "refused", "plain")
    }
    mariadb.execute(
        f"USE {database}",
        *(f"CREATE TABLE {name} (id INT PRIMARY KEY, version INT)" for name in names.values()),
    )
    for name in names.values():
        mariadb.execute(f"USE {database}", f"INSERT INTO {name} SELECT seq, 0 FROM seq_1_to_6000")
    async with following(mariadb.uri, meta, f"{database}.*") as feed:
        where = {names["refused"]: "no_such_column > 1", names["plain"]: "id > 100"}
        job = await start(meta, where=where, rows_per_s=1000)
        await until(meta, feed, lambda found: any(each.rows > 0 for each in found.values()))
        mariadb.execute(
            f"ALTER TABLE {names['altered']} ADD COLUMN more VARCHAR(9) DEFAULT 'x' FIRST, MODIFY "
            "version BIGINT",
            f"UPDATE {names['altered']} SET version = 1 WHERE id % 2",
            f"TRUNCATE TABLE {names['truncated']}",
            f"INSERT INTO {names['truncated']} VALUES (1, 7)",
            f"DROP TABLE {names['dropped']}",
        )
        await hurry(meta, job)
        found = await until(meta, feed, over)
        assert {kind: found[name].state for kind, name in names.items()} == {
            "altered": TableState.DONE,
            "truncated": TableState.DONE,
            "dropped": TableState.DROPPED,
            "refused": TableState.FAILED,
            "plain": TableState.DONE,
        }
        assert "no_such_column" in found[names["refused"]].error
        assert len(applied(feed, names["plain"])) == 5900
        wanted = source(mariadb, names["altered"], ("more", "id", "version"))
        await feed.until(lambda: len(applied(feed, names["altered"])) == len(wanted))
        held = applied(feed, names["altered"])
        assert {key: row["version"] for key, row in held.items()} == {
            key: row["version"] for key, row in wanted.items()
        }
        truncate_ts = next(change.commit_ts for change in feed.target.changes if change.truncated)
        span = next(
            span
            for span, each in feed.target.versions.items()
            if each[-1][1].name == names["truncated"]
        )
        after = [
            row["id"] for row in feed.target.changes_of(span) if row["_commit_ts"] > truncate_ts
        ]
        assert set(after) == {1}


async def test_paused_dumps_read_nothing_and_failed_tables_are_tried_again(
    mariadb: MariaDb, meta: EtcdMeta
) -> None:
    database = mariadb.database()
    name = f"{database}.t"
    mariadb.execute(f"USE {database}", f"CREATE TABLE {name} (id INT PRIMARY KEY, version INT)")
    mariadb.execute(f"USE {database}", f"INSERT INTO {name} SELECT seq, 0 FROM seq_1_to_500")
    records = DumpRecords(meta, "feed")
    async with following(mariadb.uri, meta, f"{database}.*") as feed:
        job = await start(meta, where={name: "version = oops"})
        found = await until(meta, feed, over)
        assert found[name].state is TableState.FAILED
        mariadb.execute(f"ALTER TABLE {name} ADD COLUMN oops INT DEFAULT 0")
        await feed.until(lambda: bool(feed.target.changes))
        await records.put_job(job, replace(job, attempt=1))
        found = await until(meta, feed, lambda found: found[name].state is TableState.DONE)
        assert len(applied(feed, name)) == 500


async def test_a_restarted_dump_begins_anew_and_tables_that_come_later_are_dumped_too(
    mariadb: MariaDb, meta: EtcdMeta
) -> None:
    database = mariadb.database()
    names = [f"{database}.t", f"{database}.later", f"{database}.hidden_t"]
    mariadb.execute(
        f"USE {database}",
        *(f"CREATE TABLE {name} (id INT PRIMARY KEY, version INT)" for name in names[::2]),
    )
    for name in names[::2]:
        mariadb.execute(f"USE {database}", f"INSERT INTO {name} SELECT seq, 0 FROM seq_1_to_4000")
    records = DumpRecords(meta, "feed")
    async with following(mariadb.uri, meta, f"{database}.*", f"!{database}.hidden_t") as feed:
        job = await start(meta, rows_per_s=4000)
        found = await until(
            meta, feed, lambda found: any(each.rows > 1000 for each in found.values())
        )
        await records.put_job(job, replace(job, id="job 2", rows_per_s=0))
        found = await until(meta, feed, over)
        assert found[names[0]].job == "job 2"
        assert found[names[0]].rows == 4000
        mariadb.execute(f"RENAME TABLE {names[2]} TO {names[1]}")
        found = await until(meta, feed, lambda found: names[1] in found and over(found))
        assert found[names[1]].rows == 4000
        assert applied(feed, names[1]) == source(mariadb, names[1], ("id", "version"))


@pytest.mark.parametrize("state", [TableState.WAITING, TableState.DUMPING])
async def test_a_dump_ends_though_a_table_of_it_went_away_while_its_progress_was_not_saved(
    mariadb: MariaDb, meta: EtcdMeta, state: TableState
) -> None:
    """The checkpoint is durable before the progress: a crash between them leaves a table that the
    log does not know.
    """
    database = mariadb.database()
    name, gone = f"{database}.t", f"{database}.gone"
    mariadb.execute(
        f"CREATE TABLE {name} (id INT PRIMARY KEY, version INT)",
        f"USE {database}",
        f"INSERT INTO {name} SELECT seq, 0 FROM seq_1_to_500",
    )
    job = await start(meta)
    ranges = (Range(),) if state is TableState.DUMPING else ()
    await DumpRecords(meta, "feed").put_tables(
        [TableProgress(gone, 77, job.id, state, ranges=ranges)]
    )
    async with following(mariadb.uri, meta, f"{database}.*") as feed:
        found = await until(meta, feed, lambda found: name in found and over(found))
        assert {name: each.state for name, each in found.items()} == {
            name: TableState.DONE,
            gone: TableState.DROPPED,
        }
        assert len(applied(feed, name)) == 500


@pytest.mark.parametrize(
    "change",
    ["c VARCHAR(20) CHARACTER SET utf8mb4", "e ENUM('y','x')", "v FLOAT", "n INT UNSIGNED"],
)
async def test_a_table_that_was_altered_beside_the_log_is_refused_and_not_read_wrongly(
    mariadb: MariaDb, meta: EtcdMeta, change: str
) -> None:
    database = mariadb.database()
    name = f"{database}.t"
    mariadb.execute(
        f"CREATE TABLE {name} (id INT PRIMARY KEY, v INT, n INT, e ENUM('x','y'),"
        " c VARCHAR(20) CHARACTER SET latin1)",
        f"INSERT INTO {name} VALUES (1, 5, 7, 'x', 'é')",
    )
    async with following(mariadb.uri, meta, f"{database}.*") as feed:
        mariadb.execute("SET sql_log_bin=0", f"ALTER TABLE {name} MODIFY {change}")
        await start(meta)
        failed = (await until(meta, feed, over))[name]
        assert failed.state is TableState.FAILED
        assert (
            f"column {change.split(maxsplit=1)[0]} of {name} is another one on the server"
            in failed.error
        )
        assert applied(feed, name) == {}


@mariadb_only("makes tables with times as servers before 5.6 had them")
@pytest.mark.parametrize("written_first", [True, False])
async def test_times_as_old_servers_stored_them_are_dumped(
    mariadb: MariaDb, meta: EtcdMeta, *, written_first: bool
) -> None:
    """The catalogue does not tell them from those of today; the log does."""
    database = mariadb.database()
    name = f"{database}.t"
    row = "'2024-01-02 03:04:05', '2024-01-02 03:04:06', '-11:12:13', '2024-01-02'"
    mariadb.execute(
        "SET GLOBAL mysql56_temporal_format=OFF",
        f"CREATE TABLE {name} (id INT PRIMARY KEY, a DATETIME, b TIMESTAMP, c TIME, d DATE)",
        "SET GLOBAL mysql56_temporal_format=ON",
        f"INSERT INTO {name} VALUES (1, {row}), (2, {row})",
    )
    async with following(mariadb.uri, meta, f"{database}.*") as feed:
        if written_first:  # which has the table read again by itself
            mariadb.execute(f"INSERT INTO {name} VALUES (3, {row})")
            async with asyncio.timeout(60):
                while await DumpRecords(meta, "feed").job() is None:  # noqa: ASYNC110 - a record tells
                    await asyncio.sleep(0.05)
        else:
            await start(meta)
        done = (await until(meta, feed, over))[name]
        assert done.state is TableState.DONE, done.error
        mariadb.execute(f"INSERT INTO {name} VALUES (4, {row})")
        await until(meta, feed, lambda _: 4 in applied(feed, name))
        rows = [
            {key: value for key, value in each.items() if key != "id"}
            for each in applied(feed, name).values()
        ]
        assert len(rows) == 3 + written_first
        assert all(each == rows[0] for each in rows)


KINDS = {
    "ci": ("VARCHAR(20) COLLATE utf8mb4_general_ci", "CONCAT('k', {n})", "UPPER(id)"),
    "padded": ("CHAR(12) CHARACTER SET latin1", "CONCAT('k', {n}, ' ')", "UPPER(id)"),
    "raw": ("BINARY(6)", "LPAD(HEX({n}), 4, 'a')", "CONCAT(SUBSTR(id, 1, 4), 'z')"),
    "wide": ("BIGINT UNSIGNED", "18446744073709551615 - {n} * 2", "id - 1"),
    "exact": ("DECIMAL(20,5)", "{n} - 500.5", "id + 0.00001"),
    "moment": (
        "TIMESTAMP(3)",
        "'2024-10-27 00:00:00' + INTERVAL {n} MINUTE",
        "id + INTERVAL 1000 MICROSECOND",
    ),
}


async def test_keys_of_every_kind_stay_unique_while_they_change_in_windows(
    mariadb: MariaDb, meta: EtcdMeta
) -> None:
    """The same row has the same key in the log and in SELECT, byte by byte."""
    database = mariadb.database()
    for kind, (column, value, _) in KINDS.items():
        mariadb.execute(
            f"USE {database}",
            f"CREATE TABLE {kind} (id {column} PRIMARY KEY, version INT) COLLATE "
            "utf8mb4_general_ci",
            f"INSERT INTO {kind} SELECT {value.format(n='seq')}, 0 FROM seq_1_to_1500",
        )

    def change(cursor: Cursor) -> None:
        cursor.execute("SET time_zone = '+00:00'")
        for number, (kind, (_, value, other)) in itertools.product(range(1, 40), KINDS.items()):
            one, another = value.format(n=number * 31), value.format(n=number * 17)
            cursor.execute(
                f"UPDATE IGNORE {kind} SET id = {other}, version = {number} WHERE id = {one}"
            )
            cursor.execute(f"DELETE FROM {kind} WHERE id = {another}")

    async with dumped_while(change, mariadb, meta, database) as feed:
        for kind in KINDS:
            ((count, total),) = mariadb.execute(
                f"SELECT COUNT(*), SUM(version) FROM {database}.{kind}"
            )

            def there(kind: str = kind, count: int = count, total: int = total) -> bool:
                rows = applied(feed, f"{database}.{kind}")
                return len(rows) == count and sum(row["version"] for row in rows.values()) == total

            await feed.until(there)


async def test_a_row_binlogged_but_not_yet_committed_is_not_dumped_as_it_was(
    meta: EtcdMeta, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Semi-sync AFTER_SYNC holds commits that are logged; a low watermark that is read is wrong."""

    async def measure_lag(marks: WatermarkWriter) -> bool:
        del marks
        return True  # a probe of the lag in front of the first round would wait, too

    monkeypatch.setattr(WatermarkWriter, "measure_lag", measure_lag)
    flags = ("--rpl-semi-sync-master-enabled=ON", "--rpl-semi-sync-master-timeout=600000")
    with running_mariadb(*flags, "--rpl-semi-sync-master-wait-point=AFTER_SYNC") as server:
        server.execute(
            "SET GLOBAL rpl_semi_sync_master_enabled=OFF",
            "CREATE DATABASE shop",
            *watermarks.CREATE,
        )
        server.execute(
            "CREATE TABLE shop.t (id INT PRIMARY KEY, version INT)",
            "INSERT INTO shop.t VALUES (1, 1)",
        )
        async with following(server.uri + "?idle-row-ms=0", meta, "shop.*") as feed:
            server.execute("SET GLOBAL rpl_semi_sync_master_enabled=ON")
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(
                    asyncio.to_thread(server.execute, "UPDATE shop.t SET version = 2")
                )
                await feed.seen("shop.t", 1)  # it is in the log
                ((seen,),) = server.execute("SELECT version FROM shop.t")
                assert seen == 1, "but SELECT does not see it yet"
                await start(meta)
                await feed.until(
                    lambda: _writes_watermark(server)
                )  # what it has read by now is of before
                server.execute("SET GLOBAL rpl_semi_sync_master_enabled=OFF")
            found = await until(meta, feed, over)
            assert found["shop.t"].state is TableState.DONE
            assert applied(feed, "shop.t") == {1: {"id": 1, "version": 2}}


def _writes_watermark(server: MariaDb) -> bool:
    statements = server.execute(
        "SELECT info FROM information_schema.processlist WHERE info LIKE 'INSERT%'"
    )
    return any(watermarks.TABLE in str(statement) for (statement,) in statements)


async def test_a_compressed_log_and_a_dump_miss_nothing(meta: EtcdMeta) -> None:
    """Compressed events are read as the others, while a dump is under way."""
    with running_mariadb("--log-bin-compress=ON", "--log-bin-compress-min-len=10") as server:
        server.execute(
            "CREATE DATABASE shop",
            "USE shop",
            "CREATE TABLE t (id INT PRIMARY KEY, version INT, name VARCHAR(300))",
            "INSERT INTO t SELECT seq, 0, REPEAT('n', 200) FROM seq_0_to_4999",
        )
        async with following(server.uri + "?idle-row-ms=300", meta, "shop.*") as feed:
            stop = asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(churn(server, "shop.t", stop, 5000))
                await start(meta)
                await until(meta, feed, over)
                stop.set()
            await feed.until(
                lambda: (
                    applied(feed, "shop.t") == source(server, "shop.t", ("id", "version", "name"))
                )
            )


@pytest.mark.timeout(600)
async def test_whatever_is_cut_off_in_between_is_read_again(
    mariadb: MariaDb, meta: EtcdMeta
) -> None:
    """The process ends at any moment, again and again, under churn,
    and begins at a checkpoint behind the reader.
    """
    chance = random.Random(20261121)
    database = mariadb.database()
    name = f"{database}.t"
    mariadb.execute(
        f"USE {database}",
        f"CREATE TABLE {name} (id INT PRIMARY KEY, version INT, name VARCHAR(300))",
        f"INSERT INTO {name} SELECT seq, 0, 'first' FROM seq_0_to_2999",
    )
    stop, replica = asyncio.Event(), _Replica()
    await start(meta, rows_per_s=3000)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(churn(mariadb, name, stop, 3000))
        for _ in range(8):
            await replica.run(mariadb, meta, f"{database}.*", chance)
        stop.set()
    await replica.run(mariadb, meta, f"{database}.*", None)
    wanted = source(mariadb, name, ("id", "version", "name"))
    assert replica.rows == wanted


class _Replica:
    """A reader that outlives the process, and remembers how far it is."""

    def __init__(self) -> None:
        self.rows: Rows = {}
        self.at_ts = self.checkpoint_ts = 0

    async def run(
        self, mariadb: MariaDb, meta: EtcdMeta, rule: str, chance: random.Random | None
    ) -> None:
        """One life of the process; without chance until the dump is done."""
        lasts = asyncio.get_running_loop().time() + (chance.random() * 1.5 if chance else WAIT_S)
        async with following(mariadb.uri, meta, rule, start_ts=self.checkpoint_ts) as feed:
            self.at_ts = self.at_ts or feed.start_ts
            self.checkpoint_ts = self.checkpoint_ts or feed.start_ts
            quiet = 0
            while asyncio.get_running_loop().time() < lasts and quiet < 10:
                await asyncio.sleep(0.05)
                self._take(feed)
                if chance is None or chance.random() < 0.5:
                    self.checkpoint_ts = max(self.checkpoint_ts, self.at_ts)
                    await meta.put(keys.status("feed"), status_json(self.checkpoint_ts))
                quiet = quiet + 1 if chance is None and over(await progress(meta)) else 0

    def _take(self, feed: Feed) -> None:
        (span,) = feed.target.versions
        end = feed.target.resolved.get(span, 0)
        for change in feed.target.changes_of(span):
            if not self.at_ts < change["_commit_ts"] <= end:
                continue
            row = {column: value for column, value in change.items() if not column.startswith("_")}
            old = self.rows.pop(row["id"], None)
            if change["_op"] != "delete":
                assert old is None or old["version"] <= row["version"], (old, change)
                self.rows[row["id"]] = row
        self.at_ts = max(self.at_ts, end)
