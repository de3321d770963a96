"""An index that stalls or fails: the log goes on, and the index catches up."""

import asyncio
import threading
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.kv import WriteBatch
from storage.leveldb import LevelDB
from storage.model.errors import UnavailableError
from storage.pump.storage import PumpStorage
from storage.pump.write_pipeline import GROUPS_MAX, Group, IndexQueue, Threads
from storage.value_log import Pointer
from tests.memory_fs import MemFS
from tests.memory_kv import MemoryKV
from tests.small_disk import fill, small_disk
from tests.unit.storage.pump.storages import (
    commit,
    heartbeat,
    opened,
    prewrite,
    pulled,
    wait_max_commit_ts,
)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.pump.write_pipeline.RETRY_SECONDS", 0.0)
    monkeypatch.setattr("storage.pump.write_pipeline.SLOW_SECONDS", 0.0)


class FaultyKV(MemoryKV):
    """Refuses writes while `broken`, and holds them while not `open`."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = False
        self.open = threading.Event()
        self.open.set()
        self.refused = 0

    def write(self, batch: WriteBatch, *, sync: bool) -> None:
        assert self.open.wait(60)
        self.refused += self.broken
        if self.broken:
            raise UnavailableError("the disk of the index is full")
        super().write(batch, sync=sync)


async def write_pairs(storage: PumpStorage, first: int, last: int) -> None:
    """One group each, in their own commit order."""
    for ts in range(first, last, 10):
        await storage.write([prewrite(ts, b"%d" % ts), commit(ts, ts + 5)])


async def test_a_stalled_index_does_not_stop_the_log_and_catches_up_from_it() -> None:
    kv, pairs = FaultyKV(), 3 * GROUPS_MAX
    async with opened(MemFS(), kv, 4000) as storage:
        kv.open.clear()
        await write_pairs(storage, 10, 10 + 10 * pairs)  # every one is acknowledged
        assert storage.statistics().index_behind
        assert storage.max_commit_ts == 0
        kv.open.set()
        found = await pulled(storage, 0, 5 + 10 * pairs)
        assert [row[0] for row in found] == [ts + 5 for ts in range(10, 10 + 10 * pairs, 10)]
        await storage.write([heartbeat(100_000)])
        await wait_max_commit_ts(storage, 100_000)
        assert not storage.statistics().index_behind


async def test_an_index_that_cannot_be_written_delays_readers_not_writers() -> None:
    kv = FaultyKV()
    async with opened(MemFS(), kv) as storage:
        await storage.write([prewrite(1), commit(1, 5), prewrite(4, b"early")])
        await wait_max_commit_ts(storage, 5)
        kv.broken = True
        await storage.write([prewrite(6), commit(6, 7)])
        await write_pairs(storage, 10, 100)
        while kv.refused < 3:  # noqa: ASYNC110 - it tries again and again, without an event
            await asyncio.sleep(0)
        assert storage.max_commit_ts == 5
        assert "the disk of the index is full" in str(storage.indexer.last_failure)
        kv.broken = False
        await storage.write([commit(4, 120), heartbeat(130)])
        assert [row[:2] for row in await pulled(storage, 5, 130)] == [
            *((ts, start) for start, ts in ((6, 7), *((ts, ts + 5) for ts in range(10, 100, 10)))),
            (120, 4),
            (130, 130),
        ]
        assert storage.all_matched


async def test_what_a_broken_index_missed_is_replayed_at_the_next_start() -> None:
    fs, kv = MemFS(), FaultyKV()
    async with opened(fs, kv) as storage:
        kv.broken = True
        await write_pairs(storage, 10, 50)
    kv.broken = False
    async with opened(fs, kv) as storage:
        assert storage.recovery.replayed == 8
        assert [row[0] for row in await pulled(storage, 0, 45)] == [15, 25, 35, 45]


async def test_an_index_that_a_full_disk_tore_goes_on_and_can_be_opened_again(
    tmp_path: Path,
) -> None:
    """It was damaged at the next start: the records behind the torn one were taken for nothing."""
    with small_disk(tmp_path / "disk", "8m") as disk:
        fs, kv = MemFS(), LevelDB(disk / "kv", write_buffer_bytes=1 << 20)
        async with opened(fs, kv) as storage:
            await write_pairs(storage, 10, 1000)
            filler, last = fill(disk), 1000
            while not storage.indexer.failures:
                last += 1000
                await write_pairs(storage, last - 1000, last)
            filler.unlink()
            await write_pairs(storage, last, last + 1000)
            assert len(await pulled(storage, 0, last + 995)) == (last + 1000) // 10 - 1
        kv.close()
        kv = LevelDB(disk / "kv")
        async with opened(fs, kv) as storage:
            assert len(await pulled(storage, 0, last + 995)) == (last + 1000) // 10 - 1
        kv.close()


async def test_readers_go_on_where_a_call_without_them_is_given_up_in_its_queue() -> None:
    with ExitStack() as stack:
        threads, busy = Threads(stack), threading.Event()
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(threads.index(busy.wait, 60))
            alone = tasks.create_task(threads.index_alone(lambda: None))
            await asyncio.sleep(0)  # both are in the queue of the index's thread
            alone.cancel()
            await asyncio.wait([alone])
            busy.set()
        assert first.result()
        async with asyncio.timeout(60):
            assert await threads.read(lambda: "read") == "read"


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 60),
    st.lists(st.sampled_from(["break", "mend", "stall", "go"]), max_size=12),
    st.randoms(),
)
async def test_whatever_the_index_does_every_acknowledged_pair_is_served_once(
    pairs: int, events: list[str], random: Random
) -> None:
    kv = FaultyKV()
    random.seed(pairs)
    moments = sorted(random.randrange(pairs) for _ in events)
    async with opened(MemFS(), kv, 300) as storage:
        for number in range(pairs):
            for moment, event in zip(moments, events, strict=True):
                if moment == number:
                    kv.broken = {"break": True, "mend": False}.get(event, kv.broken)
                    (kv.open.clear if event == "stall" else kv.open.set)()
            await write_pairs(storage, 10 * number + 10, 10 * number + 11)
        kv.broken = False
        kv.open.set()
        found = await pulled(storage, 0, 10 * pairs + 5)
        assert found == [(ts + 5, ts, b"%d" % ts) for ts in range(10, 10 * pairs + 1, 10)]


def group(number: int) -> Group:
    return Group([(0, number, 0)], [Pointer(0, 10 * number, 10)])


def joined(numbers: Iterable[int]) -> Group:
    groups = [group(number) for number in numbers]
    return Group(
        [entry for each in groups for entry in each.entries],
        [pointer for each in groups for pointer in each.pointers],
    )


async def test_groups_that_wait_are_taken_as_one_up_to_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("storage.pump.write_pipeline.REPLAY_BATCH", 3)
    queue = IndexQueue(Pointer(0, 0, 0))
    for number in range(7):
        await queue.put(group(number))
    queue.close()
    assert await queue.get() == joined(range(3))
    assert await queue.get() == joined(range(3, 6))
    assert await queue.get() == group(6)
    assert await queue.get() is None


async def test_a_queue_that_resumes_goes_on_exactly_where_it_said() -> None:
    queue = IndexQueue(Pointer(0, 0, 0), slow_seconds=0.0)
    for number in range(GROUPS_MAX + 3):
        await queue.put(group(number))
    assert queue.behind
    assert await queue.get() == joined(range(GROUPS_MAX))
    assert await queue.get() is None
    assert queue.resume() == Pointer(0, 10 * (GROUPS_MAX + 3), 0)
    await queue.put(group(GROUPS_MAX + 3))
    assert await queue.get() == group(GROUPS_MAX + 3)
    queue.close()
    assert await queue.get() is None
