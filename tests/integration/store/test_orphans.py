"""Locks of clients that were killed, in every state their transaction can be in:
they all end right.
"""

import asyncio
from typing import Any

import pytest
from kvproto import kvrpcpb_pb2 as kvrpcpb

from server.rpc.lock_resolver import LockResolver
from server.rpc.tikv import KvClient
from server.rpc.transaction import Snapshot
from tests.integration.store.daemons import Cluster
from tests.integration.store.stubs import Stubs, row_key, stubs_of

PRIMARY, HERE, THERE = row_key(101, 700), row_key(101, 701), row_key(102, 700)
ALL = (PRIMARY, HERE, THERE)


async def prewrite(
    stubs: Stubs, keys: tuple[bytes, ...], start_ts: int, ttl_ms: int = 1, **more: Any
) -> list[int]:
    """Lock the keys one by one, as a client may die in between; returns their min_commit_ts."""
    found = []
    for key in keys:
        named = {"secondaries": ALL[1:]} if key == PRIMARY and more.get("use_async_commit") else {}
        request = kvrpcpb.PrewriteRequest(
            context=await stubs.context(key),
            mutations=[kvrpcpb.Mutation(op=kvrpcpb.Put, key=key, value=b"%d" % start_ts)],
            primary_lock=PRIMARY,
            start_version=start_ts,
            lock_ttl=ttl_ms,
            min_commit_ts=start_ts + 1,
            **named,
            **more,
        )
        answer = await stubs.tikv.KvPrewrite(request)
        assert not answer.errors, answer
        found.append(answer.min_commit_ts)
    return found


async def seen(stubs: Stubs, ts: int = 0) -> list[bytes | None]:
    """What our reader finds on all keys, whatever is locked."""
    async with KvClient.open(stubs.pd) as kv:
        snapshot = Snapshot(
            kv, LockResolver(stubs.pd, kv), ts or await stubs.pd.tso(), timeout_s=60.0
        )
        return [await snapshot.get(key) for key in ALL]


async def nothing_locked(stubs: Stubs) -> bool:
    for key in ALL:
        request = kvrpcpb.ScanLockRequest(
            context=await stubs.context(key), start_key=key, end_key=key + b"\0"
        )
        request.max_version = await stubs.pd.tso()
        if (await stubs.tikv.KvScanLock(request)).locks:
            return False
    return True


async def before(stubs: Stubs) -> list[bytes | None]:
    """Something to fall back to."""
    start_ts = await stubs.pd.tso()
    await prewrite(stubs, ALL, start_ts)
    commit_ts = await stubs.pd.tso()
    for key in ALL:
        await stubs.commit(key, start_ts, commit_ts)
    return [b"%d" % start_ts] * 3


async def test_what_was_committed_on_the_primary_is_committed(cluster: Cluster) -> None:
    async with stubs_of(cluster) as stubs:
        await before(stubs)
        start_ts = await stubs.pd.tso()
        await prewrite(stubs, ALL, start_ts)
        commit_ts = await stubs.commit(PRIMARY, start_ts)
        assert await seen(stubs, commit_ts) == [b"%d" % start_ts] * 3
        assert await nothing_locked(stubs)


async def test_a_read_before_the_commit_does_not_see_it(cluster: Cluster) -> None:
    async with stubs_of(cluster) as stubs:
        old = await before(stubs)
        start_ts = await stubs.pd.tso()
        await prewrite(stubs, ALL, start_ts)
        read_ts = await stubs.pd.tso()
        await stubs.commit(PRIMARY, start_ts)
        assert await seen(stubs, read_ts) == old


@pytest.mark.parametrize("rolled_back", [True, False])
async def test_what_was_not_committed_in_time_is_rolled_back(
    cluster: Cluster, rolled_back: bool
) -> None:
    async with stubs_of(cluster) as stubs:
        old = await before(stubs)
        start_ts = await stubs.pd.tso()
        await prewrite(stubs, ALL, start_ts)
        if rolled_back:
            request = kvrpcpb.BatchRollbackRequest(start_version=start_ts, keys=[PRIMARY])
            request.context.CopyFrom(await stubs.context(PRIMARY))
            await stubs.tikv.KvBatchRollback(request)
        await asyncio.sleep(0.01)
        assert await seen(stubs) == old
        assert await nothing_locked(stubs)


async def test_secondaries_without_a_primary_are_rolled_back_and_the_primary_cannot_come_later(
    cluster: Cluster,
) -> None:
    async with stubs_of(cluster) as stubs:
        old = await before(stubs)
        start_ts = await stubs.pd.tso()
        await prewrite(stubs, ALL[1:], start_ts)
        await asyncio.sleep(0.01)
        assert await seen(stubs) == old
        with pytest.raises(AssertionError, match="conflict"):
            await prewrite(stubs, (PRIMARY,), start_ts)


@pytest.mark.parametrize("locked", [ALL, ALL[:2], ALL[:1]])
async def test_an_async_commit_is_committed_exactly_when_all_is_locked(
    cluster: Cluster, locked: tuple[bytes, ...]
) -> None:
    async with stubs_of(cluster) as stubs:
        old = await before(stubs)
        start_ts = await stubs.pd.tso()
        min_commit_ts = await prewrite(stubs, locked, start_ts, use_async_commit=True)
        await asyncio.sleep(0.01)
        whole = locked == ALL
        assert await seen(stubs) == ([b"%d" % start_ts] * 3 if whole else old)
        assert await nothing_locked(stubs)
        assert not whole or await seen(stubs, max(min_commit_ts) - 1) == old


async def test_an_async_commit_that_fell_back_is_decided_by_its_primary(cluster: Cluster) -> None:
    async with stubs_of(cluster) as stubs:
        old = await before(stubs)
        start_ts = await stubs.pd.tso()
        await prewrite(stubs, ALL[:2], start_ts, use_async_commit=True)
        assert await prewrite(
            stubs, ALL[2:], start_ts, use_async_commit=True, max_commit_ts=start_ts
        ) == [0]
        await asyncio.sleep(0.01)
        assert await seen(stubs) == old
        assert await nothing_locked(stubs)


async def test_a_reader_passes_a_live_transaction_and_that_one_commits_later(
    cluster: Cluster,
) -> None:
    async with stubs_of(cluster) as stubs:
        old = await before(stubs)
        start_ts = await stubs.pd.tso()
        await prewrite(stubs, ALL, start_ts, ttl_ms=600_000)
        read_ts = await stubs.pd.tso()
        async with asyncio.timeout(60):
            assert await seen(stubs, read_ts) == old
        commit = kvrpcpb.CommitRequest(
            context=await stubs.context(PRIMARY),
            start_version=start_ts,
            keys=[PRIMARY],
            commit_version=read_ts,
        )
        expired = (await stubs.tikv.KvCommit(commit)).error.commit_ts_expired
        assert expired.min_commit_ts > read_ts
        commit_ts = await stubs.pd.tso()
        for key in ALL:
            await stubs.commit(key, start_ts, commit_ts)
        assert await seen(stubs, read_ts) == old
        assert await seen(stubs) == [b"%d" % start_ts] * 3
