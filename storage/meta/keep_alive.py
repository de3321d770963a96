"""Renewals of many leases over one stream.

Whoever waits for an answer reads for all who wait, so there is no task of its own to supervise. A stream that fails, or
whose reader is cancelled, is given up whole: its waiters hear of it and ask again on a new one.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from typing import Any

from etcdpb import rpc_pb2

from storage.meta.calls import is_cancelled
from storage.meta.errors import MetaUnavailableError

_Waiting = dict[int, deque[asyncio.Future[int]]]


class KeepAlives:
    """`connect` opens a LeaseKeepAlive call."""

    def __init__(self, connect: Callable[[], Awaitable[Any]]) -> None:
        self._connect = connect
        self._opening = asyncio.Lock()
        self._stream: _Stream | None = None

    async def renew(self, lease: int) -> int:
        """The lease's TTL in seconds from before this was sent, 0 if it is over.

        Raises:
            MetaUnavailableError: the stream broke.
            grpc.aio.AioRpcError: it could not be opened, or the server ended it.
        """
        async with self._opening:
            if self._stream is None or self._stream.broken:
                self._stream = _Stream(await self._connect())
        return await self._stream.renew(lease)

    def close(self) -> None:
        """Give the stream up."""
        if self._stream is not None:
            self._stream.give_up()


class _Stream:
    def __init__(self, call: Any) -> None:
        self.broken = False
        self._call = call
        self._writing = asyncio.Lock()
        self._reading = asyncio.Lock()
        self._waiting: _Waiting = defaultdict(deque)

    async def renew(self, lease: int) -> int:
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        try:
            async with self._writing:
                self._check()
                self._waiting[lease].append(answer)
                await self._call.write(rpc_pb2.LeaseKeepAliveRequest(ID=lease))
            while not answer.done():
                async with self._reading:
                    if not answer.done():
                        self._check()
                        self._take(await self._call.read())
        except asyncio.InvalidStateError as err:  # gRPC's word for a call that ended while nobody read
            self.give_up()
            raise MetaUnavailableError("the stream of lease renewals had ended; try again") from err
        except BaseException as err:
            answer.cancel()  # nobody looks at it any more
            self.give_up()
            if isinstance(err, asyncio.CancelledError) and not is_cancelled():
                raise MetaUnavailableError("another waiter gave the stream of lease renewals up; try again") from err
            raise
        return answer.result()

    def _check(self) -> None:
        if self.broken:
            raise MetaUnavailableError("the stream of lease renewals broke; try again")

    def _take(self, response: Any) -> None:
        if not isinstance(response, rpc_pb2.LeaseKeepAliveResponse):
            raise MetaUnavailableError("the server ended the stream of lease renewals; try again")
        waiting = self._waiting[response.ID]
        if waiting and not (answer := waiting.popleft()).done():
            answer.set_result(response.TTL)
        if not waiting:
            del self._waiting[response.ID]

    def give_up(self) -> None:
        self.broken = True
        self._call.cancel()
