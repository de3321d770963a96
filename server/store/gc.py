"""GC of old versions in this store, at no more than the allowed rate of writes;
and destruction of whole ranges.

`Collector` does a range at a safepoint, in steps between the clients' writes. `AutoGc` makes GC
distributed: the store follows the coordinator's safepoint by itself, and walks its regions in key
order. The safepoint is looked up each minute, also during a walk: the regions that are left get the
newer one, and at the end the walk comes back for the others (see `storage.mvcc.gc.GcWalk`). A crash
costs at most the region that was being walked.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import structlog

from server.rpc.pd import PdClient, PdRefusedError
from server.store import metrics
from server.store.paced_scan import ByteRate, cursor
from server.store.region_table import RegionGate
from storage.defect import DefectError
from storage.kv import KV, Snapshot, WriteBatch
from storage.model.errors import CorruptError, UnavailableError
from storage.mvcc.engine import Command, Draft
from storage.mvcc.gc import WALK_KEY, GcWalk, RangeGC, RegionVersions, counts_key, decode_walk
from storage.mvcc.group_commit import GroupCommit, StoreBusyError
from storage.mvcc.record import LOCK_COLUMN, META_COLUMN, VALUE_COLUMN, WRITE_COLUMN, column_range
from storage.mvcc.region import Region
from storage.tasks import run_to_end

_log = structlog.get_logger(__name__)
T = TypeVar("T")
_DESTROYED_KEY = META_COLUMN + b"destroyed"
_BUSY_S = 0.5
_COMPACT_VERSIONS = 512
_COMPACT_SHARE = 0.1
# what LevelDB adds to a key: its sequence number and kind
_DELETE_OVERHEAD_BYTES = 8
# of a range that is destroyed, at once: what a foreground write may have to wait for
_SLICE_KEYS = 512
_COMPACT_SLICES = 128


@dataclass(slots=True)
class CollectorParts:
    """The parts of the store that the collector uses; `scanners` has its own thread, so that a
    compaction delays nothing else.
    """

    kv: KV
    group: GroupCommit
    gate: RegionGate
    versions: RegionVersions
    scanners: Executor
    forget_locks: Callable[[bytes, bytes], None]
    rate: ByteRate
    ratio_threshold: float
    destroy_share: float = 1.0
    """The share of time in which ranges may be destroyed; the rest is left to others."""


class Collector:
    """Deletes versions that no snapshot can read any more; `walk` is its progress, on disk before
    any deletion that depends on it.
    """

    def __init__(self, parts: CollectorParts) -> None:
        self._parts = parts
        self._one_walk = asyncio.Lock()
        self._one_slice = asyncio.Lock()
        stored = parts.kv.get(WALK_KEY)
        self.walk = self._saved = decode_walk(stored) if stored else GcWalk()

    async def save(self, walk: GcWalk) -> None:
        """Keep the progress, made from `self.walk` without awaiting in between;
        durable when it returns.
        """
        self.walk = walk
        await self._write(partial(_put_walk, data=walk.encode()))
        self._saved = walk

    async def collect(self, region: Region, safe_point: int) -> int:
        """Remove what no snapshot at or after `safe_point` can read from a region;
        returns the deleted versions.
        """
        async with self._one_walk:
            # Counts from the last walk and the writes since: a region with few old versions is not
            # read at all.
            counts = self._parts.versions.get(region.region_id)
            if counts is not None and not counts.needs_gc(safe_point, self._parts.ratio_threshold):
                metrics.GC_SKIPPED.inc()
                return 0
            # On disk before the first delete: after a crash a feed that asks for older history must
            # still be refused.
            if safe_point > self._saved.begun_safe_point:
                await self.save(self.walk.begun(safe_point))
            with metrics.gc_task("gc"):
                return await self._collect(region, safe_point)

    async def destroy(self, lower: bytes, upper: bytes) -> None:
        """Delete all versions and locks of an encoded range; durable when it returns.

        Change feeds are not told.
        """
        with metrics.gc_task("unsafe_destroy_range"):
            # The locks are few, and forgotten at once, though who asked may be gone: a lock that is
            # deleted but remembered would hold the resolved_ts back for ever.
            deleted = [await run_to_end(self._destroy_locks(lower, upper))]
            deleted += [
                await self._destroy(*column_range(column, lower, upper))
                for column in (WRITE_COLUMN, VALUE_COLUMN)
            ]
            await self._forget(lower, upper)
            for bounds in deleted:
                for first, last in pairwise(bounds):
                    await self._in_turn(self._parts.kv.compact, first, last)

    async def _destroy_locks(self, lower: bytes, upper: bytes) -> list[bytes]:
        bounds = await self._destroy(*column_range(LOCK_COLUMN, lower, upper))
        await self._forget(lower, upper)
        return bounds

    async def _forget(self, lower: bytes, upper: bytes) -> None:
        """Make the deletions durable, and drop the counts of the range."""
        parts = self._parts
        await asyncio.get_running_loop().run_in_executor(
            parts.scanners, self._mark_destroyed, lower, upper
        )
        touched = await parts.group.quiet(lambda: self._destroyed(lower, upper))
        await self._write(partial(_delete, keys=[counts_key(region_id) for region_id in touched]))

    async def _collect(self, region: Region, safe_point: int) -> int:
        parts = self._parts
        # Between two groups, so that the counts begin exactly where the snapshot ends.
        snapshot = await parts.group.quiet(lambda: self._begin(region))
        work = RangeGC(snapshot, region.start_key, region.end_key, safe_point)
        async with cursor(snapshot, work.batches(), parts.scanners) as batches:
            while (batch := await batches.next()) is not None:
                await self._delete(batch)
        await self._write(partial(self._keep_counts, region=region, work=work))
        metrics.observe_gc(work.left.versions + work.deleted_versions, work.deleted_versions)
        # LevelDB keeps deleted keys until a compaction, and every scan steps over them; few of them
        # are not worth rewriting the region.
        if work.deleted_versions >= max(_COMPACT_VERSIONS, work.left.versions * _COMPACT_SHARE):
            await asyncio.get_running_loop().run_in_executor(parts.scanners, self._compact, region)
        return work.deleted_versions

    async def _delete(self, batch: list[bytes]) -> None:
        if not batch:
            return
        size = sum(len(key) for key in batch) + len(batch) * _DELETE_OVERHEAD_BYTES
        await self._parts.rate.throttle(size)
        metrics.GC_WRITTEN_BYTES.inc(size)
        await self._write(partial(_delete, keys=batch), size)

    async def _write(self, command: Command, size: int = 0) -> None:
        """Write through the group commit, when there is room: foreground writes come first."""
        while True:
            try:
                (result,) = await self._parts.group.submit([command], size)
            # Foreground writes fill the queue; GC has time.
            except StoreBusyError:
                await asyncio.sleep(_BUSY_S)
            else:
                if isinstance(result, CorruptError | DefectError):
                    raise result
                return

    def _begin(self, region: Region) -> Snapshot:
        self._parts.versions.begin_walk(region)
        return self._parts.kv.snapshot()

    def _keep_counts(self, draft: Draft, region: Region, work: RangeGC) -> None:
        for key, value in self._parts.versions.end_walk(region, work.left).items():
            draft.put(key, value)

    def _compact(self, region: Region) -> None:
        for column in (WRITE_COLUMN, VALUE_COLUMN):
            self._parts.kv.compact(*column_range(column, region.start_key, region.end_key))

    async def _destroy(self, lower: bytes, upper: bytes) -> list[bytes]:
        """Delete all of a column's range, slice by slice;
        returns bounds between which it is worth compacting.
        """
        bounds, first, slices = [lower], lower, 0
        while True:
            deleted = await self._in_turn(self._parts.kv.delete_some, first, upper, _SLICE_KEYS)
            first = deleted.next_key
            size = deleted.key_bytes + deleted.keys * _DELETE_OVERHEAD_BYTES
            metrics.GC_WRITTEN_BYTES.inc(size)
            await self._parts.rate.throttle(size)
            slices += deleted.keys > 0
            if deleted.keys < _SLICE_KEYS:
                return [*bounds, upper] if slices else []
            if not slices % _COMPACT_SLICES:
                bounds.append(first)

    async def _in_turn(self, function: Callable[..., T], *args: Any) -> T:
        """Call `function` where GC works, then rest,
        so that all ranges together take no more than their share.
        """
        async with self._one_slice:
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            result = await loop.run_in_executor(self._parts.scanners, function, *args)
            # Sleeps in proportion to the work, so the share holds on any disk.
            await asyncio.sleep((loop.time() - began_s) * (1 / self._parts.destroy_share - 1))
            return result

    def _mark_destroyed(self, lower: bytes, upper: bytes) -> None:
        # LevelDB's log is one: what follows the deletes and is synced, syncs them
        marker = WriteBatch()
        marker.put(_DESTROYED_KEY, lower + b"\x00" + upper)
        self._parts.kv.write(marker, sync=True)

    def _destroyed(self, lower: bytes, upper: bytes) -> list[int]:
        parts = self._parts
        parts.forget_locks(lower, upper)
        touched = [
            region.region_id for region in parts.gate.regions if region.overlaps(lower, upper)
        ]
        parts.versions.replace_map(parts.gate.regions, touched)
        return touched


def _delete(draft: Draft, keys: Sequence[bytes]) -> None:
    for key in keys:
        draft.delete(key)


def _put_walk(draft: Draft, data: bytes) -> None:
    draft.put(WALK_KEY, data)


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
        metrics.GC_SAFE_POINT.set(self.collector.walk.safe_point)
        metrics.show_gc_state("idle")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._poll(), name="gc-safe-point")
            tasks.create_task(self._follow(), name="gc-walk")

    async def allowed(self) -> int:
        """The coordinator's safepoint: nothing after it may be collected.

        Raises:
            PdUnavailableError: the coordinator is silent.
        """
        self._note_safe_point(await self.pd.gc_safe_point())
        return self.newest

    async def _poll(self) -> None:
        while True:
            try:
                await self.allowed()
            except (UnavailableError, PdRefusedError) as err:
                _log.warning("gc safepoint is not known", error=err.message)
            await asyncio.sleep(self.poll_interval_s)

    def _note_safe_point(self, safe_point: int) -> None:
        # A coordinator that has just taken over may answer an older one; GC does not go back.
        self.newest = max(self.newest, safe_point)
        self._moved.set()

    async def _follow(self) -> None:
        while True:
            await self._moved.wait()
            self._moved.clear()
            if not self.collector.walk.finished or self.newest > self.collector.walk.safe_point:
                await self._walk()

    async def _walk(self) -> None:
        metrics.show_gc_state("working")
        self.processed_regions, deleted = 0, 0
        _log.info(
            "gc_worker: started auto gc",
            safe_point=max(self.newest, self.collector.walk.safe_point),
        )
        while self.newest > self.collector.walk.safe_point or not self.collector.walk.finished:
            deleted += await self._next_region()
        metrics.show_gc_state("idle")
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
            # Saved before the first region is collected at it: the walk's safepoint on disk is
            # never behind what was deleted.
            await self.collector.save(walk)
            metrics.GC_SAFE_POINT.set(walk.safe_point)
            if walk.rewind_key:
                _log.info(
                    "gc_worker: auto gc rewinds",
                    safe_point=walk.safe_point,
                    regions=self.processed_regions,
                )
        region = self.gate.regions.after(walk.next_key)
        deleted = await self._collect(region, walk.safe_point) if region else 0
        await self.collector.save(self.collector.walk.passed(region.end_key if region else b""))
        self.processed_regions += region is not None
        for kind in ("scan", "gc"):
            metrics.GC_REGIONS.labels(kind).set(self.processed_regions)
        return deleted

    async def _collect(self, region: Region, safe_point: int) -> int:
        """Collect one region; one with a damaged file keeps its old versions,
        and the walk goes on.
        """
        try:
            return await self.collector.collect(region, safe_point)
        except CorruptError as err:
            _log.error(
                "gc_worker: region is not collected", region_id=region.region_id, error=err.message
            )
            return 0
