"""GC beside readers and beside a busy LevelDB."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from storage.leveldb import LevelDB
from storage.pump.gc import Collected, Throttle
from storage.pump.storage import BinlogPurgedError, Chunk, PumpStorage
from tests.memory_fs import MemFS
from tests.memory_kv import MemoryKV
from tests.unit.storage.pump.storages import (
    DIRECTORY,
    commit,
    heartbeat,
    opened,
    prewrite,
    wait_max_commit_ts,
)


async def fill(storage: PumpStorage) -> None:
    """Commits at 12, 22, …, 92, and a heartbeat at 100;
    one segment each if the segments are small.
    """
    for ts in range(10, 100, 10):
        await storage.write([prewrite(ts), commit(ts, ts + 2)])
    await storage.write([heartbeat(100)])
    await wait_max_commit_ts(storage, 100)


async def next_chunk(reader: AsyncIterator[Chunk]) -> Chunk:
    return await anext(reader)


async def test_gc_stays_behind_the_slowest_reader() -> None:
    async with opened(MemFS()) as storage:
        await fill(storage)
        slow, fast = storage.pull(32), storage.pull(52)
        await anext(slow)
        await anext(fast)
        assert storage.readers.lowest_ts == 32
        assert await storage.gc(80) == Collected(gc_ts=32, keys=6)
        await slow.aclose()
        assert await storage.gc(80) == Collected(gc_ts=52, keys=4)
        await fast.aclose()
        assert (await storage.gc(80)).gc_ts == 80


async def test_a_reader_counts_as_having_what_it_was_given_when_it_asks_for_more() -> None:
    async with opened(MemFS()) as storage:
        await fill(storage)
        reader = storage.pull(32)
        await anext(reader)
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            more = tasks.create_task(next_chunk(reader))
            while storage.readers.lowest_ts != 100:  # noqa: ASYNC110 - positions have no event
                await asyncio.sleep(0)
            assert (await storage.gc(80)).gc_ts == 80
            await storage.write([heartbeat(110)])
            assert len((await more).payloads) == 1


async def test_the_retention_age_overtakes_a_reader_and_counts_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("storage.pump.storage.CHUNK_COMMITS", 1)
    async with opened(MemFS()) as storage:
        await fill(storage)
        slow = storage.pull(32)
        await anext(slow)
        assert await storage.gc(80, force_ts=60) == Collected(gc_ts=60, keys=10, overtaken=1)
        with pytest.raises(BinlogPurgedError, match="would lose rows"):
            await anext(slow)


class BusyKV(MemoryKV):
    """Has level-0 files for a while."""

    def __init__(self, files: list[int]) -> None:
        super().__init__()
        self.files = files

    def level0_files(self) -> int:
        return self.files.pop(0) if self.files else 0


async def test_gc_pauses_while_leveldb_has_many_level_0_files() -> None:
    kv = BusyKV([3, 8, 9, 7, 8])
    async with opened(MemFS(), kv, throttle=Throttle(8, 0.0)) as storage:
        await fill(storage)
        assert await storage.gc(80) == Collected(gc_ts=80, keys=14)
        kv.files = [8, 9, 7]
        assert await storage.gc(95) == Collected(gc_ts=95, keys=4, pauses=2)


def test_leveldb_tells_how_many_level_0_files_it_has(tmp_path: Path) -> None:
    kv = LevelDB(tmp_path)
    assert kv.level0_files() == 0
    kv.close()


async def test_the_current_segment_gives_its_space_back_after_it_was_rotated_by_age() -> None:
    fs = MemFS()
    async with opened(fs) as storage:
        await fill(storage)
        assert (await storage.gc(80)).segments == 0
        await storage.rotate()
        await storage.rotate()  # nothing was written since: nothing to finalise
        await storage.write([prewrite(200), commit(200, 201), heartbeat(202)])
        await wait_max_commit_ts(storage, 202)
        assert (await storage.gc(150)).segments == 1
        assert fs.names(DIRECTORY / "value") == ["000001.vlog"]
