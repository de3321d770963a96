"""The coroutines of tikvpb.Tikv: the BatchCommands stream, and the rare calls that are not worth a batch."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from kvproto import kvrpcpb_pb2 as kvrpcpb
from kvproto import tikvpb_pb2 as tikvpb

from server.store.batch_commands import BatchStream, Others
from server.store.collector import Collector
from server.store.lock_wait import lock_or_wait
from server.store.region_check import RegionGate
from server.store.runner import Runner
from server.store.split import Splitter
from storage.codec import encode_bytes
from storage.mvcc.region import Region


class TikvService:
    """What `RpcServer.add_service` finds beside the batch functions."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        runner: Runner,
        gate: RegionGate,
        collector: Collector,
        splitter: Splitter,
    ) -> None:
        """`tasks` outlives every call: streams that a client leaves are cancelled there."""
        self._tasks = tasks
        self._runner = runner
        self._gate = gate
        self._collector = collector
        self._splitter = splitter
        self._streams: set[BatchStream] = set()
        self._others: Others = {"GC": self.KvGC, "DeleteRange": self.KvDeleteRange}

    def close(self) -> None:
        """End all streams, so that the listener need not wait for their clients."""
        for stream in self._streams:
            stream.close()

    async def BatchCommands(self, requests: Any, _: Any) -> AsyncIterator[tikvpb.BatchCommandsResponse]:  # noqa: N802
        """See `batch_commands`."""
        stream = BatchStream(self._runner, self._others)
        self._streams.add(stream)
        receiving = self._tasks.create_task(stream.receive(requests), name="batch-commands")
        try:
            async for response in stream.responses():
                yield response
        finally:
            self._streams.discard(stream)
            receiving.cancel()

    async def KvPessimisticLock(  # noqa: N802
        self, request: kvrpcpb.PessimisticLockRequest, _: Any
    ) -> kvrpcpb.PessimisticLockResponse:
        """Take pessimistic locks, see `lock_wait`; not a batch function, because one call's wait is not another's."""
        return await lock_or_wait(self._runner, request)

    async def KvGC(self, request: kvrpcpb.GCRequest, _: Any) -> kvrpcpb.GCResponse:  # noqa: N802
        """Collect one region up to the given safepoint (GC mode "central"); done when it returns."""
        region = self._gate.admit(request.context, ())
        if not isinstance(region, Region):
            return kvrpcpb.GCResponse(region_error=region)
        await self._collector.collect(region.start_key, region.end_key, request.safe_point)
        return kvrpcpb.GCResponse()

    async def KvDeleteRange(  # noqa: N802
        self, request: kvrpcpb.DeleteRangeRequest, _: Any
    ) -> kvrpcpb.DeleteRangeResponse:
        """Destroy all versions of a range within one region."""
        region = self._gate.admit(request.context, (request.start_key,))
        if not isinstance(region, Region):
            return kvrpcpb.DeleteRangeResponse(region_error=region)
        if not request.notify_only:
            lower, upper = region.clamp(*_encoded(request.start_key, request.end_key))
            await self._collector.destroy(lower, upper)
        return kvrpcpb.DeleteRangeResponse()

    async def UnsafeDestroyRange(  # noqa: N802
        self, request: kvrpcpb.UnsafeDestroyRangeRequest, _: Any
    ) -> kvrpcpb.UnsafeDestroyRangeResponse:
        """Destroy all versions and locks of a range of this store, whatever its regions; done when it returns."""
        await self._collector.destroy(*_encoded(request.start_key, request.end_key))
        return kvrpcpb.UnsafeDestroyRangeResponse()

    async def SplitRegion(  # noqa: N802
        self, request: kvrpcpb.SplitRegionRequest, _: Any
    ) -> kvrpcpb.SplitRegionResponse:
        """Split a region at user keys."""
        return await self._splitter.split(request)

    async def GetStoreSafeTS(  # noqa: N802
        self, _request: kvrpcpb.StoreSafeTSRequest, _: Any
    ) -> kvrpcpb.StoreSafeTSResponse:
        """0: stale reads from followers are not served, there are no followers."""
        return kvrpcpb.StoreSafeTSResponse(safe_ts=0)


def _encoded(start: bytes, end: bytes) -> tuple[bytes, bytes]:
    return encode_bytes(start) if start else b"", encode_bytes(end) if end else b""
