"""The store's GC at work: it keeps its place over a crash and its pace on demand,
and feeds never miss what it took.
"""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import grpc.aio
import pytest
from kvproto import debugpb_pb2 as debugpb
from kvproto import debugpb_pb2_grpc as debuggrpc
from kvproto import kvrpcpb_pb2 as kvrpcpb
from tidemarkpb.v1 import store_pb2
from tidemarkpb.v1.store_pb2_grpc import StoreServiceStub

from storage.codec import encode_bytes
from tests.integration.store.daemons import Cluster, running_cluster
from tests.integration.store.feeds import feeding
from tests.integration.store.stubs import Stubs, row_key, stubs_of

QUICK = ("--gc-poll-interval", "0.1", "--resolved-ts-interval", "0.05")
LIMIT = "gc.max_write_bytes_per_sec"


async def status(stubs: Stubs) -> store_pb2.GetStoreStatusResponse:
    return await StoreServiceStub(stubs.channel).GetStoreStatus(store_pb2.GetStoreStatusRequest())


async def set_limit(stubs: Stubs, text: str, name: str = LIMIT) -> None:
    request = debugpb.ModifyTikvConfigRequest(
        module=debugpb.SERVER, config_name=name, config_value=text
    )
    await debuggrpc.DebugStub(stubs.channel).ModifyTikvConfig(request)


async def wait_gc(
    stubs: Stubs, reached: Callable[[store_pb2.GCProgress], bool]
) -> store_pb2.GCProgress:
    async with asyncio.timeout(60):
        while True:
            progress = (await status(stubs)).gc
            if reached(progress):
                return progress
            await asyncio.sleep(0.05)


async def overwritten(stubs: Stubs, keys: list[bytes], versions: int) -> None:
    """Versions of all keys in one transaction each."""
    contexts = {key: await stubs.context(key) for key in keys}
    for version in range(versions):
        start_ts = await stubs.pd.tso()
        for key in keys:
            mutation = kvrpcpb.Mutation(op=kvrpcpb.Put, key=key, value=b"%d" % version)
            answer = await stubs.tikv.KvPrewrite(
                kvrpcpb.PrewriteRequest(
                    context=contexts[key],
                    mutations=[mutation],
                    primary_lock=key,
                    start_version=start_ts,
                    lock_ttl=3000,
                )
            )
            assert not answer.errors
        commit_ts = await stubs.pd.tso()
        for key in keys:
            await stubs.commit(key, start_ts, commit_ts)


async def writes_of(stubs: Stubs, key: bytes) -> int:
    request = kvrpcpb.MvccGetByKeyRequest(context=await stubs.context(key), key=key)
    return len((await stubs.tikv.MvccGetByKey(request)).info.writes)


@pytest.mark.parametrize("seed", [1, 2])
async def test_gc_goes_on_where_it_was_after_the_store_was_killed(
    tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    keys = [row_key(table, handle) for table in (50, 101, 102, 200) for handle in (1, 2, 600, 601)]
    with running_cluster(tmp_path, *QUICK, "--gc-max-write-bytes-per-sec", "300") as cluster:
        async with stubs_of(cluster) as stubs:
            await overwritten(stubs, keys, 6)
            safe_point = await stubs.pd.tso()
            await stubs.put(keys[0], b"after")
            await stubs.pd.update_gc_safe_point(safe_point)
            before = await wait_gc(stubs, lambda gc: bool(gc.next_key) and not gc.finished)
            await asyncio.sleep(rng.uniform(0, 0.3))
            cluster.store.kill()
        cluster.restart_store()
        async with stubs_of(cluster) as stubs:
            after = (await status(stubs)).gc
            assert after.safe_point == before.safe_point == safe_point
            assert after.finished or after.next_key >= before.next_key
            newer = await stubs.pd.tso()
            await stubs.pd.update_gc_safe_point(newer)
            await set_limit(stubs, "0")
            await wait_gc(stubs, lambda gc: gc.finished and gc.safe_point == newer)
            for key in keys:
                assert (await stubs.get(key, safe_point)).value == (b"5" if key != keys[0] else b"")
                assert (await stubs.get(key)).value == (b"5" if key != keys[0] else b"after")
                assert await writes_of(stubs, key) == 1


async def test_the_limit_is_changed_while_gc_runs_and_kept(tmp_path: Path) -> None:
    keys = [row_key(table, handle) for table in (101, 102) for handle in range(8)]
    with running_cluster(tmp_path, *QUICK, "--gc-max-write-bytes-per-sec", "1") as cluster:
        async with stubs_of(cluster) as stubs:
            await overwritten(stubs, keys, 4)
            for name, text in (("gc.no-such", "1"), (LIMIT, "fast")):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await set_limit(stubs, text, name)
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            await stubs.pd.update_gc_safe_point(await stubs.pd.tso())
            await wait_gc(stubs, lambda gc: not gc.finished)
            await asyncio.sleep(0.3)  # by now it waits with the second region
            await set_limit(stubs, "10MB")
            await wait_gc(stubs, lambda gc: gc.finished and bool(gc.safe_point))
            assert await writes_of(stubs, keys[0]) == 1
            counted = [
                region.versions for region in (await status(stubs)).regions if region.versions.rows
            ]
            assert [(counts.rows, counts.puts, counts.versions) for counts in counted] == [
                (8, 8, 8)
            ] * 2
            cluster.store.kill()
        cluster.restart_store()
        async with stubs_of(cluster) as stubs:
            found = await status(stubs)
            assert found.gc.max_write_bytes_per_sec == 10 << 20
            assert [region.versions for region in found.regions if region.versions.rows] == counted


async def collect(stubs: Stubs, key: bytes, safe_point: int, **more: object) -> kvrpcpb.GCResponse:
    context = await stubs.context(key)
    for name, value in more.items():
        setattr(context, name, value)
    return await stubs.tikv.KvGC(kvrpcpb.GCRequest(context=context, safe_point=safe_point))


async def test_central_gc_refuses_what_the_coordinator_protects_and_wrong_regions(
    cluster: Cluster,
) -> None:
    key = row_key(101, 7)
    async with stubs_of(cluster) as stubs:
        await overwritten(stubs, [key], 3)
        safe_point = await stubs.pd.tso()
        for ahead in (safe_point, safe_point + (1 << 60)):
            answer = await collect(stubs, key, ahead)
            assert answer.error.abort.startswith("[TM:ErrGCSafePointAhead]")
        assert await writes_of(stubs, key) == 3
        assert (await collect(stubs, key, 1, region_id=999_999)).region_error.HasField(
            "region_not_found"
        )
        stale = await stubs.context(key)
        stale.region_epoch.version = 0
        answer = await stubs.tikv.KvGC(kvrpcpb.GCRequest(context=stale, safe_point=1))
        assert answer.region_error.epoch_not_match.current_regions[0].id == stale.region_id
        foreign = await stubs.context(key)
        foreign.peer.store_id = 77
        answer = await stubs.tikv.KvGC(kvrpcpb.GCRequest(context=foreign, safe_point=1))
        assert answer.region_error.store_not_match.request_store_id == 77


async def test_a_feed_from_before_the_safepoint_is_told_so_and_never_begins(tmp_path: Path) -> None:
    key = row_key(101, 3)
    with running_cluster(tmp_path, *QUICK) as cluster:
        async with stubs_of(cluster) as stubs, feeding(stubs) as feed:
            await overwritten(stubs, [key], 3)
            checkpoint_ts = await stubs.pd.tso()
            await overwritten(stubs, [key], 2)
            safe_point = await stubs.pd.tso()
            await stubs.pd.update_gc_safe_point(safe_point)
            await wait_gc(stubs, lambda gc: gc.finished and gc.safe_point == safe_point)
            route = await stubs.pd.region(encode_bytes(key))
            feed.subscribe(route, checkpoint_ts)
            while not feed.errors:
                await feed.step()
            busy = feed.errors[0].error.server_is_busy
            assert busy.reason.startswith("[TM:ErrSnapshotLostByGC]")
            assert str(checkpoint_ts) in busy.reason
            assert busy.backoff_ms
            feed.subscribe(route, safe_point)
            await feed.wait_resolved(await stubs.pd.tso())
            assert not feed.committed


async def test_the_stores_safe_ts_follows_the_clock_and_stops_before_an_open_lock(
    tmp_path: Path,
) -> None:
    with running_cluster(tmp_path, *QUICK) as cluster:
        async with stubs_of(cluster) as stubs:

            async def safe_ts(start: bytes = b"", end: bytes = b"") -> int:
                asked = kvrpcpb.KeyRange(start_key=start, end_key=end)
                return (
                    await stubs.tikv.GetStoreSafeTS(kvrpcpb.StoreSafeTSRequest(key_range=asked))
                ).safe_ts

            async def wait_safe(ts: int, *bounds: bytes) -> None:
                async with asyncio.timeout(60):
                    while True:
                        if await safe_ts(*bounds) >= ts:
                            return
                        await asyncio.sleep(0.02)

            await wait_safe(await stubs.pd.tso())
            start_ts = await stubs.prewrite(row_key(101, 1), b"v")
            now = await stubs.pd.tso()
            await wait_safe(now, row_key(102, 1), row_key(102, 2))
            assert await safe_ts() < now, (
                "it may have passed start_ts before the lock came, but nothing after that"
            )
            await stubs.commit(row_key(101, 1), start_ts)
            await wait_safe(now)
