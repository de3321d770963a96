"""Partitioned tables: dumped like others; rows that come and go with partitions are in no event of the log."""

import asyncio
from typing import Any

import pytest

from server.dump.job import DumpRecords, Job
from server.dump.progress import TableState
from server.puller.mysql.errors import RowsMovedError
from storage.meta.client import EtcdMeta
from tests.integration.dump.dumping import Rows, churn, hurry, over, source, start, until
from tests.integration.mysql.replica import Feed, following
from tests.mariadb import MariaDb

COLUMNS = ("id", "version", "name")
ROWS = 6000
PARTITIONS = "PARTITION a VALUES LESS THAN ({}), PARTITION b VALUES LESS THAN (4000)"


def make(mariadb: MariaDb, database: str) -> str:
    name = f"{database}.t"
    mariadb.execute(
        f"USE {database}",
        f"CREATE TABLE {name} (id INT PRIMARY KEY, version INT, name VARCHAR(300)) PARTITION BY RANGE (id) "
        f"({PARTITIONS.format(2000)}, PARTITION c VALUES LESS THAN MAXVALUE)",
        f"INSERT INTO {name} SELECT seq, 0, REPEAT('n', 200) FROM seq_0_to_{ROWS - 1}",
    )
    return name


def held(feed: Feed, name: str) -> Rows:
    """What a target has that empties a table where it is told to."""
    span = next(span for span, versions in feed.target.versions.items() if versions[-1][1].name == name)
    emptied = [change.commit_ts for change in feed.target.changes if name in change.truncated]
    rows: Rows = {}
    for change in feed.target.changes_of(span):
        while emptied and emptied[0] < change["_commit_ts"]:
            emptied.pop(0)
            rows.clear()
        row: dict[str, Any] = {column: value for column, value in change.items() if not column.startswith("_")}
        rows.pop(row["id"], None)
        if change["_op"] != "delete":
            rows[row["id"]] = row
    return {} if emptied else rows


async def test_rows_that_go_and_come_with_partitions_begin_the_table_anew(mariadb: MariaDb, meta: EtcdMeta) -> None:
    database = mariadb.database()
    name = make(mariadb, database)
    mariadb.execute(
        f"USE {database}",
        "CREATE TABLE other (id INT PRIMARY KEY, version INT, name VARCHAR(300))",
        "INSERT INTO other SELECT seq, 7, 'exchanged' FROM seq_2000_to_2999",
    )
    stop = asyncio.Event()
    async with following(mariadb.uri, meta, f"{database}.t") as feed:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(churn(mariadb, name, stop, ROWS))
            job = await start(meta, rows_per_s=500)
            for statement in (
                "TRUNCATE PARTITION a",
                f"EXCHANGE PARTITION b WITH TABLE {database}.other",
                f"REORGANIZE PARTITION a, b INTO ({PARTITIONS.format(3000)})",
                "DROP PARTITION b",
            ):
                await until(meta, feed, lambda found: any(each.rows_read > 0 for each in found.values()))
                mariadb.execute(f"ALTER TABLE {name} {statement}")
            await hurry(meta, job)
            found = await until(meta, feed, over)
            stop.set()
        assert found[name].state is TableState.DONE
        await feed.until(lambda: held(feed, name) == source(mariadb, name, COLUMNS))
        told = [change for change in feed.target.changes if change.truncated]
        assert [change.query.split(" ", 3)[3].split()[0] for change in told] == ["TRUNCATE", "EXCHANGE", "DROP"]


async def test_a_table_that_is_done_is_emptied_only_once_somebody_asks_for_its_rows(
    mariadb: MariaDb, meta: EtcdMeta
) -> None:
    database = mariadb.database()
    name = make(mariadb, database)
    records = DumpRecords(meta, "feed")
    said = f"TRUNCATE PARTITION a.* brings or takes rows of {name} .*dumpstart --table {name}.*then resume"
    with pytest.RaisesGroup(pytest.RaisesExc(RowsMovedError, match=said), flatten_subgroups=True):
        async with following(mariadb.uri, meta, f"{database}.*") as feed:
            start_ts, tables = (
                feed.start_ts,
                [each for versions in feed.target.versions.values() for _, each in versions],
            )
            job = await start(meta)
            found = await until(meta, feed, over)
            assert (found[name].state, found[name].rows) == (TableState.DONE, ROWS)
            mariadb.execute(f"ALTER TABLE {name} TRUNCATE PARTITION a", f"INSERT INTO {name} VALUES (1, 1, 'one')")
            await asyncio.wait_for(asyncio.wait([feed.task]), 200)
    await records.put_job(job, Job("job 2", tables=(name,)))
    async with following(mariadb.uri, meta, f"{database}.*", start_ts=start_ts, tables=tables) as feed:
        await until(meta, feed, over)
        await feed.until(lambda: held(feed, name) == source(mariadb, name, COLUMNS))
        assert [change.truncated for change in feed.target.changes] == [(name,)]


@pytest.mark.parametrize(
    "statement", ["ALTER TABLE {0}.t CONVERT PARTITION a TO TABLE {0}.made", "RENAME TABLE {0}.t TO {0}.made"]
)
async def test_a_new_table_that_has_rows_is_copied_or_refused(mariadb: MariaDb, meta: EtcdMeta, statement: str) -> None:
    """MariaDB makes tables of partitions; a table that was renamed was not taken by its name before."""
    database = mariadb.database()
    make(mariadb, database)
    made = f"{database}.made"
    with pytest.RaisesGroup(
        pytest.RaisesExc(RowsMovedError, match=f"dumpstart --table {made}"), flatten_subgroups=True
    ):
        async with following(mariadb.uri, meta, made) as feed:
            start_ts = feed.start_ts
            mariadb.execute(statement.format(database))
            await asyncio.wait_for(asyncio.wait([feed.task]), 200)
    await start(meta, tables=(made,))
    async with following(mariadb.uri, meta, made, start_ts=start_ts, tables=[]) as feed:
        await until(meta, feed, lambda found: made in found and over(found))
        await feed.until(lambda: held(feed, made) == source(mariadb, made, COLUMNS))
        assert len(held(feed, made)) == mariadb.execute(f"SELECT COUNT(*) FROM {made}")[0][0] >= 2000
