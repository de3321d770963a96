"""KV: the embedded server, a real etcd and the passed-on ones answer alike.

Tests share a server and its revisions, so each uses keys of its own and revisions relative to what
it reads.
"""

from typing import Any

import grpc
import pytest
from etcdpb import rpc_pb2, rpc_pb2_grpc

from storage.codec import prefix_end
from storage.meta.client import EtcdMeta
from storage.meta.meta import Compare, Delete, Get, Put

Range = rpc_pb2.RangeRequest


def kv(channel: grpc.aio.Channel) -> Any:
    return rpc_pb2_grpc.KVStub(channel)


async def put_all(meta: EtcdMeta, prefix: bytes, *names: bytes) -> list[int]:
    return [await meta.put(prefix + name, b"value of " + name) for name in names]


async def test_revisions_and_versions_count_as_etcd_counts_them(
    meta: EtcdMeta, prefix: bytes
) -> None:
    first = await meta.put(prefix, b"1")
    second = await meta.put(prefix, b"2")
    pair = await meta.get(prefix)
    assert pair is not None
    assert (pair.value, pair.create_revision, pair.mod_revision, pair.version) == (
        b"2",
        first,
        second,
        2,
    )
    assert second > first
    await meta.delete(prefix)
    assert await meta.get(prefix) is None
    third = await meta.put(prefix, b"3")
    pair = await meta.get(prefix)
    assert pair is not None
    assert (pair.create_revision, pair.version) == (third, 1)


async def test_a_write_that_changes_nothing_makes_no_revision(
    meta: EtcdMeta, prefix: bytes
) -> None:
    """Coordinators write now and then, too: it is enough to see it once."""
    for _ in range(50):
        before = await meta.put(prefix, b"")
        deleted = await meta.delete(prefix + b"none")
        refused = (await meta.txn([Compare.absent(prefix)], [Put(prefix, b"x")])).revision
        if before == deleted == refused:
            return
    raise AssertionError((before, deleted, refused))


async def test_ranges_sort_limit_count_and_hide_values(
    channel: grpc.aio.Channel, meta: EtcdMeta, prefix: bytes
) -> None:
    await put_all(meta, prefix, b"b", b"a", b"c")
    whole = {"key": prefix, "range_end": prefix_end(prefix)}
    answer = await kv(channel).Range(Range(**whole, limit=2))
    assert ([pair.key[-1:] for pair in answer.kvs], answer.more, answer.count) == (
        [b"a", b"b"],
        True,
        3,
    )
    newest = Range(**whole, sort_order=Range.DESCEND, sort_target=Range.MOD, keys_only=True)
    answer = await kv(channel).Range(newest)
    assert [pair.key[-1:] for pair in answer.kvs] == [b"c", b"a", b"b"]
    assert not any(pair.value for pair in answer.kvs)
    answer = await kv(channel).Range(Range(**whole, count_only=True))
    assert (answer.count, len(answer.kvs)) == (3, 0)
    answer = await kv(channel).Range(Range(**whole, sort_target=Range.CREATE, limit=1))
    assert [pair.key[-1:] for pair in answer.kvs] == [b"b"]


async def test_a_past_revision_shows_the_past(
    channel: grpc.aio.Channel, meta: EtcdMeta, prefix: bytes
) -> None:
    revision = (await put_all(meta, prefix, b"a", b"b"))[-1]
    await meta.put(prefix + b"a", b"later")
    await meta.delete(prefix + b"b")
    await meta.put(prefix + b"c", b"later")
    answer = await kv(channel).Range(
        Range(key=prefix, range_end=prefix_end(prefix), revision=revision)
    )
    assert [(pair.key[-1:], pair.value) for pair in answer.kvs] == [
        (b"a", b"value of a"),
        (b"b", b"value of b"),
    ]


@pytest.mark.parametrize(
    ("request_", "status", "text"),
    [
        (Range(), "INVALID_ARGUMENT", "etcdserver: key is not provided"),
        (
            Range(key=b"a", revision=1 << 40),
            "OUT_OF_RANGE",
            "etcdserver: mvcc: required revision is a future revision",
        ),
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
        (
            kv(channel).Put,
            rpc_pb2.PutRequest(key=b"a", lease=404),
            "etcdserver: requested lease not found",
        ),
        (
            kv(channel).Put,
            rpc_pb2.PutRequest(key=b"no such", ignore_value=True),
            "etcdserver: key not found",
        ),
        (
            kv(channel).Txn,
            rpc_pb2.TxnRequest(success=[put, put]),
            "etcdserver: duplicate key given in txn request",
        ),
        (
            kv(channel).Txn,
            rpc_pb2.TxnRequest(success=[put] * 129),
            "etcdserver: too many operations in txn request",
        ),
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
    again = await meta.txn(
        [Compare.absent(key)], [Put(key, b"2")], [Get(key), Delete(other), Get(other)]
    )
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


async def test_ranges_are_filtered_by_revisions(
    channel: grpc.aio.Channel, meta: EtcdMeta, prefix: bytes
) -> None:
    first, second, third = await put_all(meta, prefix, b"a", b"b", b"c")
    newest = await meta.put(prefix + b"a", b"again")
    whole = {"key": prefix, "range_end": prefix_end(prefix)}
    for bounds, names in (
        ({"min_mod_revision": third}, b"ac"),
        ({"max_mod_revision": second}, b"b"),
        ({"min_create_revision": second, "max_mod_revision": newest - 1}, b"bc"),
        ({"max_create_revision": first}, b"a"),
    ):
        answer = await kv(channel).Range(Range(**whole, **bounds))
        assert b"".join(pair.key[-1:] for pair in answer.kvs) == names
        assert answer.count == 3


async def test_writes_give_back_what_was_before_and_keep_what_they_are_told_to(
    channel: grpc.aio.Channel, meta: EtcdMeta, prefix: bytes
) -> None:
    lease = (await rpc_pb2_grpc.LeaseStub(channel).LeaseGrant(rpc_pb2.LeaseGrantRequest(TTL=60))).ID
    await meta.put(prefix, b"1", lease)
    answer = await kv(channel).Put(
        rpc_pb2.PutRequest(key=prefix, value=b"2", ignore_lease=True, prev_kv=True)
    )
    assert (answer.prev_kv.value, answer.prev_kv.lease) == (b"1", lease)
    await kv(channel).Put(rpc_pb2.PutRequest(key=prefix, ignore_value=True))
    answer = await kv(channel).DeleteRange(rpc_pb2.DeleteRangeRequest(key=prefix, prev_kv=True))
    assert [(pair.value, pair.lease, pair.version) for pair in answer.prev_kvs] == [(b"2", 0, 3)]


async def test_an_inner_transaction_is_judged_by_what_was_before_the_outer_one(
    channel: grpc.aio.Channel, prefix: bytes
) -> None:
    absent = rpc_pb2.Compare(key=prefix, target=rpc_pb2.Compare.CREATE, create_revision=0)
    put = rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=prefix, value=b"outer"))
    get = rpc_pb2.RequestOp(request_range=rpc_pb2.RangeRequest(key=prefix))
    inner = rpc_pb2.RequestOp(request_txn=rpc_pb2.TxnRequest(compare=[absent], success=[get]))
    answer = await kv(channel).Txn(rpc_pb2.TxnRequest(compare=[absent], success=[put, inner]))
    nested = answer.responses[1].response_txn
    assert nested.succeeded
    assert [pair.value for pair in nested.responses[0].response_range.kvs] == [b"outer"]


async def test_a_condition_over_a_range_holds_if_it_does_for_every_key(
    channel: grpc.aio.Channel, meta: EtcdMeta, prefix: bytes
) -> None:
    revisions = await put_all(meta, prefix, b"a", b"b")
    whole = {"key": prefix, "range_end": prefix_end(prefix)}
    for wanted in revisions:
        older = rpc_pb2.Compare(**whole, target="MOD", result="LESS", mod_revision=wanted + 1)
        assert (await kv(channel).Txn(rpc_pb2.TxnRequest(compare=[older]))).succeeded == (
            wanted == revisions[1]
        )


async def test_a_request_of_more_than_a_megabyte_and_a_half_is_refused(
    channel: grpc.aio.Channel, prefix: bytes
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await kv(channel).Put(rpc_pb2.PutRequest(key=prefix, value=bytes(1536 << 10)))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details() == "etcdserver: request is too large"
