"""What a dump answers the log about rows that no event brings: durable before it says yes."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from server.dump.job import DumpRecords, Job
from server.dump.keeper import ProgressKeeper
from server.dump.mysql.copying import DumpCopying
from server.dump.mysql.listener import DumpListener
from server.dump.progress import Cell, Range, TableProgress, TableState
from server.dump.table_dump import TableDump
from server.puller.mysql.source import mysql_table
from server.puller.table import SourceTable, TableRecord
from storage.meta.client import EtcdMeta
from storage.meta.embedded import EmbeddedEtcd
from storage.mysql.schema import Column, Table
from storage.mysql.types import Type

JOB = Job("j", tables=("s.*",))
HALF = (Range((Cell(3, b"1234"),)),)


def table(name: str, table_id: int) -> SourceTable:
    columns = (Column(name="id", type=Type.LONG, nullable=False),)
    return mysql_table(TableRecord("s", Table(table_id, name, columns, ("id",)).to_doc()))


def progress(name: str, table_id: int, state: TableState) -> TableProgress:
    return TableProgress(f"s.{name}", table_id, "j", state, ranges=HALF, rows=5, rows_read=5, chunks=1)


@pytest.fixture
async def records(tmp_path: Path) -> AsyncIterator[DumpRecords]:
    async with EmbeddedEtcd.open(tmp_path) as etcd:
        yield DumpRecords(EtcdMeta(etcd), "shop")


def dumping(records: DumpRecords, *tables: TableProgress) -> DumpCopying:
    listener = DumpListener("shop", [table(name, table_id) for name, table_id in (("a", 1), ("b", 2), ("new", 3))])
    listener.take_up({each.table_id: TableDump(each) for each in tables})
    keeper = ProgressKeeper("shop", records, listener)
    keeper.begin({each.table_id: each for each in tables})
    return DumpCopying("shop", listener, keeper)


@pytest.mark.parametrize("state", [TableState.WAITING, TableState.DUMPING, TableState.FAILED])
async def test_a_table_that_is_not_done_begins_anew_durably(records: DumpRecords, state: TableState) -> None:
    tables = [progress("a", 1, state), progress("b", 2, TableState.DONE)]
    await records.put_tables(tables)
    copying = dumping(records, *tables)
    copying.taken_up(JOB)
    assert await copying.copies_anew(["s.a"])
    found = {each.name: each for each in await records.tables(JOB)}
    assert (found["s.a"].state, found["s.a"].ranges, found["s.a"].rows) == (TableState.WAITING, (Range(),), 0)
    assert found["s.b"] == tables[1]


async def test_nothing_changes_if_one_of_the_tables_is_done_or_not_asked_for(records: DumpRecords) -> None:
    tables = [progress("a", 1, TableState.DUMPING), progress("b", 2, TableState.DONE)]
    await records.put_tables(tables)
    copying = dumping(records, *tables)
    copying.taken_up(JOB)
    assert not await copying.copies_anew(["s.a", "s.b"])
    assert sorted(await records.tables(JOB), key=lambda each: each.name) == tables
    assert await copying.copies_anew(["s.new"]), "nothing of it was read yet"
    copying.taken_up(Job("k", tables=("s.a",)))
    assert not await copying.copies_anew(["s.new"])
    copying.taken_up(None)
    assert not await copying.copies_anew(["s.new"])


async def test_new_tables_are_copied_if_the_job_takes_them_and_the_answer_waits_for_it(records: DumpRecords) -> None:
    copying = dumping(records)
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(copying.copies(["s.x", "s.y"]))
        await asyncio.sleep(0)
        assert not asked.done(), "nobody knows the job yet"
        copying.taken_up(JOB)
    assert asked.result()
    assert not await copying.copies(["s.x", "other.y"])
    copying.taken_up(None)
    assert not await copying.copies(["s.x"])


def test_a_range_that_was_set_back_is_not_read_with_the_cursor_it_had() -> None:
    listener = DumpListener("shop", [table("a", 1)])
    dump = TableDump(progress("a", 1, TableState.DUMPING))
    listener.take_up({1: dump})
    _, epoch = dump.ahead(0)
    assert listener.known_at(1, 0, epoch) == listener.known(1) is not None
    assert listener.begin_anew(["s.a"], JOB)
    assert listener.known_at(1, 0, epoch) is None
    assert listener.known_at(1, 0, dump.ahead(0)[1]) == listener.known(1)
