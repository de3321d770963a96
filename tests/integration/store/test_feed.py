"""The change feed under load tells every committed change once,
and nothing at or before a resolved_ts.
"""

import asyncio
import random

import grpc.aio
import pytest
from kvproto import cdcpb_pb2 as cdcpb
from kvproto import cdcpb_pb2_grpc as cdcgrpc
from kvproto import kvrpcpb_pb2 as kvrpcpb

from storage.codec import encode_bytes
from tests.integration.store.daemons import Cluster
from tests.integration.store.feeds import Feed, feeding
from tests.integration.store.stubs import Stubs, row_key, stubs_of

KEYS = [row_key(table, handle) for table in (101, 102) for handle in (1, 2, 600, 601)]


async def subscribe_all(feed: Feed, checkpoint_ts: int = 0) -> None:
    for route in await feed.stubs.pd.scan_regions(b""):
        feed.subscribe(route, checkpoint_ts)


async def work(stubs: Stubs, rng: random.Random, rounds: int) -> list[tuple[int, bytes, bytes]]:
    """Random transactions, a third of them rolled back; returns (commit_ts, key,
    value) of the committed ones.
    """
    done = []
    for _ in range(rounds):
        key, value = rng.choice(KEYS), rng.randbytes(rng.choice([1, 10, 400]))
        start_ts = await stubs.pd.tso()
        answer = await stubs.tikv.KvPrewrite(
            kvrpcpb.PrewriteRequest(
                context=await stubs.context(key),
                mutations=[kvrpcpb.Mutation(op=kvrpcpb.Put, key=key, value=value)],
                primary_lock=key,
                start_version=start_ts,
                lock_ttl=3000,
            )
        )
        if answer.errors:
            continue
        if rng.random() < 1 / 3:
            await stubs.tikv.KvBatchRollback(
                kvrpcpb.BatchRollbackRequest(
                    context=await stubs.context(key), start_version=start_ts, keys=[key]
                )
            )
        else:
            done.append((await stubs.commit(key, start_ts), key, value))
    return done


@pytest.mark.parametrize("seed", [1, 2])
async def test_every_commit_is_told_once_with_its_old_value_while_writers_run(
    cluster: Cluster, seed: int
) -> None:
    rng = random.Random(seed)
    async with stubs_of(cluster) as stubs, feeding(stubs) as feed:
        checkpoint_ts = await stubs.pd.tso()
        before = await work(stubs, rng, 20)
        async with asyncio.TaskGroup() as tasks:
            writers = [
                tasks.create_task(work(stubs, random.Random(seed + at), 40)) for at in range(4)
            ]
            await subscribe_all(feed, checkpoint_ts)
            await feed.wait_resolved(await stubs.pd.tso())
            while not all(writer.done() for writer in writers):
                await feed.step()
        await feed.wait_resolved(await stubs.pd.tso())
    written = sorted([*before, *(row for writer in writers for row in writer.result())])
    told = sorted((commit_ts, key, value) for commit_ts, _, key, _, value, _ in feed.committed)
    assert told == written
    assert not feed.errors
    last: dict[bytes, bytes] = {}
    for commit_ts, _, key, _, value, old_value in sorted(feed.committed):
        if key in last:
            assert old_value == last[key], (commit_ts, key)
        last[key] = value


async def test_an_open_lock_holds_resolved_ts_back_until_it_ends(cluster: Cluster) -> None:
    async with stubs_of(cluster) as stubs, feeding(stubs) as feed:
        start_ts = await stubs.prewrite(row_key(101, 50), b"v")
        feed.subscribe(await stubs.pd.region(encode_bytes(row_key(101, 50))), start_ts - 1)
        now = await stubs.pd.tso()
        while not next(iter(feed.regions.values())).resolved_ts:
            await feed.step()
        # a tick between start_ts and its prewrite may have resolved more, and commit_ts is above it
        assert start_ts - 1 <= next(iter(feed.regions.values())).resolved_ts < now
        commit_ts = await stubs.commit(row_key(101, 50), start_ts)
        await feed.wait_resolved(now)
        assert [(row[0], row[4]) for row in feed.committed if row[2] == row_key(101, 50)] == [
            (commit_ts, b"v")
        ]


async def test_deletes_come_with_what_they_deleted(cluster: Cluster) -> None:
    key = row_key(102, 77)
    async with stubs_of(cluster) as stubs, feeding(stubs) as feed:
        await stubs.put(key, b"old" * 200)
        await subscribe_all(feed, await stubs.pd.tso())
        await feed.wait_resolved(await stubs.pd.tso())
        start_ts = await stubs.pd.tso()
        await stubs.tikv.KvPrewrite(
            kvrpcpb.PrewriteRequest(
                context=await stubs.context(key),
                mutations=[kvrpcpb.Mutation(op=kvrpcpb.Del, key=key)],
                primary_lock=key,
                start_version=start_ts,
                lock_ttl=3000,
            )
        )
        commit_ts = await stubs.commit(key, start_ts)
        await feed.wait_resolved(commit_ts)
    deleted = cdcpb.Event.Row.DELETE
    assert feed.committed == [(commit_ts, start_ts, key, deleted, b"", b"old" * 200)]


async def test_bad_requests_get_their_error_and_spare_the_others(cluster: Cluster) -> None:
    async with stubs_of(cluster) as stubs, feeding(stubs) as feed:
        routes = await stubs.pd.scan_regions(b"")
        await subscribe_all(feed)
        feed.subscribe(routes[0])  # the same request_id and region
        feed.subscribe(routes[0], request_id=2, header=cdcpb.Header(cluster_id=99))
        feed.subscribe(routes[0], request_id=3, region_id=999)
        feed.subscribe(routes[0], request_id=4, region_epoch={"conf_ver": 1, "version": 99})
        while len(feed.errors) < 4:
            await feed.step()
        named = {event.request_id: event.error for event in feed.errors}
        assert named[1].HasField("duplicate_request")
        assert named[2].cluster_id_mismatch.current == stubs.pd.cluster_id
        assert named[3].region_not_found.region_id == 999
        assert routes[0].region in named[4].epoch_not_match.current_regions
        await feed.wait_resolved(1)


async def test_the_first_event_feed_serves_the_same_rows_and_names_no_request_in_resolved_ts(
    cluster: Cluster,
) -> None:
    key = row_key(102, 90)
    async with stubs_of(cluster) as stubs:
        commit_ts, route = await stubs.put(key, b"v"), await stubs.pd.region(encode_bytes(key))
        call = cdcgrpc.ChangeDataStub(stubs.channel).EventFeed()
        await call.write(
            cdcpb.ChangeDataRequest(
                header=cdcpb.Header(cluster_id=stubs.pd.cluster_id),
                region_id=route.region.id,
                region_epoch=route.region.region_epoch,
                checkpoint_ts=commit_ts - 1,
                request_id=9,
            )
        )
        scanned = await call.read()
        (event,) = scanned.events
        rows = [(row.type, row.key, row.value) for row in event.entries.entries]
        assert event.request_id == 9
        assert rows[0] == (cdcpb.Event.COMMITTED, key, b"v")
        resolved = (await call.read()) if len(rows) > 1 else None
        while resolved is None or not resolved.HasField("resolved_ts"):
            resolved = await call.read()
        assert (resolved.resolved_ts.request_id, list(resolved.resolved_ts.regions)) == (
            0,
            [route.region.id],
        )
        call.cancel()


async def test_deregister_stops_the_regions_of_a_request(cluster: Cluster) -> None:
    async with stubs_of(cluster) as stubs, feeding(stubs) as feed:
        await subscribe_all(feed, await stubs.pd.tso())
        await feed.wait_resolved(1)
        feed.send(
            cdcpb.ChangeDataRequest(request_id=1, deregister=cdcpb.ChangeDataRequest.Deregister())
        )
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(feed.wait_resolved(2**63), 1.0)


async def test_a_split_ends_the_region_with_the_new_map_and_the_feed_goes_on_there(
    cluster: Cluster,
) -> None:
    key = row_key(102, 5000)
    async with stubs_of(cluster) as stubs, feeding(stubs) as feed:
        await subscribe_all(feed, await stubs.pd.tso())
        await feed.wait_resolved(1)
        answer = await stubs.tikv.SplitRegion(
            kvrpcpb.SplitRegionRequest(context=await stubs.context(key), split_keys=[key])
        )
        assert len(answer.regions) == 2
        while not feed.errors:
            await feed.step()
        current = feed.errors[0].error.epoch_not_match.current_regions
        assert {region.id for region in answer.regions} <= {region.id for region in current}
        checkpoint_ts = feed.regions.pop(feed.errors[0].region_id).resolved_ts
        for region in answer.regions:
            feed.subscribe((await stubs.pd.region_by_id(region.id)), checkpoint_ts)
        commit_ts = await stubs.put(key, b"v")
        await feed.wait_resolved(commit_ts)
        assert [row[2] for row in feed.committed] == [key]


async def test_an_unknown_feature_is_unimplemented(cluster: Cluster) -> None:
    async with stubs_of(cluster) as stubs:
        call = cdcgrpc.ChangeDataStub(stubs.channel).EventFeedV2(
            metadata=(("features", "telepathy"),)
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_filter_loop_hides_what_a_changefeed_wrote_here_live_and_scanned(
    cluster: Cluster,
) -> None:
    ours, looped = row_key(102, 80), row_key(102, 81)
    async with stubs_of(cluster) as stubs, feeding(stubs) as feed:
        checkpoint_ts, route = await stubs.pd.tso(), await stubs.pd.region(encode_bytes(ours))

        async def put(key: bytes, source: int) -> int:
            start_ts = await stubs.pd.tso()
            context = await stubs.context(key)
            context.txn_source = source
            answer = await stubs.tikv.KvPrewrite(
                kvrpcpb.PrewriteRequest(
                    context=context,
                    mutations=[kvrpcpb.Mutation(op=kvrpcpb.Put, key=key, value=b"v")],
                    primary_lock=key,
                    start_version=start_ts,
                    lock_ttl=3000,
                )
            )
            assert not answer.errors
            return await stubs.commit(key, start_ts)

        written = [await put(ours, 0x100), await put(looped, 1)]
        feed.subscribe(route, checkpoint_ts, filter_loop=True)
        await feed.wait_resolved(written[-1])
        written += [await put(looped, 1), await put(ours, 0)]
        await feed.wait_resolved(written[-1])
        assert [row[2] for row in feed.committed] == [ours, ours]
        feed.subscribe(route, checkpoint_ts, request_id=2)
        feed.committed.clear()
        while len(feed.committed) < 4:
            await feed.step()
        assert sorted(row[2] for row in feed.committed) == [ours, ours, looped, looped]
