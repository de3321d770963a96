"""An index that stalls or fails: the log goes on, and the index catches up."""

import asyncio
import threading
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.kv import MemoryKV, WriteBatch
from storage.model.errors import UnavailableError
from storage.pump.append import Append
from storage.pump.feed import GROUPS_MAX, Feed, Group
from storage.value_log import Pointer
from storage.vfs.memory import MemFS
from tests.unit.storage.pump.storages import commit, heartbeat, opened, prewrite, pulled, wait_max_commit_ts


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.pump.indexer.RETRY_SECONDS", 0.0)
    monkeypatch.setattr("storage.pump.feed.SLOW_SECONDS", 0.0)


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


async def write_pairs(append: Append, first: int, last: int) -> None:
    """One group each, in their own commit order."""
    for ts in range(first, last, 10):
        await append.write([prewrite(ts, b"%d" % ts), commit(ts, ts + 5)])


async def test_a_stalled_index_does_not_stop_the_log_and_catches_up_from_it() -> None:
    kv, pairs = FaultyKV(), 3 * GROUPS_MAX
    async with opened(MemFS(), kv, 4000) as append:
        kv.open.clear()
        await write_pairs(append, 10, 10 + 10 * pairs)  # every one is acknowledged
        assert append.statistics().index_behind
        assert append.max_commit_ts == 0
        kv.open.set()
        found = await pulled(append, 0, 5 + 10 * pairs)
        assert [row[0] for row in found] == [ts + 5 for ts in range(10, 10 + 10 * pairs, 10)]
        await append.write([heartbeat(100_000)])
        await wait_max_commit_ts(append, 100_000)
        assert not append.statistics().index_behind


async def test_an_index_that_cannot_be_written_delays_readers_not_writers() -> None:
    kv = FaultyKV()
    async with opened(MemFS(), kv) as append:
        await append.write([prewrite(1), commit(1, 5), prewrite(4, b"early")])
        await wait_max_commit_ts(append, 5)
        kv.broken = True
        await append.write([prewrite(6), commit(6, 7)])
        await write_pairs(append, 10, 100)
        while kv.refused < 3:  # noqa: ASYNC110 - it tries again and again, without an event
            await asyncio.sleep(0)
        assert append.max_commit_ts == 5
        assert "the disk of the index is full" in str(append.indexer.last_failure)
        kv.broken = False
        await append.write([commit(4, 120), heartbeat(130)])
        assert [row[:2] for row in await pulled(append, 5, 130)] == [
            *((ts, start) for start, ts in ((6, 7), *((ts, ts + 5) for ts in range(10, 100, 10)))),
            (120, 4),
            (130, 130),
        ]
        assert append.all_matched


async def test_what_a_broken_index_missed_is_replayed_at_the_next_start() -> None:
    fs, kv = MemFS(), FaultyKV()
    async with opened(fs, kv) as append:
        kv.broken = True
        await write_pairs(append, 10, 50)
    kv.broken = False
    async with opened(fs, kv) as append:
        assert append.recovery.replayed == 8
        assert [row[0] for row in await pulled(append, 0, 45)] == [15, 25, 35, 45]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 60), st.lists(st.sampled_from(["break", "mend", "stall", "go"]), max_size=12), st.randoms())
async def test_whatever_the_index_does_every_acknowledged_pair_is_served_once(
    pairs: int, events: list[str], random: Random
) -> None:
    kv = FaultyKV()
    random.seed(pairs)
    moments = sorted(random.randrange(pairs) for _ in events)
    async with opened(MemFS(), kv, 300) as append:
        for number in range(pairs):
            for moment, event in zip(moments, events, strict=True):
                if moment == number:
                    kv.broken = {"break": True, "mend": False}.get(event, kv.broken)
                    (kv.open.clear if event == "stall" else kv.open.set)()
            await write_pairs(append, 10 * number + 10, 10 * number + 11)
        kv.broken = False
        kv.open.set()
        found = await pulled(append, 0, 10 * pairs + 5)
        assert found == [(ts + 5, ts, b"%d" % ts) for ts in range(10, 10 * pairs + 1, 10)]


def group(number: int) -> Group:
    return Group([(0, number, 0)], [Pointer(0, 10 * number, 10)])


async def test_a_feed_that_resumes_goes_on_exactly_where_it_said() -> None:
    feed = Feed(Pointer(0, 0, 0), slow_seconds=0.0)
    for number in range(GROUPS_MAX + 3):
        await feed.put(group(number))
    assert feed.behind
    assert [await feed.get() for _ in range(GROUPS_MAX)] == [group(number) for number in range(GROUPS_MAX)]
    assert await feed.get() is None
    assert feed.resume() == Pointer(0, 10 * (GROUPS_MAX + 3), 0)
    await feed.put(group(GROUPS_MAX + 3))
    assert await feed.get() == group(GROUPS_MAX + 3)
    feed.close()
    assert await feed.get() is None
