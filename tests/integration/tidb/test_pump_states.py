"""Pumps that come, go, die and lose things while they are read: nothing is passed over,
and what is lost is named.
"""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest
from tipb import binlog_pb2, pump_pb2, pump_pb2_grpc

from server.capture.source.pump import PumpSource
from server.changefeed import keys
from server.changefeed.info import status_json
from server.changefeed.source import SourceUri
from server.puller.pump.puller import PumpOfflineError
from server.puller.pump.stream import BinlogPurgedError, PrewriteMissingError, PumpClusterError
from server.puller.pump.transactions import TableUnknownError
from server.puller.source import SourceContext
from server.puller.tidb.cluster import SchemaGapError
from server.pump.registry import PUMPS
from server.rpc.client import connect
from storage.meta.meta import Delete
from storage.model.errors import TidemarkError
from tests.integration.pump.test_daemon import Daemon, pump_argv, started
from tests.integration.pump.test_steering import asked
from tests.integration.store.daemons import Cluster
from tests.integration.tidb.pumps import FLAGS, pumps, written_to
from tests.integration.tidb.replica import Replica

QUICK = ("--fake-binlog-seconds", "0.2")
NEVER_TS = 1 << 63


def replica_at(context: SourceContext, start_ts: int) -> Replica:
    return Replica(PumpSource("feed", SourceUri.parse("pump://"), context), start_ts)


def numbers(replica: Replica, ts: int) -> list[int]:
    return sorted(int(row["id"] or 0) for row in replica.at(ts)["vec.upk"].rows.values())


@asynccontextmanager
async def reading(replica: Replica, upto_ts: int) -> AsyncIterator[asyncio.Task[None]]:
    async with asyncio.timeout(200), asyncio.TaskGroup() as tasks:
        yield tasks.create_task(replica.run(upto_ts))


async def name_of(pump: Daemon, context: SourceContext) -> str:
    assert context.meta is not None
    pairs = await context.meta.get_prefix(PUMPS)
    return next(
        pair.key.removeprefix(PUMPS).decode()
        for pair in pairs
        if pump.endpoints["pump"].encode() in pair.value
    )


async def test_a_pump_that_joins_while_others_are_read_is_read_too(
    cluster: Cluster, context: SourceContext, tmp_path: Path
) -> None:
    start_ts = await context.pd.tso()
    async with (
        AsyncExitStack() as stack,
        pumps(cluster, context, tmp_path, 1, *QUICK) as (written, daemons),
    ):
        await written.insert(1)
        replica = replica_at(context, start_ts)
        argv = pump_argv(cluster.coordinator.addr, tmp_path / "late", *FLAGS, *QUICK)
        async with reading(replica, NEVER_TS):
            late = await stack.enter_async_context(started(*argv))
            both = await written_to(context, [*daemons, late], stack)
            for number in range(2, 6):
                last_ts = await both.insert(number, number % 2)
            replica.upto_ts = last_ts
        assert numbers(replica, last_ts) == [1, 2, 3, 4, 5]


async def test_a_pump_that_is_killed_is_waited_for_and_found_again_elsewhere(
    cluster: Cluster, context: SourceContext, tmp_path: Path
) -> None:
    start_ts = await context.pd.tso()
    async with (
        AsyncExitStack() as stack,
        pumps(cluster, context, tmp_path, 2, *QUICK) as (written, daemons),
    ):
        await written.insert(1, 0)
        last_ts = await written.insert(2, 1)
        await daemons[1].end(signal.SIGKILL)
        replica = replica_at(context, start_ts)
        async with reading(replica, last_ts) as task:
            killed = daemons[1].endpoints["pump"]
            while not (slowest := replica.slowest_peer) or slowest.address != killed:  # noqa: ASYNC110 - tells no events
                await asyncio.sleep(0.05)
            await asyncio.sleep(1)
            assert not task.done()  # nobody else has the second row
            argv = pump_argv(cluster.coordinator.addr, tmp_path / "pump1", *FLAGS, *QUICK)
            await stack.enter_async_context(started(*argv))
        assert numbers(replica, last_ts) == [1, 2]


async def test_a_pump_that_goes_offline_waits_for_the_checkpoint_and_is_let_go_of(
    cluster: Cluster, context: SourceContext, tmp_path: Path
) -> None:
    start_ts = await context.pd.tso()
    assert context.meta is not None
    async with pumps(cluster, context, tmp_path, 2, *QUICK) as (written, daemons):
        last_ts = await written.insert(1, 1)
        replica = replica_at(context, start_ts)
        async with reading(replica, NEVER_TS) as task:
            await asked(daemons[1], "PUT", f"/state/{await name_of(daemons[1], context)}/close")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(daemons[1].process.wait(), 1.5)
            await context.meta.put(keys.status("feed"), status_json(1 << 62))
            assert await asyncio.wait_for(daemons[1].process.wait(), 100) == 0
            assert not task.done()
            replica.upto_ts = await context.pd.tso()
        assert numbers(replica, last_ts) == [1]
        await context.meta.txn([], [Delete(keys.status("feed"))])


async def test_a_reader_is_registered_with_its_checkpoint(
    cluster: Cluster, context: SourceContext, tmp_path: Path
) -> None:
    start_ts = await context.pd.tso()
    async with pumps(cluster, context, tmp_path, 1, *QUICK) as (written, _):
        await replica_at(context, start_ts).run(await written.insert(1))
        assert context.meta is not None
        pair = await context.meta.get(keys.drainer("feed"))
        assert pair is not None
        assert json.loads(pair.value)["maxCommitTS"] == start_ts


async def _offline(context: SourceContext, written: Any) -> None:
    last_ts = await written.insert(1)
    assert context.meta is not None
    entry = {"nodeId": "gone", "host": "127.0.0.1:1", "state": "offline", "maxCommitTS": last_ts}
    await context.meta.put(PUMPS + b"gone", json.dumps(entry).encode())


async def _bare_commit(context: SourceContext, written: Any) -> None:
    start_ts = await context.pd.tso()
    await written.binlog(tp=binlog_pb2.Commit, start_ts=start_ts, commit_ts=await context.pd.tso())


async def _unknown_table(context: SourceContext, written: Any) -> None:
    del context
    await written.insert(1, table_id=4_711)


async def _unknown_job(context: SourceContext, written: Any) -> None:
    ddl = {
        "start_ts": await context.pd.tso(),
        "ddl_query": b"create table x(id int)",
        "ddl_job_id": 4_711,
    }
    await written.binlog(tp=binlog_pb2.Prewrite, **ddl)
    await written.binlog(tp=binlog_pb2.Commit, commit_ts=await context.pd.tso(), **ddl)


BAD: dict[type[TidemarkError], Callable[[SourceContext, Any], Awaitable[None]]] = {
    PumpOfflineError: _offline,
    PrewriteMissingError: _bare_commit,
    TableUnknownError: _unknown_table,
    SchemaGapError: _unknown_job,
}


@pytest.mark.parametrize("error", BAD, ids=lambda error: error.code)
async def test_what_would_lose_rows_stops_the_feed_by_name_before_it_is_resolved(
    cluster: Cluster,
    context: SourceContext,
    tmp_path: Path,
    error: type[TidemarkError],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("server.puller.tidb.cluster._PAUSES_S", (0.01,))
    start_ts = await context.pd.tso()
    async with pumps(cluster, context, tmp_path, 1, *QUICK) as (written, _):
        before_ts = await written.insert(7)
        await BAD[error](context, written)
        replica = replica_at(context, start_ts)
        with pytest.RaisesGroup(error, flatten_subgroups=True):
            await replica.run(await context.pd.tso() + (60_000 << 18))
        span = replica.at(before_ts)["vec.upk"].source.span
        assert replica.taken.resolved[span] <= await context.pd.tso()
        if error is not PumpOfflineError:
            assert numbers(replica, before_ts) in ([7], [])


async def wait_purged(pump: Daemon, after_ts: int, cluster_id: int) -> None:
    """Until a pump has no more what comes after a timestamp."""
    request = pump_pb2.PullBinlogReq(clusterID=cluster_id, startFrom=pump_pb2.Pos(offset=after_ts))
    async with asyncio.timeout(100), connect(pump.endpoints["pump"]) as channel:
        while True:
            stream = pump_pb2_grpc.PumpStub(channel).PullBinlogs(request)
            try:
                await stream.read()
            except grpc.aio.AioRpcError as err:
                if "ErrBinlogPurged" in (err.details() or ""):
                    return
                raise
            stream.cancel()
            await asyncio.sleep(0.1)


async def test_binlogs_that_gc_removed_are_missed_by_name(
    cluster: Cluster, context: SourceContext, tmp_path: Path
) -> None:
    start_ts = await context.pd.tso()
    retention = (
        "--gc-retention-seconds",
        "1",
        "--gc-force-seconds",
        "1",
        "--gc-interval-seconds",
        "0.2",
    )
    async with pumps(cluster, context, tmp_path, 1, *QUICK, *retention) as (written, [daemon]):
        await written.insert(1)
        await wait_purged(daemon, start_ts, context.pd.cluster_id)
        with pytest.RaisesGroup(BinlogPurgedError, flatten_subgroups=True):
            await replica_at(context, start_ts).run(await context.pd.tso() + (60_000 << 18))


async def test_a_pump_of_another_cluster_is_refused(
    cluster: Cluster, context: SourceContext, tmp_path: Path
) -> None:
    start_ts = await context.pd.tso()
    async with pumps(cluster, context, tmp_path, 1, *QUICK):
        other: Any = _OtherCluster(context.pd)
        with pytest.RaisesGroup(PumpClusterError, flatten_subgroups=True):
            await replica_at(replace(context, pd=other), start_ts).run(start_ts + (60_000 << 18))


class _OtherCluster(SimpleNamespace):
    """The coordinator of this cluster, under another id."""

    def __init__(self, pd: Any) -> None:
        super().__init__(
            cluster_id=1,
            tso=pd.tso,
            gc_safe_point=pd.gc_safe_point,
            scan_regions=pd.scan_regions,
            region=pd.region,
        )
