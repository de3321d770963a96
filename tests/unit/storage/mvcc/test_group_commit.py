"""Group commit: order, durability before answers, observers before callers,
quiet moments, shutdown.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest

from storage.kv import WriteBatch
from storage.model.errors import UnavailableError
from storage.mvcc.engine import PREWRITE, Change, Draft, Engine
from storage.mvcc.errors import InvalidTxnError, StoreStoppedError
from storage.mvcc.group_commit import MAX_WAITING_COMMANDS, GroupCommit, StoreBusyError
from storage.mvcc.record import PUT
from tests.memory_kv import MemoryKV


class CountingKV(MemoryKV):
    def __init__(self) -> None:
        super().__init__()
        self.groups: list[list[bytes]] = []

    def write(self, batch: WriteBatch, *, sync: bool) -> None:
        assert sync
        self.groups.append(list(batch.ops))
        super().write(batch, sync=sync)


def put(key: bytes) -> Any:
    def command(draft: Draft) -> bytes:
        draft.put(key, b"v")
        draft.note(Change(PREWRITE, key, key, PUT, 1))
        return key

    return command


def refuse(_: Draft) -> None:
    raise InvalidTxnError("no")


@asynccontextmanager
async def running(kv: MemoryKV, seen: list[Sequence[Change]]) -> AsyncIterator[GroupCommit]:
    with ThreadPoolExecutor(1) as executor:
        group = GroupCommit(Engine(kv), executor, seen.append)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(group.run())
            yield group
            task.cancel()


async def test_what_waits_becomes_one_group_and_answers_follow_the_observer() -> None:
    kv, seen = CountingKV(), list[Sequence[Change]]()
    answered: list[int] = []

    async with running(kv, seen) as group:

        async def submit(key: bytes) -> None:
            assert list(await group.submit([put(key)])) == [key]
            answered.append(len(seen))

        async with asyncio.TaskGroup() as callers:
            for number in range(20):
                callers.create_task(submit(b"%02d" % number))
    assert len(kv.groups) <= 2
    assert [key for written in kv.groups for key in written] == [
        b"%02d" % number for number in range(20)
    ]
    assert all(count >= 1 for count in answered)


async def test_errors_are_values_and_spare_their_neighbours() -> None:
    kv = CountingKV()
    async with running(kv, []) as group:
        first, second = await group.submit([refuse, put(b"a")])
    assert isinstance(first, InvalidTxnError)
    assert second == b"a"


async def test_a_quiet_moment_sees_exactly_what_was_observed() -> None:
    kv, seen = CountingKV(), list[Sequence[Change]]()
    async with running(kv, seen) as group, asyncio.TaskGroup() as callers:
        for number in range(50):
            callers.create_task(group.submit([put(b"%02d" % number)]))
            stored, observed = await group.quiet(
                lambda: (len(list(kv.scan(b""))), sum(map(len, seen)))
            )
            assert stored == observed


async def test_a_function_that_fails_in_a_quiet_moment_fails_its_caller_only() -> None:
    async with running(MemoryKV(), []) as group:
        with pytest.raises(ZeroDivisionError):
            await group.quiet(lambda: 1 // 0)
        assert await group.submit([put(b"a")]) == [b"a"]


async def test_a_failing_disk_ends_the_group_commit_and_answers_nobody() -> None:
    class BrokenKV(MemoryKV):
        def write(self, batch: WriteBatch, *, sync: bool) -> None:
            raise UnavailableError("no space left")

    async def submit() -> None:
        async with running(BrokenKV(), []) as group:
            with pytest.raises(StoreStoppedError):
                await group.submit([put(b"a")])
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as caught:
        await submit()
    assert caught.group_contains(UnavailableError, match="no space left")


async def test_a_stopped_store_refuses() -> None:
    async with running(MemoryKV(), []) as group:
        await group.submit([put(b"a")])
    with pytest.raises(StoreStoppedError):
        await group.submit([put(b"a")])
    with pytest.raises(StoreStoppedError):
        await group.quiet(lambda: None)


async def test_the_queue_is_bounded() -> None:
    async with running(MemoryKV(), []) as group:
        with pytest.raises(StoreBusyError):
            await group.submit([refuse] * (MAX_WAITING_COMMANDS + 1))
