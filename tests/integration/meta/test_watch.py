"""Watch: the embedded server, a real etcd and the passed-on ones show the same changes."""

from typing import Any

import grpc
import pytest
from etcdpb import rpc_pb2, rpc_pb2_grpc

from storage.meta.client import EtcdMeta
from storage.meta.errors import CompactedError
from storage.meta.meta import Delete, Put

Range = rpc_pb2.RangeRequest


def kv(channel: grpc.aio.Channel) -> Any:
    return rpc_pb2_grpc.KVStub(channel)


async def put_all(meta: EtcdMeta, prefix: bytes, *names: bytes) -> list[int]:
    return [await meta.put(prefix + name, b"value of " + name) for name in names]


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


async def test_a_watch_stream_carries_many_watches(
    channel: grpc.aio.Channel, meta: EtcdMeta, prefix: bytes
) -> None:
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
    await call.write(
        rpc_pb2.WatchRequest(cancel_request=rpc_pb2.WatchCancelRequest(watch_id=second))
    )
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


async def watched(channel: grpc.aio.Channel, **fields: Any) -> tuple[Any, Any]:
    """A watch stream and its first response."""
    call = rpc_pb2_grpc.WatchStub(channel).Watch()
    await call.write(rpc_pb2.WatchRequest(create_request=rpc_pb2.WatchCreateRequest(**fields)))
    return call, await call.read()


async def test_filters_leave_puts_or_deletes_out(
    channel: grpc.aio.Channel, meta: EtcdMeta, prefix: bytes
) -> None:
    revision = await meta.put(prefix, b"1")
    await meta.delete(prefix)
    await meta.put(prefix, b"2")
    for dropped, versions in (("NODELETE", [1, 1]), ("NOPUT", [0])):
        call, _ = await watched(channel, key=prefix, start_revision=revision, filters=[dropped])
        seen: list[int] = []
        while len(seen) < len(versions):
            seen += [event.kv.version for event in (await call.read()).events]
        assert seen == versions
        call.cancel()


async def test_a_watch_of_the_future_waits_for_it(
    channel: grpc.aio.Channel, meta: EtcdMeta, prefix: bytes
) -> None:
    revision = await meta.put(prefix, b"1")
    start = revision + 10
    call, created = await watched(channel, key=prefix, start_revision=start)
    assert created.created
    while revision < start:
        revision = await meta.put(prefix, b"again")
    assert [event.kv.mod_revision for event in (await call.read()).events] == [revision]
    call.cancel()


async def test_a_watch_from_a_compacted_revision_says_from_where_there_is_history(
    channel: grpc.aio.Channel, meta: EtcdMeta, prefix: bytes
) -> None:
    first, second = await put_all(meta, prefix, b"a", b"a")
    await kv(channel).Compact(rpc_pb2.CompactionRequest(revision=second))
    call, created = await watched(channel, key=prefix + b"a", start_revision=first)
    assert created.created
    cancelled = await call.read()
    assert (cancelled.canceled, cancelled.compact_revision) == (True, second)
    call.cancel()
    call, _ = await watched(channel, key=prefix + b"a", start_revision=second)
    assert [event.kv.mod_revision for event in (await call.read()).events] == [second]
    call.cancel()


async def test_watches_that_cannot_be_are_cancelled_in_etcds_words(
    channel: grpc.aio.Channel, prefix: bytes
) -> None:
    call, created = await watched(channel, key=prefix, watch_id=7)
    assert (created.created, created.watch_id) == (True, 7)
    for fields, reason in (
        ({"key": prefix, "watch_id": 7}, "mvcc: duplicate watch ID provided on the WatchStream"),
        ({"key": prefix, "range_end": prefix}, "mvcc: watcher range is empty"),
    ):
        await call.write(rpc_pb2.WatchRequest(create_request=rpc_pb2.WatchCreateRequest(**fields)))
        refused = await call.read()
        assert (refused.created, refused.canceled, refused.watch_id) == (True, True, -1)
        assert refused.cancel_reason == reason
    call.cancel()


async def test_asked_for_progress_is_told(
    channel: grpc.aio.Channel, meta: EtcdMeta, prefix: bytes
) -> None:
    call, _ = await watched(channel, key=prefix)
    revision = await meta.put(prefix + b"other", b"")
    await call.write(rpc_pb2.WatchRequest(progress_request=rpc_pb2.WatchProgressRequest()))
    told = await call.read()
    assert (told.watch_id, len(told.events)) == (-1, 0)
    assert told.header.revision >= revision
    call.cancel()


async def test_the_changes_of_one_transaction_come_together(meta: EtcdMeta, prefix: bytes) -> None:
    await meta.put(prefix + b"doomed", b"")
    done = await meta.txn(
        [], [Put(prefix + b"a", b"1"), Put(prefix + b"b", b"2"), Delete(prefix + b"doomed")]
    )
    async for events in meta.watch(prefix, done.revision):
        assert {event.pair.mod_revision for event in events} == {done.revision}
        assert [event.pair.key for event in events] == [
            prefix + b"a",
            prefix + b"b",
            prefix + b"doomed",
        ]
        break


async def test_megabytes_of_history_come_in_fragments_and_whole(
    meta: EtcdMeta, prefix: bytes
) -> None:
    revisions = [await meta.put(prefix + b"%d" % number, bytes(700 << 10)) for number in range(6)]
    seen: list[int] = []
    async for events in meta.watch(prefix, revisions[0]):
        seen += [event.pair.mod_revision for event in events]
        if len(seen) == len(revisions):
            break
    assert seen == revisions
    await meta.delete_prefix(prefix)
