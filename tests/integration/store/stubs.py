"""A store's services as a test calls them: contexts from the coordinator,
requests as they are on the wire.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import grpc.aio
from kvproto import kvrpcpb_pb2 as kvrpcpb
from kvproto import tikvpb_pb2_grpc as tikvpb

from server.rpc.client import connect
from server.rpc.pd import PdClient, RegionMissingError
from server.rpc.region_cache import RegionRoute
from storage.codec import encode_bytes, encode_i64
from tests.integration.store.daemons import Cluster


def row_key(table_id: int, handle: int) -> bytes:
    """The key of a row, as TiDB has it."""
    return b"t" + encode_i64(table_id) + b"_r" + encode_i64(handle)


@dataclass
class Stubs:
    """The coordinator's client and the store's stub."""

    pd: PdClient
    channel: grpc.aio.Channel
    tikv: tikvpb.TikvStub

    async def context(self, key: bytes) -> kvrpcpb.Context:
        """The context of a request for a user key."""
        route = await self._route(encode_bytes(key))
        return kvrpcpb.Context(
            region_id=route.region.id, region_epoch=route.region.region_epoch, peer=route.leader
        )

    async def _route(self, key: bytes) -> RegionRoute:
        """As clients do: regions that change are reported one by one,
        and in between there may be none for a key.
        """
        async with asyncio.timeout(60):
            while True:
                with suppress(RegionMissingError):
                    return await self.pd.region(key)
                await asyncio.sleep(0.01)

    async def prewrite(
        self,
        key: bytes,
        value: bytes,
        *,
        primary: bytes = b"",
        start_ts: int = 0,
        ttl_ms: int = 3000,
    ) -> int:
        """Lock one key and leave it so; returns the start_ts."""
        start_ts = start_ts or await self.pd.tso()
        answer = await self.tikv.KvPrewrite(
            kvrpcpb.PrewriteRequest(
                context=await self.context(key),
                mutations=[kvrpcpb.Mutation(op=kvrpcpb.Put, key=key, value=value)],
                primary_lock=primary or key,
                start_version=start_ts,
                lock_ttl=ttl_ms,
            )
        )
        assert not answer.errors, answer
        return start_ts

    async def commit(self, key: bytes, start_ts: int, commit_ts: int = 0) -> int:
        """Commit one key; returns the commit_ts."""
        commit_ts = commit_ts or await self.pd.tso()
        answer = await self.tikv.KvCommit(
            kvrpcpb.CommitRequest(
                context=await self.context(key),
                start_version=start_ts,
                keys=[key],
                commit_version=commit_ts,
            )
        )
        assert not answer.HasField("error"), answer
        assert not answer.HasField("region_error"), answer
        return commit_ts

    async def put(self, key: bytes, value: bytes) -> int:
        """One whole transaction; returns its commit_ts."""
        return await self.commit(key, await self.prewrite(key, value))

    async def get(self, key: bytes, version: int = 0) -> kvrpcpb.GetResponse:
        """A read at `version`, or now."""
        request = kvrpcpb.GetRequest(
            context=await self.context(key), key=key, version=version or await self.pd.tso()
        )
        return await self.tikv.KvGet(request)


@asynccontextmanager
async def stubs_of(cluster: Cluster) -> AsyncIterator[Stubs]:
    """Connected stubs for the block."""
    async with (
        PdClient.open(cluster.coordinator.addr) as pd,
        connect(cluster.store.addr) as channel,
    ):
        yield Stubs(pd, channel, tikvpb.TikvStub(channel))
