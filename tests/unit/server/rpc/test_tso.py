"""Timestamps for many callers over one stream: callers leave, streams end,
and nobody gets another's timestamps.
"""

import asyncio
from typing import Any

import grpc
import pytest
from kvproto import pdpb_pb2

from server.rpc.pd import TsoStream, TsoUnavailableError
from storage.model.ts import compose


class Call:
    """A stream whose answers wait until `go` is set; then it counts on from `last`,
    or has ended.
    """

    def __init__(self, last: int = 0, *, ends: bool = False) -> None:
        self.go, self.asked = asyncio.Event(), asyncio.Event()
        self.written: list[int] = []
        self._last = last
        self._ends = ends

    async def write(self, request: pdpb_pb2.TsoRequest) -> None:
        self.written.append(request.count)
        self.asked.set()

    async def read(self) -> Any:
        await self.go.wait()
        if self._ends:
            return grpc.aio.EOF
        self._last += self.written[-1]
        return pdpb_pb2.TsoResponse(timestamp=pdpb_pb2.Timestamp(physical=1, logical=self._last))

    def cancel(self) -> None:
        self._ends = True


def stream_of(*calls: Call) -> TsoStream:
    coming = iter(calls)

    async def connect() -> Any:
        return next(coming)

    return TsoStream(connect, pdpb_pb2.RequestHeader())


async def fails(stream: TsoStream) -> None:
    with pytest.raises(TsoUnavailableError):
        await stream.take(1)


async def test_callers_that_wait_together_share_a_request_and_part_its_timestamps() -> None:
    call = Call()
    stream = stream_of(call)
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(stream.take(1))
        await call.asked.wait()
        others = [tasks.create_task(stream.take(count)) for count in (2, 3)]
        await asyncio.sleep(0)
        call.go.set()
    assert call.written == [1, 5]
    assert [task.result() for task in (first, *others)] == [
        compose(1, 1),
        compose(1, 3),
        compose(1, 6),
    ]


async def test_a_caller_that_leaves_while_its_round_is_under_way_disturbs_nobody() -> None:
    silent, second = Call(), Call(last=100)
    stream = stream_of(silent, second)
    second.go.set()
    async with asyncio.TaskGroup() as tasks:
        leading = tasks.create_task(stream.take(1))
        await silent.asked.wait()
        following = [tasks.create_task(stream.take(1)) for _ in range(2)]
        await asyncio.sleep(0)
        for task in (
            following[0],
            leading,
        ):  # of one still in the queue, and of the one that asks for all
            task.cancel()
    assert following[1].result() == compose(1, 101)
    assert second.written == [1]


async def test_a_caller_that_leaves_on_board_of_anothers_round_does_not_come_back_with_it() -> None:
    first, ending, last = Call(), Call(ends=True), Call(last=100)
    stream = stream_of(first, ending, last)
    last.go.set()
    async with asyncio.TaskGroup() as tasks:
        opening = tasks.create_task(stream.take(1))
        await first.asked.wait()
        tasks.create_task(fails(stream))
        boarded = tasks.create_task(stream.take(1))
        await asyncio.sleep(0)
        opening.cancel()
        await ending.asked.wait()
        assert ending.written == [2]
        boarded.cancel()
        await asyncio.sleep(0)
        ending.go.set()
    assert await stream.take(1) == compose(1, 101)
    assert last.written == [1]


async def test_a_stream_that_ended_between_two_calls_tells_why_when_read() -> None:
    call = Call(ends=True)
    call.go.set()

    async def ended(_request: pdpb_pb2.TsoRequest) -> None:
        raise asyncio.InvalidStateError("RPC already finished.")

    call.write = ended  # type: ignore[method-assign]  # what grpc.aio does then
    with pytest.raises(TsoUnavailableError):
        await stream_of(call).take(1)
