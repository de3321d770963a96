"""Distributed GC: the store follows the coordinator's safepoint by itself, and walks its regions in key order.

The safepoint is looked up each minute, also during a walk: the regions that are left get the newer one, and at the end
the walk comes back for the others (see `storage.mvcc.gc.GcWalk`). A crash costs at most the region that was being walked.
"""

import asyncio
from dataclasses import dataclass, field

import structlog

from server.rpc.pd import PdClient, PdRefusedError
from server.store import gc_metrics
from server.store.collector import Collector
from server.store.region_check import RegionGate
from storage.model.errors import CorruptError, UnavailableError
from storage.mvcc.region import Region

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class AutoGc:
    """The walker; `newest` is the coordinator's safepoint as last heard."""

    pd: PdClient
    gate: RegionGate
    collector: Collector
    poll_interval_s: float
    newest: int = 0
    processed_regions: int = 0
    _moved: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Collect until cancelled."""
        gc_metrics.AUTO_SAFE_POINT.set(self.collector.walk.safe_point)
        gc_metrics.auto_state("idle")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._poll(), name="gc-safe-point")
            tasks.create_task(self._follow(), name="gc-walk")

    async def allowed(self) -> int:
        """The coordinator's safepoint: nothing after it may be collected.

        Raises:
            PdUnavailableError: the coordinator is silent.
        """
        self._heard(await self.pd.gc_safe_point())
        return self.newest

    async def _poll(self) -> None:
        while True:
            try:
                await self.allowed()
            except (UnavailableError, PdRefusedError) as err:
                _log.warning("gc safepoint is not known", error=err.message)
            await asyncio.sleep(self.poll_interval_s)

    def _heard(self, safe_point: int) -> None:
        self.newest = max(self.newest, safe_point)
        self._moved.set()

    async def _follow(self) -> None:
        while True:
            await self._moved.wait()
            self._moved.clear()
            if not self.collector.walk.finished or self.newest > self.collector.walk.safe_point:
                await self._walk()

    async def _walk(self) -> None:
        gc_metrics.auto_state("working")
        self.processed_regions, deleted = 0, 0
        _log.info("gc_worker: started auto gc", safe_point=max(self.newest, self.collector.walk.safe_point))
        while self.newest > self.collector.walk.safe_point or not self.collector.walk.finished:
            deleted += await self._next_region()
        gc_metrics.auto_state("idle")
        _log.info(
            "gc_worker: finished auto gc",
            safe_point=self.collector.walk.safe_point,
            processed_regions=self.processed_regions,
            deleted_versions=deleted,
        )

    async def _next_region(self) -> int:
        """One region; the safepoint changes only between two of them."""
        walk = self.collector.walk
        if self.newest > walk.safe_point:
            walk = walk.switched(self.newest)
            await self.collector.save(walk)
            gc_metrics.AUTO_SAFE_POINT.set(walk.safe_point)
            if walk.rewind_key:
                _log.info("gc_worker: auto gc rewinds", safe_point=walk.safe_point, regions=self.processed_regions)
        region = self.gate.regions.after(walk.next_key)
        deleted = await self._collect(region, walk.safe_point) if region else 0
        await self.collector.save(self.collector.walk.passed(region.end_key if region else b""))
        self.processed_regions += region is not None
        for kind in ("scan", "gc"):
            gc_metrics.AUTO_REGIONS.labels(kind).set(self.processed_regions)
        return deleted

    async def _collect(self, region: Region, safe_point: int) -> int:
        """Collect one region; one with a damaged file keeps its old versions, and the walk goes on."""
        try:
            return await self.collector.collect(region, safe_point)
        except CorruptError as err:
            _log.error("gc_worker: region is not collected", region_id=region.region_id, error=err.message)
            return 0
