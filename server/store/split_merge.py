"""Regions are split and merged, by call and by size: neither too big nor too small.

A `Splitter` gets new ids from the coordinator, then changes the table; a `Merger` makes one region
of two neighbours of this store, under the target's id. `SizeCheck` looks at the sizes from time to
time. Rules and defaults as TiKV's and PD's: a region of more than 1.5 times `region_split_size` is
cut into parts of about that size; two neighbours that together stay within `region_merge_size`
become one, but none that changed, and none at all after a start, before `split_merge_interval` is
over. TiKV asks PD who merges; here a region has one copy and its store decides alone.
"""

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

import structlog
from kvproto import errorpb_pb2 as errorpb
from kvproto import kvrpcpb_pb2 as kvrpcpb

from server.rpc.pd import PdClient, PdRefusedError
from server.store import metrics
from server.store.config import StoreConfig
from server.store.identity import region_message
from server.store.region_table import RegionGate, RegionTable, outside
from storage.codec import encode_bytes
from storage.kv import KV
from storage.model.errors import CorruptError, InvalidError, UnavailableError
from storage.mvcc.region import Region, RegionMissingError, region_bytes, split_keys

_log = structlog.get_logger(__name__)


class Splitter:
    """Splits regions one call at a time."""

    def __init__(self, pd: PdClient, table: RegionTable) -> None:
        self._pd = pd
        self._table = table

    async def split(self, request: kvrpcpb.SplitRegionRequest) -> kvrpcpb.SplitRegionResponse:
        """Split the request's region at its keys; those that are its border already change
        nothing.
        """
        return await self._table.change(lambda: self._split_requested(request))

    async def split_unchanged(self, region: Region, keys: Sequence[bytes]) -> None:
        """Split a region at encoded keys inside it, unless it has changed since they were
        chosen.
        """
        if keys:
            await self._table.change(lambda: self._split_if_unchanged(region, keys))

    async def _split_requested(
        self, request: kvrpcpb.SplitRegionRequest
    ) -> kvrpcpb.SplitRegionResponse:
        gate = self._table.gate
        region = gate.admit(request.context, ())
        if not isinstance(region, Region):
            return kvrpcpb.SplitRegionResponse(region_error=region)
        keys = _inner_split_keys(request, region)
        if isinstance(keys, errorpb.Error):
            return kvrpcpb.SplitRegionResponse(region_error=keys)
        parts = await self._split(region, keys) if keys else [region]
        messages = [region_message(part, gate.store_id) for part in parts]
        return kvrpcpb.SplitRegionResponse(left=messages[0], right=messages[-1], regions=messages)

    async def _split_if_unchanged(self, region: Region, keys: Sequence[bytes]) -> None:
        if self._table.gate.regions.get(region.region_id) == region:
            await self._split(region, keys)

    async def _split(self, region: Region, keys: Sequence[bytes]) -> list[Region]:
        # Ids from the coordinator, within the table's change: nobody changes the region between the
        # ids and the split.
        given = await self._pd.ask_batch_split(
            region_message(region, self._table.gate.store_id), len(keys)
        )
        parts = region.split(
            keys, [(split_id.new_region_id, split_id.new_peer_ids[0]) for split_id in given]
        )
        await self._table.replace([region], parts)
        metrics.REGION_SPLITS.inc()
        _log.info(
            "region split", region_id=region.region_id, parts=[part.region_id for part in parts]
        )
        return parts


def _inner_split_keys(
    request: kvrpcpb.SplitRegionRequest, region: Region
) -> list[bytes] | errorpb.Error:
    requested = request.split_keys or [request.split_key]
    if not all(requested):
        return errorpb.Error(message="a split key must not be empty")
    keys = {key: key if request.is_raw_kv else encode_bytes(key) for key in requested}
    for key, encoded in keys.items():
        if not region.contains(encoded):
            return outside(key, region)
    return sorted(set(keys.values()) - {region.start_key})


class NotNeighboursError(InvalidError):
    """Only regions that touch each other can merge."""

    code = "ErrRegionsNotAdjacent"


class Merger:
    """Merges regions one call at a time."""

    def __init__(self, table: RegionTable) -> None:
        self._table = table

    async def merge(self, source_id: int, target_id: int) -> Region:
        """Merge the source into the target; returns the target as it is now, durable.

        Raises:
            RegionMissingError: one of them is not on this store.
            NotNeighboursError: they do not touch, or are the same.
        """
        return await self._table.change(lambda: self._merge_known(source_id, target_id))

    async def merge_unchanged(self, source: Region, target: Region) -> None:
        """Like `merge`, unless one of them has changed since they were chosen."""
        await self._table.change(lambda: self._merge_if_unchanged(source, target))

    async def _merge_known(self, source_id: int, target_id: int) -> Region:
        return await self._merge(self._known(source_id), self._known(target_id))

    async def _merge_if_unchanged(self, source: Region, target: Region) -> None:
        regions = self._table.gate.regions
        if all(regions.get(region.region_id) == region for region in (source, target)):
            await self._merge(source, target)

    async def _merge(self, source: Region, target: Region) -> Region:
        if not target.touches(source):
            raise NotNeighboursError(
                f"regions {source.region_id} and {target.region_id} are no neighbours; merge "
                "regions that touch"
            )
        merged = target.merged(source)
        await self._table.replace([source, target], [merged])
        metrics.REGION_MERGES.inc()
        _log.info(
            "regions merged",
            source=source.region_id,
            target=target.region_id,
            version=merged.version,
        )
        return merged

    def _known(self, region_id: int) -> Region:
        region = self._table.gate.regions.get(region_id)
        if region is None:
            raise RegionMissingError(
                f"region {region_id} is not on this store; ask the coordinator where it is"
            )
        return region


@dataclass(slots=True)
class SizeCheck:
    """The regular look at all regions; disk is read in `scanners`."""

    kv: KV
    gate: RegionGate
    splitter: Splitter
    merger: Merger
    scanners: Executor
    config: StoreConfig
    _seen: dict[Region, float] = field(default_factory=dict)

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            await asyncio.sleep(self.config.region_check_interval)
            try:
                await self.check(time.monotonic())
            except (UnavailableError, PdRefusedError) as err:
                _log.warning("regions cannot be split or merged now", error=err.message)
            except CorruptError as err:
                _log.error("regions cannot be split or merged", error=err.message)

    async def check(self, now_s: float) -> None:
        """One look: splits first, then merges."""
        loop = asyncio.get_running_loop()
        sizes = await loop.run_in_executor(self.scanners, self._sizes, list(self.gate.regions))
        part = self.config.region_split_size
        for region, size in sizes.items():
            if part and size > part * 3 // 2:
                keys = await loop.run_in_executor(self.scanners, split_keys, self.kv, region, part)
                await self.splitter.split_unchanged(region, keys)
        # A region is its value, epoch included: one that changed is a new key, and its time of
        # quiet begins anew.
        self._seen = {region: self._seen.get(region, now_s) for region in sizes}
        calm = [
            region
            for region in sizes
            if now_s - self._seen[region] >= self.config.split_merge_interval
        ]
        for source, target in tiny_neighbours(calm, sizes, self.config.region_merge_size):
            await self.merger.merge_unchanged(source, target)

    def _sizes(self, regions: list[Region]) -> dict[Region, int]:
        return {region: region_bytes(self.kv, region) for region in regions}


def tiny_neighbours(
    regions: list[Region], sizes: dict[Region, int], most_bytes: int
) -> list[tuple[Region, Region]]:
    """(source, target) of merges that leave regions within `most_bytes` (0: none);
    each region in one pair at most.
    """
    pairs: list[tuple[Region, Region]] = []
    free: Region | None = None
    for region in regions:
        if (
            most_bytes
            and free is not None
            and free.touches(region)
            and sizes[free] + sizes[region] <= most_bytes
        ):
            # The smaller one goes into the larger one, whose id clients know best.
            source, target = sorted((free, region), key=lambda one: sizes[one])
            pairs.append((source, target))
            free = None
        else:
            free = region
    return pairs
