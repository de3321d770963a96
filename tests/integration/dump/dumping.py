"""Dumps of a real MariaDB into a running log: begun, waited for, changed under;
what the target then holds.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from typing import Any

from pymysql.cursors import Cursor

from server.changefeed import keys
from server.changefeed.info import status_json
from server.dump.job import DumpRecords, Job
from server.dump.progress import TableProgress, TableState
from storage.meta.client import EtcdMeta
from tests.integration.mysql.replica import Feed, following
from tests.mariadb import MariaDb

Rows = dict[Any, dict[str, Any]]
WAIT_S = 200.0


async def acknowledge(meta: EtcdMeta, feed: Feed) -> None:
    """The reader is as far as the log."""
    resolved = max(feed.target.resolved.values(), default=0)  # those of dropped tables stand
    await meta.put(keys.status("feed"), status_json(resolved))


async def progress(meta: EtcdMeta) -> dict[str, TableProgress]:
    records = DumpRecords(meta, "feed")
    job = await records.job()
    assert job is not None
    return {each.name: each for each in await records.tables(job)}


async def until(
    meta: EtcdMeta, feed: Feed, done: Callable[[dict[str, TableProgress]], bool]
) -> dict[str, TableProgress]:
    """Wait while the reader keeps up."""
    async with asyncio.timeout(WAIT_S):
        while not done(found := await progress(meta)):
            if feed.task.done():
                await feed.task
            await acknowledge(meta, feed)
            await asyncio.sleep(0.05)
    return found


def over(found: dict[str, TableProgress]) -> bool:
    return bool(found) and all(each.state.is_over for each in found.values())


def applied(feed: Feed, name: str, key: str = "id") -> Rows:
    """What a target would hold; no row may be there twice, or go back in time."""
    span = next(
        span for span, versions in feed.target.versions.items() if versions[-1][1].name == name
    )
    rows: Rows = {}
    for change in feed.target.changes_of(span):
        row = {column: value for column, value in change.items() if not column.startswith("_")}
        old = rows.pop(row[key], None)
        if change["_op"] != "delete":
            assert old is None or old.get("version", 0) <= row.get("version", 0), (old, change)
            rows[row[key]] = row
    return rows


def source(mariadb: MariaDb, name: str, columns: tuple[str, ...], key: str = "id") -> Rows:
    rows = mariadb.execute(f"SELECT {', '.join(columns)} FROM {name}")
    found = [dict(zip(columns, row, strict=True)) for row in rows]
    return {row[key]: row for row in found}


async def start(meta: EtcdMeta, **more: Any) -> Job:
    job = Job("job 1", **more)
    await DumpRecords(meta, "feed").put_job(None, job)
    return job


async def churn(mariadb: MariaDb, name: str, stop: asyncio.Event, most: int) -> None:
    """Change, add, move and remove rows until told to stop; each change has a greater version."""

    def run() -> None:
        connection = mariadb.connect()
        with connection.cursor() as cursor:
            number = 0
            while not stop.is_set():
                number += 1
                cursor.execute(
                    f"UPDATE {name} SET version = {number} WHERE id % 97 = {number % 97}"
                )
                cursor.execute(f"DELETE FROM {name} WHERE id = {number * 13 % most}")
                cursor.execute(
                    f"REPLACE INTO {name} VALUES ({number * 29 % most}, {number}, 'again')"
                )
                cursor.execute(
                    f"UPDATE IGNORE {name} SET id = id + {most}, version = {number} WHERE id = "
                    f"{number * 7 % most}"
                )
        connection.close()

    await asyncio.to_thread(run)


async def hurry(meta: EtcdMeta, job: Job) -> None:
    """Let a slow dump, which had to be under way when something happened, come to its end."""
    await DumpRecords(meta, "feed").put_job(job, replace(job, rows_per_s=0))


@asynccontextmanager
async def dumped_while(
    change: Callable[[Cursor], None], mariadb: MariaDb, meta: EtcdMeta, database: str
) -> AsyncIterator[Feed]:
    """A changefeed whose tables were all dumped while `change` wrote in the database."""

    def write() -> None:
        with closing(mariadb.connect(database)) as connection, connection.cursor() as cursor:
            change(cursor)

    async with following(mariadb.uri, meta, f"{database}.*") as feed:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.to_thread(write))
            await start(meta, rows_per_s=6000)
            found = await until(meta, feed, over)
        assert {each.state for each in found.values()} == {TableState.DONE}
        yield feed
