"""DROP and TRUNCATE PARTITION in several steps,
as TiDB takes them where there may be global indexes.

From its second step on users see the table without the old partitions, long before the job is done:
keys of theirs are written to others.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest

from server.capture.source.tidb import TidbSource
from server.puller.source import SourceContext
from storage.model.event import DELETE
from storage.tidb.ddl import job_key
from storage.tidb.record import decode_record, decode_record_key, encode_record
from storage.tidb.row import encode_row
from storage.tidb.schema import Column, TableInfo
from tests.integration.store.daemons import Cluster, running_cluster
from tests.integration.tidb.conftest import context_of
from tests.integration.tidb.history import Txn, load
from tests.integration.tidb.replica import Replica
from tests.tidb_encoding import database_key, table_key

TABLE = TableInfo.build(7, "t", [Column.bigint("id"), Column.bigint("v")])
DROP_PARTITION, TRUNCATE_PARTITION = 20, 23
NONE, DELETE_ONLY, DELETE_REORGANIZATION, PUBLIC = 0, 1, 4, 5
RUNNING, DONE = 1, 6
Rows = dict[Any, Any]


def info(partition_ids: list[int], dropping: list[int]) -> dict[str, Any]:
    members = {"definitions": partition_ids, "dropping_definitions": dropping}
    parts = {
        name: [{"id": it, "name": {"O": f"p{it}"}} for it in numbers]
        for name, numbers in members.items()
    }
    return {**json.loads(TABLE.to_json()), "partition": {"enable": True, **parts}}


def step(
    kind: int, number: int, states: tuple[int, int], table: dict[str, Any]
) -> dict[bytes, bytes | None]:
    """What one step of a job writes: its row, and the table as it is from then on."""
    state, schema_state = states
    job: dict[str, Any] = {
        "id": number,
        "type": kind,
        "state": state,
        "schema_state": schema_state,
        "schema_id": 1,
        "table_id": 7,
    }
    if state == DONE:
        job["binlog"] = {"TableInfo": table}
    writes: dict[bytes, bytes | None] = {job_key(number): encode_row({5: json.dumps(job).encode()})}
    return writes | {table_key(1, 7): json.dumps(table).encode()}


def row(partition_id: int, number: int, value: int) -> dict[bytes, bytes | None]:
    key, data = encode_record(replace(TABLE, id=partition_id), {"id": number, "v": value})
    return {key: data}


WRITES: list[dict[bytes, bytes | None]] = [
    {
        database_key(1): b'{"id":1,"db_name":{"O":"shop"}}',
        table_key(1, 7): json.dumps(info([8, 9], [])).encode(),
    },
    row(8, 1, 10) | row(8, 2, 20) | row(9, 3, 30),
    step(DROP_PARTITION, 50, (RUNNING, PUBLIC), info([8, 9], [])),
    row(8, 1, 11),
    step(DROP_PARTITION, 50, (RUNNING, DELETE_ONLY), info([9], [8])),
    row(9, 1, 12),  # there is no such key for whoever sees the table without the partition
    row(8, 2, 21),  # nobody will have it: written by a server that does not know yet
    step(DROP_PARTITION, 50, (RUNNING, DELETE_REORGANIZATION), info([9], [8])),
    row(9, 4, 40),
    step(DROP_PARTITION, 50, (DONE, NONE), info([9], [])),
    row(9, 3, 31),
    step(TRUNCATE_PARTITION, 51, (RUNNING, PUBLIC), info([9], [])),
    step(TRUNCATE_PARTITION, 51, (RUNNING, DELETE_ONLY), info([10], [9])),
    row(10, 3, 32) | row(10, 5, 50),
    step(TRUNCATE_PARTITION, 51, (RUNNING, DELETE_REORGANIZATION), info([10], [9])),
    row(10, 6, 60),
    step(TRUNCATE_PARTITION, 51, (DONE, NONE), info([10], [])),
    row(10, 7, 70),
]
WRITTEN_BEFORE_DROP, DROPPED = {1: 11, 2: 20, 3: 30}, {1: 12, 3: 31, 4: 40}
AT_THE_END = {3: 32, 5: 50, 6: 60, 7: 70}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("steps")) as started:
        yield started


@pytest.fixture
async def context(cluster: Cluster) -> AsyncIterator[SourceContext]:
    async with context_of(cluster) as found:
        yield found


async def test_rows_are_those_that_users_see_also_after_a_new_start_at_any_step(
    context: SourceContext,
) -> None:
    times = [await context.pd.tso() for _ in range(2 * len(WRITES) + 1)]
    txns = [Txn(times[2 * at], times[2 * at + 1], writes) for at, writes in enumerate(WRITES)]
    await load(context.kv, txns)
    whole = await followed(context, txns[0].commit_ts, times[-1])
    assert replayed(whole, {}, txns[3].commit_ts) == WRITTEN_BEFORE_DROP
    assert replayed(whole, {}, txns[10].commit_ts) == DROPPED
    assert replayed(whole, {}, times[-1]) == AT_THE_END
    for txn in txns[1:-1]:
        for ts in (txn.commit_ts - 1, txn.commit_ts):
            held = replayed(whole, {}, ts)
            again = await followed(context, ts, times[-1], whole)
            assert replayed(again, held, times[-1]) == AT_THE_END, (WRITES[txns.index(txn)], ts)


async def followed(
    context: SourceContext, start_ts: int, upto_ts: int, before: Replica | None = None
) -> Replica:
    replica = Replica(TidbSource(context), start_ts, before)
    async with asyncio.timeout(200):
        await replica.run(upto_ts)
    return replica


def replayed(replica: Replica, rows: Rows, upto_ts: int) -> Rows:
    """What a lake has: rows by the table's key, whichever partition they came from."""
    rows = dict(rows)
    changes = [change for change in replica.changes if change.commit_ts <= upto_ts]
    spans = [replica.first[0].span, *(change.tables[0].span for change in changes)]
    ends = [*(change.commit_ts for change in changes), upto_ts]
    for span, end_ts in zip(spans, ends, strict=True):
        for change in replica.taken.rows(span):
            number = decode_record_key(change["key"]).handle
            if change["commit_ts"] > end_ts:
                break
            if change["op"] == DELETE:
                rows.pop(number, None)
            else:
                rows[number] = decode_record(TABLE, change["key"], change["value"])["v"]
    return rows
