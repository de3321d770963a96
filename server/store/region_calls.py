"""The calls of tikvpb.Tikv about whole regions and ranges: GC, destruction, splits, and how far the store is resolved."""

from dataclasses import dataclass
from typing import Any

from kvproto import kvrpcpb_pb2 as kvrpcpb

from server.store.collector import Collector
from server.store.region_check import RegionGate
from server.store.split import Splitter
from storage.codec import encode_bytes
from storage.mvcc.region import Region


@dataclass(frozen=True, slots=True)
class RegionBackend:
    """What these calls work with."""

    gate: RegionGate
    collector: Collector
    splitter: Splitter


class RegionCalls:
    """Rare calls: coroutines, not batch functions."""

    def __init__(self, backend: RegionBackend) -> None:
        self._regions = backend

    async def KvGC(self, request: kvrpcpb.GCRequest, _: Any) -> kvrpcpb.GCResponse:  # noqa: N802
        """Collect one region up to the given safepoint (GC mode "central"); done when it returns."""
        region = self._regions.gate.admit(request.context, ())
        if not isinstance(region, Region):
            return kvrpcpb.GCResponse(region_error=region)
        await self._regions.collector.collect(region.start_key, region.end_key, request.safe_point)
        return kvrpcpb.GCResponse()

    async def KvDeleteRange(  # noqa: N802
        self, request: kvrpcpb.DeleteRangeRequest, _: Any
    ) -> kvrpcpb.DeleteRangeResponse:
        """Destroy all versions of a range within one region."""
        region = self._regions.gate.admit(request.context, (request.start_key,))
        if not isinstance(region, Region):
            return kvrpcpb.DeleteRangeResponse(region_error=region)
        if not request.notify_only:
            lower, upper = region.clamp(*_encoded(request.start_key, request.end_key))
            await self._regions.collector.destroy(lower, upper)
        return kvrpcpb.DeleteRangeResponse()

    async def UnsafeDestroyRange(  # noqa: N802
        self, request: kvrpcpb.UnsafeDestroyRangeRequest, _: Any
    ) -> kvrpcpb.UnsafeDestroyRangeResponse:
        """Destroy all versions and locks of a range of this store, whatever its regions; done when it returns."""
        await self._regions.collector.destroy(*_encoded(request.start_key, request.end_key))
        return kvrpcpb.UnsafeDestroyRangeResponse()

    async def SplitRegion(  # noqa: N802
        self, request: kvrpcpb.SplitRegionRequest, _: Any
    ) -> kvrpcpb.SplitRegionResponse:
        """Split a region at user keys."""
        return await self._regions.splitter.split(request)

    async def GetStoreSafeTS(  # noqa: N802
        self, _request: kvrpcpb.StoreSafeTSRequest, _: Any
    ) -> kvrpcpb.StoreSafeTSResponse:
        """0: stale reads from followers are not served, there are no followers."""
        return kvrpcpb.StoreSafeTSResponse(safe_ts=0)


def _encoded(start: bytes, end: bytes) -> tuple[bytes, bytes]:
    return encode_bytes(start) if start else b"", encode_bytes(end) if end else b""
