"""Partitioned tables: dumped like others; rows that come and go with partitions are in no event of
the log.
"""

import asyncio
from typing import Any

import pytest

from server.dump.job import DumpRecords, Job
from server.dump.progress import TableState
from server.puller.mysql.session.errors import RowsMovedError
from storage.meta.client import EtcdMeta
from tests.integration.dump.dumping import Rows, churn, hurry, over, source, start, until
from tests.integration.mysql.replica import Feed, following
from tests.mariadb import MariaDb, mariadb_only

COLUMNS = ("id", "version", "name")
ROWS = 6000
PARTITIONS = "PARTITION a VALUES LESS THAN ({}), PARTITION b VALUES LESS THAN (4000)"


def make(mariadb: MariaDb, database: str) -> str:
    name = f"{database}.t"
    mariadb.execute(
        f"USE {database}",
        f"CREATE TABLE {name} (id INT PRIMARY KEY, version INT, name VARCHAR(300)) PARTITION BY "
        f"RANGE (id) ({PARTITIONS.format(2000)}, PARTITION c VALUES LESS THAN MAXVALUE)",
        f"INSERT INTO {name} SELECT seq, 0, REPEAT('n', 200) FROM seq_0_to_{ROWS - 1}",
    )
    return name


def held(feed: Feed, name: str) -> Rows:
    """What a target has that empties a table where it is told to."""
    span = next(
        span for span, versions in feed.target.versions.items() if versions[-1][1].name == name
    )
    emptied = [change.commit_ts for change in feed.target.changes if name in change.truncated]
    rows: Rows = {}
    for change in feed.target.changes_of(span):
        while emptied and emptied[0] < change["_commit_ts"]:
            emptied.pop(0)
            rows.clear()
        row: dict[str, Any] = {
            column: value for column, value in change.items() if not column.startswith("_")
        }
        rows.pop(row["id"], None)
        if change["_op"] != "delete":
            rows[row["id"]] = row
    return {} if emptied else rows


async def test_rows_that_go_and_come_with_partitions_begin_the_table_anew(
    mariadb: MariaDb, meta: EtcdMeta
) -> None:
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
                await until(
                    meta, feed, lambda found: any(each.rows_read > 0 for each in found.values())
                )
                mariadb.execute(f"ALTER TABLE {name} {statement}")
            await hurry(meta, job)
            found = await until(meta, feed, over)
            stop.set()
        assert found[name].state is TableState.DONE
        await feed.until(lambda: held(feed, name) == source(mariadb, name, COLUMNS))
        told = [change for change in feed.target.changes if change.truncated]
        assert [change.query.split(" ", 3)[3].split()[0] for change in told] == [
            "TRUNCATE",
            "EXCHANGE",
            "DROP",
        ]


async def test_a_table_that_is_done_is_emptied_only_once_somebody_asks_for_its_rows(
    mariadb: MariaDb, meta: EtcdMeta
) -> None:
    database = mariadb.database()
    name = make(mariadb, database)
    records = DumpRecords(meta, "feed")
    said = (
        f"TRUNCATE PARTITION a.* brings, takes or changes rows .*{name} .*dumpstart --table "
        f"{name}.*then resume"
    )
    with pytest.RaisesGroup(pytest.RaisesExc(RowsMovedError, match=said), flatten_subgroups=True):
        async with following(f"{mariadb.uri}?on-unclear-ddl=stop", meta, f"{database}.*") as feed:
            start_ts, tables = (
                feed.start_ts,
                [each for versions in feed.target.versions.values() for _, each in versions],
            )
            job = await start(meta)
            found = await until(meta, feed, over)
            assert (found[name].state, found[name].rows) == (TableState.DONE, ROWS)
            mariadb.execute(
                f"ALTER TABLE {name} TRUNCATE PARTITION a",
                f"INSERT INTO {name} VALUES (1, 1, 'one')",
            )
            await asyncio.wait_for(asyncio.wait([feed.task]), 200)
    await records.put_job(job, Job("job 2", tables=(name,)))
    async with following(
        mariadb.uri, meta, f"{database}.*", start_ts=start_ts, tables=tables
    ) as feed:
        await until(meta, feed, over)
        await feed.until(lambda: held(feed, name) == source(mariadb, name, COLUMNS))
        assert [change.truncated for change in feed.target.changes] == [(name,)]


@pytest.mark.parametrize(
    "statement",
    [
        "ALTER TABLE {0}.t TRUNCATE PARTITION a",
        "ALTER TABLE {0}.t DROP PARTITION b",
        "ALTER TABLE {0}.t EXCHANGE PARTITION b WITH TABLE {0}.other",
        "ALTER IGNORE TABLE {0}.u ADD UNIQUE (v)",
        "ALTER TABLE {0}.t CONVERT PARTITION a TO TABLE {0}.made",
        "RENAME TABLE {0}.outside TO {0}.made",
    ],
)
@pytest.mark.parametrize("dumped", [False, True])
async def test_rows_that_go_and_come_in_no_event_are_read_again_by_themselves(
    mariadb: MariaDb, meta: EtcdMeta, statement: str, dumped: bool
) -> None:
    database = mariadb.database()
    make(mariadb, database)
    mariadb.execute(
        *(
            f"CREATE TABLE {name} (id INT PRIMARY KEY, version INT, name VARCHAR(300))"
            for name in ("other", "outside")
        ),
        "INSERT INTO other SELECT seq, 7, 'exchanged' FROM seq_2000_to_2999",
        "INSERT INTO outside SELECT seq, 7, 'moved' FROM seq_1_to_100",
        "CREATE TABLE u (id INT PRIMARY KEY, v INT NOT NULL)",
        "INSERT INTO u VALUES (1, 1), (2, 1), (3, 3)",
        database=database,
    )
    names = [f"{database}.{name}" for name in ("t", "u", "made")]
    async with following(f"{mariadb.uri}?idle-row-ms=200", meta, *names) as feed:
        if dumped:
            await start(meta, tables=(f"{database}.t", f"{database}.u"))
            await until(meta, feed, over)
        mariadb.execute(statement.format(database), f"DELETE FROM {database}.t WHERE id = 5999")
        await feed.until(lambda: feed.target.holds.open_since > 0 or bool(feed.target.changes))
        await feed.until(lambda: not feed.target.holds.open_since)
        job = await DumpRecords(meta, "feed").job()
        assert job is not None
        assert set(job.reasons) <= set(names)
        assert job.reasons.keys() == job.since_ts.keys()
        for name in job.reasons:
            columns = ("id", "v") if name.endswith(".u") else COLUMNS
            await feed.until(
                lambda name=name, columns=columns: (
                    held(feed, name) == source(mariadb, name, columns)
                )
            )
        assert job.reasons


@pytest.mark.parametrize(
    "statement",
    [
        pytest.param(
            "ALTER TABLE {0}.t CONVERT PARTITION a TO TABLE {0}.made",
            marks=mariadb_only("CONVERT PARTITION"),
        ),
        "RENAME TABLE {0}.t TO {0}.made",
    ],
)
async def test_a_new_table_that_has_rows_is_copied_or_refused(
    mariadb: MariaDb, meta: EtcdMeta, statement: str
) -> None:
    """MariaDB makes tables of partitions; a table that was renamed was not taken by its name
    before.
    """
    database = mariadb.database()
    make(mariadb, database)
    made = f"{database}.made"
    with pytest.RaisesGroup(
        pytest.RaisesExc(RowsMovedError, match=f"dumpstart --table {made}"), flatten_subgroups=True
    ):
        async with following(f"{mariadb.uri}?on-unclear-ddl=stop", meta, made) as feed:
            start_ts = feed.start_ts
            mariadb.execute(statement.format(database))
            await asyncio.wait_for(asyncio.wait([feed.task]), 200)
    await start(meta, tables=(made,))
    async with following(mariadb.uri, meta, made, start_ts=start_ts, tables=[]) as feed:
        await until(meta, feed, lambda found: made in found and over(found))
        await feed.until(lambda: held(feed, made) == source(mariadb, made, COLUMNS))
        assert (
            len(held(feed, made)) == mariadb.execute(f"SELECT COUNT(*) FROM {made}")[0][0] >= 2000
        )
