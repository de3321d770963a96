"""Async commit and 1PC over the wire: reads, orphans and change feeds agree on one commit_ts."""

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio
from kvproto import kvrpcpb_pb2 as kvrpcpb

from server.rpc.lock_resolver import LockResolver
from server.rpc.tikv import KvClient
from storage.codec import encode_bytes
from tests.integration.store.daemons import Cluster, running_cluster
from tests.integration.store.feeds import feeding
from tests.integration.store.stubs import Stubs, row_key, stubs_of


async def prewrite(
    stubs: Stubs, *keys: bytes, start_ts: int, **more: Any
) -> kvrpcpb.PrewriteResponse:
    request = kvrpcpb.PrewriteRequest(
        context=await stubs.context(keys[0]),
        mutations=[kvrpcpb.Mutation(op=kvrpcpb.Put, key=key, value=b"v" + key) for key in keys],
        start_version=start_ts,
        lock_ttl=more.pop("ttl_ms", 3000),
        **({"primary_lock": keys[0]} | more),
    )
    answer = await stubs.tikv.KvPrewrite(request)
    assert not answer.errors, answer
    return answer


async def test_one_pc_is_read_at_its_commit_ts_and_above_every_earlier_read(
    cluster: Cluster,
) -> None:
    key = row_key(101, 410)
    async with stubs_of(cluster) as stubs:
        start_ts, reader_ts = await stubs.pd.tso(), await stubs.pd.tso()
        assert (await stubs.get(key, reader_ts)).not_found
        done = await prewrite(stubs, key, start_ts=start_ts, try_one_pc=True)
        assert (done.one_pc_commit_ts > reader_ts, done.min_commit_ts) == (True, 0)
        assert (await stubs.get(key, done.one_pc_commit_ts)).value == b"v" + key
        assert (await stubs.get(key, reader_ts)).not_found
        again = await prewrite(stubs, key, start_ts=start_ts, try_one_pc=True)
        assert again.one_pc_commit_ts == done.one_pc_commit_ts


async def test_an_orphan_of_async_commit_is_committed_once_all_its_locks_are_there(
    cluster: Cluster,
) -> None:
    primary, other = row_key(101, 411), row_key(102, 411)
    async with stubs_of(cluster) as stubs, KvClient.open(stubs.pd) as kv:
        start_ts = await stubs.pd.tso()
        more = {"use_async_commit": True, "ttl_ms": 1, "primary_lock": primary}
        first = await prewrite(stubs, primary, start_ts=start_ts, secondaries=[other], **more)
        later_ts = await stubs.pd.tso()
        assert (await stubs.get(other, later_ts)).not_found
        second = await prewrite(stubs, other, start_ts=start_ts, **more)
        assert second.min_commit_ts > later_ts
        locked = (await stubs.get(other)).error.locked
        assert (locked.use_async_commit, locked.min_commit_ts) == (True, second.min_commit_ts)
        await asyncio.sleep(0.01)
        await LockResolver(stubs.pd, kv).resolve([locked], 0)
        await LockResolver(stubs.pd, kv).resolve([(await stubs.get(primary)).error.locked], 0)
        commit_ts = max(first.min_commit_ts, second.min_commit_ts)
        for key in (primary, other):
            assert (await stubs.get(key, commit_ts)).value == b"v" + key
            assert (await stubs.get(key, commit_ts - 1)).not_found


async def test_an_orphan_of_async_commit_without_all_locks_is_rolled_back_for_good(
    cluster: Cluster,
) -> None:
    primary, other = row_key(101, 412), row_key(102, 412)
    async with stubs_of(cluster) as stubs, KvClient.open(stubs.pd) as kv:
        start_ts = await stubs.pd.tso()
        more = {"use_async_commit": True, "ttl_ms": 1, "primary_lock": primary}
        await prewrite(stubs, primary, start_ts=start_ts, secondaries=[other], **more)
        await asyncio.sleep(0.01)
        await LockResolver(stubs.pd, kv).resolve([(await stubs.get(primary)).error.locked], 0)
        assert (await stubs.get(primary)).not_found
        request = kvrpcpb.PrewriteRequest(
            context=await stubs.context(other),
            mutations=[kvrpcpb.Mutation(op=kvrpcpb.Put, key=other, value=b"late")],
            primary_lock=primary,
            start_version=start_ts,
            use_async_commit=True,
        )
        (late,) = (await stubs.tikv.KvPrewrite(request)).errors
        assert late.conflict.reason == 3, "SelfRolledBack"


async def test_no_computed_commit_ever_comes_at_or_below_a_resolved_ts(cluster: Cluster) -> None:
    table = 310
    async with stubs_of(cluster) as stubs, feeding(stubs) as feed:
        feed.subscribe(await stubs.pd.region(encode_bytes(row_key(table, 0))))
        await feed.wait_resolved(1)
        committed: dict[bytes, int] = {}

        async def client(worker: int) -> None:
            for number in range(25):
                key = row_key(table, worker * 1000 + number)
                start_ts = await stubs.pd.tso()
                await asyncio.sleep(0.01)  # resolved timestamps overtake start_ts
                if number % 2:
                    committed[key] = (
                        await prewrite(stubs, key, start_ts=start_ts, try_one_pc=True)
                    ).one_pc_commit_ts
                else:
                    done = await prewrite(stubs, key, start_ts=start_ts, use_async_commit=True)
                    committed[key] = await stubs.commit(key, start_ts, done.min_commit_ts)

        async with asyncio.TaskGroup() as clients:
            for worker in range(4):
                clients.create_task(client(worker))
        await feed.wait_resolved(await stubs.pd.tso())
    assert {row[2]: row[0] for row in feed.committed if row[2] in committed} == committed


async def test_a_killed_store_keeps_every_computed_commit_it_answered(tmp_path: Path) -> None:
    answered: dict[bytes, tuple[int, int]] = {}
    enough = asyncio.Event()

    async def client(stubs: Stubs, worker: int) -> None:
        for number in range(100_000):
            key = row_key(101, worker * 1000 + number)
            mode = {"try_one_pc": True} if number % 2 else {"use_async_commit": True}
            try:
                start_ts = await stubs.pd.tso()
                done = await prewrite(stubs, key, start_ts=start_ts, **mode)
            except grpc.aio.AioRpcError:
                return
            answered[key] = start_ts, max(done.one_pc_commit_ts, done.min_commit_ts)
            if len(answered) >= 60:
                enough.set()

    with running_cluster(tmp_path, "--split-keys", "") as started:
        async with stubs_of(started) as stubs, asyncio.TaskGroup() as clients:
            for worker in range(4):
                clients.create_task(client(stubs, worker))
            await enough.wait()
            started.store.kill()
        started.restart_store()
        async with stubs_of(started) as stubs, KvClient.open(stubs.pd) as kv:
            for key, (start_ts, commit_ts) in answered.items():
                lock = (await stubs.get(key)).error.locked
                if lock.lock_version == start_ts:
                    assert await LockResolver(stubs.pd, kv).decide(lock) == commit_ts
                    await kv.resolve_lock([key], start_ts, commit_ts)
                assert (await stubs.get(key, commit_ts)).value == b"v" + key
                assert (await stubs.get(key, commit_ts - 1)).not_found
