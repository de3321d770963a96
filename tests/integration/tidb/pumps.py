"""Real pump daemons beside a cluster, and ways to write to them."""

import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from tipb import binlog_pb2, pump_pb2, pump_pb2_grpc

from server.changefeed import keys
from server.puller.source import SourceContext
from server.pump.registry import PUMPS
from server.rpc.client import connect
from server.rpc.pd import PdClient
from storage.codec import prefix_end
from storage.meta.meta import Delete
from storage.pump.binlog import fake
from storage.tidb.number import encode_varint
from tests.integration.pump.test_daemon import Daemon, pump_argv, started
from tests.integration.store.daemons import Cluster

# No heartbeats but a test's own: their timestamps are of today, the vectors' are three years older.
FLAGS = ("--fake-binlog-seconds", "1000", "--heartbeat-seconds", "0.2", "--lonely-seconds", "0.2")
TABLE_ID = 143
"""vec.upk, in the end: an unsigned integer key, and an integer."""


class Written:
    """Some pumps, and what is sent to them."""

    def __init__(self, pumps: Sequence[Any], pd: PdClient) -> None:
        self._pumps = pumps
        self._pd = pd

    async def send(self, payloads: Sequence[bytes]) -> None:
        """Binlogs of one transaction go to one pump, in the order given;
        then a heartbeat of today.
        """
        for payload in payloads:
            start_ts = binlog_pb2.Binlog.FromString(payload).start_ts
            await self._send(self._pumps[start_ts % 7 % len(self._pumps)], payload)
        await self.heartbeat(await self._pd.tso())

    async def heartbeat(self, ts: int) -> None:
        """Every pump has nothing more up to `ts`."""
        for pump in self._pumps:
            await self._send(pump, fake(ts))

    async def insert(self, number: int, pump: int = 0, *, table_id: int = TABLE_ID) -> int:
        """Commit one row; returns its commit_ts."""
        start_ts = await self._pd.tso()
        row = b"\x08" + encode_varint(number) + b"\x08\x04\x08\x0a"
        mutation = binlog_pb2.TableMutation(
            table_id=table_id, inserted_rows=[row], sequence=[binlog_pb2.MutationType.Insert]
        )
        rows = binlog_pb2.PrewriteValue(schema_version=1, mutations=[mutation]).SerializeToString()
        await self.binlog(
            pump, tp=binlog_pb2.Prewrite, start_ts=start_ts, prewrite_key=b"k", prewrite_value=rows
        )
        commit_ts = await self._pd.tso()
        await self.binlog(
            pump, tp=binlog_pb2.Commit, start_ts=start_ts, commit_ts=commit_ts, prewrite_key=b"k"
        )
        return commit_ts

    async def binlog(self, pump: int = 0, **fields: Any) -> None:
        """Send one binlog to one pump."""
        await self._send(self._pumps[pump], binlog_pb2.Binlog(**fields).SerializeToString())

    async def _send(self, pump: Any, payload: bytes) -> None:
        await pump.WriteBinlog(
            pump_pb2.WriteBinlogReq(clusterID=self._pd.cluster_id, payload=payload)
        )


@asynccontextmanager
async def pumps(
    cluster: Cluster, context: SourceContext, directory: Path, count: int, *flags: str
) -> AsyncIterator[tuple[Written, list[Daemon]]]:
    """Pump daemons, registered for the block, and the way to write to them."""
    async with AsyncExitStack() as stack:
        daemons = []
        for number in range(count):
            argv = pump_argv(cluster.coordinator.addr, directory / f"pump{number}", *FLAGS, *flags)
            daemons.append(await stack.enter_async_context(started(*argv)))
        assert context.meta is not None
        await context.meta.put(
            keys.info("feed"), b"{}"
        )  # who registers is a changefeed that exists
        try:
            yield await written_to(context, daemons, stack), daemons
        finally:
            for daemon in daemons:
                await daemon.end(signal.SIGKILL)
            await forget_pumps(context)


async def written_to(
    context: SourceContext, daemons: Sequence[Daemon], stack: AsyncExitStack
) -> Written:
    """The way to write to pumps."""
    channels = [await stack.enter_async_context(connect(it.endpoints["pump"])) for it in daemons]
    return Written([pump_pb2_grpc.PumpStub(channel) for channel in channels], context.pd)


async def forget_pumps(context: SourceContext) -> None:
    """No pump is registered any more, nor a reader."""
    assert context.meta is not None
    await context.meta.txn(
        [], [Delete(prefix, prefix_end(prefix)) for prefix in (PUMPS, keys.DRAINERS)]
    )
