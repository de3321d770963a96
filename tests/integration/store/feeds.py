"""A change-feed client that holds the store to the rules TiCDC dies by (PROTOCOLS,
cdcpb rules 6 to 9).
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from kvproto import cdcpb_pb2 as cdcpb
from kvproto import cdcpb_pb2_grpc as cdcgrpc
from kvproto import kvrpcpb_pb2 as kvrpcpb

from server.rpc.region_cache import RegionRoute
from tests.integration.store.stubs import Stubs

Row = cdcpb.Event.Row
Committed = tuple[int, int, bytes, int, bytes, bytes]


@dataclass
class RegionState:
    """The matcher of one region subscription."""

    checkpoint_ts: int
    initialized: bool = False
    resolved_ts: int = 0
    prewritten: dict[tuple[int, bytes], Row] = field(default_factory=dict)
    early: list[Row] = field(default_factory=list)

    def apply(self, row: Row) -> list[Committed]:
        """The changes that are now known to be committed: (commit_ts, start_ts, key, op,
        value, old_value).
        """
        at = (row.start_ts, row.key)
        match row.type:
            case cdcpb.Event.PREWRITE:
                self.prewritten[at] = row
            case cdcpb.Event.INITIALIZED:
                assert not self.initialized
                self.initialized = True
                early, self.early = self.early, []
                return [out for earlier in early for out in self.apply(earlier)]
            case cdcpb.Event.COMMITTED:
                assert row.commit_ts > self.checkpoint_ts
                assert not self.initialized or row.commit_ts > self.resolved_ts, (
                    "a 1PC at or before a resolved_ts"
                )
                return [_committed(row, row)]
            case _ if not self.initialized:
                self.early.append(row)
            case cdcpb.Event.COMMIT:
                assert row.commit_ts > self.resolved_ts, "a commit at or before a resolved_ts"
                assert at in self.prewritten, "a commit without its prewrite"
                return [_committed(row, self.prewritten.pop(at))]
            case cdcpb.Event.ROLLBACK:
                self.prewritten.pop(at, None)
        return []


def _committed(row: Row, values: Row) -> Committed:
    return row.commit_ts, row.start_ts, row.key, values.op_type, values.value, values.old_value


class Feed:
    """One EventFeedV2 stream."""

    def __init__(
        self, stubs: Stubs, requests: asyncio.Queue[cdcpb.ChangeDataRequest | None]
    ) -> None:
        self.stubs = stubs
        self.regions: dict[int, RegionState] = {}
        self.committed: list[Committed] = []
        self.errors: list[cdcpb.Event] = []
        self.live_rows = 0
        self._requests = requests
        self._call = cdcgrpc.ChangeDataStub(stubs.channel).EventFeedV2(
            self._sent(), metadata=(("features", "stream-multiplexing"),)
        )

    async def _sent(self) -> AsyncIterator[cdcpb.ChangeDataRequest]:
        while (request := await self._requests.get()) is not None:
            yield request

    def subscribe(self, route: RegionRoute, checkpoint_ts: int = 0, **more: object) -> None:
        """Ask for a whole region."""
        self.regions[route.region.id] = RegionState(checkpoint_ts)
        asked: dict[str, Any] = {
            "header": cdcpb.Header(cluster_id=self.stubs.pd.cluster_id),
            "region_id": route.region.id,
            "region_epoch": route.region.region_epoch,
            "checkpoint_ts": checkpoint_ts,
            "start_key": route.region.start_key,
            "end_key": route.region.end_key,
            "request_id": 1,
            "extra_op": kvrpcpb.ReadOldValue,
        }
        self._requests.put_nowait(cdcpb.ChangeDataRequest(**(asked | more)))

    def send(self, request: cdcpb.ChangeDataRequest) -> None:
        """Send anything."""
        self._requests.put_nowait(request)

    async def step(self) -> None:
        """Take one message."""
        async with asyncio.timeout(60):
            message = await self._call.read()
        assert isinstance(message, cdcpb.ChangeDataEvent), "the store ended the stream"
        assert not (message.events and message.HasField("resolved_ts"))
        for event in message.events:
            if event.HasField("error"):
                self.errors.append(event)
                continue
            for row in event.entries.entries:
                self.live_rows += 1
                self.committed += self.regions[event.region_id].apply(row)
        for region_id in message.resolved_ts.regions:
            state = self.regions[region_id]
            assert state.initialized, "resolved before INITIALIZED"
            assert message.resolved_ts.ts >= state.resolved_ts, "resolved_ts went back"
            state.resolved_ts = message.resolved_ts.ts

    async def wait_resolved(self, ts: int) -> None:
        """Until every region is resolved at or after `ts`."""
        while min(state.resolved_ts for state in self.regions.values()) < ts:
            await self.step()

    def cancel(self) -> None:
        """Leave."""
        self._call.cancel()


@asynccontextmanager
async def feeding(stubs: Stubs) -> AsyncIterator[Feed]:
    """A feed for the block."""
    feed = Feed(stubs, asyncio.Queue())
    try:
        yield feed
    finally:
        feed.cancel()
