"""The coroutines of tikvpb.Tikv: the BatchCommands stream,
and the rare calls that are not worth a batch.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from kvproto import kvrpcpb_pb2 as kvrpcpb
from kvproto import tikvpb_pb2 as tikvpb

from server.store.batch_commands import BatchStream, Others
from server.store.lock_wait import LockWaits
from server.store.raw_expiry import expire
from server.store.region_calls import RegionBackend, RegionCalls
from server.store.runner import Runner


class TikvService(RegionCalls):
    """What `RpcServer.add_service` finds beside the batch functions."""

    def __init__(
        self, tasks: asyncio.TaskGroup, runner: Runner, regions: RegionBackend, lock_wait_s: float
    ) -> None:
        """`tasks` outlives every call: streams that a client leaves are cancelled there."""
        super().__init__(regions)
        self._tasks = tasks
        self._runner = runner
        self._waits = LockWaits(runner, lock_wait_s)
        self._streams: set[BatchStream] = set()
        self._expiry = tasks.create_task(expire(runner), name="raw-expiry")
        self._others: Others = {"GC": self.KvGC, "DeleteRange": self.KvDeleteRange}

    def close(self) -> None:
        """End all streams, so that the listener need not wait for their clients."""
        self._expiry.cancel()
        for stream in self._streams:
            stream.close()

    async def BatchCommands(
        self, requests: Any, _: Any
    ) -> AsyncIterator[tikvpb.BatchCommandsResponse]:
        """See `batch_commands`."""
        stream = BatchStream(self._runner, self._waits, self._others)
        self._streams.add(stream)
        receiving = self._tasks.create_task(stream.receive(requests), name="batch-commands")
        try:
            async for response in stream.responses():
                yield response
        finally:
            self._streams.discard(stream)
            receiving.cancel()

    async def KvPessimisticLock(
        self, request: kvrpcpb.PessimisticLockRequest, _: Any
    ) -> kvrpcpb.PessimisticLockResponse:
        """Take pessimistic locks, see `lock_wait`; not a batch function,
        because one call's wait is not another's.
        """
        return await self._waits.lock(request)
