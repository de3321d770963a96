"""Regions of real stores: splits by size, merges, and empty regions that go to a second store."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import grpc.aio
import pytest
from kvproto import kvrpcpb_pb2 as kvrpcpb
from kvproto import tikvpb_pb2_grpc as tikvpb
from tidemarkpb.v1 import store_pb2
from tidemarkpb.v1.store_pb2_grpc import StoreServiceStub

from server.rpc.client import connect
from server.rpc.pd import PdClient
from server.rpc.tikv import KvClient
from storage.codec import encode_bytes
from tests.integration.store.daemons import Cluster, Daemon, running_cluster, start
from tests.integration.store.feeds import feeding
from tests.integration.store.regions import QUICK, put, regions_of, wait_regions
from tests.integration.store.stubs import Stubs, row_key, stubs_of


async def test_a_region_that_grows_is_split_at_rows_and_all_of_it_stays_readable(
    tmp_path: Path,
) -> None:
    flags = (
        "--split-keys",
        "",
        "--write-buffer-bytes",
        "65536",
        "--region-split-size",
        "200000",
        *QUICK,
    )
    with running_cluster(tmp_path, *flags) as cluster:
        async with PdClient.open(cluster.coordinator.addr) as pd, KvClient.open(pd) as client:
            rng = random.Random(5)
            written = {row_key(101, handle): rng.randbytes(10_000) for handle in range(100)}
            for key, value in written.items():
                await put(client, pd, key, value)
            await wait_regions(pd, 3)
            assert await client.batch_get(written, await pd.tso()) == written


async def test_tiny_neighbours_become_one_region_and_their_feeds_hear_of_it(tmp_path: Path) -> None:
    with running_cluster(tmp_path, *QUICK, "--split-merge-interval", "6") as cluster:
        async with stubs_of(cluster) as stubs, feeding(stubs) as feed:
            old = await regions_of(stubs.pd)
            stale = await stubs.context(row_key(101, 1))
            await stubs.put(row_key(101, 1), b"v")
            for route in old:
                feed.subscribe(route)
            (whole,) = await wait_regions(stubs.pd, 1, 1)
            assert whole.region.region_epoch.version > max(
                route.region.region_epoch.version for route in old
            )
            assert (await stubs.get(row_key(101, 1))).value == b"v"
            answer = await stubs.tikv.KvGet(
                kvrpcpb.GetRequest(context=stale, key=row_key(101, 1), version=1)
            )
            assert answer.region_error.HasField("epoch_not_match") or answer.region_error.HasField(
                "region_not_found"
            )
            while len(feed.errors) < len(old):
                await feed.step()
            told = [
                region.id
                for event in feed.errors
                for region in event.error.epoch_not_match.current_regions
            ]
            assert whole.region.id in told


async def test_merges_by_call_follow_tikvs_epoch_rules(cluster: Cluster) -> None:
    async with stubs_of(cluster) as stubs:
        admin = StoreServiceStub(stubs.channel)
        first, second, third = (route.region for route in (await regions_of(stubs.pd))[:3])
        for source, target in ((first.id, third.id), (first.id, first.id), (999_999, first.id)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await admin.MergeRegions(
                    store_pb2.MergeRegionsRequest(source_region_id=source, target_region_id=target)
                )
            assert "[TM:ErrRegion" in str(caught.value.details())
        stale = await stubs.context(row_key(101, 1))
        answer = await admin.MergeRegions(
            store_pb2.MergeRegionsRequest(source_region_id=first.id, target_region_id=second.id)
        )
        merged = answer.region
        assert (merged.id, merged.start_key, merged.end_key) == (
            second.id,
            first.start_key,
            second.end_key,
        )
        versions = (first.region_epoch.version, second.region_epoch.version)
        assert merged.region_epoch.version == max(versions[0] + 1, versions[1]) + 1
        assert merged.region_epoch.conf_ver == second.region_epoch.conf_ver
        read = await stubs.tikv.KvGet(
            kvrpcpb.GetRequest(context=stale, key=row_key(101, 1), version=1)
        )
        assert merged in read.region_error.epoch_not_match.current_regions
        assert (await stubs.pd.region_by_id(merged.id)).region == merged
        split = await stubs.tikv.SplitRegion(
            kvrpcpb.SplitRegionRequest(
                context=await stubs.context(b"a"), split_keys=[row_key(101, 0)]
            )
        )
        assert split.regions[-1].id == merged.id


async def test_bad_splits_and_ranges_get_their_error_and_change_nothing(cluster: Cluster) -> None:
    async with stubs_of(cluster) as stubs:
        before = [route.region for route in await regions_of(stubs.pd)]
        key = row_key(101, 1)
        await stubs.put(key, b"v")
        context = await stubs.context(key)

        async def split(
            *keys: bytes, raw: bool = False, **changed: object
        ) -> kvrpcpb.SplitRegionResponse:
            asked = kvrpcpb.Context.FromString(context.SerializeToString())
            for name, value in changed.items():
                setattr(asked, name, value)
            return await stubs.tikv.SplitRegion(
                kvrpcpb.SplitRegionRequest(context=asked, split_keys=keys, is_raw_kv=raw)
            )

        outside = (await split(key, b"zzz")).region_error.key_not_in_region
        assert (outside.key, outside.region_id) == (b"zzz", context.region_id)
        assert "must not be empty" in (await split(key, b"")).region_error.message
        assert (await split(key, region_id=999)).region_error.region_not_found.region_id == 999
        (region,) = [region for region in before if region.id == context.region_id]
        unchanged = await split(region.start_key, raw=True)
        assert list(unchanged.regions) == [region]
        context.region_epoch.version += 1
        assert region in (await split(key)).region_error.epoch_not_match.current_regions
        context.region_epoch.version -= 1
        context.peer.store_id += 1
        assert (
            await split(key)
        ).region_error.store_not_match.actual_store_id == context.peer.store_id - 1
        for start, end in ((b"", b""), (key, b""), (key, key), (key + b"x", key)):
            request = kvrpcpb.UnsafeDestroyRangeRequest(start_key=start, end_key=end)
            assert (await stubs.tikv.UnsafeDestroyRange(request)).error.startswith(
                "[TM:ErrEmptyRange]"
            )
        assert (await stubs.get(key)).value == b"v"
        assert [route.region for route in await regions_of(stubs.pd)] == before


@contextmanager
def second_store(cluster: Cluster, directory: Path, *flags: str) -> Iterator[Daemon]:
    """Another store of the same cluster."""
    here = (
        "--addr",
        "127.0.0.1:0",
        "--coordinator",
        cluster.coordinator.addr,
        "--data-dir",
        str(directory),
    )
    daemon = start("store", *here, *flags)
    try:
        yield daemon
    finally:
        if daemon.process.poll() is None:
            daemon.kill()


@asynccontextmanager
async def stubs_for(pd: PdClient, key: bytes) -> AsyncIterator[Stubs]:
    """Stubs of the store that serves a key."""
    async with connect((await pd.region(encode_bytes(key))).address) as channel:
        yield Stubs(pd, channel, tikvpb.TikvStub(channel))


async def wait_shared(pd: PdClient) -> dict[int, int]:
    """Until two stores serve two regions each."""
    async with asyncio.timeout(60):
        while True:
            served: dict[int, int] = {}
            for route in await pd.scan_regions(b""):
                served[route.leader.store_id] = served.get(route.leader.store_id, 0) + 1
            if sorted(served.values()) == [2, 2]:
                return served
            await asyncio.sleep(0.1)


async def test_empty_regions_are_shared_and_one_that_holds_data_stays(tmp_path: Path) -> None:
    with running_cluster(tmp_path, *QUICK) as cluster:
        async with stubs_of(cluster) as stubs:
            ours = (await stubs.pd.stores())[0].id
            held = [b"zzz", row_key(101, 1)]
            for key in held:
                await stubs.put(key, b"v")
            stale = await stubs.context(row_key(101, 600))
            with second_store(cluster, tmp_path / "second", *QUICK):
                await wait_shared(stubs.pd)
                for key in held:
                    assert (await stubs.context(key)).peer.store_id == ours
                    assert (await stubs.get(key)).value == b"v"
                refused = await stubs.tikv.KvGet(
                    kvrpcpb.GetRequest(context=stale, key=row_key(101, 600), version=1)
                )
                assert refused.region_error.region_not_found.region_id == stale.region_id
                async with stubs_for(stubs.pd, row_key(101, 600)) as other:
                    assert (await other.context(row_key(101, 600))).peer.store_id != ours
                    await other.put(row_key(101, 600), b"there")
                    assert (await other.get(row_key(101, 600))).value == b"there"


async def test_a_handover_ends_on_one_store_whatever_is_killed_in_between(tmp_path: Path) -> None:
    with running_cluster(tmp_path, *QUICK) as cluster:
        flags = ("--region-check-interval", "0.05", "--heartbeat-interval", "0.2")
        with second_store(cluster, tmp_path / "second", *flags) as second:
            await asyncio.sleep(0.25)
            second.kill()
            cluster.store.kill()
        cluster.restart_store()
        with second_store(cluster, tmp_path / "second", *flags):
            async with PdClient.open(cluster.coordinator.addr) as pd:
                await wait_shared(pd)
                statuses = []
                for store in await pd.stores():
                    async with connect(store.address) as channel:
                        statuses.append(
                            await StoreServiceStub(channel).GetStoreStatus(
                                store_pb2.GetStoreStatusRequest()
                            )
                        )
                served = sorted(
                    status.region.id for answer in statuses for status in answer.regions
                )
                assert served == sorted(route.region.id for route in await regions_of(pd)), (
                    "served twice or never"
                )


async def change_regions(stubs: Stubs, rng: random.Random) -> None:
    """Splits and merges until the store is gone."""
    admin = StoreServiceStub(stubs.channel)
    while True:
        try:
            regions = [route.region for route in await stubs.pd.scan_regions(b"")]
            at = rng.randrange(len(regions))
            if len(regions) > 1 and rng.random() < len(regions) / 16:
                neighbour = regions[at - 1 if at else 1]
                await admin.MergeRegions(
                    store_pb2.MergeRegionsRequest(
                        source_region_id=regions[at].id, target_region_id=neighbour.id
                    )
                )
            else:
                key = row_key(101, rng.randrange(1000))
                context = await stubs.context(key)
                await stubs.tikv.SplitRegion(
                    kvrpcpb.SplitRegionRequest(context=context, split_keys=[key])
                )
        except grpc.aio.AioRpcError as err:
            if err.code() is grpc.StatusCode.UNAVAILABLE:
                return


@pytest.mark.parametrize("seed", [1, 2])
async def test_splits_and_merges_are_whole_or_not_at_all_when_the_store_is_killed(
    tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    with running_cluster(tmp_path, *QUICK) as cluster:
        written = {row_key(101, handle): b"%d" % handle for handle in range(0, 1000, 50)}
        async with PdClient.open(cluster.coordinator.addr) as pd, KvClient.open(pd) as client:
            for key, value in written.items():
                await put(client, pd, key, value)
            for _ in range(3):
                async with stubs_of(cluster) as stubs, asyncio.TaskGroup() as tasks:
                    for _ in range(3):
                        tasks.create_task(change_regions(stubs, rng))
                    await asyncio.sleep(rng.uniform(0.1, 0.4))
                    cluster.store.kill()
                cluster.restart_store()
                await regions_of(pd)
                async with stubs_of(cluster) as stubs:
                    status = await StoreServiceStub(stubs.channel).GetStoreStatus(
                        store_pb2.GetStoreStatusRequest()
                    )
                assert [region.region for region in status.regions] == [
                    route.region for route in await regions_of(pd)
                ], "the coordinator and the store disagree"
                assert await client.batch_get(written, await pd.tso()) == written
