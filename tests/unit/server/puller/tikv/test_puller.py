"""One table's puller between a scripted coordinator, scripted feeds and a recording sorter."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest
from kvproto import cdcpb_pb2 as cdcpb
from kvproto import metapb_pb2 as metapb

from server.puller.open_transactions import OpenTransactions
from server.puller.tikv.feed import ClusterIdMismatchError, Fault
from server.puller.tikv.matcher import LateCommitError
from server.puller.tikv.puller import TablePuller, Upstream
from server.rpc.region_cache import RegionRoute
from storage.codec import encode_bytes
from storage.model.errors import UnavailableError
from storage.model.span import Span

SPAN = Span(1, b"a", b"z")
Row = cdcpb.Event.Row


def region(region_id, start, end, store="s1"):
    bounds = [encode_bytes(key) if key else b"" for key in (start, end)]
    meta = metapb.Region(id=region_id, start_key=bounds[0], end_key=bounds[1])
    return RegionRoute(meta, metapb.Peer(id=1, store_id=1), store)


class Pd:
    def __init__(self, *routes):
        self.routes = list(routes)
        self.down = 0

    async def scan_regions(self, start, end, limit):
        if self.down:
            self.down -= 1
            raise UnavailableError("down")
        touching = [
            route
            for route in self.routes
            if (not end or route.region.start_key < end)
            and (not route.region.end_key or route.region.end_key > start)
        ]
        return touching[:limit]


class Feeds:
    def __init__(self):
        self.subscribed = asyncio.Queue()
        self.ended = []

    def subscribe(self, subscription):
        self.subscribed.put_nowait(subscription)

    def unsubscribe(self, subscription):
        self.ended.append(subscription)

    async def next(self):
        async with asyncio.timeout(60):
            return await self.subscribed.get()


class Sorter:
    def __init__(self):
        self.rows, self.resolved, self.moved = [], [], asyncio.Event()
        self.sizes = []
        self.loop = asyncio.get_running_loop()

    def add(self, span, batch):
        assert span == SPAN
        self.rows += [(row["commit_ts"], row["key"]) for row in batch.to_pylist()]
        self.sizes.append(batch.num_rows)
        self.loop.call_soon_threadsafe(self.moved.set)

    def resolve(self, span, ts):
        self.resolved.append((ts, len(self.rows)))
        self.loop.call_soon_threadsafe(self.moved.set)

    async def wait_rows(self, count):
        async with asyncio.timeout(60):
            while len(self.rows) < count:
                await self.moved.wait()
                self.moved.clear()

    async def until(self, ts):
        async with asyncio.timeout(60):
            while not self.resolved or self.resolved[-1][0] < ts:
                await self.moved.wait()
                self.moved.clear()


@asynccontextmanager
async def pulling(pd, start_ts=10, shared=None):
    feeds, sorter = Feeds(), Sorter()
    with ThreadPoolExecutor(1) as executor:
        puller = TablePuller(
            SPAN, start_ts, Upstream(pd, feeds, executor, shared or OpenTransactions()), sorter
        )
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(puller.run())
            yield feeds, sorter, puller, task
            task.cancel()


def entries(*rows):
    return cdcpb.Event(entries=cdcpb.Event.Entries(entries=rows))


def initialized():
    return entries(Row(type=cdcpb.Event.INITIALIZED))


def committed(ts, key):
    return entries(
        Row(
            type=cdcpb.Event.COMMITTED,
            op_type=Row.PUT,
            start_ts=ts - 1,
            commit_ts=ts,
            key=key,
            value=b"v",
        )
    )


def error(**fields):
    return cdcpb.Event(error=cdcpb.Error(**fields))


async def send(subscription, *contents):
    for content in contents:
        await subscription.inbox.put((subscription, content), 1)


async def test_rows_are_in_the_sorter_before_they_are_resolved():
    async with pulling(Pd(region(1, b"", b""))) as (feeds, sorter, _, _):
        only = await feeds.next()
        assert (only.part.start_key, only.part.end_key) == (encode_bytes(b"a"), encode_bytes(b"z"))
        assert only.matcher.start_ts == 10
        await send(only, initialized(), committed(12, b"k"), 12)
        await sorter.until(12)
        assert sorter.resolved == [(12, 1)]


async def test_the_span_is_resolved_as_far_as_its_slowest_region():
    async with pulling(Pd(region(1, b"", b"m"), region(2, b"m", b""))) as (
        feeds,
        sorter,
        puller,
        _,
    ):
        left, right = await feeds.next(), await feeds.next()
        assert puller.regions == 2
        await send(left, initialized(), 30)
        await send(right, initialized(), 20)
        await sorter.until(20)
        assert [ts for ts, _ in sorter.resolved] == [20]


async def test_the_slowest_regions_come_first_and_what_nobody_serves_is_one_of_them():
    async with pulling(Pd(region(1, b"", b"m"), region(2, b"m", b"t"))) as (
        feeds,
        sorter,
        puller,
        _,
    ):
        left, right = await feeds.next(), await feeds.next()
        await send(left, initialized(), 30)
        await send(right, initialized(), 20)
        await send(left, committed(40, b"a"))
        await sorter.wait_rows(1)
        shown = [(it.region_id, it.store, it.resolved_ts) for it in puller.slowest(5)]
        assert shown == [(0, "", 10), (2, "s1", 20), (1, "s1", 30)]
        assert [it.region_id for it in puller.slowest(2)] == [0, 2]


async def test_a_split_is_followed_from_the_regions_resolved_ts():
    pd = Pd(region(1, b"", b""))
    async with pulling(pd) as (feeds, sorter, _, _):
        old = await feeds.next()
        await send(old, initialized(), 20)
        await sorter.until(20)
        pd.routes = [region(1, b"m", b""), region(3, b"", b"m")]
        pd.routes.sort(key=lambda route: route.region.start_key)
        await send(old, error(epoch_not_match={}), committed(99, b"late, of the old subscription"))
        left, right = await feeds.next(), await feeds.next()
        assert [part.matcher.start_ts for part in (left, right)] == [20, 20]
        assert [part.region_id for part in (left, right)] == [3, 1]
        await send(left, initialized(), committed(21, b"b"), 40)
        await send(right, initialized(), 40)
        await sorter.until(40)
        assert sorter.rows == [(21, b"b")]
        assert old in feeds.ended


async def test_a_broken_stream_and_an_absent_coordinator_only_delay():
    pd = Pd(region(1, b"", b""))
    async with pulling(pd) as (feeds, sorter, _, _):
        first = await feeds.next()
        await send(first, initialized(), committed(12, b"k"), 15)
        await sorter.until(15)
        pd.down = 2
        await send(first, Fault("stream_broken"))
        again = await feeds.next()
        assert again.matcher.start_ts == 15
        assert again.request_id != first.request_id


async def test_a_commit_without_prewrite_is_read_again_from_the_store():
    async with pulling(Pd(region(1, b"", b""))) as (feeds, sorter, _, _):
        first = await feeds.next()
        await send(first, initialized(), 15)
        await send(
            first,
            entries(
                Row(type=cdcpb.Event.COMMIT, op_type=Row.PUT, start_ts=16, commit_ts=17, key=b"k")
            ),
        )
        again = await feeds.next()
        assert again.matcher.start_ts == 15
        assert sorter.rows == []


async def pull_and_send(*contents):
    async with pulling(Pd(region(1, b"", b""))) as (feeds, _, _, task):
        await send(await feeds.next(), *contents)
        await task


async def test_a_store_of_another_cluster_stops_the_puller():
    with pytest.raises(ExceptionGroup) as caught:
        await pull_and_send(error(cluster_id_mismatch={"current": 1, "request": 2}))
    assert caught.group_contains(ClusterIdMismatchError)


async def test_a_broken_promise_stops_the_puller():
    with pytest.raises(ExceptionGroup) as caught:
        await pull_and_send(initialized(), 20, committed(20, b"k"))
    assert caught.group_contains(LateCommitError)


async def test_a_region_that_stands_still_is_stuck_only_after_the_lag():
    async with pulling(Pd(region(1, b"", b""))) as (feeds, sorter, puller, _):
        await send(await feeds.next(), initialized(), 20 << 18)
        await sorter.until(20 << 18)
        assert puller.stuck(25 << 18, 5) == []
        assert len(puller.stuck(26 << 18, 5)) == 1
