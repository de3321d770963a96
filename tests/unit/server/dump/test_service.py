"""The dumps' API over metadata of this process: what each verb asks for, and what is refused."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import sentinel

import pytest
from tidemarkpb.v1 import dump_pb2 as pb

from server.capture.errors import ChangefeedNotExistsError
from server.changefeed import keys
from server.changefeed.history import SchemaChange, table_json
from server.changefeed.info import ChangefeedInfo, RunningError, State
from server.changefeed.records import head_put
from server.changefeed.table import TableRecord
from server.cli.dump import PriorityError, WhereError, _condition, _output, _priority
from server.dump.job import DumpRecords, DumpStateError, Job
from server.dump.progress import Range, TableProgress, TableState
from server.dump.service import (
    DumpInvalidError,
    DumpNotFoundError,
    DumpService,
    DumpUnsupportedError,
)
from storage.meta.client import EtcdMeta
from storage.meta.embedded import EmbeddedEtcd
from storage.meta.meta import Put

CONTEXT: Any = sentinel.context


@pytest.fixture
async def meta(tmp_path: Path) -> AsyncIterator[EtcdMeta]:
    async with EmbeddedEtcd.open(tmp_path) as etcd:
        meta = EtcdMeta(etcd)
        for name, source in (
            ("shop", "mysql://root@db:3306"),
            ("tikv", ""),
            ("pumped", "pump://"),
            ("odd", "odd://"),
        ):
            info = ChangefeedInfo(
                id=name,
                sink_uri="parquet:///x",
                source_uri=source,
                start_ts=1,
                target_ts=0,
                create_time="",
            )
            await meta.put(keys.info(name), info.to_json())
            await in_force(meta, name, "t", "old")
        yield meta


async def in_force(meta: EtcdMeta, changefeed: str, *names: str, keyless: str = "") -> None:
    """The changefeed has these tables of the schema `shop`, one of them without a key."""
    keys_of = {name: [] if name == keyless else ["id"] for name in names}
    change = SchemaChange(
        1,
        tables=tuple(
            TableRecord("shop", {"id": 7 + at, "name": name, "primary_key": keys_of[name]})
            for at, name in enumerate(names)
        ),
    )
    await meta.write_all(
        [
            *(
                Put(keys.schema_table(changefeed, 1, 7 + at), table_json(table))
                for at, table in enumerate(change.tables)
            )
        ]
    )
    await meta.write_all([head_put(changefeed, change)])


async def test_verbs_change_the_job_and_asking_twice_changes_nothing(meta: EtcdMeta) -> None:
    service, records = DumpService(meta), DumpRecords(meta, "shop")
    request = pb.StartDumpRequest(
        changefeed_id="shop", tables=["shop.*"], where={"shop.t": "id > 1"}, parallel=2
    )
    begun = (await service.StartDump(request, CONTEXT)).dump
    assert (begun.state, begun.parallel, dict(begun.where)) == ("running", 2, {"shop.t": "id > 1"})
    assert (await service.StartDump(request, CONTEXT)).dump.job_id == begun.job_id
    with pytest.raises(DumpStateError):
        await service.StartDump(pb.StartDumpRequest(changefeed_id="shop"), CONTEXT)
    paused = (await service.PauseDump(pb.PauseDumpRequest(changefeed_id="shop"), CONTEXT)).dump
    assert (paused.state, paused.job_id) == ("paused", begun.job_id)
    resumed = (await service.ResumeDump(pb.ResumeDumpRequest(changefeed_id="shop"), CONTEXT)).dump
    assert (resumed.state, resumed.job_id) == ("running", begun.job_id)
    restarted = (
        await service.RestartDump(pb.RestartDumpRequest(changefeed_id="shop"), CONTEXT)
    ).dump
    assert restarted.job_id != begun.job_id
    job = await records.job()
    assert job is not None
    assert job.attempt == 1


async def test_status_tells_progress_and_when_all_is_over_a_new_dump_may_begin(
    meta: EtcdMeta,
) -> None:
    service, records = DumpService(meta), DumpRecords(meta, "shop")
    begun = await service.StartDump(pb.StartDumpRequest(changefeed_id="shop"), CONTEXT)
    job = begun.dump.job_id
    half = TableProgress(
        "shop.t", 7, job, TableState.DUMPING, "", (Range(),), 50, 500, 1, 100, 11, 10
    )
    await records.put_tables([half, TableProgress("shop.old", 8, "another job")])
    status = await service.GetDumpStatus(pb.GetDumpStatusRequest(changefeed_id="shop"), CONTEXT)
    [table] = status.status
    assert (table.table, table.progress_percent, table.eta_seconds) == ("shop.t", 50.0, 5)
    await records.put_tables(
        [TableProgress("shop.t", 7, job, TableState.DONE, "", (Range(done=True),), 99, 990, 2, 100)]
    )
    over = await service.GetDumpStatus(pb.GetDumpStatusRequest(changefeed_id="shop"), CONTEXT)
    assert (over.dump.state, over.status[0].progress_percent) == ("finished", 100.0)
    again = await service.StartDump(pb.StartDumpRequest(changefeed_id="shop"), CONTEXT)
    assert again.dump.job_id != job
    assert again.dump.state == "running"


async def test_a_table_without_a_key_is_no_dumps(meta: EtcdMeta) -> None:
    await in_force(meta, "shop", "t", "k", keyless="k")
    service, records = DumpService(meta), DumpRecords(meta, "shop")
    with pytest.raises(DumpInvalidError, match=r"--table shop\.k: it has no key"):
        await service.StartDump(
            pb.StartDumpRequest(changefeed_id="shop", tables=["shop.k"]), CONTEXT
        )
    begun = await service.StartDump(pb.StartDumpRequest(changefeed_id="shop"), CONTEXT)
    done = TableProgress("shop.t", 7, begun.dump.job_id, TableState.DONE, "", (Range(done=True),))
    await records.put_tables([done])
    over = await service.GetDumpStatus(pb.GetDumpStatusRequest(changefeed_id="shop"), CONTEXT)
    assert over.dump.state == "finished", "nothing waits for the other table"
    assert {each.table: each.state for each in over.status} == {
        "shop.t": "done",
        "shop.k": "ignored",
    }


async def test_a_dump_whose_tables_are_gone_is_over_and_another_may_begin(meta: EtcdMeta) -> None:
    """As when a table that was to be read again is dropped before anything was noted of it."""
    service, records = DumpService(meta), DumpRecords(meta, "shop")
    gone = Job(
        "j", tables=("shop.gone",), reasons={"shop.gone": "ALTER"}, since_ts={"shop.gone": 0}
    )
    await records.put_job(None, gone)
    for _ in range(2):
        status = await service.GetDumpStatus(pb.GetDumpStatusRequest(changefeed_id="shop"), CONTEXT)
        assert (status.dump.state, [(each.table, each.state) for each in status.status]) == (
            "finished",
            [("shop.gone", "dropped")],
        )
        await service.RestartDump(pb.RestartDumpRequest(changefeed_id="shop"), CONTEXT)
    both = Job("k", tables=("shop.gone", "shop.t"))
    await records.put_job(await records.job(), both)
    with pytest.raises(DumpStateError):
        await service.StartDump(pb.StartDumpRequest(changefeed_id="shop"), CONTEXT)
    await records.put_tables([TableProgress("shop.t", 7, "k", TableState.DONE)])
    begun = await service.StartDump(pb.StartDumpRequest(changefeed_id="shop"), CONTEXT)
    assert (begun.dump.state, begun.dump.tables) == ("running", [])


async def test_tables_come_in_the_order_of_their_ids(meta: EtcdMeta) -> None:
    records = DumpRecords(meta, "shop")
    await DumpService(meta).StartDump(pb.StartDumpRequest(changefeed_id="shop"), CONTEXT)
    job = await records.job()
    assert job is not None
    await records.put_tables(
        [TableProgress("shop.t", table_id, job.id) for table_id in (10, 9, 100)]
    )
    assert [each.table_id for each in await records.tables(job)] == [9, 10, 100]


async def test_what_cannot_be_dumped_is_refused_by_name(meta: EtcdMeta) -> None:
    service = DumpService(meta)
    with pytest.raises(ChangefeedNotExistsError):
        await service.StartDump(pb.StartDumpRequest(changefeed_id="nobody"), CONTEXT)
    with pytest.raises(DumpUnsupportedError, match="odd:// source"):
        await service.StartDump(pb.StartDumpRequest(changefeed_id="odd"), CONTEXT)
    for name in ("tikv", "pumped"):
        with pytest.raises(DumpUnsupportedError, match="no SQL"):
            await service.StartDump(
                pb.StartDumpRequest(changefeed_id=name, where={"shop.t": "id > 1"}), CONTEXT
            )
        with pytest.raises(DumpUnsupportedError, match="sums no rows"):
            await service.StartDump(pb.StartDumpRequest(changefeed_id=name, verify=True), CONTEXT)
    with pytest.raises(DumpInvalidError, match="at most 16"):
        await service.StartDump(pb.StartDumpRequest(changefeed_id="shop", parallel=17), CONTEXT)
    with pytest.raises(DumpNotFoundError, match="dumpstart"):
        await service.PauseDump(pb.PauseDumpRequest(changefeed_id="shop"), CONTEXT)


async def test_names_that_no_table_has_are_refused_before_anything_is_read(meta: EtcdMeta) -> None:
    service = DumpService(meta)
    for more, said in (
        (
            {"tables": ["shop.typo"]},
            "--table shop.typo: changefeed shop has no such table; its tables are shop.old, shop.t",
        ),
        ({"where": {"shop.T": "1"}}, "--where shop.T: .* no such table"),
        ({"where": {"shop.*": "1"}}, "one table that is dumped, by its name"),
        ({"tables": ["shop.old"], "where": {"shop.t": "1"}}, "one table that is dumped"),
        ({"priority": {"crm.x": 1}}, "--priority crm.x: .* no such table"),
    ):
        with pytest.raises(DumpInvalidError, match=said):
            await service.StartDump(pb.StartDumpRequest(changefeed_id="shop", **more), CONTEXT)
    with pytest.raises(DumpNotFoundError):
        await service.GetDumpStatus(pb.GetDumpStatusRequest(changefeed_id="shop"), CONTEXT)


async def test_a_changefeed_that_stands_may_be_asked_for_tables_that_its_log_is_about_to_bring(
    meta: EtcdMeta,
) -> None:
    pair = await meta.get(keys.info("shop"))
    assert pair is not None
    info = replace(ChangefeedInfo.from_json(pair.value), rules=("shop.*",)).moved_to(State.FAILED)
    await meta.put(keys.info("shop"), info.to_json())
    service = DumpService(meta)
    with pytest.raises(DumpInvalidError, match="no such table"):
        await service.StartDump(
            pb.StartDumpRequest(changefeed_id="shop", tables=["crm.made"]), CONTEXT
        )
    answer = await service.StartDump(
        pb.StartDumpRequest(changefeed_id="shop", tables=["shop.made"]), CONTEXT
    )
    assert [(each.table, each.state) for each in answer.status] == [("shop.made", "waiting")]


async def test_while_the_changefeed_stands_the_status_says_why_and_makes_up_no_end(
    meta: EtcdMeta,
) -> None:
    service, records = DumpService(meta), DumpRecords(meta, "shop")
    begun = await service.StartDump(pb.StartDumpRequest(changefeed_id="shop"), CONTEXT)
    half = TableProgress(
        "shop.t", 7, begun.dump.job_id, TableState.DUMPING, "", (Range(),), 50, 500, 1, 100, 11, 10
    )
    await records.put_tables([half])
    running = await service.GetDumpStatus(pb.GetDumpStatusRequest(changefeed_id="shop"), CONTEXT)
    assert (running.dump.waits_for, running.dump.eta_seconds, running.status[0].eta_seconds) == (
        "",
        5,
        5,
    )
    pair = await meta.get(keys.info("shop"))
    assert pair is not None
    failed = ChangefeedInfo.from_json(pair.value).moved_to(
        State.FAILED, RunningError("TM:ErrX", "no log", "now")
    )
    await meta.put(keys.info("shop"), failed.to_json())
    stands = await service.GetDumpStatus(pb.GetDumpStatusRequest(changefeed_id="shop"), CONTEXT)
    assert (stands.dump.state, stands.dump.eta_seconds, stands.status[0].rows_per_second) == (
        "running",
        -1,
        0,
    )
    assert "failed: [TM:ErrX] no log. " in stands.dump.waits_for
    assert "\nthe changefeed is failed" in (_output(stands).shown or "")
    done = replace(half, state=TableState.DONE)
    await records.put_tables([done])
    over = await service.GetDumpStatus(pb.GetDumpStatusRequest(changefeed_id="shop"), CONTEXT)
    assert (over.dump.state, over.dump.waits_for) == ("finished", "")


async def test_an_update_changes_what_it_names_and_the_dump_goes_on(meta: EtcdMeta) -> None:
    service, records = DumpService(meta), DumpRecords(meta, "shop")
    request = pb.StartDumpRequest(
        changefeed_id="shop", rows_per_second_max=9, priority={"shop.*": 1, "shop.t": 3}
    )
    begun = (await service.StartDump(request, CONTEXT)).dump
    update = pb.UpdateDumpRequest(changefeed_id="shop", priority={"shop.old": 5}, parallel=2)
    updated = (await service.UpdateDump(update, CONTEXT)).dump
    assert (updated.job_id, updated.parallel, updated.rows_per_second_max) == (begun.job_id, 2, 9)
    assert dict(updated.priority) == {"shop.*": 1, "shop.t": 3, "shop.old": 5}
    assert (
        await service.UpdateDump(
            pb.UpdateDumpRequest(changefeed_id="shop", rows_per_second_max=0), CONTEXT
        )
    ).dump
    job = await records.job()
    assert job is not None
    assert (job.rows_per_s, job.attempt) == (0, 0)
    with pytest.raises(DumpInvalidError, match="at least 1"):
        await service.UpdateDump(pb.UpdateDumpRequest(changefeed_id="shop", parallel=0), CONTEXT)
    with pytest.raises(DumpInvalidError, match="no such table"):
        await service.UpdateDump(
            pb.UpdateDumpRequest(changefeed_id="shop", priority={"shop.typo": 5}), CONTEXT
        )


async def test_tables_that_the_changefeed_leaves_out_are_told_and_refused_by_name(
    meta: EtcdMeta,
) -> None:
    pair = await meta.get(keys.info("shop"))
    assert pair is not None
    info = replace(ChangefeedInfo.from_json(pair.value), ignored=("shop.nokey", "crm.nokey"))
    await meta.put(keys.info("shop"), info.to_json())
    service = DumpService(meta)
    with pytest.raises(DumpInvalidError, match=r"shop\.nokey: .* could not be replicated"):
        await service.StartDump(
            pb.StartDumpRequest(changefeed_id="shop", tables=["shop.nokey"]), CONTEXT
        )
    answer = await service.StartDump(
        pb.StartDumpRequest(changefeed_id="shop", tables=["shop.*"]), CONTEXT
    )
    assert [(each.table, each.state) for each in answer.status] == [("shop.nokey", "ignored")]


@pytest.mark.parametrize("text", ["id > 1", "shop.t", "shop.t=", "t=id"])
def test_a_where_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(WhereError, match=r"SCHEMA\.TABLE=CONDITION"):
        _condition(text)
    assert _condition("shop.t=id = 5") == ("shop.t", "id = 5")


def test_a_priority_of_another_form_is_refused() -> None:
    for text in ("shop.t", "t=1", "shop.t=", "shop.t=high", "shop.t=99999999"):
        with pytest.raises(PriorityError, match=r"SCHEMA\.TABLE=N"):
            _priority(text)
    assert _priority("shop.a=b=-3") == ("shop.a=b", -3)
