"""The cluster's own change feed with schema changes, over what a real TiDB wrote."""

import asyncio
import random

import pytest

from server.capture.source.tidb import TidbSource
from server.puller.source import SourceContext
from tests.integration.tidb.replica import Replica, check_resumptions, compare
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
async def test_the_snapshot_of_any_time_has_the_tables_of_then(context: SourceContext, number: int) -> None:
    step = vectors.lines("steps")[number]
    records = await TidbSource(context).snapshot(step["ts_after"])
    assert [f"{it.schema_name}.{it.table_info['name']['O']}" for it in records] == sorted(step["rows_after"])
