"""The client's half of the timestamp oracle: concurrent callers share one stream and one request.

Whoever holds the lock makes the round trip for all that wait; nobody else needs a task. A round
that fails, or whose caller is cancelled, puts its callers back in front: a timestamp that was
handed out and lost does no harm.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from kvproto import pdpb_pb2

from storage.model.errors import UnavailableError
from storage.model.ts import LOGICAL_MAX, compose

TsoCall = grpc.aio.StreamStreamCall[pdpb_pb2.TsoRequest, pdpb_pb2.TsoResponse]


class TsoUnavailableError(UnavailableError):
    """The stream to the timestamp oracle ended."""

    code = "ErrTsoUnavailable"


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    count: int
    last: asyncio.Future[int]


class TsoStream:
    """Timestamps from the leader, to which `connect` opens a stream;
    `take` may be called by any number of tasks.
    """

    def __init__(
        self, connect: Callable[[], Awaitable[TsoCall]], header: pdpb_pb2.RequestHeader
    ) -> None:
        self._connect = connect
        self._header = header
        self._call: Any = None
        self._lock = asyncio.Lock()
        self._waiting: deque[_Waiter] = deque()

    async def take(self, count: int) -> int:
        """Reserve `count` timestamps; returns the last one, the others are just below it.

        Raises:
            TsoUnavailableError: the stream ended without an answer; try again.
            grpc.aio.AioRpcError: the coordinator refused, or is not there.
        """
        waiter = _Waiter(count, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        try:
            while not waiter.last.done():
                async with self._lock:
                    if not waiter.last.done():
                        await self._round()
            return waiter.last.result()
        finally:
            # its caller left; a round that has it on board looks before it answers
            if waiter.last.cancel():
                with suppress(ValueError):
                    self._waiting.remove(waiter)

    def close(self) -> None:
        """End the stream."""
        if self._call is not None:
            self._call.cancel()
            self._call = None

    async def _round(self) -> None:
        batch = self._next_batch()
        total = sum(waiter.count for waiter in batch)
        try:
            if self._call is None:
                self._call = await self._connect()
            # the stream ended meanwhile: reading tells why
            with suppress(asyncio.InvalidStateError):
                await self._call.write(pdpb_pb2.TsoRequest(header=self._header, count=total))
            # The answer names the last of `total` timestamps; each caller gets its part, in the
            # order of asking, so later callers have greater ones.
            last = _last_ts(await self._call.read()) - total
        except BaseException:
            self.close()
            # In front, in their order: they have waited longest. Timestamps that the lost round
            # handed out are never used, which does no harm.
            self._waiting.extendleft(waiter for waiter in reversed(batch) if not waiter.last.done())
            raise
        for waiter in batch:
            last += waiter.count
            if not waiter.last.done():
                waiter.last.set_result(last)

    def _next_batch(self) -> list[_Waiter]:
        batch = [self._waiting.popleft()]
        total = batch[0].count
        while self._waiting and total + self._waiting[0].count <= LOGICAL_MAX // 2:
            batch.append(self._waiting.popleft())
            total += batch[-1].count
        return batch


def _last_ts(response: Any) -> int:
    if not isinstance(response, pdpb_pb2.TsoResponse):
        raise TsoUnavailableError("the coordinator ended the TSO stream; try again")
    return compose(response.timestamp.physical, response.timestamp.logical)
