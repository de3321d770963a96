"""Rows of several partitions on their way into one span, and rows of DDL jobs."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.puller.tidb.partitioned_puller import JoinedRows
from server.puller.tidb.schema_puller import JobRows
from storage.model.event import INSERT, raw_batch
from storage.model.span import Span
from storage.tidb.ddl import JOB_META_COLUMN_ID, job_key, job_span
from storage.tidb.record import table_span
from storage.tidb.row import encode_row

WHOLE = Span(7, b"a", b"z")
PARTS = [table_span(number) for number in (8, 9, 10)]


class Told:
    """Rows that were passed on."""

    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(1)
        self.resolved: list[int] = []
        self.added: list[Span] = []

    def add(self, span: Span, batch: pa.RecordBatch) -> None:
        del batch
        self.added.append(span)

    def resolve(self, span: Span, ts: int) -> None:
        assert span == WHOLE
        self.resolved.append(ts)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), max_size=40))
def test_a_table_is_resolved_as_far_as_its_slowest_partition(steps: list[tuple[int, int]]) -> None:
    told, at = Told(), [100, 100, 100]
    joined = JoinedRows(WHOLE, PARTS, 100, told)
    for number, step in steps:
        at[number] += step
        joined.resolve(PARTS[number], at[number])
        assert (told.resolved or [100])[-1] == min(at)
    assert told.resolved == sorted(set(told.resolved))


def test_rows_of_a_partition_go_to_the_table() -> None:
    told = Told()
    JoinedRows(WHOLE, PARTS, 100, told).add(PARTS[1], raw_batch([], [], [], [], [], []))
    assert told.added == [WHOLE]


def jobs(*found: tuple[int, int, int], **more: Any) -> pa.RecordBatch:
    """A batch of (commit_ts, job id, state)."""
    job = {"type": 3, "schema_id": 1, "table_id": 2} | more
    docs = [job | {"id": number, "state": state} for _, number, state in found]
    values = [encode_row({JOB_META_COLUMN_ID: json.dumps(doc).encode()}) for doc in docs]
    times = [commit_ts for commit_ts, _, _ in found]
    keys = [job_key(number) for _, number, _ in found]
    return raw_batch(
        times, [ts - 1 for ts in times], [INSERT] * len(found), keys, values, [None] * len(found)
    )


async def test_jobs_come_in_order_once_they_are_done_and_complete() -> None:
    rows = JobRows(100)
    rows.loop = asyncio.get_running_loop()
    rows.add(job_span(), jobs((120, 2, 4), (110, 1, 1), (115, 1, 4), (90, 9, 4), (130, 3, 4)))
    rows.add(job_span(), jobs((115, 1, 4)))
    rows.resolve(job_span(), 125)
    assert await rows.wait_resolved(100) == 125
    assert [(ts, job.id) for ts, job in rows.take(125)] == [(115, 1), (120, 2)]
    assert rows.take(125) == []
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(rows.wait_resolved(125))
        await asyncio.sleep(0)
        rows.resolve(job_span(), 131)
    assert waiting.result() == 131
    assert [job.id for _, job in rows.take(131)] == [3]


def several(*found: tuple[int, int, int], revertible: bool) -> pa.RecordBatch:
    """ALTERs with several changes."""
    return jobs(
        *found, type=61, multi_schema_info={"sub_jobs": [{"type": 5}], "revertible": revertible}
    )


async def nothing_more(rows: JobRows, above_ts: int) -> bool:
    """Whether nothing is known above a ts: waiting does not end at once."""
    with suppress(TimeoutError):
        async with asyncio.timeout(0):
            await rows.wait_resolved(above_ts)
            return False
    return True


@pytest.mark.parametrize("is_disordered", [False, True])
async def test_an_alter_with_several_changes_is_told_where_users_had_them_once_it_is_done(
    is_disordered: bool,
) -> None:
    rows = JobRows(100)
    rows.loop = asyncio.get_running_loop()
    public = [
        several((110, 1, 1), revertible=True),
        several((120, 1, 1), (123, 1, 1), revertible=False),
    ]
    for batch in reversed(public) if is_disordered else public:
        rows.add(job_span(), batch)
    rows.add(job_span(), jobs((115, 2, 4), (125, 3, 4)))
    rows.resolve(job_span(), 130)
    assert await rows.wait_resolved(100) == 119, (
        "nothing is known from 120 on: who knows which columns came"
    )
    assert [(ts, job.id) for ts, job in rows.take(119)] == [(115, 2)]
    assert await nothing_more(rows, 119)
    rows.add(job_span(), several((140, 1, 4), revertible=False))
    assert await rows.wait_resolved(119) == 130
    rows.resolve(job_span(), 150)
    assert await rows.wait_resolved(119) == 150
    assert [(ts, job.id, job.added_columns) for ts, job in rows.take(150)] == [
        (120, 1, 1),
        (125, 3, 0),
    ]
    rows.add(job_span(), several((120, 1, 1), revertible=False))
    assert await nothing_more(rows, 150)
    rows.resolve(job_span(), 160)
    assert await rows.wait_resolved(150) == 160, "what is sent once more holds nothing back"


async def test_a_modify_is_told_where_users_had_the_new_column() -> None:
    rows = JobRows(100)
    rows.loop = asyncio.get_running_loop()
    rows.add(job_span(), jobs((110, 1, 1), type=12, schema_state=3))
    rows.add(job_span(), jobs((120, 1, 1), (130, 1, 1), type=12, schema_state=5))
    rows.resolve(job_span(), 135)
    assert await rows.wait_resolved(100) == 119
    rows.add(job_span(), jobs((140, 1, 4), type=12, schema_state=5))
    rows.resolve(job_span(), 150)
    assert await rows.wait_resolved(119) == 150
    assert [(ts, job.id) for ts, job in rows.take(150)] == [(120, 1)]
