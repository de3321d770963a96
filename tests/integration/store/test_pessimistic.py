"""Pessimistic locks over the wire: waiting, the order of waking up, deadlocks, force-lock,
giving back.
"""

import asyncio
import time
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

from kvproto import kvrpcpb_pb2 as kvrpcpb
from kvproto import tikvpb_pb2 as tikvpb

from storage.mvcc.fingerprint import fingerprint64
from tests.integration.store.daemons import Cluster
from tests.integration.store.stubs import Stubs, row_key, stubs_of

FOREVER = 2**63 - 1
CEILING_S = 6.0
STORE_FLAGS = ("--wait-for-lock-timeout", f"{CEILING_S}")


async def asked(
    stubs: Stubs, *keys: bytes, start_ts: int, **more: Any
) -> kvrpcpb.PessimisticLockRequest:
    fields = {"for_update_ts": start_ts, "lock_ttl": 600_000, "wait_timeout": FOREVER} | more
    return kvrpcpb.PessimisticLockRequest(
        context=await stubs.context(keys[0]),
        mutations=[kvrpcpb.Mutation(op=kvrpcpb.PessimisticLock, key=key) for key in keys],
        primary_lock=keys[0],
        start_version=start_ts,
        **fields,
    )


async def lock(
    stubs: Stubs, *keys: bytes, start_ts: int, **more: Any
) -> kvrpcpb.PessimisticLockResponse:
    return await stubs.tikv.KvPessimisticLock(await asked(stubs, *keys, start_ts=start_ts, **more))


async def lock_in_time(
    stubs: Stubs, *keys: bytes, start_ts: int
) -> kvrpcpb.PessimisticLockResponse:
    """Ask again as clients do, when the store's ceiling was lower than what the request would
    wait.
    """
    while True:
        answer = await lock(stubs, *keys, start_ts=start_ts)
        if not answer.errors or not answer.errors[0].HasField("locked"):
            return answer


async def waits(cluster: Cluster) -> int:
    """How often a lock request has begun to wait."""
    with await asyncio.to_thread(
        urllib.request.urlopen, f"http://{cluster.store.http}/metrics"
    ) as answer:
        text = answer.read().decode()
    return int(float(text.partition("\ntidemark_store_lock_waits_total ")[2].partition("\n")[0]))


async def wait_waiting(cluster: Cluster, before: int, count: int) -> None:
    """Until so many more requests wait than did."""
    async with asyncio.timeout(60):
        while await waits(cluster) < before + count:  # noqa: ASYNC110 - metrics tell no events
            await asyncio.sleep(0.01)


async def give_back(stubs: Stubs, *keys: bytes, start_ts: int, where: bytes = b"") -> None:
    context = await stubs.context(where or keys[0])
    answer = await stubs.tikv.KVPessimisticRollback(
        kvrpcpb.PessimisticRollbackRequest(
            context=context, start_version=start_ts, for_update_ts=start_ts, keys=keys
        )
    )
    assert not answer.errors


async def test_a_lock_request_waits_as_long_as_it_says_and_not_longer(cluster: Cluster) -> None:
    key = row_key(101, 500)
    async with stubs_of(cluster) as stubs:
        first, second = await stubs.pd.tso(), await stubs.pd.tso()
        assert not (await lock(stubs, key, start_ts=first, wait_timeout=-1)).errors
        for wait_ms, least_s, most_s in (
            (-1, 0.0, CEILING_S),
            (50, 0.05, CEILING_S),
            (0, CEILING_S, 60.0),
        ):
            began = time.monotonic()
            refused = await lock(stubs, key, start_ts=second, wait_timeout=wait_ms)
            assert refused.errors[0].locked.lock_version == first
            assert least_s <= time.monotonic() - began < most_s
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(lock_in_time(stubs, key, start_ts=second))
            await give_back(stubs, key, start_ts=first)
        assert not waiting.result().errors
        await give_back(stubs, key, start_ts=second)


async def test_the_unlock_that_wakes_a_waiter_may_come_on_its_own_stream(cluster: Cluster) -> None:
    key = row_key(101, 501)
    async with stubs_of(cluster) as stubs:
        first, second = await stubs.pd.tso(), await stubs.pd.tso()
        await lock(stubs, key, start_ts=first)
        request = tikvpb.BatchCommandsRequest.Request
        freed = kvrpcpb.PessimisticRollbackRequest(
            context=await stubs.context(key), start_version=first, for_update_ts=first, keys=[key]
        )
        batch = tikvpb.BatchCommandsRequest(
            requests=[
                request(PessimisticLock=await asked(stubs, key, start_ts=second)),
                request(PessimisticRollback=freed),
            ],
            request_ids=[1, 2],
        )

        async def requests() -> AsyncIterator[tikvpb.BatchCommandsRequest]:
            yield batch
            await asyncio.Event().wait()

        call, answers = stubs.tikv.BatchCommands(requests()), {}
        async with asyncio.timeout(60):
            while len(answers) < 2:
                message = await call.read()
                answers |= dict(zip(message.request_ids, message.responses, strict=True))
        call.cancel()
        assert not answers[1].PessimisticLock.errors
        await give_back(stubs, key, start_ts=second)


async def test_waiters_are_woken_oldest_first_and_a_commit_tells_them_all_to_read_again(
    cluster: Cluster,
) -> None:
    key = row_key(101, 502)
    async with stubs_of(cluster) as stubs:
        owner = await stubs.pd.tso()
        starts = [await stubs.pd.tso() for _ in range(4)]
        await lock(stubs, key, start_ts=owner)
        done: list[int] = []

        async def wait(start_ts: int) -> None:
            answer = await lock_in_time(stubs, key, start_ts=start_ts)
            assert not answer.errors
            done.append(start_ts)
            await give_back(stubs, key, start_ts=start_ts)

        async with asyncio.TaskGroup() as tasks:
            before = await waits(cluster)
            for start_ts in reversed(starts):
                tasks.create_task(wait(start_ts))
            await wait_waiting(cluster, before, len(starts))
            await give_back(stubs, key, start_ts=owner)
        assert done == starts

        await lock(stubs, key, start_ts=owner)
        async with asyncio.TaskGroup() as tasks:
            before = await waits(cluster)
            refused = [
                tasks.create_task(lock_in_time(stubs, key, start_ts=start_ts))
                for start_ts in starts
            ]
            await wait_waiting(cluster, before, len(starts))
            await stubs.prewrite(key, b"v", start_ts=owner)
            commit_ts = await stubs.commit(key, owner)
        for task in refused:
            conflict = task.result().errors[0].conflict
            assert (conflict.conflict_commit_ts, conflict.reason) == (commit_ts, 2), (
                "PessimisticRetry"
            )


async def test_a_deadlock_is_refused_at_once_with_its_wait_chain(cluster: Cluster) -> None:
    one, two, three = (row_key(101, handle) for handle in (505, 506, 507))
    async with stubs_of(cluster) as stubs:
        first, second, third = [await stubs.pd.tso() for _ in range(3)]
        for key, start_ts in ((one, first), (two, second), (three, third)):
            await lock(stubs, key, start_ts=start_ts)
        async with asyncio.TaskGroup() as tasks:
            before = await waits(cluster)
            tasks.create_task(lock_in_time(stubs, two, start_ts=first))
            tasks.create_task(lock_in_time(stubs, three, start_ts=second))
            await wait_waiting(cluster, before, 2)
            (error,) = (await lock(stubs, one, start_ts=third)).errors
            deadlock = error.deadlock
            assert (deadlock.lock_ts, deadlock.lock_key) == (first, one)
            assert (deadlock.deadlock_key, deadlock.deadlock_key_hash) == (
                three,
                fingerprint64(three),
            )
            chain = [(edge.txn, edge.wait_for_txn, edge.key) for edge in deadlock.wait_chain]
            assert chain == [(first, second, two), (second, third, three), (third, first, one)]
            await give_back(stubs, three, start_ts=third)
            await lock_in_time(stubs, three, start_ts=second)
            await give_back(stubs, two, three, start_ts=second)
        await give_back(stubs, one, two, start_ts=first)


async def test_a_forced_lock_is_taken_in_spite_of_a_newer_version(cluster: Cluster) -> None:
    key = row_key(101, 520)
    async with stubs_of(cluster) as stubs:
        start_ts = await stubs.pd.tso()
        commit_ts = await stubs.put(key, b"newer")
        forced = {"wake_up_mode": kvrpcpb.WakeUpModeForceLock, "return_values": True}
        (result,) = (await lock(stubs, key, start_ts=start_ts, **forced)).results
        assert result.type == kvrpcpb.LockResultLockedWithConflict
        assert (result.locked_with_conflict_ts, result.value, result.existence) == (
            commit_ts,
            b"newer",
            True,
        )
        other = await lock(stubs, key, start_ts=await stubs.pd.tso(), wait_timeout=-1, **forced)
        assert other.errors[0].locked.lock_for_update_ts == commit_ts
        assert [result.type for result in other.results] == [kvrpcpb.LockResultFailed]
        await stubs.tikv.KVPessimisticRollback(
            kvrpcpb.PessimisticRollbackRequest(
                context=await stubs.context(key),
                start_version=start_ts,
                for_update_ts=commit_ts,
                keys=[key],
            )
        )


async def test_a_rollback_without_keys_gives_back_all_locks_of_its_region(cluster: Cluster) -> None:
    keys = [row_key(101, handle) for handle in (530, 531, 532)]
    async with stubs_of(cluster) as stubs:
        mine, other = await stubs.pd.tso(), await stubs.pd.tso()
        await lock(stubs, *keys[:2], start_ts=mine)
        await lock(stubs, keys[2], start_ts=other)
        await give_back(stubs, start_ts=mine, where=keys[0])
        assert not (await lock(stubs, *keys[:2], start_ts=other, wait_timeout=-1)).errors
        await give_back(stubs, *keys, start_ts=other)


async def test_lock_requests_tell_values_and_existence_as_asked(cluster: Cluster) -> None:
    there, absent = row_key(101, 540), row_key(101, 541)
    async with stubs_of(cluster) as stubs:
        await stubs.put(there, b"v")
        start_ts = await stubs.pd.tso()
        values = await lock(
            stubs, there, absent, start_ts=start_ts, return_values=True, lock_only_if_exists=True
        )
        assert (list(values.values), list(values.not_founds)) == ([b"v", b""], [False, True])
        existence = await lock(stubs, there, absent, start_ts=start_ts, check_existence=True)
        assert (list(existence.values), list(existence.not_founds)) == ([], [False, True])
        await give_back(stubs, there, absent, start_ts=start_ts)
