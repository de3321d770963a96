"""What operators ask of a store: debugpb.Debug (TiKV's) changes settings,
tidemarkpb.v1.StoreService knows regions.
"""

import asyncio
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from kvproto import debugpb_pb2 as debugpb
from tidemarkpb.v1 import store_pb2

from server.store.feed.hub import FeedHub
from server.store.gc import AutoGc, CollectorParts
from server.store.handover import Handover
from server.store.identity import Identity, region_message
from server.store.online_config import OnlineConfig
from server.store.split_merge import Merger
from storage.mvcc.region import Region, region_bytes


class DebugService:
    """debugpb.Debug, as far as it changes settings."""

    def __init__(self, config: OnlineConfig) -> None:
        self._config = config

    async def ModifyTikvConfig(
        self, request: debugpb.ModifyTikvConfigRequest, _: Any
    ) -> debugpb.ModifyTikvConfigResponse:
        """Change one setting; the module is ignored, as in TiKV, names are whole."""
        await self._config.set(request.config_name, request.config_value)
        return debugpb.ModifyTikvConfigResponse()


@dataclass(slots=True)
class StoreService:
    """tidemarkpb.v1.StoreService."""

    identity: Identity
    parts: CollectorParts
    gc: AutoGc
    hub: FeedHub
    merger: Merger
    handover: Handover
    scanners: Executor

    async def GetStoreStatus(
        self, _request: store_pb2.GetStoreStatusRequest, _: Any
    ) -> store_pb2.GetStoreStatusResponse:
        """Regions with their sizes, GC's progress, and how far the store is resolved."""
        regions = list(self.parts.gate.regions)
        loop = asyncio.get_running_loop()
        sizes = await loop.run_in_executor(
            self.scanners, lambda: [region_bytes(self.parts.kv, r) for r in regions]
        )
        return store_pb2.GetStoreStatusResponse(
            cluster_id=self.identity.cluster_id,
            store_id=self.identity.store_id,
            regions=[
                self._region(region, size) for region, size in zip(regions, sizes, strict=True)
            ],
            gc=self._progress(),
            safe_ts=self.hub.safe_ts(b"", b""),
        )

    async def MergeRegions(
        self, request: store_pb2.MergeRegionsRequest, _: Any
    ) -> store_pb2.MergeRegionsResponse:
        """See `Merger.merge`."""
        merged = await self.merger.merge(request.source_region_id, request.target_region_id)
        return store_pb2.MergeRegionsResponse(region=region_message(merged, self.identity.store_id))

    async def AdoptRegion(
        self, request: store_pb2.AdoptRegionRequest, _: Any
    ) -> store_pb2.AdoptRegionResponse:
        """See `Handover.adopt`."""
        await self.handover.adopt(request.cluster_id, request.region, request.gc_safe_point)
        return store_pb2.AdoptRegionResponse()

    def _region(self, region: Region, size: int) -> store_pb2.RegionStatus:
        message = region_message(region, self.identity.store_id)
        counts = self.parts.versions.get(region.region_id)
        if counts is None:
            return store_pb2.RegionStatus(region=message, approximate_bytes=size)
        versions = store_pb2.VersionCounts(
            rows=counts.rows, puts=counts.puts, versions=counts.versions, min_ts=counts.min_ts
        )
        return store_pb2.RegionStatus(region=message, approximate_bytes=size, versions=versions)

    def _progress(self) -> store_pb2.GCProgress:
        walk = self.gc.collector.walk
        return store_pb2.GCProgress(
            safe_point=walk.safe_point,
            finished=walk.finished,
            next_key=walk.next_key,
            processed_regions=self.gc.processed_regions,
            max_write_bytes_per_sec=self.parts.rate.bytes_per_s,
        )
