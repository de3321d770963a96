"""The calls of tikvpb.Tikv about whole regions and ranges: GC, destruction, splits,
the store's resolved timestamp.
"""

from dataclasses import dataclass
from typing import Any

from kvproto import kvrpcpb_pb2 as kvrpcpb

from server.store.feed.hub import FeedHub
from server.store.gc import AutoGc, Collector
from server.store.region_table import RegionGate
from server.store.split_merge import Splitter
from storage.codec import encode_bytes
from storage.model.errors import InvalidError
from storage.mvcc.region import Region


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


def _encoded(start: bytes, end: bytes) -> tuple[bytes, bytes]:
    return encode_bytes(start) if start else b"", encode_bytes(end) if end else b""
