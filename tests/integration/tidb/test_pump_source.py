"""Real pumps, merged: every binlog of a real TiDB, in the order in which it was sent,
in others, and with losses.
"""

import asyncio
import base64
import random
from pathlib import Path

import pytest
from tipb import binlog_pb2

from server.capture.source.pump import PumpSource
from server.changefeed.source import SourceUri
from server.puller.source import SourceContext
from tests.integration.store.daemons import Cluster
from tests.integration.tidb.pumps import pumps
from tests.integration.tidb.replica import Replica, check_resumptions, compare
from tests.unit.storage.tidb import vectors

PAUSE_TS = 60 << 18
"""60 ms, of which the whole history takes two seconds."""


def binlogs() -> list[bytes]:
    """In order of arrival."""
    return [base64.b64decode(line["payload_b64"]) for line in vectors.lines("binlogs")]


async def check_all_steps(context: SourceContext) -> Replica:
    """What pumps have of the vectors, compared after each step."""
    steps = vectors.lines("steps")
    replica = Replica(source_of(context), steps[0]["ts_before"])
    async with asyncio.timeout(200):
        await replica.run(steps[-1]["ts_after"])
    assert sum(compare(replica, step) for step in steps) > 2000
    return replica


def source_of(context: SourceContext) -> PumpSource:
    return PumpSource("feed", SourceUri.parse("pump://"), context)


async def test_each_step_ends_with_the_rows_that_select_gave_also_after_a_new_start_anywhere(
    cluster: Cluster, context: SourceContext, tmp_path: Path
) -> None:
    async with pumps(cluster, context, tmp_path, 1) as (written, _):
        await written.send(binlogs())
        whole = await check_all_steps(context)
        await check_resumptions(source_of(context), whole, random.Random(1), 5)


def disordered(chance: random.Random, lost: int, repeated: int) -> list[bytes]:
    """Some order in which they can arrive: a prewrite before its commit_ts is taken,
    an outcome any time after it.
    """
    parsed = [(binlog_pb2.Binlog.FromString(payload), payload) for payload in binlogs()]
    commits = {it.start_ts: it.commit_ts for it, _ in parsed if it.tp == binlog_pb2.Commit}
    gone = set(chance.sample(sorted(commits), lost))
    arrivals: list[tuple[int, bytes]] = []
    for it, payload in parsed:
        if it.tp == binlog_pb2.Prewrite:
            at = chance.randint(it.start_ts, commits.get(it.start_ts, it.start_ts))
        else:
            at = (it.commit_ts or it.start_ts) + int(chance.expovariate(1 / PAUSE_TS))
        if it.tp == binlog_pb2.Prewrite or it.start_ts not in gone:
            arrivals.append((at, payload))
    arrivals += [
        (at + int(chance.expovariate(1 / PAUSE_TS)), it)
        for at, it in chance.sample(arrivals, repeated)
    ]
    return [payload for _, payload in sorted(arrivals)]


@pytest.mark.parametrize("seed", [1])
async def test_three_pumps_with_disorder_repetitions_and_lost_commits_give_the_same(
    cluster: Cluster, context: SourceContext, tmp_path: Path, seed: int
) -> None:
    sent = disordered(random.Random(seed), lost=20, repeated=40)
    async with pumps(cluster, context, tmp_path, 3) as (written, _):
        await written.send(sent)
        await check_all_steps(context)
