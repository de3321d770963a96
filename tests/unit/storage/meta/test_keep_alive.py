"""Lease renewals over one stream: however the stream ends,
each waiter hears of it as one error it can act on.
"""

import asyncio
from typing import Any

import pytest
from etcdpb import rpc_pb2

from storage.meta.calls import KeepAlives
from storage.meta.errors import MetaUnavailableError


class Call:
    """A stream as grpc.aio has it: a cancelled one raises CancelledError in its reader,
    an ended one refuses writes.
    """

    def __init__(self, *answers: Any) -> None:
        self.ended = False
        self.read_from, self._woken = asyncio.Event(), asyncio.Event()
        self._answers = list(answers)

    async def write(self, _request: rpc_pb2.LeaseKeepAliveRequest) -> None:
        if self.ended:
            raise asyncio.InvalidStateError("RPC already finished.")

    async def read(self) -> Any:
        if self._answers:
            return self._answers.pop()
        self.read_from.set()
        await self._woken.wait()
        raise asyncio.CancelledError

    def cancel(self) -> None:
        self.ended = True
        self._woken.set()


def answer(lease: int, ttl_s: int) -> rpc_pb2.LeaseKeepAliveResponse:
    return rpc_pb2.LeaseKeepAliveResponse(ID=lease, TTL=ttl_s)


async def test_a_stream_that_ended_between_two_renewals_is_opened_anew() -> None:
    calls: list[Call] = []

    async def connect() -> Call:
        calls.append(Call(answer(7, 3)))
        return calls[-1]

    keep_alives = KeepAlives(connect)
    assert await keep_alives.renew(7) == 3
    calls[0].ended = True
    with pytest.raises(MetaUnavailableError):
        await keep_alives.renew(7)
    assert await keep_alives.renew(7) == 3
    assert len(calls) == 2


async def test_a_stream_that_one_waiter_gives_up_is_an_error_to_the_others_and_cancels_nobody() -> (
    None
):
    call = Call()

    async def connect() -> Call:
        return call

    keep_alives = KeepAlives(connect)

    async def fails(lease: int) -> None:
        with pytest.raises(MetaUnavailableError):
            await keep_alives.renew(lease)

    async with asyncio.TaskGroup() as tasks:
        waiters = [tasks.create_task(fails(lease)) for lease in (7, 8)]
        await call.read_from.wait()
        keep_alives.close()
    assert not any(waiter.cancelled() for waiter in waiters)
