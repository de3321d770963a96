import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from storage.model.errors import UnavailableError
from storage.pump import write_pipeline as module
from storage.pump.binlog import Binlog, fake, parse
from storage.pump.write_pipeline import GroupCommit, IndexQueue, PumpBusyError, PumpClosedError
from storage.value_log import ValueLog
from tests.hooked_fs import HookedFS
from tests.memory_fs import MemFS


class Disk:
    """A log whose fdatasync waits for the test."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.syncs = 0
        self.log = ValueLog(HookedFS(MemFS(), self._hook), Path("/log"), ts_of=lambda _: 0)
        self.index_queue = IndexQueue(self.log.end)

    def _hook(self, call: str, path: Path) -> None:
        if call == "sync":
            self.syncs += 1
            assert self.released.wait(60)


def binlog(ts: int) -> Binlog:
    return parse(fake(ts))


async def test_what_waits_while_the_disk_works_is_one_group() -> None:
    disk = Disk()
    with ThreadPoolExecutor(1) as thread:
        group_commit = GroupCommit(disk.log, thread, disk.index_queue)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(group_commit.run())
            writers = [tasks.create_task(group_commit.write([binlog(ts)])) for ts in range(1, 101)]
            await asyncio.sleep(0)
            disk.released.set()
            await asyncio.gather(*writers)
            group_commit.close()
    assert disk.syncs <= 2
    entries = []
    while group := await disk.index_queue.get():
        entries += group.entries
    assert disk.index_queue.closed
    assert entries == [(2, ts, ts) for ts in range(1, 101)]


async def test_nothing_is_acknowledged_before_the_disk_has_it() -> None:
    disk = Disk()
    with ThreadPoolExecutor(1) as thread:
        group_commit = GroupCommit(disk.log, thread, disk.index_queue)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(group_commit.run())
            writer = tasks.create_task(group_commit.write([binlog(1)]))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(writer), 0.05)
            disk.released.set()
            await writer
            group_commit.close()


async def test_a_queue_beyond_its_bound_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITING_BYTES_MAX", 50)
    disk = Disk()
    with ThreadPoolExecutor(1) as thread:
        group_commit = GroupCommit(disk.log, thread, disk.index_queue)
        async with asyncio.TaskGroup() as tasks:
            waiting = [tasks.create_task(group_commit.write([binlog(1 << 60)])) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(PumpBusyError, match="bytes wait for the disk"):
                await group_commit.write([binlog(1 << 60)])
            disk.released.set()
            tasks.create_task(group_commit.run())
            await asyncio.gather(*waiting)
            group_commit.close()


async def test_refusing_answers_those_who_wait() -> None:
    disk = Disk()
    with ThreadPoolExecutor(1) as thread:
        group_commit = GroupCommit(disk.log, thread, disk.index_queue)
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(_refusal(group_commit))
            await asyncio.sleep(0)
            group_commit.refuse(UnavailableError("the index is full"))
            assert "the index is full" in await waiting
            group_commit.close()
            assert "the index is full" in await _refusal(group_commit)


async def test_a_closed_commit_stores_what_waits_and_refuses_the_rest() -> None:
    disk = Disk()
    disk.released.set()
    with ThreadPoolExecutor(1) as thread:
        group_commit = GroupCommit(disk.log, thread, disk.index_queue)
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(group_commit.write([binlog(1)]))
            await asyncio.sleep(0)
            group_commit.close()
            tasks.create_task(group_commit.run())
            await waiting
            with pytest.raises(PumpClosedError):
                await group_commit.write([binlog(2)])


@pytest.mark.parametrize("cancelled", [True, False])
async def test_writers_of_an_append_that_nobody_knows_the_end_of_get_an_error(
    cancelled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = Disk()

    def broken(_payloads: object, _max_ts: int) -> None:
        assert disk.released.wait(60)
        raise ZeroDivisionError

    monkeypatch.setattr(disk.log, "append", broken)
    with ThreadPoolExecutor(1) as thread:
        group_commit = GroupCommit(disk.log, thread, disk.index_queue)
        writer = asyncio.create_task(group_commit.write([binlog(1)]))  # noqa: TID251
        running = asyncio.create_task(group_commit.run())  # noqa: TID251
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if cancelled:
            running.cancel()
        else:
            disk.released.set()
        with pytest.raises(PumpClosedError):
            await writer
        with pytest.raises(asyncio.CancelledError if cancelled else ZeroDivisionError):
            await running
        disk.released.set()
    assert group_commit.written == 0


async def _refusal(group_commit: GroupCommit) -> str:
    with pytest.raises(UnavailableError) as caught:
        await group_commit.write([binlog(1)])
    return str(caught.value)
