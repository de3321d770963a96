"""Hot unary calls as batches: what waits on a route is handed to one function call, and answered together.

A batch function takes the requests' bytes and returns as many answers, bytes or errors as values: one bad request must
not fail its neighbours. While a batch is being worked on, the next one gathers; there is no timer. grpc.aio is the
engine today, a native one may follow behind the same two types (docs/ARCHITECTURE.md, "Front").
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import grpc

from server.rpc.errors import StatusError
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


class Route:
    """One method's queue and the loop that empties it."""

    def __init__(self, name: str, handler: BatchHandler) -> None:
        self.name = name
        self._handler = handler
        self._waiting: deque[tuple[bytes, asyncio.Future[Answer]]] = deque()
        self._bytes = 0
        self._wake = asyncio.Event()

    async def call(self, request: bytes) -> Answer:
        """Queue one request and wait for its answer; who stops waiting before it is worked on has asked nothing."""
        if self._waiting and (len(self._waiting) >= MAX_WAITING or self._bytes + len(request) > MAX_WAITING_BYTES):
            waiting = f"{len(self._waiting)} calls of {self.name} with {self._bytes} bytes"
            return OverloadedError(f"{waiting} are waiting; slow down and try again")
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        self._bytes += len(request)
        self._wake.set()
        return await future

    async def run(self) -> None:
        """Answer batches until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while batch := self._take():
                await self._answer(batch)

    def _take(self) -> list[tuple[bytes, asyncio.Future[Answer]]]:
        batch: list[tuple[bytes, asyncio.Future[Answer]]] = []
        size = 0
        while self._waiting and len(batch) < MAX_ITEMS and size < MAX_BYTES:
            request, future = self._waiting.popleft()
            self._bytes -= len(request)
            if not future.done():
                size += len(request)
                batch.append((request, future))
        return batch

    async def _answer(self, batch: list[tuple[bytes, asyncio.Future[Answer]]]) -> None:
        try:
            answers = await self._handler([request for request, _ in batch])
        except TidemarkError as err:
            answers = [err] * len(batch)
        assert len(answers) == len(batch), f"{self.name} answered {len(answers)} of {len(batch)} calls"
        for (_, future), answer in zip(batch, answers, strict=True):
            if not future.done():
                future.set_result(answer)
