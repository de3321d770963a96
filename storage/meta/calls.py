"""The calls that a client has open, and the one stream that renews all its leases."""

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from etcdpb import rpc_pb2

from storage.meta.errors import MetaUnavailableError


class OpenCalls:
    """The open calls of a client, unary ones too, by endpoint:
    a server that falls silent ends all calls to it.
    """

    def __init__(self) -> None:
        self._open: dict[Any, str] = {}

    @contextmanager
    def reading(self, call: Any, address: str) -> Iterator[None]:
        """Register `call` to `address` for the block, which reads it;
        the call is cancelled at its end.

        Raises:
            MetaUnavailableError: `cancel_all` cancelled the call, or it had ended before it was
                used.
        """
        self._open[call] = address
        try:
            yield
        except asyncio.InvalidStateError as err:  # gRPC raises it for a call that has ended
            raise MetaUnavailableError(f"{address} ended a stream; try again") from err
        except asyncio.CancelledError as err:
            if is_cancelled():
                raise
            raise MetaUnavailableError(f"{address} is silent; try again") from err
        finally:
            self._open.pop(call, None)
            call.cancel()

    def cancel_all(self, address: str) -> None:
        """Cancel all calls to a server that fell silent."""
        for call, endpoint in list(self._open.items()):
            if endpoint == address:
                call.cancel()


def is_cancelled() -> bool:
    """Whether this task is cancelled; gRPC raises CancelledError also for a call that another task
    cancelled.
    """
    return cancellations() > 0


def cancellations() -> int:
    """The number of times that this task was cancelled; compare it with an earlier result."""
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0


class KeepAlives:
    """Renews many leases over one LeaseKeepAlive stream, which `connect` opens.

    One of the tasks that wait for an answer reads for all of them, so no task of the stream's own
    has to be supervised. When the stream fails, or a task that waits on it is cancelled, the whole
    stream is closed; the other tasks get MetaUnavailableError and try again on a new stream.
    """

    def __init__(self, connect: Callable[[], Awaitable[Any]]) -> None:
        self._connect = connect
        self._opening = asyncio.Lock()
        self._stream: _Stream | None = None

    async def renew(self, lease: int) -> int:
        """Renew; returns the lease's TTL in seconds, counted from before this was sent,
        0 if it has expired.

        Raises:
            MetaUnavailableError: the stream broke.
            grpc.aio.AioRpcError: it could not be opened, or the server ended it.
        """
        async with self._opening:
            if self._stream is None or self._stream.broken:
                self._stream = _Stream(await self._connect())
        return await self._stream.renew(lease)

    def close(self) -> None:
        """Close the stream."""
        if self._stream is not None:
            self._stream.close()


class _Stream:
    def __init__(self, call: Any) -> None:
        self.broken = False
        self._call = call
        self._writing = asyncio.Lock()
        self._reading = asyncio.Lock()
        self._waiting: dict[int, deque[asyncio.Future[int]]] = defaultdict(deque)

    async def renew(self, lease: int) -> int:
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        try:
            # Answers carry the lease's id only: they come in the order in which they were sent.
            async with self._writing:
                self._check()
                self._waiting[lease].append(answer)
                await self._call.write(rpc_pb2.LeaseKeepAliveRequest(ID=lease))
            # The task that holds `_reading` reads for all; the next may have its answer already.
            while not answer.done():
                async with self._reading:
                    if not answer.done():
                        self._check()
                        self._set_answer(await self._call.read())
        except asyncio.InvalidStateError as err:
            # gRPC raises it for a call that ended while nobody read.
            self.close()
            raise MetaUnavailableError("the stream of lease renewals had ended; try again") from err
        except BaseException as err:
            answer.cancel()
            self.close()
            if isinstance(err, asyncio.CancelledError) and not is_cancelled():
                raise MetaUnavailableError(
                    "another waiter gave the stream of lease renewals up; try again"
                ) from err
            raise
        return answer.result()

    def _check(self) -> None:
        if self.broken:
            raise MetaUnavailableError("the stream of lease renewals broke; try again")

    def _set_answer(self, response: Any) -> None:
        if not isinstance(response, rpc_pb2.LeaseKeepAliveResponse):
            raise MetaUnavailableError("the server ended the stream of lease renewals; try again")
        waiting = self._waiting[response.ID]
        if waiting and not (answer := waiting.popleft()).done():
            answer.set_result(response.TTL)
        if not waiting:
            del self._waiting[response.ID]

    def close(self) -> None:
        self.broken = True
        self._call.cancel()
