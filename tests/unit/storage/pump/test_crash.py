"""A crash at every call that the disk sees, a flipped bit in every structure, a lost file,
a full disk.
"""

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from storage.kv import WriteBatch
from storage.leveldb import CorruptDatabaseError, LevelDB
from storage.model.errors import TidemarkError
from storage.pump.binlog import Binlog
from storage.pump.index import IndexVersionError
from storage.pump.storage import PumpStorage
from storage.value_log import SegmentMissingError, ValueLogWriteError
from tests.hooked_fs import HookedFS
from tests.memory_fs import MemFS
from tests.memory_kv import MemoryKV
from tests.unit.storage.pump.storages import (
    DIRECTORY,
    Row,
    commit,
    heartbeat,
    opened,
    prewrite,
    pulled,
    rollback,
    wait_max_commit_ts,
)

SEGMENT_BYTES = 150
END_TS = 1000
CHANGES = {"append", "sync", "create", "sync_directory", "truncate", "remove"}


class Crash:
    """A disk that is cloned before each change to it, with what was acknowledged until then."""

    def __init__(self) -> None:
        self.disk = MemFS()
        self.kv = MemoryKV()
        self.acknowledged: list[Binlog] = []
        self.moments: list[tuple[str, MemFS, MemFS, MemoryKV, list[Binlog]]] = []

    def hook(self, call: str, path: Path) -> None:
        if call in CHANGES:
            clones = self.disk.crash_clone(), self.disk.crash_clone(torn_bytes=30)
            self.moments.append((call, *clones, self.kv.snapshot(), list(self.acknowledged)))

    async def write(self, storage: PumpStorage, *binlogs: Binlog) -> None:
        await storage.write(binlogs)
        self.acknowledged += binlogs


async def worked(crash: Crash) -> None:
    """Groups, rotations, a rollback, a lonely prewrite, GC:
    each of the calls that storage makes.
    """
    async with opened(HookedFS(crash.disk, crash.hook), crash.kv, SEGMENT_BYTES) as storage:
        for ts in range(10, 100, 10):
            await crash.write(storage, prewrite(ts, b"%d" % ts))
            await crash.write(storage, commit(ts, ts + 5), prewrite(ts + 1), rollback(ts + 1))
        await crash.write(storage, heartbeat(200))
        await wait_max_commit_ts(storage, 200)
        await storage.gc(40)
        await storage.rotate()
        await crash.write(storage, prewrite(210, b"210"))
        await crash.write(storage, commit(210, 215))


def expected(acknowledged: list[Binlog], gc_ts: int) -> list[Row]:
    rows = {binlog.start_ts: b"%d" % binlog.start_ts for binlog in acknowledged if binlog.kind == 0}
    commits = [binlog for binlog in acknowledged if binlog.commit_ts > gc_ts]
    return [
        (binlog.commit_ts, binlog.start_ts, b"" if binlog.is_fake else rows[binlog.start_ts])
        for binlog in commits
    ]


def only_synced(kv: MemoryKV) -> MemoryKV:
    """LevelDB after a power cut that took everything but the one write that was synced: gc_ts."""
    gc_ts = kv.get(b"g")
    return MemoryKV({b"g": gc_ts} if gc_ts else {})


async def served(disk: MemFS, kv: MemoryKV) -> tuple[list[Row], int]:
    """What a restart serves; whatever still waits for its outcome is rolled back first."""
    async with opened(disk, kv, SEGMENT_BYTES) as storage:
        waiting = await storage.oldest_waiting(100)
        await storage.write([*(rollback(start_ts) for start_ts, _ in waiting), heartbeat(END_TS)])
        return (await pulled(storage, 0, END_TS))[:-1], storage.gc_ts


async def test_a_crash_before_any_change_to_the_disk_loses_nothing_acknowledged_and_invents_nothing() -> (
    None
):
    crash = Crash()
    await worked(crash)
    assert {call for call, *_ in crash.moments} == CHANGES - {"truncate"}
    assert len(crash.moments) > 40
    written = expected(crash.acknowledged, 0)
    for _, clean, torn, kv, acknowledged in crash.moments:
        for disk, index in (
            (clean, kv),
            (torn, kv.snapshot()),
            (clean.crash_clone(), only_synced(kv)),
        ):
            rows, gc_ts = await served(disk, index)
            kept = expected(acknowledged, gc_ts)
            assert [row for row in rows if row in kept] == kept
            assert all(row in written for row in rows)
            assert len(set(rows)) == len(rows)


async def filled(disk: MemFS, kv: MemoryKV | None = None) -> list[str]:
    """Four segments with a footer, and one without; their names."""
    async with opened(disk, kv or MemoryKV(), 1) as storage:
        for binlog in (prewrite(1, b"one"), prewrite(2, b"two"), commit(2, 3), commit(1, 4)):
            await storage.write([binlog])
        await wait_max_commit_ts(storage, 4)
    return disk.names(DIRECTORY / "value")


@pytest.mark.parametrize("place", ["magic", "version", "length", "crc", "payload"])
async def test_a_flipped_bit_in_a_record_costs_that_record_and_is_told(place: str) -> None:
    offset = {"magic": 0, "version": 4, "length": 8, "crc": 12, "payload": 16}[place]
    disk = MemFS()
    await filled(disk)
    disk.open(DIRECTORY / "value" / "000001.vlog").content[offset] ^= 4
    async with opened(disk, segment_bytes=1) as storage:
        assert storage.recovery.skipped[0].fid == 1
        chunk = await anext(storage.pull(0))
        assert (len(chunk.payloads), chunk.orphans) == (2, [2])


@pytest.mark.parametrize("back", range(1, 25, 3))
async def test_a_flipped_bit_in_a_footer_costs_nothing(back: int) -> None:
    disk = MemFS()
    for name in await filled(disk):
        disk.open(DIRECTORY / "value" / name).content[-back] ^= 4
    async with opened(disk, segment_bytes=1) as storage:
        assert await pulled(storage, 0, 4) == [(3, 2, b"two"), (4, 1, b"one")]


async def test_a_flipped_bit_found_while_reading_ends_the_reader_with_the_place() -> None:
    disk = MemFS()
    async with opened(disk) as storage:
        await storage.write([prewrite(1), commit(1, 5)])
        await wait_max_commit_ts(storage, 5)
        disk.open(DIRECTORY / "value" / "000000.vlog").content[20] ^= 4
        with pytest.raises(
            TidemarkError, match=r"no good record of \d+ bytes at offset 0"
        ) as caught:
            await anext(storage.pull(0))
        assert caught.value.code == "ErrRecordCorrupt"


async def test_a_flipped_bit_in_the_state_of_the_index_stops_the_start() -> None:
    disk, kv = MemFS(), MemoryKV()
    await filled(disk, kv)
    state = bytearray(kv.get(b"s") or b"")
    state[0] ^= 4
    batch = WriteBatch()
    batch.put(b"s", bytes(state))
    kv.write(batch, sync=True)
    with pytest.raises(IndexVersionError, match="move its kv directory away"):
        async with opened(disk, kv, 1):
            pass


@pytest.mark.parametrize("number", range(4))
async def test_a_lost_segment_is_named_when_a_reader_needs_it(number: int) -> None:
    disk, kv = MemFS(), MemoryKV()
    lost = (await filled(disk, kv))[number]
    async with opened(disk, kv, 1) as storage:
        await storage.write([heartbeat(6)])
        await wait_max_commit_ts(storage, 6)
    disk.remove(DIRECTORY / "value" / lost)
    async with opened(disk, kv, 1) as storage:
        with pytest.raises(
            SegmentMissingError, match=f"{lost} is missing; it was removed by GC, or lost"
        ):
            await pulled(storage, 0, 6)
        await storage.write([heartbeat(7)])


async def test_a_start_without_the_last_segment_is_refused() -> None:
    disk, kv = MemFS(), MemoryKV()
    lost = (await filled(disk, kv))[-1]
    disk.remove(DIRECTORY / "value" / lost)
    with pytest.raises(
        SegmentMissingError, match="segment 3 of the value log is missing; restore its file"
    ):
        async with opened(disk, kv, 1):
            pass


def full(allowed: int) -> tuple[Callable[[str, Path], int | None], list[int]]:
    """A disk with room for `allowed` writes more; the last one is torn."""
    left = [allowed]

    def hook(call: str, path: Path) -> int | None:
        if call not in ("append", "create"):
            return None
        left[0] -= 1
        if left[0] == 0 and call == "append":
            return 7
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return None

    return hook, left


@pytest.mark.parametrize("allowed", range(1, 12, 2))
async def test_a_disk_that_fills_up_at_any_write_refuses_whole_groups_and_recovers(
    allowed: int,
) -> None:
    hook, left = full(allowed)
    disk, kv, acknowledged = MemFS(), MemoryKV(), list[Binlog]()
    async with opened(HookedFS(disk, hook), kv, SEGMENT_BYTES) as storage:
        for ts in range(10, 100, 10):
            group = [prewrite(ts, b"%d" % ts), commit(ts, ts + 5)]
            with contextlib.suppress(ValueLogWriteError):
                await storage.write(group)
                acknowledged += group
        left[0] = 100
        await storage.write([heartbeat(300)])
        assert await pulled(storage, 0, 300) == [*expected(acknowledged, 0), (300, 300, b"")]
    rows, _ = await served(disk.crash_clone(), kv)
    assert rows == [*expected(acknowledged, 0), (300, 300, b"")]


def test_a_flipped_bit_in_leveldb_is_found_where_it_is_read(tmp_path: Path) -> None:
    kv = LevelDB(tmp_path)
    for number in range(2000):
        batch = WriteBatch()
        batch.put(b"c%06d" % number, os.urandom(64))
        kv.write(batch, sync=False)
    kv.compact(b"", b"")
    kv.close()
    table = next(path for path in tmp_path.iterdir() if path.suffix == ".ldb")
    data = bytearray(table.read_bytes())
    data[2000] ^= 4
    table.write_bytes(data)
    kv = LevelDB(tmp_path)
    with pytest.raises(CorruptDatabaseError):
        assert len(list(kv.scan(b"c"))) < 2000
    kv.close()
