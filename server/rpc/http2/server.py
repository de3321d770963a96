"""The native listener: admits connections, finds each call's handler, bounds the calls and bytes
of all connections, and drains at its end.

It takes the same handlers as `grpc.aio.Server`, and serves those of batch routes without a task.
`Admission` limits connections: at most so many connections in all, and so many from one client
address. Where either is used up, connections without calls make room: those of the address itself
for one more of its own, those of the address with the most for one more of anybody's. An address
whose connections all have calls is refused.
"""

import asyncio
import heapq
import socket
import time
from collections.abc import Collection, Coroutine, Iterable, Mapping
from contextlib import suppress
from typing import Any

import grpc
import structlog

from server.rpc.call_access import CallAccess
from server.rpc.config import METADATA_BYTES, PING_STRIKES, PINGS_PER_S, Limits
from server.rpc.credentials import AllowedNames, ListenerTls, RefusedHandshakes
from server.rpc.errors import StatusError, unknown
from server.rpc.front import OverloadedError
from server.rpc.http1 import Http1Front, ProtocolChoice
from server.rpc.http2 import frames
from server.rpc.http2.batched import BatchedCall, BatchedStream
from server.rpc.http2.frames import ErrorCode
from server.rpc.http2.handled import HandledCall, HandlerStarter, IncomingRequest
from server.rpc.http2.headers import RequestHead
from server.rpc.http2.link import ServerProtocol
from server.rpc.http2.messages import MessageReader
from server.rpc.http2.peer import Bounds
from server.rpc.http2.stream import ConnectionState, Stream
from server.rpc.listener import (
    CONNECTIONS,
    ERRORS,
    EVICTED,
    REFUSED,
    Accepting,
    accept_connection,
    close_listener,
    open_listeners,
)
from storage.tasks import wait_at_most

_TICK_S = 2.0
_CLOSE_S = 1.0
_TURN_S, _LEAST_TURN_S = 0.01, 0.0005
"""The time of one turn of the loop that all connections together, and one of very many, may take
for what they received.
"""
_CALLS_OF_ANY_CONNECTION = 16
"""A connection with fewer open calls may open one while any is left; one with more, while at least
as many are left for all.
"""
_EVICTED_AT_ONCE = 32
_NONE_IDLE_S = 0.1
"""After a search that met no idle connection, newcomers are refused for so long without another
one.
"""

_log = structlog.get_logger(__name__)


class NativeServer:
    """One listener; `add_…` and `bind` first, then `start` and, once, `stop`."""

    def __init__(
        self,
        limits: Limits,
        tls: ListenerTls | None = None,
        allowed: AllowedNames | None = None,
        access: CallAccess | None = None,
    ) -> None:
        self._limits = limits
        self._tls = tls
        self._allowed = allowed or AllowedNames(())
        self._access = access or CallAccess()
        self._bounds = Bounds(
            metadata_bytes=METADATA_BYTES,
            streams=2 * limits.calls,
            pings=PING_STRIKES,
            pings_per_s=PINGS_PER_S,
            unsent_bytes=limits.unsent_bytes,
        )
        self._handlers: dict[str, Any] = {}
        self._generic: list[Any] = []
        self._sockets: list[socket.socket] = []
        self._accepting: asyncio.Task[None] | None = None
        self._links: set[ServerProtocol] = set()
        self._admission = Admission(limits, self._links)
        self._handshakes = RefusedHandshakes()
        self._calls = self._tasks = self._request_bytes = 0
        self._max_request_bytes = limits.held_bytes
        self._behind = self._buffered = 0
        self._relieving = False
        self._starter = HandlerStarter()
        self.start_handler, self.resume_handlers = (
            self._starter.start_handler,
            self._starter.resume_handlers,
        )
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._http1: Http1Front | None = None
        self._group: asyncio.TaskGroup | None = None
        self._serving: asyncio.Task[None] | None = None

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: Mapping[str, Any]
    ) -> None:
        """Serve these methods of a service."""
        self._handlers |= {
            f"/{service_name}/{name}": handler for name, handler in method_handlers.items()
        }

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[Any]) -> None:
        """Ask these, in order, for what nobody registered;
        those of one service are registered, too.
        """
        self._generic += [
            one for one in generic_rpc_handlers if not isinstance(one, grpc.ServiceRpcHandler)
        ]

    def bind(self, address: str) -> int:
        """Listen on `host:port`; returns the port. Connections wait until `start`.

        Raises:
            OSError: the address is taken or not ours.
        """
        self._sockets += open_listeners(address)
        name = self._sockets[-1].getsockname()
        # what gRPC says of paths
        return int(name[1]) if isinstance(name, tuple) else 1

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Serve, in tasks of the group, until `stop`."""
        started = asyncio.Event()
        self._serving = tasks.create_task(self._serve(started), name="http2")
        await started.wait()

    async def stop(self, grace_s: float) -> None:
        """Take no more calls; let those under way end within `grace_s`, then end them;
        close all connections.
        """
        # First of all, so that a client that is sent away by GOAWAY finds another server, not this
        # one.
        self._close_sockets()
        for link in list(self._links):
            link.drain()
        await wait_at_most(self._quiet, grace_s)
        # The grace is over: what still runs gets UNAVAILABLE, and a moment to have it written.
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
        if self._http1 is not None:
            await self._http1.close()
        if self._serving is not None:
            self._serving.cancel()

    def open(
        self, connection: ConnectionState, number: int, head: RequestHead, timeout_s: float | None
    ) -> Stream:
        """See `Host`."""
        free = self._limits.calls - self._calls
        if free <= 0 or self._tasks >= 2 * self._limits.calls:
            raise OverloadedError("Concurrent RPC limit exceeded!")
        own = len(connection.streams)
        # A share of what is free, not a fixed part: one client of many connections is stopped, and
        # something is left for the next.
        if own >= free and own >= _CALLS_OF_ANY_CONNECTION:
            raise OverloadedError(f"this connection has {own} calls open; {free} are left for all")
        if connection.unsent_bytes > self._bounds.unsent_bytes:
            raise OverloadedError(
                f"{connection.unsent_bytes} bytes of answers wait for this client to read them"
            )
        stream = self._stream(connection, number, head, timeout_s)
        self._calls += 1
        self._quiet.clear()
        return stream

    def released(self) -> None:
        """See `Host`."""
        self._calls -= 1
        self._check_quiet()

    def report_error(self, connection: ConnectionState, err: Exception) -> None:
        """See `Host`."""
        ERRORS.inc()
        _log.error(
            "a connection ended by an unexpected error", peer=connection.peer.address, exc_info=err
        )

    def turn_s(self) -> float:
        """See `Host`."""
        return max(_LEAST_TURN_S, _TURN_S / (1 + self._behind)) if self._behind else _TURN_S

    def count_behind(self, change: int) -> None:
        """See `Host`."""
        self._behind += change

    def count_buffered_bytes(self, change: int) -> None:
        """See `Host`."""
        self._buffered += change
        if self._buffered > self._limits.buffered_bytes and not self._relieving:
            self._relieving = True
            # Not at once: the caller is in the middle of writing one of the connections that may be
            # closed.
            asyncio.get_running_loop().call_soon(self._relieve)

    def count_request_bytes(self, change: int) -> bool:
        """See `Host`."""
        self._request_bytes += change
        return self._request_bytes <= self._max_request_bytes

    def _stream(
        self, connection: ConnectionState, number: int, head: RequestHead, timeout_s: float | None
    ) -> Stream:
        if self._allowed:
            self._allowed.check(connection.peer.auth.get("x509_common_name", ()))
        if self._access:
            names = connection.peer.auth.get("x509_common_name", ())
            metadata, peer = head.invocation_metadata, connection.peer.address
            self._access.check_call(head.method, metadata, names, peer)
        # A dictionary for what is registered; the generic handlers are asked in turn, like gRPC
        # does.
        handler = self._handlers.get(head.method) or self._generic_handler(head)
        stream = self._stream_of(connection, number, handler, head, timeout_s)
        if self._access and (handler.request_streaming or handler.response_streaming):
            stream.recheck_head = head
        return stream

    def _stream_of(
        self,
        connection: ConnectionState,
        number: int,
        handler: Any,
        head: RequestHead,
        timeout_s: float | None,
    ) -> Stream:
        size = self._limits.message_bytes
        route = getattr(handler, "route", None)
        if route is None:
            request = IncomingRequest(head, MessageReader(size, head.encoding), timeout_s)
            return HandledCall(connection, number, handler, request, self._spawn)
        if handler.request_streaming:
            return BatchedStream(connection, number, route, size, head.encoding)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        return BatchedCall(connection, number, route, size, head.encoding, deadline)

    def _generic_handler(self, head: RequestHead) -> Any:
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
            accepting = Accepting(self._connect, self._limits.spare_files)
            self._accepting = group.create_task(accepting.run(self._sockets))
            group.create_task(self._look_after())
            started.set()

    def _connect(self, accepted: socket.socket, address: str) -> None:
        refusal = self._admission.refusal(address)
        if refusal:
            self._refuse(accepted, refusal)
            return
        assert self._group is not None
        link = ServerProtocol(self, self._bounds, self._links)
        self._admission.add(link, address)
        # A task only for the set-up: TLS may take seconds, and one slow client must not hold up the
        # next.
        link.setting_up = self._group.create_task(self._connected(accepted, link, address))

    def _refuse(self, accepted: socket.socket, reason: str) -> None:
        """Say why, in plain text: over TLS it would cost a handshake."""
        REFUSED.inc()
        with suppress(OSError):
            if self._tls is None:
                accepted.send(
                    frames.settings({}) + frames.goaway(0, ErrorCode.ENHANCE_YOUR_CALM, reason)
                )
        accepted.close()

    def _relieve(self) -> None:
        """Close the connections whose peers let the most bytes wait,
        until a quarter of the bound is free.
        """
        self._relieving = False
        for link in sorted(self._links, key=lambda link: link.buffered_bytes, reverse=True):
            if self._buffered <= self._limits.buffered_bytes * 3 // 4 or not link.buffered_bytes:
                break
            EVICTED.labels("unread").inc()
            link.refuse(
                f"{link.buffered_bytes} bytes wait for this client to read them, too many with "
                "those of others"
            )

    def serve_http1(self, front: Http1Front) -> None:
        """Answer HTTP/1.1 on the same port; call it before `start`."""
        self._http1 = front
        if self._tls is not None:
            # gRPC's clients offer h2 only; who offers both wants HTTP
            self._tls.offer("http/1.1", "h2")

    def _protocol(self, link: ServerProtocol) -> asyncio.Protocol:
        """The protocol of a new connection: HTTP/2, or the choice between it and HTTP/1.1."""
        if self._http1 is None:
            return link
        choice = ProtocolChoice(
            link, self._http1, lambda: self._links.discard(link), lambda: link.connection_lost(None)
        )
        link.closed.add_done_callback(lambda _: choice.abort())
        return choice

    async def _connected(self, accepted: socket.socket, link: ServerProtocol, address: str) -> None:
        try:
            context = self._tls.context() if self._tls else None
            await accept_connection(lambda: self._protocol(link), accepted, context)
            await link.closed
        except OSError as err:
            if self._tls:
                self._handshakes.add(err, address)
            _log.debug("a connection was not set up", reason=str(err))
        except Exception as err:  # noqa: BLE001 - the `ssl` module may fail on a certificate that OpenSSL accepted
            ERRORS.inc()
            _log.exception("a connection could not be set up", reason=str(err))
        finally:
            self._admission.remove(link)
            link.connection_lost(None)

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            now_s = time.monotonic()
            for link in list(self._links):
                link.tick(now_s)
            if self._access and self._access.has_changed():
                self._end_refused()

    def _end_refused(self) -> None:
        """End the calls whose clients may not make them any more."""
        for stream in self._open_streams():
            head, peer = stream.recheck_head, stream.connection.peer
            if head is None:
                continue
            names = peer.auth.get("x509_common_name", ())
            try:
                self._access.check_again(head.method, head.invocation_metadata, names, peer.address)
            except StatusError as err:
                stream.finish(err.status, str(err))

    def _close_sockets(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
        for one in self._sockets:
            close_listener(one)


class _Client:
    """The connections of one address."""

    __slots__ = ("links", "none_idle_until_s", "warned")

    def __init__(self) -> None:
        self.links: set[ServerProtocol] = set()
        self.none_idle_until_s = 0.0
        self.warned = False

    def evict_idle(self, serving: Collection[ServerProtocol]) -> list[ServerProtocol]:
        """Choose those that have been without calls for the longest time;
        `serving` are those that speak HTTP/2.
        """
        now_s = time.monotonic()
        if now_s < self.none_idle_until_s:
            return []
        # Those with calls are never evicted: their clients would lose work, the others only
        # reconnect.
        idle = (link for link in self.links if link in serving and link.evictable)
        evicted = heapq.nsmallest(_EVICTED_AT_ONCE, idle, key=lambda link: link.called_s)
        if not evicted:
            self.none_idle_until_s = now_s + _NONE_IDLE_S
        return evicted


class Admission:
    """Counts a listener's connections from their accepting on,
    until they are over or make room for others.
    """

    def __init__(self, limits: Limits, serving: Collection[ServerProtocol]) -> None:
        self._limits = limits
        self._serving = serving
        self._clients: dict[str, _Client] = {}
        self._address_of: dict[ServerProtocol, str] = {}
        self._none_idle_until_s = 0.0

    @property
    def connections(self) -> int:
        """The number of connections that are open or being set up."""
        return len(self._address_of)

    def refusal(self, address: str) -> str:
        """Why one more connection of this address is not taken; empty: it is,
        others have made room if need be.
        """
        client = self._clients.get(address)
        share = self._limits.most_connections_per_address
        if (
            address
            and client is not None
            and len(client.links) >= share
            and not self._evict(client)
        ):
            if not client.warned:
                client.warned = True
                _log.warning(
                    "an address has as many connections as it may have",
                    address=address,
                    connections=share,
                )
            return (
                f"your address has {share} connections with calls, as many as it may have; end "
                "some of them"
            )
        if self.connections >= self._limits.most_connections and not self._evict_largest():
            return "all connections are in use; try again later, or another server"
        return ""

    def add(self, link: ServerProtocol, address: str) -> None:
        """Count a connection that was not refused."""
        self._clients.setdefault(address, _Client()).links.add(link)
        self._address_of[link] = address
        CONNECTIONS.inc()

    def remove(self, link: ServerProtocol) -> None:
        """Stop counting a connection; one that is not counted is ignored."""
        address = self._address_of.pop(link, None)
        if address is None:
            return
        CONNECTIONS.dec()
        client = self._clients[address]
        client.links.remove(link)
        if not client.links:
            del self._clients[address]

    def _evict_largest(self) -> bool:
        now_s = time.monotonic()
        if now_s < self._none_idle_until_s:
            return False
        for client in sorted(
            self._clients.values(), key=lambda client: len(client.links), reverse=True
        ):
            if self._evict(client):
                return True
        self._none_idle_until_s = now_s + _NONE_IDLE_S
        return False

    def _evict(self, client: _Client) -> bool:
        evicted = client.evict_idle(self._serving)
        for link in evicted:
            self.remove(link)
            link.leave()
        EVICTED.labels("idle").inc(len(evicted))
        return bool(evicted)
