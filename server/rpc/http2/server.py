"""The listener: accepts connections, finds each call's handler, bounds what all of them have, drains.

It takes the same handlers as `grpc.aio.Server`, and serves those of batch routes without a task.
"""

import asyncio
import socket
import ssl
import time
from collections.abc import Coroutine, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import grpc
import structlog

from server.rpc.errors import StatusError, unknown
from server.rpc.front import OverloadedError
from server.rpc.http2 import metrics
from server.rpc.http2.batched import BatchedCall, BatchedStream
from server.rpc.http2.connection import Connection
from server.rpc.http2.handled import HandledCall
from server.rpc.http2.host import Bounds
from server.rpc.http2.link import Link
from server.rpc.http2.messages import MessageReader
from server.rpc.http2.request_head import RequestHead
from server.rpc.http2.sockets import close, listening
from server.rpc.http2.stream import Stream
from server.rpc.limits import METADATA_BYTES, PING_STRIKES, PINGS_PER_S, Limits

_TICK_S = 2.0
_HANDSHAKE_S = 10.0
_OUT_OF_FILES_S = 0.5
_CLOSE_S = 1.0
_MAX_UNSENT_BYTES = 64 << 20

_log = structlog.get_logger(__name__)


class NativeServer:
    """One listener; `add_…` and `bind` first, then `start` and, once, `stop`."""

    def __init__(self, limits: Limits, tls: ssl.SSLContext | None) -> None:
        self._limits = limits
        self._tls = tls
        self._bounds = Bounds(
            metadata_bytes=METADATA_BYTES, streams=2 * limits.calls, pings=PING_STRIKES, pings_per_s=PINGS_PER_S
        )
        self._handlers: dict[str, Any] = {}
        self._generic: list[Any] = []
        self._sockets: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._links: set[Link] = set()
        self._connections = self._calls = self._tasks = self._held = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._group: asyncio.TaskGroup | None = None
        self._serving: asyncio.Task[None] | None = None

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Any]) -> None:
        """Serve these methods of a service."""
        self._handlers |= {f"/{service_name}/{name}": handler for name, handler in method_handlers.items()}

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[Any]) -> None:
        """Ask these, in order, for what nobody registered; those of one service are registered, too."""
        self._generic += [one for one in generic_rpc_handlers if not isinstance(one, grpc.ServiceRpcHandler)]

    def bind(self, address: str) -> int:
        """Listen on `host:port`; returns the port. Connections wait until `start`.

        Raises:
            OSError: the address is taken or not ours.
        """
        self._sockets += listening(address)
        name = self._sockets[-1].getsockname()
        return int(name[1]) if isinstance(name, tuple) else 1  # what gRPC says of paths

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Serve, in tasks of the group, until `stop`."""
        started = asyncio.Event()
        self._serving = tasks.create_task(self._serve(started), name="http2")
        await started.wait()

    async def stop(self, grace_s: float) -> None:
        """Take no more calls; let those under way end within `grace_s`, then end them; close all connections."""
        self._close_sockets()
        for link in list(self._links):
            link.connection.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._quiet.wait()
        for stream in self._open_streams():
            stream.stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await self._quiet.wait()
                for link in list(self._links):
                    link.close()
                while self._links:
                    await next(iter(self._links)).closed
        for link in list(self._links):
            link.cut()
        if self._serving is not None:
            self._serving.cancel()

    def open(self, connection: Connection, number: int, head: RequestHead, timeout_s: float | None) -> Stream:
        """See `Host`."""
        if self._calls >= self._limits.calls or self._tasks >= 2 * self._limits.calls:
            raise OverloadedError("Concurrent RPC limit exceeded!")
        if connection.unsent_bytes > _MAX_UNSENT_BYTES:
            raise OverloadedError(f"{connection.unsent_bytes} bytes of answers wait for this client to read them")
        stream = self._stream(connection, number, head, timeout_s)
        self._calls += 1
        self._quiet.clear()
        return stream

    def released(self) -> None:
        """See `Host`."""
        self._calls -= 1
        self._check_quiet()

    def hold(self, change: int) -> bool:
        """See `Host`."""
        self._held += change
        return self._held <= self._limits.held_bytes

    def _stream(self, connection: Connection, number: int, head: RequestHead, timeout_s: float | None) -> Stream:
        handler = self._handlers.get(head.method) or self._asked(head)
        size = self._limits.message_bytes
        route = getattr(handler, "route", None)
        if route is None:
            reader = MessageReader(size, head.encoding)
            return HandledCall(connection, number, handler, head, reader, self._spawn, timeout_s)
        if handler.request_streaming:
            return BatchedStream(connection, number, route, size, head.encoding)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        return BatchedCall(connection, number, route, size, head.encoding, deadline)

    def _asked(self, head: RequestHead) -> Any:
        for generic in self._generic:
            handler = generic.service(head)
            if handler is not None:
                return handler
        raise StatusError(grpc.StatusCode.UNIMPLEMENTED, unknown(head.method))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        assert self._group is not None
        task = self._group.create_task(coroutine)
        self._tasks += 1
        task.add_done_callback(self._ended)
        return task

    def _ended(self, _task: asyncio.Task[None]) -> None:
        self._tasks -= 1
        self._check_quiet()

    def _check_quiet(self) -> None:
        if not self._calls and not self._tasks:
            self._quiet.set()

    def _open_streams(self) -> list[Stream]:
        return [stream for link in self._links for stream in link.connection.streams.values()]

    async def _serve(self, started: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            self._group = group
            self._accepting = [group.create_task(self._accept(one, group)) for one in self._sockets]
            group.create_task(self._look_after())
            started.set()

    async def _accept(self, listener: socket.socket, group: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listener)
            except OSError as err:
                _log.warning("a connection cannot be accepted", reason=str(err))
                await asyncio.sleep(_OUT_OF_FILES_S)
                continue
            if self._connections >= self._limits.most_connections:
                accepted.close()
            else:
                group.create_task(self._connected(accepted))

    async def _connected(self, accepted: socket.socket) -> None:
        self._connections += 1
        metrics.CONNECTIONS.inc()
        try:
            _, link = await asyncio.get_running_loop().connect_accepted_socket(
                partial(Link, self, self._bounds, self._links),
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=_HANDSHAKE_S if self._tls else None,
            )
            await link.closed
        except OSError as err:
            _log.debug("a connection was not set up", reason=str(err))
        finally:
            self._connections -= 1
            metrics.CONNECTIONS.dec()

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            now_s = time.monotonic()
            for link in list(self._links):
                link.tick(now_s)

    def _close_sockets(self) -> None:
        for task in self._accepting:
            task.cancel()
        for one in self._sockets:
            close(one)
