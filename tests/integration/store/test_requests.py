"""Regions, errors, BatchCommands, GC and destruction over the wire."""

import asyncio

import grpc.aio
import pytest
from kvproto import kvrpcpb_pb2 as kvrpcpb
from kvproto import tikvpb_pb2 as tikvpb

from storage.codec import encode_bytes
from storage.tidb.number import decode_uvarint, encode_uvarint
from tests.integration.store.daemons import Cluster
from tests.integration.store.stubs import Stubs, row_key, stubs_of


async def get_with(stubs: Stubs, key: bytes, context: kvrpcpb.Context) -> kvrpcpb.GetResponse:
    return await stubs.tikv.KvGet(
        kvrpcpb.GetRequest(context=context, key=key, version=await stubs.pd.tso())
    )


async def test_the_first_regions_begin_at_the_split_keys(cluster: Cluster) -> None:
    async with stubs_of(cluster) as stubs:
        routes = await stubs.pd.scan_regions(b"")
        (store,) = await stubs.pd.stores()
    starts = [route.region.start_key for route in routes]
    assert starts[0] == b""
    assert {encode_bytes(row_key(101, 0)[:9]), encode_bytes(row_key(102, 0)[:9])} <= set(starts)
    assert len(routes) >= 3
    assert store.version == "8.5.0"
    assert store.address == cluster.store.addr


async def test_requests_that_miss_their_region_learn_what_is_right(cluster: Cluster) -> None:
    key = row_key(101, 1)
    async with stubs_of(cluster) as stubs:
        right = await stubs.context(key)
        stale = kvrpcpb.Context()
        stale.CopyFrom(right)
        stale.region_epoch.version += 1
        unknown = kvrpcpb.Context(region_id=9999, region_epoch=right.region_epoch)
        elsewhere = kvrpcpb.Context()
        elsewhere.CopyFrom(right)
        elsewhere.peer.store_id = 4711
        epoch = (await get_with(stubs, key, stale)).region_error.epoch_not_match
        assert right.region_id in {region.id for region in epoch.current_regions}
        assert (await get_with(stubs, key, unknown)).region_error.region_not_found.region_id == 9999
        assert (await get_with(stubs, key, elsewhere)).region_error.store_not_match.actual_store_id
        outside = (await get_with(stubs, row_key(102, 1), right)).region_error.key_not_in_region
        assert outside.region_id == right.region_id


async def test_a_split_serves_both_parts_and_tells_the_coordinator(cluster: Cluster) -> None:
    left, right = row_key(300, 1), row_key(300, 5)
    async with stubs_of(cluster) as stubs:
        await stubs.put(left, b"l")
        await stubs.put(right, b"r")
        old = await stubs.context(right)
        answer = await stubs.tikv.SplitRegion(
            kvrpcpb.SplitRegionRequest(context=old, split_keys=[row_key(300, 3)])
        )
        assert [region.id for region in answer.regions][-1] == old.region_id
        assert (await stubs.context(left)).region_id == answer.left.id
        assert (await stubs.get(left)).value == b"l"
        assert (await stubs.get(right)).value == b"r"
        assert (await get_with(stubs, right, old)).region_error.HasField("epoch_not_match")


async def test_a_lock_shows_what_a_client_needs_to_resolve_it(cluster: Cluster) -> None:
    primary, key = row_key(101, 400), row_key(101, 401)
    async with stubs_of(cluster) as stubs:
        start_ts = await stubs.prewrite(primary, b"v")
        await stubs.prewrite(key, b"v", primary=primary, start_ts=start_ts)
        locked = (await stubs.get(key)).error.locked
        assert (locked.primary_lock, locked.lock_version, locked.key, locked.lock_ttl) == (
            primary,
            start_ts,
            key,
            3000,
        )
        context = await stubs.context(key)
        cleaned = await stubs.tikv.KvCleanup(
            kvrpcpb.CleanupRequest(
                context=await stubs.context(primary), key=primary, start_version=start_ts
            )
        )
        assert cleaned.commit_version == 0
        await stubs.tikv.KvResolveLock(
            kvrpcpb.ResolveLockRequest(context=context, start_version=start_ts)
        )
        assert (await stubs.get(key)).not_found


async def test_garbage_is_not_a_request(cluster: Cluster) -> None:
    async with stubs_of(cluster) as stubs:
        call = stubs.channel.unary_unary("/tikvpb.Tikv/KvGet")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"\xff\xff\xff")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "ErrBadRequest" in (caught.value.details() or "")


async def test_gc_follows_the_coordinators_safepoint(cluster: Cluster) -> None:
    key = row_key(101, 420)
    async with stubs_of(cluster) as stubs:
        for value in (b"1", b"2", b"3"):
            await stubs.put(key, value)
        await stubs.pd.update_gc_safe_point(await stubs.pd.tso())
        newest = await stubs.put(key, b"4")
        async with asyncio.timeout(60):
            while len(await _writes(stubs, key)) > 2:
                await stubs.pd.gc_safe_point()
        kept = await _writes(stubs, key)
        assert [(write.short_value, write.commit_ts == newest) for write in kept] == [
            (b"4", True),
            (b"3", False),
        ]


async def _writes(stubs: Stubs, key: bytes) -> list[kvrpcpb.MvccWrite]:
    request = kvrpcpb.MvccGetByKeyRequest(context=await stubs.context(key), key=key)
    return list((await stubs.tikv.MvccGetByKey(request)).info.writes)


async def test_destroyed_ranges_are_gone_with_locks_and_all(cluster: Cluster) -> None:
    async with stubs_of(cluster) as stubs:
        await stubs.put(row_key(400, 1), b"v" * 300)
        await stubs.prewrite(row_key(400, 2), b"v")
        kept = row_key(401, 1)
        await stubs.put(kept, b"v")
        await stubs.tikv.UnsafeDestroyRange(
            kvrpcpb.UnsafeDestroyRangeRequest(start_key=row_key(400, 0), end_key=row_key(401, 0))
        )
        assert (await stubs.get(row_key(400, 1))).not_found
        assert (await stubs.get(row_key(400, 2))).not_found
        assert (await stubs.get(kept)).value == b"v"


async def test_commands_over_ranges_end_though_they_give_way_every_1024_keys(
    cluster: Cluster,
) -> None:
    keys = [b"k-many-%04d" % number for number in range(2500)]
    async with stubs_of(cluster) as stubs:
        of = {"context": await stubs.context(keys[0]), "start_version": await stubs.pd.tso()}
        owner = of | {"primary_lock": keys[0], "lock_ttl": 60_000}
        locks = [kvrpcpb.Mutation(op=kvrpcpb.PessimisticLock, key=key) for key in keys]
        puts = [kvrpcpb.Mutation(op=kvrpcpb.Put, key=key, value=b"v") for key in keys]

        async def locked() -> int:
            request = kvrpcpb.ScanLockRequest(
                context=of["context"], max_version=of["start_version"]
            )
            return len((await stubs.tikv.KvScanLock(request)).locks)

        taken = kvrpcpb.PessimisticLockRequest(
            **owner, mutations=locks, for_update_ts=of["start_version"]
        )
        assert not (await stubs.tikv.KvPessimisticLock(taken)).errors
        assert await locked() == len(keys)
        given = kvrpcpb.PessimisticRollbackRequest(**of, for_update_ts=of["start_version"])
        assert not (await stubs.tikv.KVPessimisticRollback(given)).errors
        assert await locked() == 0
        assert not (
            await stubs.tikv.KvPrewrite(kvrpcpb.PrewriteRequest(**owner, mutations=puts))
        ).errors
        resolve = kvrpcpb.ResolveLockRequest(**of, commit_version=await stubs.pd.tso())
        assert not (await stubs.tikv.KvResolveLock(resolve)).HasField("error")
        assert await locked() == 0
        assert (await stubs.get(keys[-1])).value == b"v"
        pairs = [kvrpcpb.KvPair(key=key, value=b"v") for key in keys]
        await stubs.tikv.RawBatchPut(kvrpcpb.RawBatchPutRequest(context=of["context"], pairs=pairs))
        span = {"context": of["context"], "start_key": b"k-many-", "end_key": b"k-many-z"}
        await stubs.tikv.RawDeleteRange(kvrpcpb.RawDeleteRangeRequest(**span))
        assert not (await stubs.tikv.RawScan(kvrpcpb.RawScanRequest(**span, limit=1))).kvs


UNSUPPORTED = {  # field number -> name, and where its error text stands in its response
    5: ("Import", (2,)),
    22: ("Coprocessor", (4,)),
    34: ("RawCoprocessor", (2,)),
    35: ("FlashbackToVersion", (2,)),
    36: ("PrepareFlashbackToVersion", (2,)),
    37: ("Flush", (2, 3)),
    38: ("BufferBatchGet", (2, 3)),
    39: ("RequestHealthFeedback", (1, 1)),
}


async def test_an_unsupported_command_names_itself_and_leaves_the_stream_to_the_others(
    cluster: Cluster,
) -> None:
    """client-go reads these texts; of an empty response it only says "Unknown command response"."""
    asked = tikvpb.BatchCommandsRequest()
    for number in (*UNSUPPORTED, 200):
        asked.request_ids.append(number)
        asked.requests.add().MergeFromString(encode_uvarint(number << 3 | 2) + b"\0")
    asked.request_ids.append(1000)
    asked.requests.add().Empty.test_id = 7

    answers: dict[int, tikvpb.BatchCommandsResponse.Response] = {}
    async with stubs_of(cluster) as stubs:
        call = stubs.tikv.BatchCommands(iter([asked]), timeout=60)
        async for response in call:
            answers |= dict(zip(response.request_ids, response.responses, strict=True))

    assert answers[1000].Empty.test_id == 7
    assert answers[200] == tikvpb.BatchCommandsResponse.Response()
    for number, (name, path) in UNSUPPORTED.items():
        value = answers[number].SerializeToString()
        for inner in (number, *path):
            tag = encode_uvarint(inner << 3 | 2)
            assert value.startswith(tag), (name, value)
            size, at = decode_uvarint(value, len(tag))
            value = value[at : at + size]
        assert value.decode().startswith(f"[TM:ErrCommandUnsupported] this store has no {name}"), (
            name
        )
