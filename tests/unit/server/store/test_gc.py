"""The collector on a real database: space comes back, counts stay exact,
and what has nothing old is left alone.
"""

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from server.store.app import Database
from server.store.gc import AutoGc, Collector, CollectorParts
from server.store.paced_scan import ByteRate
from server.store.region_table import RegionGate
from storage.codec import encode_bytes
from storage.kv import Deleted, WriteBatch
from storage.mvcc.engine import Draft, Engine
from storage.mvcc.gc import VersionCounts, stored_versions
from storage.mvcc.group_commit import GroupCommit
from storage.mvcc.record import (
    DELETE,
    LOCK_COLUMN,
    PUT,
    WRITE_COLUMN,
    Write,
    column_range,
    lock_key,
    write_key,
)
from storage.mvcc.region import Region, RegionMap, region_bytes
from storage.mvcc.snapshot import Snapshot

BORDER = encode_bytes(b"k00050")
LEFT, RIGHT = Region(1, 11, b"", BORDER), Region(2, 12, BORDER, b"")


@dataclass
class Store:
    """As much of a store as GC needs."""

    kv: Database
    parts: CollectorParts
    collector: Collector


@asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[Store]:
    kv = Database(directory, 64 << 10)
    regions = RegionMap([LEFT, RIGHT])
    versions = stored_versions(kv, regions)
    kv.count = versions.count
    with ThreadPoolExecutor(1) as writer, ThreadPoolExecutor(1) as scanners:
        group = GroupCommit(Engine(kv), writer, lambda _: None)
        parts = CollectorParts(
            kv=kv,
            group=group,
            gate=RegionGate(1, regions),
            versions=versions,
            scanners=scanners,
            forget_locks=lambda _lower, _upper: None,
            rate=ByteRate(),
            ratio_threshold=1.1,
        )
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(group.run())
            yield Store(kv, parts, Collector(parts))
            running.cancel()
    kv.close()


def fill(kv: Database, rows: int, versions: int) -> None:
    rng, batch = random.Random(1), WriteBatch()
    for row in range(rows):
        for version in range(1, versions + 1):
            write = Write(PUT, 10 * version, rng.randbytes(200))
            batch.put(write_key(encode_bytes(b"k%05d" % row), 10 * version + 5), write.encode())
    kv.write(batch, sync=True)


def skipped() -> float:
    return REGISTRY.get_sample_value("tidemark_store_gc_skipped_regions_total") or 0.0


def written_bytes() -> float:
    return REGISTRY.get_sample_value("tidemark_store_gc_write_bytes_total") or 0.0


async def test_space_comes_back_and_reads_stay(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        fill(store.kv, 100, 30)
        store.kv.compact(b"", b"\xff")
        before = region_bytes(store.kv, LEFT)
        assert await store.collector.collect(LEFT, 295) == 50 * 28
        assert region_bytes(store.kv, LEFT) < before / 10
        assert store.parts.versions.get(1) == VersionCounts(50, 100, 100, 295)
        assert store.parts.versions.get(2) is None
        for ts in (295, 305, 1000):
            assert Snapshot(store.kv, ts).get(b"k00049") is not None


async def test_a_region_with_nothing_old_is_skipped_until_enough_was_written_also_after_a_crash(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as store:
        fill(store.kv, 50, 1)
        assert await store.collector.collect(LEFT, 100) == 0
    async with opened(tmp_path) as store:
        before = skipped()
        assert await store.collector.collect(LEFT, 200) == 0
        assert skipped() == before + 1
        for row in range(6):
            command = partial(_overwrite, row=row)
            await store.parts.group.submit([command])
        assert await store.collector.collect(LEFT, 200) == 2 * 6
        assert skipped() == before + 1
        assert store.parts.versions.get(1) == VersionCounts(44, 44, 44, 15)


def _overwrite(draft: Draft, row: int) -> None:
    draft.put_write(encode_bytes(b"k%05d" % row), 150, Write(DELETE, 140))


async def test_the_walk_follows_a_newer_safepoint_and_is_kept(tmp_path: Path) -> None:
    class Coordinator:
        safe_point = 55

        async def gc_safe_point(self) -> int:
            return self.safe_point

    coordinator = Coordinator()
    async with opened(tmp_path) as store:
        fill(store.kv, 100, 30)
        gc = AutoGc(coordinator, store.parts.gate, store.collector, 0.001)  # type: ignore[arg-type]  # all that is asked of one
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(gc.run())
            for safe_point in (55, 105, 295):
                coordinator.safe_point = safe_point
                await asyncio.sleep(0.01)
            while not (store.collector.walk.finished and store.collector.walk.safe_point == 295):  # noqa: ASYNC110 - a walk has no event
                await asyncio.sleep(0.01)
            running.cancel()
    async with opened(tmp_path) as store:
        assert store.collector.walk.safe_point == store.collector.walk.begun_safe_point == 295
        for region in (LEFT, RIGHT):
            assert store.parts.versions.get(region.region_id) == VersionCounts(50, 100, 100, 295)


async def test_a_range_is_destroyed_in_slices_that_leave_time_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete_some, slices, work_s = Database.delete_some, list[int](), list[float]()

    def timed(self: Database, lower: bytes, upper: bytes, most: int) -> Deleted:
        began = time.perf_counter()
        deleted = delete_some(self, lower, upper, most)
        slices.append(deleted.keys)
        work_s.append(time.perf_counter() - began)
        return deleted

    async with opened(tmp_path) as store:
        fill(store.kv, 2000, 3)
        monkeypatch.setattr(Database, "delete_some", timed)
        store.collector = Collector(replace(store.parts, destroy_share=0.25))
        began = time.perf_counter()
        await asyncio.gather(
            store.collector.destroy(encode_bytes(b"k00000"), encode_bytes(b"k00900")),
            store.collector.destroy(encode_bytes(b"k00900"), encode_bytes(b"k01900")),
        )
        passed_s = time.perf_counter() - began
        assert sum(slices) == 1900 * 3
        assert max(slices) <= 512
        assert sum(work_s) <= passed_s * 0.25 + 0.01
        left = [key for key, _ in store.kv.scan(*column_range(WRITE_COLUMN, b"", b""))]
        assert len(left) == 100 * 3


async def test_what_destroying_writes_is_counted_with_its_keys(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        fill(store.kv, 2000, 1)
        keys = [key for key, _ in store.kv.scan(*column_range(WRITE_COLUMN, b"", b""))]
        before = written_bytes()
        await store.collector.destroy(b"", b"")
        assert written_bytes() - before == sum(len(key) + 8 for key in keys)


async def test_locks_of_a_destroyed_range_are_forgotten_though_who_asked_is_gone(
    tmp_path: Path,
) -> None:
    forgotten = asyncio.Event()
    async with opened(tmp_path) as store:
        fill(store.kv, 2000, 3)
        lock = WriteBatch()
        lock.put(lock_key(encode_bytes(b"k00001")), b"a lock")
        store.kv.write(lock, sync=True)
        parts = replace(
            store.parts, destroy_share=0.01, forget_locks=lambda _lower, _upper: forgotten.set()
        )
        async with asyncio.TaskGroup() as tasks:
            destroying = tasks.create_task(
                Collector(parts).destroy(encode_bytes(b"k"), encode_bytes(b"l"))
            )
            await asyncio.wait_for(forgotten.wait(), 60)
            destroying.cancel()
        assert list(store.kv.scan(*column_range(LOCK_COLUMN, b"", b""))) == []
        assert list(store.kv.scan(*column_range(WRITE_COLUMN, b"", b"")))


async def test_locks_are_forgotten_though_who_asked_left_while_they_were_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten, deleting = asyncio.Event(), asyncio.Event()
    loop, go_on, delete_some = asyncio.get_running_loop(), threading.Event(), Database.delete_some

    def stalling(self: Database, lower: bytes, upper: bytes, most: int) -> Deleted:
        deleted = delete_some(self, lower, upper, most)
        loop.call_soon_threadsafe(deleting.set)
        assert go_on.wait(60)
        return deleted

    monkeypatch.setattr(Database, "delete_some", stalling)
    async with opened(tmp_path) as store:
        parts = replace(store.parts, forget_locks=lambda _lower, _upper: forgotten.set())
        destroying = loop.create_task(Collector(parts).destroy(b"k", b"l"))
        await asyncio.wait_for(deleting.wait(), 60)
        destroying.cancel()
        await asyncio.wait([destroying])
        go_on.set()
        await asyncio.wait_for(forgotten.wait(), 20)


async def test_a_destroyed_range_is_counted_anew(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        fill(store.kv, 100, 2)
        await store.collector.collect(LEFT, 1)
        await store.collector.destroy(encode_bytes(b"k00010"), encode_bytes(b"k00020"))
        assert store.parts.versions.get(1) is None
        await store.collector.collect(LEFT, 1)
        assert store.parts.versions.get(1) == VersionCounts(40, 80, 80, 15)
