"""A dump that nobody here can do is said to be so, in its own status, and a capture that can takes it up again."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from server.dump.cluster import ClusterDump, Store
from server.dump.held import HeldTables
from server.dump.job import DumpRecords, Job
from server.dump.progress import TableProgress, TableState
from server.dump.unsupported import EVERY_TABLE, UnsupportedDump
from storage.meta.client import EtcdMeta
from storage.meta.embedded import EmbeddedEtcd


@pytest.fixture
async def records(tmp_path: Path) -> AsyncIterator[DumpRecords]:
    async with EmbeddedEtcd.open(tmp_path) as etcd:
        yield DumpRecords(EtcdMeta(etcd), "shop")


async def until(records: DumpRecords, job: Job, wanted: Any) -> list[TableProgress]:
    for _ in range(500):
        if wanted(found := await records.tables(job)):
            return found
        await asyncio.sleep(0.02)
    raise TimeoutError(found)


async def test_a_dump_fails_by_name_where_workers_pull_and_can_be_taken_up_elsewhere(records: DumpRecords) -> None:
    job = Job("j")
    await records.put_job(None, job)
    await records.put_tables([TableProgress("shop.t", 7, "j", TableState.DUMPING)])
    async with asyncio.TaskGroup() as tasks:
        refusing = tasks.create_task(UnsupportedDump("shop", records).run())
        found = await until(records, job, lambda tables: len(tables) == 2)
        refusing.cancel()
    [refused] = [each for each in found if each.table_id == EVERY_TABLE]
    assert refused.state is TableState.FAILED
    assert "ErrDumpUnsupported" in refused.error
    async with asyncio.TaskGroup() as tasks:
        dumping = tasks.create_task(ClusterDump("shop", records, cast("Store", None), HeldTables()).run())
        await until(records, job, lambda tables: [each.table_id for each in tables] == [7])
        dumping.cancel()
