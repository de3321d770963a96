"""Turns of the loop: what a peer sends or does not read costs the others a bounded time,
and us bounded memory.
"""

import asyncio
import gzip
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from server.rpc.http2 import frames, handled
from server.rpc.http2.frames import ErrorCode, frame
from server.rpc.http2.handled import HandlerStarter
from server.rpc.http2.peer import Bounds
from server.rpc.http2.stream import MAX_UNREAD_BYTES, ROOM_BYTES
from tests.unit.server.rpc.http2.test_link import connected
from tests.unit.server.rpc.http2.wire import Client, EchoHost, data, message

WINDOWS = frames.settings({4: frames.MAX_WINDOW}) + frames.window_update(0, 1 << 30)
DATA_COST = 256


def ready(host: EchoHost | None = None) -> tuple[Any, Any, Client]:
    """A link, its socket, and a client that only encodes."""
    link, transport = connected(host)
    link.data_received(frames.PREFACE + WINDOWS)
    return link, transport, Client()


async def turns(is_over: Callable[[], bool]) -> None:
    """As many turns of the loop as it takes."""
    while not is_over():  # noqa: ASYNC110 - turns are what is tested
        await asyncio.sleep(0)


async def test_what_does_not_fit_into_a_turn_is_handled_in_the_next_ones_and_not_read_meanwhile() -> (
    None
):
    host = EchoHost(turn=-1.0)  # every turn is over at once: one frame each
    link, transport, client = ready(host)
    await turns(lambda: not link.connection.behind)
    link.data_received(b"".join(client.call(number, b"x") for number in range(1, 21, 2)))
    assert transport.paused
    assert host.behind == 1
    assert host.buffered > 0
    assert len(host.opened) <= 1
    await turns(lambda: not link.connection.behind)
    assert len(host.opened) == 10
    assert not transport.paused
    assert (host.behind, host.buffered) == (0, 0)


async def test_a_connection_that_ends_behind_leaves_nothing() -> None:
    host = EchoHost(turn=-1.0)
    link, _, client = ready(host)
    link.data_received(b"".join(client.call(number, b"x") for number in range(1, 21, 2)))
    link.connection_lost(None)
    await asyncio.sleep(0)
    assert (host.behind, host.buffered, host.request_bytes, host.open_now) == (0, 0, 0, 0)


def test_answers_wait_in_their_streams_while_the_socket_is_full() -> None:
    client = Client().send(WINDOWS)
    client.take()
    connection = client.connection
    connection.congested, connection.room = True, 0
    client.send(client.call(1, bytes(1000)), client.call(3, bytes(2000)))
    assert not [one for one in client.take() if one.kind == frames.DATA]
    assert connection.unsent_bytes == client.host.buffered == connection.unread_bytes == 3010
    connection.resumed()
    assert sum(len(one.payload) for one in client.take() if one.kind == frames.DATA) == 3010
    assert (connection.unsent_bytes, client.host.buffered, connection.unread_bytes) == (0, 0, 0)


def test_one_turn_writes_no_more_than_a_socket_takes() -> None:
    client = Client().send(WINDOWS)
    client.take()
    client.send(
        client.headers(1),
        *(data(1, message(bytes(16_000))[at : at + 8000]) for at in (0, 8000, 16_000)),
    )
    stream = client.host.opened[0]
    stream.send_message(bytes(10 * ROOM_BYTES))
    first = client.connection.take()
    assert ROOM_BYTES // 2 <= len(first) <= ROOM_BYTES + (32 << 10)
    assert client.woken


def test_an_answer_beyond_what_may_wait_is_not_kept_and_its_call_says_so() -> None:
    client = Client(
        bounds=Bounds(
            metadata_bytes=16 << 10, streams=100, pings=20, pings_per_s=1, unsent_bytes=10_000
        )
    )
    client.send(frames.settings({4: 0}))
    client.send(client.headers(1), client.headers(3))
    client.host.opened[0].answer(bytes(20_000))
    client.host.opened[1].answer(b"small")
    assert client.connection.unsent_bytes == 20_005  # one of any size may wait
    fields, body = client.answer(3)
    assert fields["grpc-status"] == "8"
    assert "20005 bytes of answers wait to be read" in fields["grpc-message"]
    assert body == b""
    client.send(frames.window_update(1, 30_000))
    fields, body = client.answer(1)
    assert fields["grpc-status"] == "0"
    assert len(body) == 20_005


def test_windows_that_grow_by_bytes_are_looked_at_once_in_a_turn() -> None:
    client = Client().send(frames.settings({4: 0}), Client().call(1, bytes(5000)))
    client.take()
    client.send(frames.window_update(1, 1) * 1000)
    answered = [one for one in client.take() if one.kind == frames.DATA]
    assert [len(one.payload) for one in answered] == [1000]


def test_many_streams_that_take_a_byte_each_are_served_a_part_in_each_turn() -> None:
    client = Client(
        EchoHost(most=5000), Bounds(metadata_bytes=16 << 10, streams=5000, pings=20, pings_per_s=1)
    )
    client.send(
        frames.settings({4: 0}), *(client.call(number, b"x" * 100) for number in range(1, 4001, 2))
    )
    client.take()
    client.send(*(frames.window_update(number, 1) for number in range(1, 4001, 2)))
    first = client.connection.take()
    assert len(first) <= 10 * (ROOM_BYTES // DATA_COST + 1)
    rest = [one for one in client.take() if one.kind == frames.DATA]
    assert len(rest) + len(first) // 10 == 2000


async def test_a_header_block_that_does_not_end_ends_its_connection() -> None:
    link, transport, client = ready()
    begun = client.headers(1)
    link.data_received(begun[:4] + b"\0" + begun[5:])  # without END_HEADERS
    now_s = link._heard_s
    link.tick(now_s)
    link.tick(now_s + 9)
    assert not transport.aborted
    link.data_received(frame(frames.CONTINUATION, 0, 1, b""))
    link.tick(now_s + 11)
    assert transport.aborted
    assert link.connection.failed.code is ErrorCode.ENHANCE_YOUR_CALM


async def test_a_frame_that_does_not_end_ends_its_connection() -> None:
    link, transport, client = ready()
    begun = client.call(1, bytes(1000))
    link.data_received(begun[:-10])
    now_s = link._heard_s
    for later_s in (0, 10, 20, 29):
        link.data_received(begun[-10:-9] if later_s == 20 else b"")
        link.tick(now_s + later_s)
    assert not transport.aborted
    link.tick(now_s + 31)
    assert transport.aborted


@pytest.mark.parametrize(("size", "ends"), [(100, True), (16_000, False)])
async def test_a_request_that_goes_on_too_slowly_is_ended(size: int, ends: bool) -> None:
    link, _, client = ready()
    link.data_received(client.headers(1) + data(1, b"\0" + (1 << 20).to_bytes(4)))
    now_s = link._heard_s
    for seconds in range(0, 41, 2):
        link.tick(now_s + seconds)
        if 1 in link.connection.streams:
            link.data_received(data(1, bytes(size)))
    assert (1 not in link.connection.streams) == ends
    assert not link.connection.failed


def call_of(connection: Any, number: int, started: list[int]) -> Any:
    return SimpleNamespace(
        connection=connection, number=number, start=lambda: started.append(number)
    )


def peer_that_reads(reads: bool = True) -> Any:
    return Client(ready=False).connection if reads else unread(Client(ready=False).connection)


def unread(connection: Any) -> Any:
    connection.unread_bytes = MAX_UNREAD_BYTES + 1
    return connection


async def test_handlers_start_a_few_in_a_turn_and_the_connections_in_turn() -> None:
    starts, started = HandlerStarter(), []
    greedy, modest = peer_that_reads(), peer_that_reads()
    for number in range(1, 1001):
        starts.start_handler(call_of(greedy, number, started))
    starts.start_handler(call_of(modest, 2001, started))
    assert len(started) == handled._MOST_STARTS
    await asyncio.sleep(0)
    assert 2001 in started
    assert len(started) <= 2 * handled._MOST_STARTS
    await turns(lambda: not greedy.starting)
    assert sorted(started) == [*range(1, 1001), 2001]


async def test_no_handler_starts_for_a_peer_that_does_not_read_until_it_does() -> None:
    starts, started = HandlerStarter(), []
    deaf, other = peer_that_reads(False), peer_that_reads()
    starts.start_handler(call_of(deaf, 1, started))
    starts.start_handler(call_of(other, 2, started))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert started == [2]
    assert deaf.gated
    deaf.unread_bytes = 0
    starts.resume_handlers(deaf)
    await asyncio.sleep(0)
    assert started == [2, 1]


def test_a_compressed_message_takes_as_many_turns_as_it_needs() -> None:
    host = EchoHost(turn=-1.0)
    client = Client(host, ready=False).send(frames.PREFACE + frames.settings({}))
    body = bytes(1 << 20)
    packed = gzip.compress(body)
    call = client.headers(1, ("grpc-encoding", "gzip")) + data(
        1, message(packed, flag=1), end_stream=True
    )
    client.send(call)
    turns = 0
    while client.connection.behind:
        client.connection.proceed()
        turns += 1
    assert turns >= 4
    assert b"".join(host.opened[0].got) == body
