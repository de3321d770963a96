"""What our client adds to the API: campaigns, bounds, many writes."""

import asyncio

import pytest
from etcdpb import rpc_pb2

from storage.meta import client
from storage.meta.client import EtcdMeta
from storage.meta.errors import CompactedError, RequestTooLargeError, TooManyOpsError
from storage.meta.meta import Compare, Put


async def test_a_campaign_is_won_by_one_and_then_by_the_next(meta: EtcdMeta, prefix: bytes) -> None:
    async with asyncio.TaskGroup() as tasks, await meta.grant_lease(120) as second:
        async with await meta.grant_lease(120) as first:
            revision = await meta.campaign(prefix, b"first", first.id)
            assert await meta.campaign(prefix, b"first", first.id) == revision
            waiting = tasks.create_task(meta.campaign(prefix, b"second", second.id))
            done, _ = await asyncio.wait([waiting], timeout=0.2)
            assert not done
        fence = await waiting
        assert fence > revision
        assert not (await meta.txn([Compare.created_at(prefix, revision)], [])).succeeded
        assert (await meta.txn([Compare.created_at(prefix, fence)], [])).succeeded


async def test_more_than_128_operations_are_refused_before_they_are_sent(meta: EtcdMeta) -> None:
    with pytest.raises(TooManyOpsError, match="write_all"):
        await meta.txn([], [Put(b"%d" % number, b"") for number in range(129)])


async def test_a_value_that_is_too_large_is_refused_with_the_bound(
    meta: EtcdMeta, prefix: bytes
) -> None:
    for size in (1536 << 10, 3 << 20):
        with pytest.raises(RequestTooLargeError, match="MiB"):
            await meta.put(prefix, bytes(size))


async def test_any_number_of_writes_goes_in_transactions_that_fit(
    meta: EtcdMeta, prefix: bytes
) -> None:
    small = [Put(prefix + b"s/%03d" % number, b"") for number in range(300)]
    large = [Put(prefix + b"l/%d" % number, bytes(600 << 10)) for number in range(4)]
    last = await meta.write_all([*small, *large])
    pairs = await meta.get_prefix(prefix)
    assert len(pairs) == 304
    assert max(pair.mod_revision for pair in pairs) == last
    assert await meta.delete_prefix(prefix) == 304


async def test_a_prefix_is_read_in_pages_that_show_one_revision(
    meta: EtcdMeta, prefix: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    await meta.write_all([Put(prefix + b"%03d" % number, b"old") for number in range(25)])
    monkeypatch.setattr(client, "_PAGE_KEYS", 10)
    read, pages = meta._api.read, []

    async def written_between(request: rpc_pb2.RangeRequest) -> rpc_pb2.RangeResponse:
        answer = await read(request)
        pages.append(len(answer.kvs))
        await meta.put(prefix + b"%03d" % (24 - len(pages)), b"new")
        return answer

    monkeypatch.setattr(meta._api, "read", written_between)
    pairs = await meta.get_prefix(prefix)
    assert pages == [10, 10, 5]
    assert [pair.key for pair in pairs] == [prefix + b"%03d" % number for number in range(25)]
    assert {pair.value for pair in pairs} == {b"old"}


async def test_a_compaction_between_two_pages_begins_the_reading_anew(
    meta: EtcdMeta, prefix: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    await meta.write_all([Put(prefix + b"%03d" % number, b"") for number in range(25)])
    monkeypatch.setattr(client, "_PAGE_KEYS", 10)
    read, asked = meta._api.read, []

    async def compacted_once(request: rpc_pb2.RangeRequest) -> rpc_pb2.RangeResponse:
        asked.append(request.revision)
        if len(asked) == 2:
            raise CompactedError
        return await read(request)

    monkeypatch.setattr(meta._api, "read", compacted_once)
    assert len(await meta.get_prefix(prefix)) == 25
    assert [bool(revision) for revision in asked] == [False, True, False, True, True]
