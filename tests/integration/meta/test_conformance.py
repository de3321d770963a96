"""One suite for the etcd API: the embedded server, a real etcd and the passed-on one answer alike.

Tests share a server and its revisions, so each uses keys of its own and revisions relative to what it reads.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from etcdpb import kv_pb2, rpc_pb2, rpc_pb2_grpc

from storage.codec import prefix_end
from storage.meta.client import EtcdMeta, open_meta
from storage.meta.errors import CompactedError, LeaseNotFoundError, MetaRequestError
from storage.meta.meta import Compare, Delete, Get, Put

Range, Event = rpc_pb2.RangeRequest, kv_pb2.Event


@pytest.fixture
async def channel(etcd_api: Any) -> AsyncIterator[grpc.aio.Channel]:
    async with etcd_api.channel(etcd_api.addresses[0]) as opened:
        yield opened


@pytest.fixture
async def meta(etcd_api: Any) -> AsyncIterator[EtcdMeta]:
    async with open_meta(etcd_api.url, etcd_api.channel) as opened:
        yield opened


@pytest.fixture
def prefix() -> bytes:
    return f"/test/{uuid.uuid4()}/".encode()


def kv(channel: grpc.aio.Channel) -> Any:
    return rpc_pb2_grpc.KVStub(channel)


async def put_all(meta: EtcdMeta, prefix: bytes, *names: bytes) -> list[int]:
    return [await meta.put(prefix + name, b"value of " + name) for name in names]


async def test_revisions_and_versions_count_as_etcd_counts_them(meta: EtcdMeta, prefix: bytes) -> None:
    first = await meta.put(prefix, b"1")
    second = await meta.put(prefix, b"2")
    pair = await meta.get(prefix)
    assert pair is not None
    assert (pair.value, pair.create_revision, pair.mod_revision, pair.version) == (b"2", first, second, 2)
    assert second == first + 1
    await meta.delete(prefix)
    assert await meta.get(prefix) is None
    third = await meta.put(prefix, b"3")
    pair = await meta.get(prefix)
    assert pair is not None
    assert (pair.create_revision, pair.version) == (third, 1)


async def test_a_write_that_changes_nothing_makes_no_revision(meta: EtcdMeta, prefix: bytes) -> None:
    before = await meta.put(prefix, b"")
    assert await meta.delete(prefix + b"none") == before
    assert (await meta.txn([Compare.absent(prefix)], [Put(prefix, b"x")])).revision == before


async def test_ranges_sort_limit_count_and_hide_values(
    channel: grpc.aio.Channel, meta: EtcdMeta, prefix: bytes
) -> None:
    await put_all(meta, prefix, b"b", b"a", b"c")
    whole = {"key": prefix, "range_end": prefix_end(prefix)}
    answer = await kv(channel).Range(Range(**whole, limit=2))
    assert ([pair.key[-1:] for pair in answer.kvs], answer.more, answer.count) == ([b"a", b"b"], True, 3)
    newest = Range(**whole, sort_order=Range.DESCEND, sort_target=Range.MOD, keys_only=True)
    answer = await kv(channel).Range(newest)
    assert [pair.key[-1:] for pair in answer.kvs] == [b"c", b"a", b"b"]
    assert not any(pair.value for pair in answer.kvs)
    answer = await kv(channel).Range(Range(**whole, count_only=True))
    assert (answer.count, len(answer.kvs)) == (3, 0)
    answer = await kv(channel).Range(Range(**whole, sort_target=Range.CREATE, limit=1))
    assert [pair.key[-1:] for pair in answer.kvs] == [b"b"]


async def test_a_past_revision_shows_the_past(channel: grpc.aio.Channel, meta: EtcdMeta, prefix: bytes) -> None:
    revision = (await put_all(meta, prefix, b"a", b"b"))[-1]
    await meta.put(prefix + b"a", b"later")
    await meta.delete(prefix + b"b")
    await meta.put(prefix + b"c", b"later")
    answer = await kv(channel).Range(Range(key=prefix, range_end=prefix_end(prefix), revision=revision))
    assert [(pair.key[-1:], pair.value) for pair in answer.kvs] == [(b"a", b"value of a"), (b"b", b"value of b")]


@pytest.mark.parametrize(
    ("request_", "status", "text"),
    [
        (Range(), "INVALID_ARGUMENT", "etcdserver: key is not provided"),
        (Range(key=b"a", revision=1 << 40), "OUT_OF_RANGE", "etcdserver: mvcc: required revision is a future revision"),
    ],
)
async def test_bad_reads_are_refused_in_etcds_words(
    channel: grpc.aio.Channel, request_: Any, status: str, text: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await kv(channel).Range(request_)
    assert (refused.value.code().name, refused.value.details()) == (status, text)


async def test_bad_writes_are_refused_in_etcds_words(channel: grpc.aio.Channel) -> None:
    put = rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=b"twice"))
    cases = [
        (kv(channel).Put, rpc_pb2.PutRequest(), "etcdserver: key is not provided"),
        (kv(channel).Put, rpc_pb2.PutRequest(key=b"a", lease=404), "etcdserver: requested lease not found"),
        (kv(channel).Put, rpc_pb2.PutRequest(key=b"no such", ignore_value=True), "etcdserver: key not found"),
        (kv(channel).Txn, rpc_pb2.TxnRequest(success=[put, put]), "etcdserver: duplicate key given in txn request"),
        (kv(channel).Txn, rpc_pb2.TxnRequest(success=[put] * 129), "etcdserver: too many operations in txn request"),
    ]
    for method, request, text in cases:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await method(request)
        assert refused.value.details() == text


async def test_a_transaction_takes_one_branch_whole(meta: EtcdMeta, prefix: bytes) -> None:
    key, other = prefix + b"k", prefix + b"o"
    created = await meta.txn([Compare.absent(key)], [Put(key, b"1"), Put(other, b"1"), Get(key)])
    assert created.succeeded
    assert created.pairs[0][0].mod_revision == created.revision
    again = await meta.txn([Compare.absent(key)], [Put(key, b"2")], [Get(key), Delete(other), Get(other)])
    assert not again.succeeded
    assert [[pair.value for pair in pairs] for pairs in again.pairs] == [[b"1"], []]
    for compare, holds in [
        (Compare(key, "value", "==", b"1"), True),
        (Compare(key, "version", ">", 0), True),
        (Compare(key, "mod_revision", "<", created.revision), False),
        (Compare(key, "create_revision", "!=", created.revision), False),
        (Compare(other, "value", "!=", b"x"), False),
    ]:
        assert (await meta.txn([compare], [])).succeeded == holds


async def test_delete_prefix_counts_and_leaves_neighbours(meta: EtcdMeta, prefix: bytes) -> None:
    await put_all(meta, prefix, b"x/1", b"x/2", b"y")
    assert await meta.delete_prefix(prefix + b"x/") == 2
    assert [pair.key for pair in await meta.get_prefix(prefix)] == [prefix + b"y"]


async def test_a_watch_replays_from_its_revision_and_follows(meta: EtcdMeta, prefix: bytes) -> None:
    revisions = await put_all(meta, prefix, b"a", b"b")
    await meta.put(prefix[:-1], b"a neighbour of the prefix")
    seen: list[tuple[bool, bytes, int]] = []
    async for events in meta.watch(prefix, revisions[0]):
        if not seen:
            revisions.append(await meta.delete(prefix + b"a"))
        seen += [(event.deleted, event.pair.key, event.pair.mod_revision) for event in events]
        if len(seen) == 3:
            break
    wanted = [(False, prefix + b"a"), (False, prefix + b"b"), (True, prefix + b"a")]
    assert seen == [(*event, revision) for event, revision in zip(wanted, revisions, strict=True)]


async def test_a_watch_stream_carries_many_watches(channel: grpc.aio.Channel, meta: EtcdMeta, prefix: bytes) -> None:
    call = rpc_pb2_grpc.WatchStub(channel).Watch()
    for name in (b"a", b"b"):
        create = rpc_pb2.WatchCreateRequest(key=prefix + name, prev_kv=True)
        await call.write(rpc_pb2.WatchRequest(create_request=create))
    created = [await call.read(), await call.read()]
    assert all(response.created for response in created)
    first, second = (response.watch_id for response in created)
    assert first != second
    await put_all(meta, prefix, b"b", b"b")
    events: list[Any] = []
    while len(events) < 2:
        response = await call.read()
        assert response.watch_id == second
        events += response.events
    assert events[1].prev_kv.value == b"value of b"
    await call.write(rpc_pb2.WatchRequest(cancel_request=rpc_pb2.WatchCancelRequest(watch_id=second)))
    cancelled = await call.read()
    assert (cancelled.canceled, cancelled.watch_id) == (True, second)
    call.cancel()


async def test_compaction_ends_reads_and_watches_of_the_past(
    channel: grpc.aio.Channel, meta: EtcdMeta, prefix: bytes
) -> None:
    first, _, third = await put_all(meta, prefix, b"a", b"a", b"a")
    await kv(channel).Compact(rpc_pb2.CompactionRequest(revision=third))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await kv(channel).Range(Range(key=prefix, revision=first))
    assert refused.value.code() == grpc.StatusCode.OUT_OF_RANGE
    assert refused.value.details() == "etcdserver: mvcc: required revision has been compacted"
    with pytest.raises(CompactedError):
        async for _ in meta.watch(prefix, first):
            pass
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await kv(channel).Compact(rpc_pb2.CompactionRequest(revision=third))
    assert refused.value.code() == grpc.StatusCode.OUT_OF_RANGE


async def test_a_revoked_lease_takes_its_keys_along(channel: grpc.aio.Channel, meta: EtcdMeta, prefix: bytes) -> None:
    leases = rpc_pb2_grpc.LeaseStub(channel)
    lease = (await leases.LeaseGrant(rpc_pb2.LeaseGrantRequest(TTL=60))).ID
    await meta.put(prefix + b"b", b"", lease)
    await meta.put(prefix + b"a", b"", lease)
    await meta.put(prefix + b"kept", b"", lease)
    await meta.put(prefix + b"kept", b"")
    left = await leases.LeaseTimeToLive(rpc_pb2.LeaseTimeToLiveRequest(ID=lease, keys=True))
    assert sorted(left.keys) == [prefix + b"a", prefix + b"b"]
    assert left.grantedTTL == 60
    assert 55 <= left.TTL <= 60
    await leases.LeaseRevoke(rpc_pb2.LeaseRevokeRequest(ID=lease))
    assert [pair.key for pair in await meta.get_prefix(prefix)] == [prefix + b"kept"]
    gone = await leases.LeaseTimeToLive(rpc_pb2.LeaseTimeToLiveRequest(ID=lease))
    assert gone.TTL == -1
    with pytest.raises(LeaseNotFoundError):
        await meta.put(prefix, b"", lease)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await leases.LeaseRevoke(rpc_pb2.LeaseRevokeRequest(ID=lease))
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND


async def test_a_lease_nobody_renews_expires(meta: EtcdMeta, prefix: bytes) -> None:
    lease = await meta.grant_lease(1)
    revision = await meta.put(prefix, b"", lease.id)
    async for events in meta.watch(prefix, revision + 1):
        assert events[0].deleted
        break
    assert await meta.get(prefix) is None


async def test_a_kept_lease_outlives_its_ttl_and_knows_when_it_is_lost(
    channel: grpc.aio.Channel, meta: EtcdMeta, prefix: bytes
) -> None:
    async with await meta.grant_lease(2) as lease:
        await meta.put(prefix, b"", lease.id)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(lease.ttl_s + 1.5):
                await lease.lost.wait()
        assert await meta.get(prefix) is not None
        await rpc_pb2_grpc.LeaseStub(channel).LeaseRevoke(rpc_pb2.LeaseRevokeRequest(ID=lease.id))
        async with asyncio.timeout(lease.ttl_s + 1):
            await lease.lost.wait()
    assert await meta.get(prefix) is None


async def test_a_lease_id_cannot_be_taken_twice(channel: grpc.aio.Channel) -> None:
    leases = rpc_pb2_grpc.LeaseStub(channel)
    lease = (await leases.LeaseGrant(rpc_pb2.LeaseGrantRequest(TTL=60))).ID
    for request, status in [
        (rpc_pb2.LeaseGrantRequest(TTL=60, ID=lease), grpc.StatusCode.FAILED_PRECONDITION),
        (rpc_pb2.LeaseGrantRequest(TTL=10**10), grpc.StatusCode.OUT_OF_RANGE),
    ]:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await leases.LeaseGrant(request)
        assert refused.value.code() == status


async def test_a_campaign_is_won_by_one_and_then_by_the_next(meta: EtcdMeta, prefix: bytes) -> None:
    async with asyncio.TaskGroup() as tasks, await meta.grant_lease(5) as second:
        async with await meta.grant_lease(5) as first:
            revision = await meta.campaign(prefix, b"first", first.id)
            assert await meta.campaign(prefix, b"first", first.id) == revision
            waiting = tasks.create_task(meta.campaign(prefix, b"second", second.id))
            done, _ = await asyncio.wait([waiting], timeout=0.2)
            assert not done
        fence = await waiting
        assert fence > revision
        assert not (await meta.txn([Compare.created_at(prefix, revision)], [])).succeeded
        assert (await meta.txn([Compare.created_at(prefix, fence)], [])).succeeded


async def test_members_and_status_are_told(channel: grpc.aio.Channel) -> None:
    members = await rpc_pb2_grpc.ClusterStub(channel).MemberList(rpc_pb2.MemberListRequest())
    assert members.members[0].clientURLs[0].startswith(("http://127.0.0.1:", "https://127.0.0.1:"))
    status = await rpc_pb2_grpc.MaintenanceStub(channel).Status(rpc_pb2.StatusRequest())
    assert status.version.startswith("3.")
    assert status.leader == status.header.member_id


async def test_a_malformed_request_of_ours_is_an_invalid_error(meta: EtcdMeta) -> None:
    with pytest.raises(MetaRequestError, match="too many operations"):
        await meta.txn([], [Put(b"%d" % number, b"") for number in range(129)])
