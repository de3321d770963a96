"""A listener in front of gRPC's own engine, and of Flight's, which is gRPC's, too.

It copies the bytes of each connection to and from the engine's listener. TLS passes through: the
engine decrypts it and checks certificates. The listener watches the handshake meanwhile: it sets a
deadline, and counts and logs failed handshakes, which the engine does not do.

`GrpcioFront` also answers HTTP/1.1 on the same port, for which it reads the first bytes of each
connection. With TLS the ClientHello decides: a client that offers `h2` by ALPN, and not `http/1.1`,
gets gRPC. The engine listens on a Unix socket in a directory that only this user may enter.
"""

import asyncio
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import structlog

from server.rpc.config import Limits
from server.rpc.credentials import ListenerTls, RefusedHandshakes
from server.rpc.handshake_watch import HandshakeWatch
from server.rpc.http1 import Http1Connection, Http1Front, begins_like_http1
from server.rpc.listener import (
    HANDSHAKE_S,
    REFUSED,
    Accepting,
    accept_connection,
    close_listener,
    open_listeners,
)

_PEEK_BYTES = 16 << 10
_PEEK_AGAIN_S = 0.01
_COPY_BYTES = 64 << 10
_FILES_OF_A_CONNECTION = 3
"""The client's, and both ends of the one to gRPC's listener."""
_UNIX = "unix:"
_TLS_HANDSHAKE, _CLIENT_HELLO, _ALPN = 0x16, 1, 16

_log = structlog.get_logger(__name__)


class PassingListener:
    """A public listener that passes its connections on to the one at `address`."""

    def __init__(self, address: str, limits: Limits, *, has_tls: bool) -> None:
        """`address`: `host:port`, or `unix:path`."""
        self.address = address
        self._limits = limits
        self._has_tls = has_tls
        self._handshakes = RefusedHandshakes()
        self._sockets: Sequence[socket.socket] = ()
        self._accepting: asyncio.Task[None] | None = None
        self._group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def bind(self, address: str) -> int:
        """Listen on `host:port`; returns the port. Connections wait until `start`.

        Raises:
            OSError: the address is taken or not ours.
        """
        self._sockets = open_listeners(address)
        name = self._sockets[-1].getsockname()
        return int(name[1]) if isinstance(name, tuple) else 1

    async def run(self) -> None:
        """Pass connections on until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self.start(tasks)

    def close(self) -> None:
        """Listen no more."""
        for one in self._sockets:
            close_listener(one)

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Accept connections, in tasks of the group, until `stop_accepting`."""
        self._group = tasks
        accepting = Accepting(self._connect, self._limits.spare_files)
        self._accepting = tasks.create_task(accepting.run(self._sockets))

    def stop_accepting(self) -> None:
        """Take no more connections."""
        if self._accepting is not None:
            self._accepting.cancel()
        self.close()

    async def stop(self) -> None:
        """Close all connections."""
        for task in list(self._tasks):
            task.cancel()

    def _connect(self, accepted: socket.socket, address: str) -> None:
        if len(self._tasks) >= self._limits.most_connections:
            REFUSED.inc()
            accepted.close()
            return
        assert self._group is not None
        task = self._group.create_task(self._connected(accepted, address))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connected(self, accepted: socket.socket, address: str) -> None:
        try:
            if not await self._answered(accepted):
                await self._pass_on(accepted, address)
        except OSError as err:
            if self._has_tls:
                self._handshakes.add(err, address)
            _log.debug("a connection was not set up, or broke", reason=str(err))
        except Exception:  # noqa: BLE001 - an exception in a connection ends that connection only
            _log.exception("a connection could not be set up")
        finally:
            accepted.close()

    async def _answered(self, accepted: socket.socket) -> bool:
        """Answer the connection here if it is not to be passed on; returns whether it was."""
        del accepted
        return False

    async def _pass_on(self, accepted: socket.socket, address: str) -> None:
        watch = HandshakeWatch(lambda fault: self._handshakes.add_fault(fault, address))
        if not self._has_tls:
            watch.client_closed()  # there is no handshake
        inner_reader, inner_writer = await _connect_to(self.address)
        outer_reader, outer_writer = await asyncio.open_connection(sock=accepted)
        writers = (inner_writer, outer_writer)
        deadline = asyncio.get_running_loop().call_later(
            HANDSHAKE_S, _end_late_handshake, watch, writers
        )
        try:
            async with asyncio.TaskGroup() as copies:
                to_server = (outer_reader, inner_writer, outer_writer)
                to_client = (inner_reader, outer_writer, inner_writer)
                ends = (watch.client_closed, watch.server_closed)
                copies.create_task(_copy(*to_server, watch.client_sent, *ends))
                copies.create_task(_copy(*to_client, watch.server_sent, *reversed(ends)))
        finally:
            deadline.cancel()
            for writer in writers:
                writer.transport.abort()


class GrpcioFront(PassingListener):
    """The public listener of gRPC's own engine; `address` is where that one has to listen."""

    def __init__(self, front: Http1Front | None, tls: ListenerTls | None, limits: Limits) -> None:
        """Without `front` there is no HTTP/1.1. `tls` is for it; None: the port is plaintext."""
        self._directory = Path(tempfile.mkdtemp(prefix="tidemark-"))
        address = f"unix:{self._directory / 'grpc.sock'}"
        super().__init__(address, limits, has_tls=tls is not None)
        self._front = front
        self._tls = tls

    def bind(self, address: str) -> int:
        """See `PassingListener.bind`."""
        try:
            return super().bind(address)
        except OSError:
            shutil.rmtree(self._directory, ignore_errors=True)
            raise

    async def stop(self) -> None:
        """Close all connections."""
        if self._front is not None:
            await self._front.close()
        await super().stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _answered(self, accepted: socket.socket) -> bool:
        if self._front is None:
            return False
        async with asyncio.timeout(HANDSHAKE_S):
            is_http1 = await self._is_http1(accepted)
        if is_http1:
            await self._answer(accepted, self._front)
        return is_http1

    async def _is_http1(self, accepted: socket.socket) -> bool:
        """Look at what has come until it is clear. Raises: ConnectionError: the client has gone."""
        seen = 0
        while True:
            await _readable(accepted)
            first = accepted.recv(_PEEK_BYTES, socket.MSG_PEEK)
            if not first:
                raise ConnectionError("closed before the first byte")
            http1 = begins_like_http1(first) if self._tls is None else wants_http1(first)
            if http1 is not None:
                return http1
            if len(first) == _PEEK_BYTES:
                return False
            if len(first) == seen:
                # what was only looked at keeps the socket readable
                await asyncio.sleep(_PEEK_AGAIN_S)
            seen = len(first)

    async def _answer(self, accepted: socket.socket, front: Http1Front) -> None:
        closed = asyncio.Event()
        await accept_connection(
            lambda: Http1Connection(front, closed.set),
            accepted,
            self._tls.context() if self._tls else None,
        )
        await closed.wait()


async def _connect_to(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if address.startswith(_UNIX):
        return await asyncio.open_unix_connection(address.removeprefix(_UNIX))
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


def _end_late_handshake(watch: HandshakeWatch, writers: Iterable[asyncio.StreamWriter]) -> None:
    if not watch.is_over:
        watch.end_late()
        for writer in writers:
            writer.transport.abort()


def passed_on(limits: Limits) -> Limits:
    """`limits` with as many connections as there are files for, when each is passed on."""
    return replace(
        limits, connections=min(limits.connections, limits.spare_files // _FILES_OF_A_CONNECTION)
    )


def wants_http1(data: bytes) -> bool | None:
    """Whether a TLS ClientHello selects HTTP/1.1: it offers it by ALPN, or does not offer HTTP/2;
    None: more bytes are needed.
    """
    offered = offered_protocols(data)
    return None if offered is None else b"http/1.1" in offered or b"h2" not in offered


def offered_protocols(data: bytes) -> Sequence[bytes] | None:
    """The protocols that a TLS ClientHello offers by ALPN (RFC 8446 §4.1.2, RFC 7301 §3.1); None if
    more bytes are needed.

    What is no ClientHello, or one that is spread over several records, is left to gRPC as if it
    offered `h2`.
    """
    if not data or data[0] != _TLS_HANDSHAKE:
        return (b"h2",)
    if len(data) < 9 or len(data) < 5 + int.from_bytes(data[3:5]):
        return None
    size = int.from_bytes(data[6:9])
    hello = data[9 : 9 + size]
    if data[5] != _CLIENT_HELLO or len(hello) < size:
        return (b"h2",)
    at = 2 + 32  # version, random
    for width in (1, 2, 1):  # session id, cipher suites, compression methods
        at += width + int.from_bytes(hello[at : at + width])
    at += 2
    while at + 4 <= len(hello):
        kind, size = int.from_bytes(hello[at : at + 2]), int.from_bytes(hello[at + 2 : at + 4])
        if kind == _ALPN:
            return _names(hello[at + 6 : at + 4 + size])
        at += 4 + size
    return ()


def _names(data: bytes) -> Sequence[bytes]:
    names: list[bytes] = []
    while data:
        names.append(data[1 : 1 + data[0]])
        data = data[1 + data[0] :]
    return names


async def _copy(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    origin: asyncio.StreamWriter,
    look: Callable[[bytes], None],
    sender_closed: Callable[[], None],
    receiver_closed: Callable[[], None],
) -> None:
    """Copy until either side ends; then the other one ends when it has taken what was copied.

    `look` sees what comes; which side ended is told.
    """
    while data := await _read(reader):
        look(data)
        writer.write(data)
        try:
            await writer.drain()
        except OSError:
            receiver_closed()
            break
    else:
        sender_closed()
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    origin.transport.abort()


async def _read(reader: asyncio.StreamReader) -> bytes:
    """The received bytes; empty when the sender has ended the connection, in whatever way."""
    try:
        return await reader.read(_COPY_BYTES)
    except OSError:
        return b""


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _readable(accepted: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(accepted, _resolve, readable)
    try:
        await readable
    finally:
        loop.remove_reader(accepted)
