"""The coroutines of tikvpb.Tikv: the BatchCommands stream, waits for pessimistic locks, and the
rare calls about whole regions and ranges that are not worth a batch.

Those are GC, destruction, splits, the store's resolved timestamp. Raw pairs whose TTL is over are
removed beside them.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog
from kvproto import kvrpcpb_pb2 as kvrpcpb
from kvproto import tikvpb_pb2 as tikvpb

from server.store.batch_commands import BatchStream, Others
from server.store.feed.hub import FeedHub
from server.store.gc import AutoGc, Collector
from server.store.lock_wait import LockWaits
from server.store.raw_calls import now_s
from server.store.region_table import RegionGate
from server.store.runner import Runner
from server.store.split_merge import Splitter
from storage.codec import encode_bytes
from storage.model.errors import CorruptError, InvalidError
from storage.mvcc import raw
from storage.mvcc.group_commit import StoreBusyError
from storage.mvcc.region import Region

_EXPIRE_EVERY_S = 60.0
_EXPIRED_AT_ONCE = 1024

_log = structlog.get_logger(__name__)


class SafePointAheadError(InvalidError):
    """Nothing may be collected that the coordinator's safepoint still protects."""

    code = "ErrGCSafePointAhead"

    def __init__(self, requested: int, allowed: int) -> None:
        super().__init__(
            f"safepoint {requested} is ahead of the coordinator's GC safepoint {allowed}; update that "
            "one first"
        )


class EmptyRangeError(InvalidError):
    """A range to destroy has no keys; an empty end is not taken for the end of everything."""

    code = "ErrEmptyRange"

    def __init__(self, start: bytes, end: bytes) -> None:
        super().__init__(
            f"the range [{start.hex()}, {end.hex()}) has no keys, nothing was destroyed; name "
            "both its ends"
        )


@dataclass(frozen=True, slots=True)
class RegionBackend:
    """What these calls work with."""

    gate: RegionGate
    collector: Collector
    splitter: Splitter
    hub: FeedHub
    gc: AutoGc


class RegionCalls:
    """Rare calls: coroutines, not batch functions."""

    def __init__(self, backend: RegionBackend) -> None:
        self._regions = backend

    async def KvGC(self, request: kvrpcpb.GCRequest, _: Any) -> kvrpcpb.GCResponse:
        """Collect one region up to the given safepoint (GC mode "central");
        done when it returns.
        """
        region = self._regions.gate.admit(request.context, ())
        if not isinstance(region, Region):
            return kvrpcpb.GCResponse(region_error=region)
        allowed = await self._regions.gc.allowed()
        if request.safe_point > allowed:
            ahead = SafePointAheadError(request.safe_point, allowed)
            return kvrpcpb.GCResponse(error=kvrpcpb.KeyError(abort=str(ahead)))
        await self._regions.collector.collect(region, request.safe_point)
        return kvrpcpb.GCResponse()

    async def KvDeleteRange(
        self, request: kvrpcpb.DeleteRangeRequest, _: Any
    ) -> kvrpcpb.DeleteRangeResponse:
        """Destroy all versions of a range within one region."""
        region = self._regions.gate.admit(request.context, (request.start_key,))
        if not isinstance(region, Region):
            return kvrpcpb.DeleteRangeResponse(region_error=region)
        if not request.start_key < request.end_key:
            return kvrpcpb.DeleteRangeResponse(
                error=str(EmptyRangeError(request.start_key, request.end_key))
            )
        if not request.notify_only:
            lower, upper = region.clamp(
                encode_bytes(request.start_key), encode_bytes(request.end_key)
            )
            await self._regions.collector.destroy(lower, upper)
        return kvrpcpb.DeleteRangeResponse()

    async def UnsafeDestroyRange(
        self, request: kvrpcpb.UnsafeDestroyRangeRequest, _: Any
    ) -> kvrpcpb.UnsafeDestroyRangeResponse:
        """Destroy all versions and locks of a range of this store, whatever its regions;
        done when it returns.
        """
        if not request.start_key < request.end_key:
            return kvrpcpb.UnsafeDestroyRangeResponse(
                error=str(EmptyRangeError(request.start_key, request.end_key))
            )
        await self._regions.collector.destroy(
            encode_bytes(request.start_key), encode_bytes(request.end_key)
        )
        return kvrpcpb.UnsafeDestroyRangeResponse()

    async def SplitRegion(
        self, request: kvrpcpb.SplitRegionRequest, _: Any
    ) -> kvrpcpb.SplitRegionResponse:
        """Split a region at user keys."""
        return await self._regions.splitter.split(request)

    async def GetStoreSafeTS(
        self, request: kvrpcpb.StoreSafeTSRequest, _: Any
    ) -> kvrpcpb.StoreSafeTSResponse:
        """The least resolved timestamp of the regions that the range touches;
        0 when there is none.
        """
        key_range = request.key_range
        return kvrpcpb.StoreSafeTSResponse(
            safe_ts=self._regions.hub.safe_ts(*_encoded(key_range.start_key, key_range.end_key))
        )


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
        # Not a child of this handler: gRPC cancels that when the client leaves, and answers under
        # way still have to be counted.
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


def _encoded(start: bytes, end: bytes) -> tuple[bytes, bytes]:
    return encode_bytes(start) if start else b"", encode_bytes(end) if end else b""


async def expire(runner: Runner) -> None:
    """Look every minute until cancelled."""
    while True:
        try:
            while await _expire_some(runner) == _EXPIRED_AT_ONCE:
                """There may be more."""
        except StoreBusyError:
            _log.info("raw pairs are not expired now, the store is busy")
        except CorruptError as err:
            _log.error("raw pairs are not expired", error=err.message)
        await asyncio.sleep(_EXPIRE_EVERY_S)


async def _expire_some(runner: Runner) -> int:
    keys = await runner.look(lambda reader: raw.expired(reader, now_s(), _EXPIRED_AT_ONCE))
    if keys:
        await runner.run(partial(raw.sweep, keys=keys, now_s=now_s()))
    return len(keys)
