"""Waiting lock requests against the real engine: order, hand-over, deadlocks,
time-outs, cancellation.
"""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest
from kvproto import kvrpcpb_pb2 as kvrpcpb
from kvproto import metapb_pb2 as metapb

from server.store.lock_wait import LockWaits
from server.store.methods import METHODS
from server.store.metrics import LOCK_WAITS
from server.store.region_table import RegionGate
from server.store.runner import Call, Runner
from storage.mvcc.engine import Engine
from storage.mvcc.group_commit import GroupCommit
from storage.mvcc.region import Region, RegionMap
from tests.memory_kv import MemoryKV

CONTEXT = kvrpcpb.Context(region_id=1, region_epoch=metapb.RegionEpoch(conf_ver=1, version=1))


class Store:
    """The write side of a store, without sockets."""

    def __init__(self, runner: Runner, ceiling_s: float) -> None:
        self.runner = runner
        self.waits = LockWaits(runner, ceiling_s)

    async def lock(
        self, *keys: bytes, start_ts: int, wait_ms: int = 10**15
    ) -> kvrpcpb.PessimisticLockResponse:
        request = kvrpcpb.PessimisticLockRequest(
            context=CONTEXT,
            mutations=[kvrpcpb.Mutation(op=kvrpcpb.PessimisticLock, key=key) for key in keys],
            primary_lock=keys[0],
            start_version=start_ts,
            for_update_ts=start_ts,
            lock_ttl=10,
            wait_timeout=wait_ms,
        )
        return await self.waits.lock(request)

    async def unlock(self, *keys: bytes, start_ts: int) -> None:
        request = kvrpcpb.PessimisticRollbackRequest(
            context=CONTEXT, start_version=start_ts, for_update_ts=start_ts, keys=keys
        )
        (answer,) = await self.runner.write([Call(METHODS["KVPessimisticRollback"], request)])
        assert not answer.errors


@asynccontextmanager
async def store(ceiling_s: float = 30.0) -> AsyncIterator[Store]:
    with ThreadPoolExecutor(1) as writer:
        group = GroupCommit(Engine(MemoryKV()), writer, lambda _: None)
        runner = Runner(MemoryKV(), RegionGate(1, RegionMap([Region(1, 1)])), group, writer)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(group.run())
            yield Store(runner, ceiling_s)
            running.cancel()


async def settled(tasks: asyncio.TaskGroup, *waits: Any) -> list[asyncio.Task[Any]]:
    """The waits as tasks that all wait; without any, some time in which others could go on."""
    before = LOCK_WAITS._value.get()
    started = [tasks.create_task(wait) for wait in waits]
    async with asyncio.timeout(60):
        while LOCK_WAITS._value.get() < before + len(waits):  # noqa: ASYNC110 - metrics tell no events
            await asyncio.sleep(0.001)
    await asyncio.sleep(0 if waits else 0.05)
    return started


async def test_the_lock_goes_from_owner_to_owner_oldest_first() -> None:
    async with store() as db:
        order: list[int] = []

        async def hold(start_ts: int) -> None:
            assert not (await db.lock(b"k", start_ts=start_ts)).errors
            order.append(start_ts)
            await db.unlock(b"k", start_ts=start_ts)

        await db.lock(b"k", start_ts=1)
        async with asyncio.TaskGroup() as tasks:
            await settled(tasks, *(hold(start_ts) for start_ts in (5, 3, 4, 2)))
            await db.unlock(b"k", start_ts=1)
        assert order == [2, 3, 4, 5]


async def test_one_who_is_woken_and_still_refused_lets_the_next_one_try() -> None:
    async with store() as db:
        await db.lock(b"a", b"b", start_ts=1)
        async with asyncio.TaskGroup() as tasks:
            both, one = await settled(
                tasks, db.lock(b"a", b"b", start_ts=2), db.lock(b"a", start_ts=3)
            )
            await db.unlock(b"a", start_ts=1)  # 2 is woken, and waits for b now
            assert not (await one).errors
            await db.unlock(b"b", start_ts=1)
            await settled(tasks)
            assert not both.done()
            await db.unlock(b"a", start_ts=3)
            assert not (await both).errors


async def test_a_deadlock_is_told_to_the_one_who_closes_it() -> None:
    async with store() as db:
        for start_ts, key in ((1, b"a"), (2, b"b"), (3, b"c")):
            await db.lock(key, start_ts=start_ts)
        async with asyncio.TaskGroup() as tasks:
            first, second = await settled(
                tasks, db.lock(b"b", start_ts=1), db.lock(b"c", start_ts=2)
            )
            (error,) = (await db.lock(b"a", start_ts=3)).errors
            assert [edge.wait_for_txn for edge in error.deadlock.wait_chain] == [2, 3, 1]
            await db.unlock(b"c", start_ts=3)
            assert not (await second).errors
            await db.unlock(b"b", start_ts=2)
            assert not (await first).errors


async def test_a_wait_ends_with_its_time_or_the_stores() -> None:
    async with store(ceiling_s=0.05) as db:
        await db.lock(b"k", start_ts=1)
        for wait_ms in (-1, 0, 1, 10**15):
            assert (await db.lock(b"k", start_ts=2, wait_ms=wait_ms)).errors[
                0
            ].locked.lock_version == 1
        await db.unlock(b"k", start_ts=1)
        assert not (await db.lock(b"k", start_ts=2)).errors


async def test_a_client_that_leaves_is_not_waited_for() -> None:
    async with store() as db:
        await db.lock(b"k", start_ts=1)
        async with asyncio.TaskGroup() as tasks:
            gone, next_one = await settled(
                tasks, db.lock(b"k", start_ts=2), db.lock(b"k", start_ts=3)
            )
            gone.cancel()
            await db.unlock(b"k", start_ts=1)
            assert not (await next_one).errors


async def test_a_client_that_leaves_just_when_it_is_woken_passes_the_turn_on() -> None:
    async with store() as db:
        await db.lock(b"k", start_ts=1)
        async with asyncio.TaskGroup() as tasks:
            gone, next_one = await settled(
                tasks, db.lock(b"k", start_ts=2), db.lock(b"k", start_ts=3)
            )
            unlocked = (
                db.waits._unlocked
            )  # the cancellation comes between the wake-up and the task's next step

            def wake_and_cancel(keys: Any) -> None:
                unlocked(keys)
                gone.cancel()

            db.runner.watch_unlocked(wake_and_cancel)
            await db.unlock(b"k", start_ts=1)
            assert not (await next_one).errors


async def test_a_client_that_leaves_just_before_it_is_woken_passes_the_turn_on() -> None:
    async with store() as db:
        await db.lock(b"k", start_ts=1)
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            gone, next_one = await settled(
                tasks, db.lock(b"k", start_ts=2), db.lock(b"k", start_ts=3)
            )
            unlocked = db.waits._unlocked

            def cancel_and_wake(keys: Any) -> None:
                gone.cancel()
                unlocked(keys)

            db.runner.watch_unlocked(cancel_and_wake)
            await db.unlock(b"k", start_ts=1)
            assert not (await next_one).errors


@pytest.mark.parametrize("is_woken_first", [True, False])
async def test_a_wake_up_in_the_moment_of_the_deadline_is_passed_on(
    is_woken_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts: list[asyncio.Timeout] = []

    def kept(when: float) -> asyncio.Timeout:
        timeouts.append(asyncio.Timeout(when))
        return timeouts[-1]

    monkeypatch.setattr(asyncio, "timeout_at", kept)
    async with store(ceiling_s=3600) as db:
        await db.lock(b"a", start_ts=1)
        await db.lock(b"b", start_ts=4)
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            late, next_one = await settled(
                tasks, db.lock(b"a", b"b", start_ts=2), db.lock(b"a", start_ts=3)
            )
            loop, unlocked = asyncio.get_running_loop(), db.waits._unlocked

            def end_and_wake(keys: Any) -> None:
                timeouts[0].reschedule(0)  # the deadline, in the next turn of the loop
                if is_woken_first:
                    unlocked(keys)
                else:
                    loop.call_soon(unlocked, keys)

            db.runner.watch_unlocked(end_and_wake)
            await db.unlock(b"a", start_ts=1)
            assert (await late).errors[0].locked.key == b"b"
            assert not (await next_one).errors
