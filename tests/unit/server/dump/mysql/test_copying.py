"""What a dump answers the log about rows that no event brings: durable before it says yes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from server.capture.source.mysql import mysql_table
from server.changefeed.table import SourceTable, TableRecord
from server.dump.job import DumpRecords, Job, ProgressSaver
from server.dump.mysql.listener import DumpCopying, DumpListener
from server.dump.mysql.window import HIGH, LOW, Chunk
from server.dump.progress import Cell, ChunkRead, Range, TableDump, TableProgress, TableState
from server.puller.mysql.listener import Reread
from server.puller.source import TableChange
from sink.holds import Holds
from storage.meta.client import EtcdMeta
from storage.meta.embedded import EmbeddedEtcd
from storage.model.errors import UnavailableError
from storage.model.ts import MAX_TS
from storage.mysql.schema import Column, Table, Type

JOB = Job("j", tables=("s.*",))
HALF = (Range((Cell(3, b"1234"),)),)


def table(name: str, table_id: int) -> SourceTable:
    columns = (Column(name="id", type=Type.LONG, nullable=False),)
    return mysql_table(TableRecord("s", Table(table_id, name, columns, ("id",)).to_doc()))


def progress(name: str, table_id: int, state: TableState) -> TableProgress:
    return TableProgress(
        f"s.{name}", table_id, "j", state, ranges=HALF, rows=5, rows_read=5, chunks=1
    )


@pytest.fixture
async def records(tmp_path: Path) -> AsyncIterator[DumpRecords]:
    async with EmbeddedEtcd.open(tmp_path) as etcd:
        yield DumpRecords(EtcdMeta(etcd), "shop")


def dumping(records: DumpRecords, *tables: TableProgress) -> DumpCopying:
    listener = DumpListener(
        "shop", [table(name, table_id) for name, table_id in (("a", 1), ("b", 2), ("new", 3))]
    )
    listener.begin_job({each.table_id: TableDump(each) for each in tables})
    saver = ProgressSaver("shop", records, listener)
    saver.begin({each.table_id: each for each in tables})
    return DumpCopying("shop", listener, saver, records)


@pytest.mark.parametrize("state", [TableState.WAITING, TableState.DUMPING, TableState.FAILED])
async def test_a_table_that_is_not_done_begins_anew_durably(
    records: DumpRecords, state: TableState
) -> None:
    tables = [progress("a", 1, state), progress("b", 2, TableState.DONE)]
    await records.put_tables(tables)
    copying = dumping(records, *tables)
    copying.set_job(JOB)
    assert await copying.copies_anew(["s.a"])
    found = {each.name: each for each in await records.tables(JOB)}
    assert (found["s.a"].state, found["s.a"].ranges, found["s.a"].rows) == (
        TableState.WAITING,
        (Range(),),
        0,
    )
    assert found["s.b"] == tables[1]


async def test_nothing_changes_if_one_of_the_tables_is_done_or_not_asked_for(
    records: DumpRecords,
) -> None:
    tables = [progress("a", 1, TableState.DUMPING), progress("b", 2, TableState.DONE)]
    await records.put_tables(tables)
    copying = dumping(records, *tables)
    copying.set_job(JOB)
    assert not await copying.copies_anew(["s.a", "s.b"])
    assert sorted(await records.tables(JOB), key=lambda each: each.name) == tables
    assert await copying.copies_anew(["s.new"]), "nothing of it was read yet"
    copying.set_job(Job("k", tables=("s.a",)))
    assert not await copying.copies_anew(["s.new"])
    copying.set_job(None)
    assert not await copying.copies_anew(["s.new"])


async def test_new_tables_are_copied_if_the_job_takes_them_and_the_answer_waits_for_it(
    records: DumpRecords,
) -> None:
    copying = dumping(records)
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(copying.copies(["s.x", "s.y"]))
        await asyncio.sleep(0)
        assert not asked.done(), "nobody knows the job yet"
        copying.set_job(JOB)
    assert asked.result()
    assert not await copying.copies(["s.x", "other.y"])
    copying.set_job(None)
    assert not await copying.copies(["s.x"])


def test_a_range_that_was_set_back_is_not_read_with_the_cursor_it_had() -> None:
    listener = DumpListener("shop", [table("a", 1)])
    dump = TableDump(progress("a", 1, TableState.DUMPING))
    listener.begin_job({1: dump})
    _, epoch = dump.unread(0)
    assert listener.table_version_at(1, 0, epoch) == listener.table_version(1) is not None
    assert listener.begin_anew(["s.a"], JOB)
    assert listener.table_version_at(1, 0, epoch) is None
    assert listener.table_version_at(1, 0, dump.unread(0)[1]) == listener.table_version(1)


def test_a_table_without_a_key_is_no_dumps() -> None:
    def keyless(name: str, table_id: int) -> SourceTable:
        columns = (Column(name="id", type=Type.LONG, nullable=False),)
        record = TableRecord("s", Table(table_id, name, columns, ()).to_doc())
        return mysql_table(record, force_replicate=True)

    listener = DumpListener("shop", [table("a", 1), keyless("b", 2)])
    assert listener.tables().keys() == {1}
    dump = TableDump(progress("a", 1, TableState.DUMPING))
    listener.begin_job({1: dump})
    listener.changed_schema(TableChange(9, "ALTER …", (keyless("a", 1), keyless("c", 3))))
    assert listener.tables() == {}
    assert dump.durable.state is TableState.DROPPED
    listener.changed_schema(TableChange(10, "ALTER …", (table("b", 2),)))
    assert listener.tables().keys() == {2}, "it has one now"


def again(ts: int, *ids: int) -> Reread:
    names = {1: "s.a", 2: "s.b"}
    tables = {each: names[each] for each in ids}
    return Reread(
        ts, tables, dict.fromkeys(tables.values(), "MODIFY v INT NOT NULL: NULL becomes a value")
    )


class Life:
    """A dump's ear and mouth from a checkpoint on, as they begin anew after a crash."""

    def __init__(self, records: DumpRecords, *tables: TableProgress) -> None:
        self.holds = Holds()
        self.listener = DumpListener("shop", [table("a", 1), table("b", 2)], self.holds)
        self.listener.begin_job({each.table_id: TableDump(each) for each in tables})
        self.saver = ProgressSaver("shop", records, self.listener)
        self.saver.begin({each.table_id: each for each in tables})
        self.copying = DumpCopying("shop", self.listener, self.saver, records)
        self.copying.set_job(None)

    def read(self, table_id: int, commit_ts: int) -> None:
        """All of a table, in one chunk whose window closes there."""
        with self.listener.locked():
            dump = self.listener.dump(table_id)
            assert dump is not None
            dump.begin((Range(),), 1)
        for kind, name in ((LOW, "low"), (HIGH, "high")):
            if kind == LOW:
                self.listener.begin("low", "high", [table_id])
            else:
                with self.listener.locked():
                    _, epoch = dump.unread(0)
                known = self.listener.table_version(table_id)
                assert known is not None
                none = pa.array([], pa.binary())
                chunk = Chunk(table_id, known[1], ChunkRead(0, epoch, None, True, 0, 0), none, none)
                self.listener.fill("high", [chunk], frozenset())
            values = {"changefeed_id": "shop", "unique_identifier": name, "event_type": kind}
            self.listener.watermark(values, commit_ts)


async def test_cuts_wait_from_before_the_answer_until_all_tables_are_complete(
    records: DumpRecords,
) -> None:
    life = Life(records, progress("a", 1, TableState.DONE), progress("b", 2, TableState.DONE))
    assert await life.copying.reads_again(again(50, 1, 2))
    job = await records.job()
    assert job is not None
    assert (dict(job.since_ts), set(job.reasons)) == ({"s.a": 50, "s.b": 50}, {"s.a", "s.b"})
    assert (life.holds.open_since, life.holds.bound(60), life.listener.rereading) == (
        50,
        50,
        {1, 2},
    )
    assert {each.state for each in await records.tables(Job("j"))} == {TableState.WAITING}, (
        "durable, too"
    )
    life.read(1, 70)
    assert life.holds.bound(80) == 50
    life.read(2, 80)
    assert (life.holds.open_since, life.holds.bound(79), life.holds.bound(80)) == (0, 50, MAX_TS)
    assert life.listener.rereading == frozenset()


async def test_a_ddl_of_the_table_begins_it_anew_and_its_end_lets_the_others_go(
    records: DumpRecords,
) -> None:
    life = Life(records, progress("a", 1, TableState.DONE), progress("b", 2, TableState.DONE))
    await life.copying.reads_again(again(50, 1, 2))
    life.read(1, 70)
    life.listener.changed_schema(TableChange(75, "RENAME", (table("c", 1),)))
    life.read(2, 80)
    assert life.holds.open_since == 50, (
        "the chunks of `a` were of another name, perhaps of other columns"
    )
    assert life.holds.waiting[1][0] == 75
    life.listener.changed_schema(TableChange(85, "DROP", dropped=("s.c",)))
    assert (life.holds.open_since, life.holds.bound(84), life.holds.bound(85)) == (0, 50, MAX_TS)
    assert life.holds.tables(50, 85, []) == {1: None, 2: 50}


@pytest.mark.parametrize("steps", range(4))
async def test_whatever_was_durable_when_a_capture_died_the_next_one_reads_again(
    records: DumpRecords, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """The job, then the progress; the checkpoint stands at the DDL or before it,
    and never beyond.
    """
    done = progress("a", 1, TableState.DONE)
    await records.put_tables([done])
    life, left = Life(records, done), [steps]
    for name in ("put_job", "put_tables"):
        write = getattr(records, name)

        async def dies(*arguments: Any, write: Any = write) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise UnavailableError("killed before it was written")
            await write(*arguments)
            if left[0] < 0:
                return
            left[0] -= 1
            if left[0] == 0:
                raise UnavailableError("killed right behind it")

        monkeypatch.setattr(records, name, dies)
    with contextlib.suppress(UnavailableError):
        await life.copying.reads_again(again(50, 1))
    monkeypatch.undo()
    job = await records.job()
    before = Life(records, *(await records.tables(Job("j"))))
    await before.copying.begin(40)
    assert not before.holds.open_since, "the log has yet to tell the DDL"
    assert await before.copying.reads_again(again(50, 1))
    assert before.holds.open_since == 50
    if steps == 0:
        assert job is not None
        at = Life(records, *(await records.tables(job)))
        await at.copying.begin(50)
        assert (at.holds.open_since, at.listener.rereading) == (50, {1})
        assert "NULL becomes" in at.holds.waiting[1][1]
        beyond = Life(records)
        await beyond.copying.begin(51)
        assert not beyond.holds.open_since


@pytest.mark.parametrize("state", [TableState.WAITING, TableState.DUMPING])
@pytest.mark.parametrize("comes", [True, False])
def test_a_table_of_an_earlier_life_is_gone_only_if_the_log_does_not_bring_it_again(
    records: DumpRecords, state: TableState, comes: bool
) -> None:
    life = Life(records, progress("a", 1, TableState.DONE), progress("c", 3, state))
    dump = life.listener.dump(3)
    assert dump is not None
    life.listener.begin("low", "high", [])
    if comes:
        life.listener.changed_schema(TableChange(45, "CREATE", (table("c", 3),)))
    for name, kind in (("low", LOW), ("high", HIGH)):
        values = {"changefeed_id": "shop", "unique_identifier": name, "event_type": kind}
        life.listener.watermark(values, 50)
    assert dump.durable.state is (TableState.WAITING if comes else TableState.DROPPED)


async def test_a_table_that_an_earlier_life_began_to_read_again_is_no_dump_under_way(
    records: DumpRecords,
) -> None:
    """Else the DDL, told once more, would begin it anew while cuts go on, and show it in part."""
    life = Life(records)
    await life.copying.reads_again(again(50, 1, 2))
    job = await records.job()
    assert job is not None
    after = Life(records)
    after.copying.set_job(job)
    await after.copying.begin(40)
    assert not await after.copying.copies_anew(["s.a"])
    assert not await after.copying.copies(["s.a"])
    assert await after.copying.reads_again(again(50, 1))
    beyond = Life(records)
    beyond.copying.set_job(job)
    await beyond.copying.begin(51)
    assert await beyond.copying.copies(["s.a"])


async def test_a_table_that_cannot_be_read_again_is_told_until_it_is_tried_anew(
    records: DumpRecords,
) -> None:
    life = Life(records, progress("a", 1, TableState.DONE))
    await life.copying.reads_again(again(50, 1))
    life.listener.reread_failed(2, "of no concern")
    assert life.holds.error is None
    life.listener.reread_failed(1, "SELECT command denied")
    assert life.holds.error is not None
    assert life.holds.error.code == "ErrDumpRereadFailed"
    assert "s.a cannot be read again" in life.holds.error.message
    assert "dumpresume -c shop" in life.holds.error.message
    life.listener.retry()
    assert life.holds.error is None
