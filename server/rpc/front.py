"""Hot calls as batches: what waits on a route is handed to one function call,
and answered together.

A batch function takes the requests' bytes and returns as many answers, bytes or errors as values:
one bad request must not fail its neighbours. While a batch is being worked on, the next one
gathers; there is no timer. Two engines put calls on routes: grpc.aio, where a task waits for each
(`handlers`), and our own, where nothing does (`http2`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import grpc

from server.rpc.errors import StatusError
from storage.defect import request_error
from storage.group_queue import GroupQueue
from storage.model.errors import TidemarkError

Answer = bytes | TidemarkError
BatchHandler = Callable[[Sequence[bytes]], Awaitable[Sequence[Answer]]]

MAX_ITEMS = 1024
MAX_BYTES = 1 << 20
MAX_WAITING = 16_384
MAX_WAITING_BYTES = 64 << 20


class OverloadedError(StatusError):
    """More calls, or bytes of them, wait on this route than the daemon will hold."""

    def __init__(self, message: str) -> None:
        super().__init__(grpc.StatusCode.RESOURCE_EXHAUSTED, message)


class ClosedError(StatusError):
    """The route's loop has ended."""

    def __init__(self) -> None:
        super().__init__(
            grpc.StatusCode.UNAVAILABLE, "the server is stopping; ask another one, or again"
        )


class Waiter(Protocol):
    """Whoever waits for one answer, as an `asyncio.Future` does."""

    def done(self) -> bool:
        """Whether it waits no more; then it is neither asked for nor answered."""

    def set_result(self, result: Answer, /) -> None:
        """The answer."""


class Route:
    """One method's queue and the loop that empties it."""

    def __init__(
        self, name: str, handler: BatchHandler, refusal: Callable[[], TidemarkError] = ClosedError
    ) -> None:
        """`refusal` makes the answer to whoever still waits, or comes, when the loop has ended."""
        self.name = name
        self._handler = handler
        self._refusal = refusal
        self._queue: GroupQueue[tuple[bytes, Waiter]] = GroupQueue(MAX_ITEMS, MAX_BYTES)
        self._batch: list[tuple[bytes, Waiter]] = []
        self._attached: set[Waiter] = set()
        self._closed = False

    async def call(self, request: bytes) -> Answer:
        """Queue one request and wait for its answer;
        who stops waiting before it is worked on has asked nothing.
        """
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.put(request, future)
        return await future

    def put(self, request: bytes, waiter: Waiter) -> None:
        """Queue one request; `waiter` is answered later, or at once with a refusal."""
        queue, size = self._queue, len(request)
        if queue and (len(queue) >= MAX_WAITING or queue.waiting_bytes + size > MAX_WAITING_BYTES):
            waiting = f"{len(queue)} calls of {self.name} with {queue.waiting_bytes} bytes"
            waiter.set_result(OverloadedError(f"{waiting} are waiting; slow down and try again"))
        elif self._closed:
            waiter.set_result(self._refusal())
        else:
            queue.put((request, waiter), size)

    def attach(self, waiter: Waiter) -> None:
        """Let one who may ask again and again know the end of the loop, too; until `detach`."""
        self._attached.add(waiter)

    def detach(self, waiter: Waiter) -> None:
        """It asks no more."""
        self._attached.discard(waiter)

    async def run(self) -> None:
        """Answer batches until cancelled; then nobody is left waiting."""
        try:
            while True:
                await self._queue.wait()
                while calls := self._queue.take():
                    self._batch = [call for call in calls if not call[1].done()]
                    await self._answer(self._batch)
        finally:
            self._close()

    async def _answer(self, batch: list[tuple[bytes, Waiter]]) -> None:
        if not batch:
            return
        try:
            answers = await self._handler([request for request, _ in batch])
            assert len(answers) == len(batch), (
                f"{self.name} answered {len(answers)} of {len(batch)} calls"
            )
        except Exception as err:  # noqa: BLE001 - whatever a batch meets, it ends its calls and not the route
            answers = [request_error(err, self.name)] * len(batch)
        self._batch = []
        for (_, waiter), answer in zip(batch, answers, strict=True):
            if not waiter.done():
                waiter.set_result(answer)

    def _close(self) -> None:
        self._closed = True
        for _, waiter in self._batch + self._queue.take_all():
            if not waiter.done():
                waiter.set_result(self._refusal())
        for waiter in list(self._attached):
            waiter.set_result(self._refusal())
