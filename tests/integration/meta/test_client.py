"""What our client adds to the API: campaigns, bounds, many writes."""

import asyncio

import pytest

from storage.meta.client import EtcdMeta
from storage.meta.errors import RequestTooLargeError, TooManyOpsError
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
