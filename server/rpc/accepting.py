"""Accepting connections: those of all addresses in turn,
so that who connects by the thousand waits for himself.

Taking a connection from the kernel costs microseconds, setting it up some hundred. So all are taken
at once, and wait here, by address, until one turn of the loop after the other sets a few of them
up. The kernel's own queue knows no addresses: behind thousands of connections in it a new client
would wait until they are set up.
"""

import asyncio
import socket
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import structlog

from server.rpc.addresses import client_address
from server.rpc.http2 import metrics

_TAKEN_AT_ONCE, _SET_UP_AT_ONCE = 128, 16
_OUT_OF_FILES_S = 0.5
_MOST_WAITING = 4096

_log = structlog.get_logger(__name__)


class Waiting:
    """Connections that are accepted and not set up, by address; where there are too many,
    the longest queue loses.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self._queues: OrderedDict[str, deque[socket.socket]] = OrderedDict()

    def __len__(self) -> int:
        return self._count

    def add(self, address: str, accepted: socket.socket) -> socket.socket | None:
        """Let it wait; returns the one, maybe itself, that has to go for it."""
        self._queues.setdefault(address, deque()).append(accepted)
        self._count += 1
        return self._last_of_longest() if self._count > self._most else None

    def next(self) -> tuple[str, socket.socket]:
        """The one whose turn it is, and its address."""
        address, queue = self._queues.popitem(last=False)
        self._count -= 1
        accepted = queue.popleft()
        if queue:
            self._queues[address] = queue
        return address, accepted

    def _last_of_longest(self) -> socket.socket:
        address = max(self._queues, key=lambda one: len(self._queues[one]))
        self._count -= 1
        dropped = self._queues[address].pop()
        if not self._queues[address]:
            del self._queues[address]
        return dropped


class Accepting:
    """Accepts for a server; `connect` sets a connection up, and does not wait."""

    def __init__(self, connect: Callable[[socket.socket, str], None], spare_files: int) -> None:
        self._connect = connect
        self._waiting = Waiting(max(1, min(_MOST_WAITING, spare_files // 4)))
        self._arrived = asyncio.Event()

    async def run(self, listeners: Sequence[socket.socket]) -> None:
        """Accept until cancelled; connections that wait are closed then."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for listener in listeners:
                    tasks.create_task(self._accept(listener))
                tasks.create_task(self._set_up())
        finally:
            while self._waiting:
                self._waiting.next()[1].close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                self._add(*await loop.sock_accept(listener))
                for _ in range(_TAKEN_AT_ONCE):
                    self._add(*listener.accept())
            except BlockingIOError:
                pass  # there are no more
            except OSError as err:
                _log.warning("a connection cannot be accepted", reason=str(err))
                await asyncio.sleep(_OUT_OF_FILES_S)
            # `sock_accept` does not wait while there is one more
            await asyncio.sleep(0)

    def _add(self, accepted: socket.socket, peer: object) -> None:
        accepted.setblocking(False)  # noqa: FBT003 - positional in the library
        dropped = self._waiting.add(client_address(peer), accepted)
        if dropped is not None:
            metrics.REFUSED.inc()
            with suppress(OSError):
                dropped.close()
        self._arrived.set()

    async def _set_up(self) -> None:
        while True:
            await self._arrived.wait()
            for _ in range(min(_SET_UP_AT_ONCE, len(self._waiting))):
                address, accepted = self._waiting.next()
                self._connect(accepted, address)
            if not self._waiting:
                self._arrived.clear()
            await asyncio.sleep(0)
