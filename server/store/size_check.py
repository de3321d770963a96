"""Keeps regions neither too big nor too small: looks at their sizes from time to time, then splits or merges.

Rules and defaults as TiKV's and PD's: a region of more than 1.5 times `region_split_size` is cut into parts of about
that size; two neighbours that together stay within `region_merge_size` become one, but none that changed, and none at
all after a start, before `split_merge_interval` is over. TiKV asks PD who merges; here a region has one copy and its
store decides alone.
"""

import asyncio
import time
from concurrent.futures import Executor
from dataclasses import dataclass, field

import structlog

from server.rpc.pd import PdRefusedError
from server.store.config import StoreConfig
from server.store.merge import Merger
from server.store.region_check import RegionGate
from server.store.split import Splitter
from storage.kv import KV
from storage.model.errors import CorruptError, UnavailableError
from storage.mvcc.region import Region, region_bytes, split_keys

_log = structlog.get_logger(__name__)


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
        self._seen = {region: self._seen.get(region, now_s) for region in sizes}
        calm = [region for region in sizes if now_s - self._seen[region] >= self.config.split_merge_interval]
        for source, target in tiny_neighbours(calm, sizes, self.config.region_merge_size):
            await self.merger.merge_unchanged(source, target)

    def _sizes(self, regions: list[Region]) -> dict[Region, int]:
        return {region: region_bytes(self.kv, region) for region in regions}


def tiny_neighbours(regions: list[Region], sizes: dict[Region, int], most_bytes: int) -> list[tuple[Region, Region]]:
    """(source, target) of merges that leave regions within `most_bytes` (0: none); each region in one pair at most."""
    pairs: list[tuple[Region, Region]] = []
    free: Region | None = None
    for region in regions:
        if most_bytes and free is not None and free.touches(region) and sizes[free] + sizes[region] <= most_bytes:
            source, target = sorted((free, region), key=lambda one: sizes[one])
            pairs.append((source, target))
            free = None
        else:
            free = region
    return pairs
