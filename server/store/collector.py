"""Removal of old versions: GC at the coordinator's safepoint, and the destruction of whole ranges."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial

import structlog

from server.rpc.pd import PdClient, PdRefusedError
from server.store import metrics
from server.store.cursor import cursor
from server.store.region_check import RegionGate
from storage.kv import KV, WriteBatch
from storage.model.errors import UnavailableError
from storage.mvcc.draft import Draft
from storage.mvcc.gc import garbage
from storage.mvcc.group_commit import GroupCommit
from storage.mvcc.layout import LOCK, META, VALUE, WRITE, column_range

_DESTROYED_KEY = META + b"destroyed"
_log = structlog.get_logger(__name__)


class Collector:
    """The store's garbage collector."""

    def __init__(
        self,
        kv: KV,
        group: GroupCommit,
        gate: RegionGate,
        scanners: Executor,
        forget_locks: Callable[[bytes, bytes], None],
    ) -> None:
        self._kv = kv
        self._group = group
        self._gate = gate
        self._scanners = scanners
        self._forget_locks = forget_locks
        self._safe_point = 0

    async def run(self, pd: PdClient, interval_s: float) -> None:
        """Follow the coordinator's GC safepoint until cancelled: all regions in key order, each time it moved."""
        while True:
            try:
                safe_point = await pd.gc_safe_point()
            except (UnavailableError, PdRefusedError) as err:
                _log.warning("gc safepoint is not known", error=err.message)
            else:
                if safe_point > self._safe_point:
                    await self._collect_all(safe_point)
            await asyncio.sleep(interval_s)

    async def collect(self, lower: bytes, upper: bytes, safe_point: int) -> int:
        """Remove what no snapshot at or after `safe_point` can read from an encoded range; returns the deleted keys."""
        snapshot = self._kv.snapshot()
        deleted = 0
        async with cursor(snapshot, garbage(snapshot, lower, upper, safe_point), self._scanners) as batches:
            while batch := await batches.next():
                await self._group.submit([partial(_delete, keys=batch)])
                deleted += len(batch)
        metrics.GC_KEYS.inc(deleted)
        return deleted

    async def destroy(self, lower: bytes, upper: bytes) -> None:
        """Delete all versions and locks of an encoded range; durable when it returns. Change feeds are not told."""
        await asyncio.get_running_loop().run_in_executor(self._scanners, self._destroy, lower, upper)
        await self._group.quiet(lambda: self._forget_locks(lower, upper))

    async def _collect_all(self, safe_point: int) -> None:
        deleted = 0
        for region in self._gate.regions:
            deleted += await self.collect(region.start_key, region.end_key, safe_point)
        self._safe_point = safe_point
        metrics.GC_SAFE_POINT.set(safe_point)
        _log.info("gc finished", safe_point=safe_point, deleted_keys=deleted)

    def _destroy(self, lower: bytes, upper: bytes) -> None:
        for column in (LOCK, WRITE, VALUE):
            self._kv.delete_range(*column_range(column, lower, upper))
        marker = WriteBatch()  # LevelDB's log is one: what follows the deletes and is synced, syncs them
        marker.put(_DESTROYED_KEY, lower + b"\x00" + upper)
        self._kv.write(marker, sync=True)


def _delete(draft: Draft, keys: list[bytes]) -> None:
    for key in keys:
        draft.delete(key)
