"""A stream that never begins, or falls silent, is opened again, of stores and of pumps."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from kvproto import cdcpb_pb2 as cdcpb
from kvproto import cdcpb_pb2_grpc, metapb_pb2
from tipb import pump_pb2, pump_pb2_grpc

from server.puller import metrics, stream_timeout
from server.puller.open_transactions import OpenTransactions
from server.puller.pump.stream import PumpStream
from server.puller.stream_timeout import StreamSilentError, StreamTimeout
from server.puller.tikv.feed import (
    Delivery,
    EventFeeds,
    Fault,
    Inbox,
    Subscription,
    next_request_id,
)
from server.puller.tikv.matcher import Matcher
from storage.model.span import KeyRange
from storage.pump.binlog import fake

LIMIT_S = 60


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_timeout, "BEGIN_S", 0.1)


@pytest.fixture
def patient(impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream may take its time to begin, as on a machine with much to do."""
    monkeypatch.setattr(stream_timeout, "BEGIN_S", LIMIT_S)


class Silent:
    """A call on which `messages` come, and then nothing."""

    def __init__(self, *messages: object) -> None:
        self._messages = list(messages)
        self.cancelled = False

    async def read(self) -> object:
        if self._messages:
            return self._messages.pop(0)
        return await asyncio.Event().wait()

    def cancel(self) -> None:
        self.cancelled = True


async def test_each_wait_in_vain_is_twice_as_long_until_one_is_not() -> None:
    begins: Any = StreamTimeout()
    for begin_s in (0.1, 0.2):
        assert begins.begin_s == begin_s
        call = Silent()
        with pytest.raises(StreamSilentError):
            await begins.first(call)
        assert call.cancelled
    assert await begins.first(Silent(7)) == 7
    assert begins.begin_s == 0.1


async def test_there_is_a_longest_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_timeout, "LONGEST_S", 0.15)
    begins: Any = StreamTimeout()
    with pytest.raises(StreamSilentError):
        await begins.first(Silent())
    assert begins.begin_s == 0.15


async def test_a_silence_ends_the_stream_and_the_next_one_may_be_twice_as_long_until_one_has_lasted() -> (
    None
):
    waits: Any = StreamTimeout(0.05)
    for silent_s in (0.05, 0.1):
        assert waits.silent_s == silent_s
        call = Silent(1, 2)
        assert [await waits.first(call), await waits.next(call)] == [1, 2]
        with pytest.raises(StreamSilentError, match="it was silent"):
            await waits.next(call)
        assert call.cancelled
    call = Silent(*range(1000))
    await waits.first(call)
    while waits.silent_s > 0.05:
        assert await waits.next(call) is not None
        await asyncio.sleep(0.01)


class Deaf(cdcpb_pb2_grpc.ChangeDataServicer, pump_pb2_grpc.PumpServicer):
    """Answers nothing on the first stream that it gets, and once only on each."""

    def __init__(self) -> None:
        self.streams = 0

    async def _begin(self) -> None:
        self.streams += 1
        if self.streams == 1:
            await asyncio.Event().wait()

    async def EventFeedV2(self, requests: Any, _: Any) -> AsyncIterator[cdcpb.ChangeDataEvent]:
        await self._begin()
        async for request in requests:
            yield cdcpb.ChangeDataEvent(
                resolved_ts=cdcpb.ResolvedTs(request_id=request.request_id, ts=9)
            )

    async def PullBinlogs(self, request: Any, _: Any) -> AsyncIterator[pump_pb2.PullBinlogResp]:
        await self._begin()
        yield pump_pb2.PullBinlogResp(
            entity=pump_pb2.Entity(payload=fake(request.startFrom.offset + 1))
        )
        await asyncio.Event().wait()


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Deaf, str]]:
    servicer, server = Deaf(), grpc.aio.server()
    cdcpb_pb2_grpc.add_ChangeDataServicer_to_server(servicer, server)
    pump_pb2_grpc.add_PumpServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield servicer, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_a_store_that_does_not_begin_is_asked_again() -> None:
    async with asyncio.timeout(LIMIT_S), serving() as (store, address), EventFeeds.open(1) as feeds:
        delivered = await first_of(feeds, address)
        assert delivered == Fault("stream_silent", wait_ms=100)
        while isinstance(delivered, Fault):
            delivered = await first_of(feeds, address)
        assert delivered == 9
        assert store.streams > 1


async def first_of(feeds: EventFeeds, address: str) -> Any:
    """What comes first of a new subscription."""
    inbox: Inbox[Delivery] = Inbox(1 << 20, 1 << 20)
    part, matcher = KeyRange(b"a", b"z"), Matcher(5, OpenTransactions())
    subscription = Subscription(
        next_request_id(), 1, metapb_pb2.RegionEpoch(), address, part, matcher, inbox
    )
    feeds.subscribe(subscription)
    [(_, content)] = await inbox.take()
    feeds.unsubscribe(subscription)
    return content


async def test_a_pump_that_does_not_begin_is_asked_again() -> None:
    async with asyncio.timeout(LIMIT_S), serving() as (pump, address):
        stream = PumpStream("p", address, 1, None, 7)
        async with aclosing(stream.run()) as transactions:
            assert (await anext(transactions)).commit_ts == 8
        assert pump.streams > 1


async def test_a_store_that_falls_silent_is_asked_again(patient: None) -> None:
    before = metrics.SILENT_STREAMS.labels("store")._value.get()
    async with (
        asyncio.timeout(LIMIT_S),
        serving() as (store, address),
        EventFeeds.open(1, silent_s=0.1) as feeds,
    ):
        store.streams = 1
        inbox: Inbox[Delivery] = Inbox(1 << 20, 1 << 20)
        part, matcher = KeyRange(b"a", b"z"), Matcher(5, OpenTransactions())
        feeds.subscribe(
            Subscription(
                next_request_id(), 1, metapb_pb2.RegionEpoch(), address, part, matcher, inbox
            )
        )
        found: list[Any] = []
        while len(found) < 2:
            found += [content for _, content in await inbox.take()]
        assert found == [9, Fault("stream_silent", wait_ms=100)]
    assert metrics.SILENT_STREAMS.labels("store")._value.get() == before + 1


async def test_a_pump_that_falls_silent_is_asked_again_from_where_it_was(patient: None) -> None:
    async with asyncio.timeout(LIMIT_S), serving() as (pump, address):
        pump.streams = 1
        stream = PumpStream("p", address, 1, None, 7, silent_s=0.1)
        async with aclosing(stream.run()) as transactions:
            assert [(await anext(transactions)).commit_ts for _ in range(3)] == [8, 9, 10]
        # Each stream gave one binlog, and was waited for in vain after that.
        assert pump.streams >= 4
