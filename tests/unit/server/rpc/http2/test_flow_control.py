"""Windows: nothing is sent beyond the peer's, everything once there is room;
ours bound what a peer may send.
"""

import asyncio
from typing import Any

import grpc
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from server.rpc.http2 import frames
from server.rpc.http2.connection import CONNECTION_WINDOW
from server.rpc.http2.frames import ErrorCode, window_update
from server.rpc.http2.handled import HandledCall, IncomingRequest
from server.rpc.http2.headers import RequestHead
from server.rpc.http2.messages import MessageReader
from server.rpc.http2.stream import STREAM_WINDOW, ConnectionState
from tests.unit.server.rpc.http2.wire import Client, EchoHost, data, message


class Answers(RuleBasedStateMachine):
    """A peer that gives windows as it likes, beside a model of what it has given."""

    @initialize(window=st.integers(0, 70_000))
    def connect(self, window: int) -> None:
        self.client = Client(ready=False)
        self.client.send(frames.PREFACE + frames.settings({4: window}))
        self.initial, self.connection_window = window, frames.DEFAULT_WINDOW
        self.windows: dict[int, int] = {}
        self.given: dict[int, bytes] = {}
        self.got: dict[int, bytes] = {}
        self.ended: set[int] = set()
        self.client.take()

    @rule(size=st.integers(0, 60_000))
    def answer_a_call(self, size: int) -> None:
        number = 2 * len(self.given) + 1
        self.client.send(self.client.headers(number, path="/hold"))
        self.windows[number] = self.initial
        body = bytes([number % 256]) * size
        self.given[number], self.got[number] = message(body), b""
        self.client.host.opened[-1].answer(body)

    @rule(increment=st.integers(1, 50_000))
    def widen_the_connection(self, increment: int) -> None:
        self.connection_window += increment
        self.client.send(window_update(0, increment))

    @precondition(lambda self: self.given)
    @rule(increment=st.integers(1, 50_000), draw=st.data())
    def widen_a_stream(self, increment: int, draw: st.DataObject) -> None:
        number = draw.draw(st.sampled_from(sorted(self.given)))
        self.windows[number] += increment
        self.client.send(window_update(number, increment))

    @rule(window=st.integers(0, 70_000))
    def change_the_initial_window(self, window: int) -> None:
        for number in self.windows:
            self.windows[number] += window - self.initial
        self.initial = window
        self.client.send(frames.settings({4: window}))

    @rule(size=st.sampled_from([16_384, 20_000, 1 << 20]))
    def change_the_largest_frame(self, size: int) -> None:
        self.client.send(frames.settings({5: size}))

    @invariant()
    def nothing_is_sent_beyond_a_window(self) -> None:
        if not hasattr(self, "client"):
            return
        for one in self.client.take():
            if one.kind == frames.DATA:
                self.windows[one.stream] -= len(one.payload)
                self.connection_window -= len(one.payload)
                assert self.windows[one.stream] >= 0
                assert self.connection_window >= 0
                self.got[one.stream] += one.payload
            if one.flags & frames.END_STREAM and one.kind == frames.HEADERS:
                self.ended.add(one.stream)
        for number, whole in self.given.items():
            assert whole.startswith(self.got[number])
            assert (number in self.ended) == (whole == self.got[number])
            stuck = (
                number not in self.ended and self.windows[number] > 0 and self.connection_window > 0
            )
            assert not stuck, "there is room, but it is not used"
        assert self.client.connection.failed is None


Answers.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAnswers = Answers.TestCase


@given(st.lists(st.integers(0, 16_384), max_size=120))
def test_our_windows_are_given_back_as_calls_are_read(sizes: list[int]) -> None:
    client = Client()
    client.send(client.headers(1, path="/hold"))
    room = {0: CONNECTION_WINDOW, 1: STREAM_WINDOW}
    client.take()
    for size in sizes:
        room[0] -= size
        room[1] -= size
        assert min(room.values()) >= 0
        client.send(data(1, message(bytes(size - 5)) if size >= 5 else b"\0\0\0\0\0" * (size > 0)))
        for one in client.take():
            assert one.kind == frames.WINDOW_UPDATE
            room[one.stream] += int.from_bytes(one.payload)
    assert client.connection.failed is None


def test_more_data_than_windows_allow_is_a_fault() -> None:
    client = Client()
    client.send(client.headers(1, path="/hold"))
    stream = client.host.opened[0]
    stream._credit = 10
    client.send(data(1, bytes(11)))
    assert [one.code for one in client.take() if one.kind == frames.RST_STREAM] == [
        ErrorCode.FLOW_CONTROL_ERROR
    ]
    client.connection._credit = 10
    client.send(client.headers(3), data(3, bytes(11)))
    assert client.take()[-1].code is ErrorCode.FLOW_CONTROL_ERROR


class HandlerHost(EchoHost):
    """Gives each call to one handler of streams."""

    def __init__(self, behavior: Any, tasks: asyncio.TaskGroup) -> None:
        super().__init__()
        self._handler = grpc.stream_stream_rpc_method_handler(behavior)
        self._tasks = tasks

    def open(
        self, connection: ConnectionState, number: int, head: RequestHead, timeout_s: float | None
    ) -> HandledCall:
        request = IncomingRequest(head, MessageReader(1 << 20, b""), timeout_s)
        return HandledCall(connection, number, self._handler, request, self._tasks.create_task)


async def test_messages_without_bytes_are_counted_until_their_handler_reads_them() -> None:
    reads, count = asyncio.Event(), 0

    async def behavior(requests: Any, _: Any) -> None:
        nonlocal count
        await reads.wait()
        async for _ in requests:
            count += 1

    async with asyncio.TaskGroup() as tasks:
        host = HandlerHost(behavior, tasks)
        client = Client(host)
        client.send(client.headers(1))
        frame, sent = data(1, message(b"") * 3000), 0
        while sent * 5 <= STREAM_WINDOW // 2:
            client.send(frame)
            sent += 3000
        given = [one.kind for one in client.take() if one.stream == 1]
        counted_bytes = host.request_bytes
        reads.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        given_then = [one.kind for one in client.take() if one.stream == 1]
        client.send(data(1, message(b""), end_stream=True))
    assert not given
    assert counted_bytes >= sent * 64
    assert given_then == [frames.WINDOW_UPDATE]
    assert count == sent + 1
    assert not host.request_bytes
