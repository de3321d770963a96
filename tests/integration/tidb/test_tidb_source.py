"""The cluster's own change feed with schema changes, over what a real TiDB wrote."""

import asyncio
import json
import random
import threading
from dataclasses import replace

import pytest
from kvproto import kvrpcpb_pb2 as kvrpcpb

from server.capture.source.tidb import TidbSource
from server.changefeed.table import TableRecord
from server.puller.source import SourceContext
from server.puller.tidb.table import tidb_table
from storage.model.event import DELETE, INSERT
from storage.model.span import Span
from storage.tidb.field_type import Flag
from storage.tidb.record import record_key
from storage.tidb.row import encode_row
from storage.tidb.schema import Column, Index, TableInfo
from tests.integration.tidb.replica import Replica, Taken, check_resumptions, compare
from tests.unit.storage.tidb import vectors


async def test_each_step_ends_with_the_rows_that_select_gave_also_after_a_new_start_anywhere(
    context: SourceContext,
) -> None:
    steps = vectors.lines("steps")
    replica = Replica(TidbSource(context), steps[0]["ts_before"])
    async with asyncio.timeout(200):
        await replica.run(steps[-1]["ts_after"])
    assert sum(compare(replica, step) for step in steps) > 2000
    await check_resumptions(TidbSource(context), replica, random.Random(2), 4)


@pytest.mark.parametrize("number", range(0, 52, 10))
async def test_the_snapshot_of_any_time_has_the_tables_of_then(
    context: SourceContext, number: int
) -> None:
    step = vectors.lines("steps")[number]
    records = await TidbSource(context).snapshot(step["ts_after"])
    assert [f"{it.schema_name}.{it.table_info['name']['O']}" for it in records] == sorted(
        step["rows_after"]
    )


@pytest.mark.parametrize(("table_id", "parts"), [(90_001, ()), (90_002, (90_003,))])
async def test_a_delete_that_found_no_row_tells_nothing_where_its_key_does_not_say_which(
    context: SourceContext, table_id: int, parts: tuple[int, ...]
) -> None:
    column = replace(Column.bigint("k", Flag.NOT_NULL), id=1)
    key = Index(1, "u", (0,), unique=True, primary=False, public=True, whole=True)
    info = TableInfo(table_id, "heap", (column,), (key,), partition_ids=parts)
    table = tidb_table(TableRecord("db", json.loads(info.to_json())))
    row, keys = (
        encode_row({1: bytes((7,))}),
        [record_key((*parts, table_id)[0], handle) for handle in (1, 2)],
    )
    start_ts = await context.pd.tso()
    await commit(context, kvrpcpb.Mutation(op=kvrpcpb.Put, key=keys[0], value=row))
    end_ts = await commit(context, *(kvrpcpb.Mutation(op=kvrpcpb.Del, key=each) for each in keys))
    taken = Until(end_ts)
    taken.resolved[table.span] = start_ts
    [puller] = TidbSource(context).pullers([table], start_ts, taken, None)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        pulling = tasks.create_task(puller.run())
        await asyncio.to_thread(taken.reached.wait, 60)
        pulling.cancel()
    rows = taken.rows(table.span)
    assert [(it["op"], it["key"]) for it in rows] == [(INSERT, keys[0]), (DELETE, keys[0])]
    assert rows[1]["old_value"] == row


class Until(Taken):
    """Rows up to a ts."""

    def __init__(self, end_ts: int) -> None:
        super().__init__()
        self._end_ts = end_ts
        self.reached = threading.Event()

    def resolve(self, span: Span, ts: int) -> None:
        super().resolve(span, ts)
        if ts >= self._end_ts:
            self.reached.set()


async def commit(context: SourceContext, *mutations: kvrpcpb.Mutation) -> int:
    """One transaction; returns its commit_ts."""
    start_ts, keys = await context.pd.tso(), [each.key for each in mutations]
    await context.kv.prewrite(
        list(mutations), primary=keys[0], start_version=start_ts, lock_ttl_ms=20_000
    )
    commit_ts = await context.pd.tso()
    await context.kv.commit(keys, start_ts, commit_ts)
    return commit_ts
