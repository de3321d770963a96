"""Real pumps, merged: every binlog of a real TiDB, in the order in which it was sent, in others, and with losses."""

import asyncio
import base64
import random
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tipb import binlog_pb2, pump_pb2, pump_pb2_grpc

from server.puller.pump.nodes import DRAINERS
from server.puller.pump.source import PumpSource
from server.puller.source import SourceContext
from server.puller.uri import SourceUri
from server.pump.registry import PREFIX
from server.rpc.client import connect
from server.rpc.pd import PdClient
from storage.codec import prefix_end
from storage.meta.meta import Delete
from storage.pump.binlog import fake
from tests.integration.pump.test_daemon import Daemon, pump_argv, started
from tests.integration.store.daemons import Cluster
from tests.integration.tidb.conftest import context_of
from tests.integration.tidb.replica import Replica, compare
from tests.unit.storage.tidb import vectors

pytestmark = vectors.needed
# No heartbeats but the test's own: their timestamps are of today, the binlogs' are three years older.
PAUSE_TS = 60 << 18
"""60 ms, of which the whole history takes two seconds."""
LATE = ("--fake-binlog-seconds", "1000", "--heartbeat-seconds", "0.2", "--lonely-seconds", "0.2")


class Written:
    """Some pumps, and what is sent to them."""

    def __init__(self, pumps: Sequence[Any], pd: PdClient) -> None:
        self._pumps = pumps
        self._pd = pd

    async def send(self, payloads: Sequence[bytes]) -> None:
        """Binlogs of one transaction go to one pump, in the order given; then a heartbeat of today."""
        for payload in payloads:
            start_ts = binlog_pb2.Binlog.FromString(payload).start_ts
            await self._send(self._pumps[start_ts % 7 % len(self._pumps)], payload)
        await self.heartbeat(await self._pd.tso())

    async def heartbeat(self, ts: int) -> None:
        """Every pump has nothing more up to `ts`."""
        for pump in self._pumps:
            await self._send(pump, fake(ts))

    async def _send(self, pump: Any, payload: bytes) -> None:
        await pump.WriteBinlog(pump_pb2.WriteBinlogReq(clusterID=self._pd.cluster_id, payload=payload))


def binlogs() -> list[bytes]:
    """In order of arrival."""
    return [base64.b64decode(line["payload_b64"]) for line in vectors.lines("binlogs")]


@asynccontextmanager
async def pumps(
    cluster: Cluster, directory: Path, count: int, *flags: str
) -> AsyncIterator[tuple[Written, list[Daemon]]]:
    """Pump daemons, registered; and the way to write to them."""
    async with AsyncExitStack() as stack:
        context = await stack.enter_async_context(context_of(cluster))
        daemons = []
        for number in range(count):
            argv = pump_argv(cluster.coordinator.addr, directory / f"pump{number}", *LATE, *flags)
            daemons.append(await stack.enter_async_context(started(*argv)))
        channels = [await stack.enter_async_context(connect(it.endpoints["pump"])) for it in daemons]
        try:
            yield Written([pump_pb2_grpc.PumpStub(channel) for channel in channels], context.pd), daemons
        finally:
            for daemon in daemons:
                await daemon.end(signal.SIGKILL)
            await forgotten(context)


async def forgotten(context: SourceContext) -> None:
    """No pump is registered any more, nor a reader."""
    assert context.meta is not None
    await context.meta.txn([], [Delete(prefix, prefix_end(prefix)) for prefix in (PREFIX, DRAINERS)])


async def replicated(context: SourceContext, start_ts: int | None = None) -> Replica:
    """Everything that pumps have of the vectors."""
    steps = vectors.lines("steps")
    source = PumpSource("feed", SourceUri.parse("pump://"), context)
    replica = Replica(source, steps[0]["ts_before"] if start_ts is None else start_ts)
    async with asyncio.timeout(60):
        await replica.run(steps[-1]["ts_after"])
    return replica


def check(replica: Replica) -> None:
    assert sum(compare(replica, step) for step in vectors.lines("steps")) > 2000


async def test_each_of_the_52_steps_ends_with_the_rows_that_select_gave(cluster: Cluster, tmp_path: Path) -> None:
    async with pumps(cluster, tmp_path, 1) as (written, _), context_of(cluster) as context:
        await written.send(binlogs())
        check(await replicated(context))


def disordered(chance: random.Random, lost: int, repeated: int) -> list[bytes]:
    """Some order in which they can arrive: a prewrite before its commit_ts is taken, an outcome any time after it."""
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
    arrivals += [(at + int(chance.expovariate(1 / PAUSE_TS)), it) for at, it in chance.sample(arrivals, repeated)]
    return [payload for _, payload in sorted(arrivals)]


@pytest.mark.parametrize("seed", [1, 2])
async def test_three_pumps_with_disorder_repetitions_and_lost_commits_give_the_same(
    cluster: Cluster, tmp_path: Path, seed: int
) -> None:
    sent = disordered(random.Random(seed), lost=20, repeated=40)
    async with pumps(cluster, tmp_path, 3) as (written, _), context_of(cluster) as context:
        await written.send(sent)
        check(await replicated(context))
