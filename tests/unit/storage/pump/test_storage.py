import asyncio
import errno
import os
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tipb import binlog_pb2

from storage.kv import WriteBatch
from storage.pump.binlog import parse
from storage.pump.gc import Collected
from storage.pump.storage import BinlogNotFoundError, BinlogPurgedError
from storage.pump.write_pipeline import PumpClosedError
from storage.value_log import SegmentMissingError, ValueLogWriteError
from tests.hooked_fs import HookedFS
from tests.memory_fs import MemFS
from tests.memory_kv import MemoryKV
from tests.unit.storage.pump.storages import (
    DIRECTORY,
    commit,
    heartbeat,
    opened,
    prewrite,
    pulled,
    rollback,
    wait_max_commit_ts,
)


async def test_commits_come_in_commit_order_joined_with_their_rows() -> None:
    async with opened(MemFS()) as storage:
        await storage.write([prewrite(1, b"one"), prewrite(2, b"two"), prewrite(3, b"three")])
        await storage.write([commit(2, 12), rollback(3), commit(1, 11), heartbeat(20)])
        assert await pulled(storage, 0, 20) == [(11, 1, b"one"), (12, 2, b"two"), (20, 20, b"")]
        assert await pulled(storage, 11, 20) == [(12, 2, b"two"), (20, 20, b"")]
        assert (storage.max_commit_ts, storage.all_matched) == (20, True)


async def test_a_lonely_prewrite_holds_later_commits_back_until_it_is_settled() -> None:
    async with opened(MemFS()) as storage:
        await storage.write(
            [prewrite(1), commit(1, 5), prewrite(6), prewrite(7), commit(7, 9), heartbeat(10)]
        )
        assert await pulled(storage, 0, 5) == [(5, 1, b"rows")]
        statistics = storage.statistics()
        assert (
            statistics.max_commit_ts,
            statistics.waiting_prewrites,
            statistics.oldest_waiting_ts,
        ) == (5, 1, 6)
        assert not storage.all_matched
        await storage.write([commit(6, 8)])
        assert [item[0] for item in await pulled(storage, 5, 10)] == [8, 9, 10]


async def test_several_readers_tail_without_polling() -> None:
    async with opened(MemFS()) as storage:
        readers = [storage.pull(0), storage.pull(0), storage.pull(4)]
        await storage.write([prewrite(1, b"v"), commit(1, 5)])
        chunks = [await anext(reader) for reader in readers]
        assert len({chunk.payloads[0] for chunk in chunks}) == 1
        await storage.write([prewrite(6, b"w"), commit(6, 7)])
        assert {(await anext(reader)).cursor.commit_ts for reader in readers} == {7}
        storage.end_pulls()
        for reader in readers:
            with pytest.raises(PumpClosedError):
                await anext(reader)


async def test_a_commit_without_its_prewrite_is_served_without_rows_and_reported() -> None:
    async with opened(MemFS()) as storage:
        await storage.write([commit(3, 5), heartbeat(9)])
        chunk = await anext(storage.pull(0))
        assert (len(chunk.payloads), chunk.orphans) == (2, [3])


async def test_a_probe_is_not_stored() -> None:
    async with opened(MemFS()) as storage:
        await storage.write([parse(b""), parse(binlog_pb2.Binlog(tp=1).SerializeToString())])
        assert storage.statistics().log_bytes == 0


async def test_any_binlog_is_found_by_its_timestamp() -> None:
    async with opened(MemFS()) as storage:
        await storage.write([prewrite(1), commit(1, 5)])
        await wait_max_commit_ts(storage, 5)
        assert await storage.get(1) == prewrite(1).payload
        assert await storage.get(5) == commit(1, 5).payload
        with pytest.raises(BinlogNotFoundError, match="no binlog is filed under 4"):
            await storage.get(4)


async def test_a_binlog_whose_segment_gc_removed_first_is_not_found_rather_than_corrupt() -> None:
    async with opened(MemFS(), segment_bytes=16) as storage:
        await storage.write([prewrite(1), commit(1, 5)])
        await storage.write([prewrite(7), commit(7, 9), heartbeat(10)])
        await wait_max_commit_ts(storage, 10)
        assert storage._index.advance_gc_ts(6)
        pointer = storage._index.find(5)
        assert pointer is not None
        storage._log.drop(pointer.fid)
        with pytest.raises(BinlogNotFoundError, match="filed under 5 was removed by GC"):
            await storage.get(5)


async def test_a_repeated_prewrite_and_commit_are_one_transaction() -> None:
    async with opened(MemFS()) as storage:
        await storage.write(
            [prewrite(1), prewrite(1), commit(1, 5), commit(1, 5), prewrite(1), heartbeat(6)]
        )
        assert await pulled(storage, 0, 6) == [(5, 1, b"rows"), (6, 6, b"")]
        assert storage.all_matched
        assert storage.statistics().late_commits == 0


async def test_a_full_disk_fails_the_writers_and_serves_the_readers() -> None:
    full = False

    def hook(call: str, path: Path) -> int | None:
        if call == "append" and full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return None

    async with opened(HookedFS(MemFS(), hook)) as storage:
        await storage.write([prewrite(1), commit(1, 5)])
        full = True
        with pytest.raises(ValueLogWriteError, match="No space left on device"):
            await storage.write([prewrite(6), commit(6, 7)])
        assert await pulled(storage, 0, 5) == [(5, 1, b"rows")]
        full = False
        await storage.write([prewrite(6), commit(6, 7)])
        assert len(await pulled(storage, 0, 7)) == 2


async def test_writing_to_a_closing_pump_is_refused() -> None:
    async with opened(MemFS()) as storage:
        storage.close()
        with pytest.raises(PumpClosedError):
            await storage.write([prewrite(1)])


async def test_a_reader_below_gc_is_told_so() -> None:
    async with opened(MemFS()) as storage:
        await storage.write([prewrite(1), commit(1, 5), prewrite(6), commit(6, 8), heartbeat(10)])
        await wait_max_commit_ts(storage, 10)
        slow = storage.pull(4)
        assert (await storage.gc(6)).keys == 2
        for reader in (slow, storage.pull(3)):
            with pytest.raises(BinlogPurgedError, match="would lose rows"):
                await anext(reader)
        assert [item[0] for item in await pulled(storage, 0, 10)] == [8, 10]
        assert storage.gc_ts == 6


async def test_gc_drops_whole_segments_but_never_a_prewrite_that_a_later_commit_needs() -> None:
    fs = MemFS()
    async with opened(fs, segment_bytes=1) as storage:
        for binlog in (
            prewrite(1),
            commit(1, 5),
            prewrite(6, b"old"),
            heartbeat(7),
            commit(6, 20),
            heartbeat(30),
        ):
            await storage.write([binlog])
        await wait_max_commit_ts(storage, 30)
        assert (await storage.gc(19)).keys == 3 + 1
        assert fs.names(DIRECTORY / "value") == [
            "000002.vlog",
            "000003.vlog",
            "000004.vlog",
            "000005.vlog",
        ]
        assert (await pulled(storage, 19, 20))[0] == (20, 6, b"old")
        await storage.write([heartbeat(40)])
        await wait_max_commit_ts(storage, 40)
        assert (await storage.gc(39)).keys > 0
        assert fs.names(DIRECTORY / "value") == ["000006.vlog"]


async def test_gc_waits_for_what_is_not_complete() -> None:
    async with opened(MemFS()) as storage:
        await storage.write([prewrite(1), commit(1, 5), prewrite(6), heartbeat(10)])
        await wait_max_commit_ts(storage, 5)
        assert (await storage.gc(5)).keys == 0
        assert await storage.gc(4) == Collected(gc_ts=4)
        assert await storage.gc(3) == Collected(gc_ts=4)


async def test_a_lost_index_is_rebuilt_from_the_log() -> None:
    fs = MemFS()
    async with opened(fs, segment_bytes=1) as storage:
        for binlog in (prewrite(1), commit(1, 5), prewrite(6), commit(6, 20), heartbeat(30)):
            await storage.write([binlog])
        await wait_max_commit_ts(storage, 30)
        await storage.gc(7)
    async with opened(fs) as storage:
        assert storage.recovery.rebuilt
        assert [item[0] for item in await pulled(storage, 6, 30)] == [20, 30]
        # Nobody knows how far GC went: a reader from before what is left would miss (1, 5).
        with pytest.raises(BinlogPurgedError, match="would lose rows"):
            await anext(storage.pull(1))


async def test_an_index_ahead_of_the_log_is_rebuilt() -> None:
    fs, kv = MemFS(), MemoryKV()
    async with opened(fs, kv) as storage:
        await storage.write([prewrite(1), commit(1, 5)])
        kept = storage.statistics().log_bytes
        await storage.write([prewrite(6), commit(6, 7)])
        await wait_max_commit_ts(storage, 7)
    fs.open(DIRECTORY / "value" / "000000.vlog").truncate(kept)
    async with opened(fs, kv) as storage:
        assert storage.recovery.rebuilt
        assert await pulled(storage, 0, 5) == [(5, 1, b"rows")]


async def test_damage_in_a_finished_segment_is_reported_and_costs_only_its_own_record() -> None:
    fs = MemFS()
    async with opened(fs, segment_bytes=1) as storage:
        for binlog in (prewrite(1), prewrite(2), commit(2, 3), commit(1, 4)):
            await storage.write([binlog])
    fs.open(DIRECTORY / "value" / "000001.vlog").content[20] ^= 1
    async with opened(fs, segment_bytes=1) as storage:
        assert [(skipped.fid, skipped.torn) for skipped in storage.recovery.skipped] == [(1, False)]
        chunk = await anext(storage.pull(0))
        assert (len(chunk.payloads), chunk.orphans) == (2, [2])


async def test_a_lost_segment_stops_the_start() -> None:
    fs, kv = MemFS(), MemoryKV()
    async with opened(fs, kv, segment_bytes=1) as storage:
        await storage.write([prewrite(1)])
        await storage.write([commit(1, 5)])
    fs.remove(DIRECTORY / "value" / "000001.vlog")
    with pytest.raises(SegmentMissingError):
        async with opened(fs, kv):
            pass


class ForgetfulKV(MemoryKV):
    """As LevelDB after a power cut: it keeps everything up to the last synced write,
    and any part of what followed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.survivors = [MemoryKV()]

    def write(self, batch: WriteBatch, *, sync: bool) -> None:
        super().write(batch, sync=sync)
        self.survivors = [*([] if sync else self.survivors), self.snapshot()]


transactions = st.lists(
    st.tuples(st.booleans(), st.binary(max_size=20), st.none() | st.integers(0, 300)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=80)
@given(transactions, st.randoms(use_true_random=False), st.integers(0, 40), st.integers(1, 120))
async def test_after_a_power_cut_every_acknowledged_transaction_is_served_once(
    rows: list[tuple[bool, bytes, int | None]], random: Random, torn_bytes: int, segment_bytes: int
) -> None:
    fs, kv = MemFS(), ForgetfulKV()
    open_transactions: list[tuple[int, bool, bytes]] = []
    expected: list[tuple[int, int, bytes]] = []
    started: set[int] = set()
    ts = 0
    async with opened(fs, kv, segment_bytes) as storage, asyncio.TaskGroup() as tasks:
        for committed, value, gc_ts in rows:
            ts += 10
            start_ts = ts - random.randrange(1, 25)  # it may have begun before others committed
            if start_ts <= 0 or start_ts % 10 == 0 or start_ts in started:
                continue
            started.add(start_ts)
            await storage.write([prewrite(start_ts, value)])
            open_transactions.append((start_ts, committed, value))
            while open_transactions and random.random() < 0.6:
                start_ts, commits, stored = open_transactions.pop(
                    random.randrange(len(open_transactions))
                )
                ts += 10
                await storage.write([commit(start_ts, ts) if commits else rollback(start_ts)])
                expected += [(ts, start_ts, stored)] if commits else []
            if gc_ts is not None:
                tasks.create_task(storage.gc(gc_ts))
        crashed, survived = fs.crash_clone(torn_bytes), random.choice(kv.survivors)
    async with opened(crashed, survived, segment_bytes) as storage:
        gc_ts = storage.gc_ts
        for start_ts, _, _ in open_transactions:
            await storage.write([rollback(start_ts)])
        await storage.write([heartbeat(ts + 1)])
        served = [item for item in expected if item[0] > gc_ts]
        assert await pulled(storage, 0, ts + 1) == [*served, (ts + 1, ts + 1, b"")]
