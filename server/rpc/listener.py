"""Listening sockets. Connections are set up round-robin by client address, so that a client with
thousands of them delays only itself.

`open_listeners` takes an address as gRPC's users write it: `host:port`, `[::]:port`, `localhost:0`,
`unix:path`. `client_address` gives the key by which connections are counted: the IPv4 address, or
the /64 of an IPv6 address, since one host may use all of these (RFC 6177). Clients behind one NAT
or proxy share an address. A client of a Unix socket has passed the file's permissions, and has no
address.

To take a connection from the kernel costs microseconds; to set it up, hundreds of them. So
`Accepting` takes all that there are into queues by address, and sets up a few in each turn of the
event loop. In the kernel's own queue, which is one for all addresses, a new client would wait until
all connections before its own are set up.
"""

import asyncio
import ipaddress
import socket
import ssl
from asyncio import sslproto
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog
from prometheus_client import Counter, Gauge

CONNECTIONS = Gauge("tidemark_rpc_connections", "Connections that are open, or being set up")
ERRORS = Counter(
    "tidemark_rpc_connection_errors_total",
    "Connections ended by an unexpected exception of the server; its log has it",
)
REFUSED = Counter(
    "tidemark_rpc_connections_refused_total",
    "Connections refused because all, or all that their address may have, are in use, or too many "
    "wait to be set up",
)
EVICTED = Counter(
    "tidemark_rpc_connections_evicted_total",
    "Connections closed to make room: `idle` for new ones, `unread` for memory that their unread "
    "answers took, `guard` those beyond an address's share, or the port's bound, where gRPC or "
    "Flight listen themselves",
    ["reason"],
)

HANDSHAKE_S = 10
_TLS_CLOSE_S = 1.0
_BACKLOG = 4096
"""Connections that the kernel queues; net.core.somaxconn may allow fewer."""
_HOST_BITS = 64
_TAKEN_AT_ONCE, _SET_UP_AT_ONCE = 128, 16
"""In one turn of the event loop."""
_OUT_OF_FILES_S = 0.5
_MOST_WAITING = 4096

_log = structlog.get_logger(__name__)


def open_listeners(address: str) -> Sequence[socket.socket]:
    """One socket for each address the host has, all with the same port;
    a path that is a socket is taken over.

    Raises:
        OSError: one of them cannot be listened on; none is left open.
    """
    if address.startswith("unix:"):
        path = Path(address.removeprefix("unix:"))
        # A process that was killed leaves its socket behind, and binding to it would fail for ever.
        # A file of another kind is not ours to remove.
        if path.is_socket():
            path.unlink()
        return [_bound(socket.AF_UNIX, str(path), alone=False)]
    host, _, port = address.rpartition(":")
    sockets: list[socket.socket] = []
    try:
        number = int(port)
        for family, _, _, _, sockaddr in socket.getaddrinfo(
            host.strip("[]") or None, number, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            sockets.append(
                _bound(family, (sockaddr[0], number, *sockaddr[2:]), alone=host != "[::]")
            )
            # With port 0 the kernel chooses for the first address; the others take the same port.
            number = sockets[0].getsockname()[1]
            if host == "[::]":
                break
    except (OSError, ValueError) as err:
        for one in sockets:
            one.close()
        raise OSError(f"{address}: {err}") from err
    return sockets


def warn_if_open(address: str, *, has_tls: bool) -> None:
    """Log it if other machines can reach the port, which is bound already, without TLS."""
    if not has_tls and not _is_loopback(address):
        _log.warning(
            "other machines can reach this port, and it has no TLS: what goes over it can be read, "
            "tokens too, and without roles every client may do everything; give --ca-path, "
            "--cert-path and --key-path, or isolate the network (docs/security.md)",
            address=address,
        )


def _is_loopback(address: str) -> bool:
    """Whether only this machine can connect to an address as `open_listeners` takes it; not, if
    its host has no address any more.
    """
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]") or None
    try:
        places = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, ValueError):  # the second: a name that is none
        return False
    return all(
        ipaddress.ip_address(str(place[4][0]).partition("%")[0]).is_loopback for place in places
    )


def close_listener(listener: socket.socket) -> None:
    """Close a socket of `open_listeners`; the path of a Unix socket is removed."""
    name = listener.getsockname()
    listener.close()
    if isinstance(name, str):
        Path(name).unlink(missing_ok=True)


async def accept_connection(
    protocol: Callable[[], asyncio.BaseProtocol],
    accepted: socket.socket,
    context: ssl.SSLContext | None,
) -> None:
    """Connect the protocol to an accepted connection, with a `context` once its TLS handshake is
    done.

    Raises:
        ssl.SSLError: the handshake failed.
        ConnectionAbortedError: it took longer than `HANDSHAKE_S`.
        OSError: the connection broke.
    """
    loop = asyncio.get_running_loop()
    if context is None:
        await loop.connect_accepted_socket(protocol, accepted)
        return
    ready: asyncio.Future[None] = loop.create_future()
    tls = _AcceptedTls(
        loop,
        protocol(),
        context,
        ready,
        server_side=True,
        ssl_handshake_timeout=HANDSHAKE_S,
        ssl_shutdown_timeout=_TLS_CLOSE_S,
    )
    transport, _ = await loop.connect_accepted_socket(lambda: tls, accepted)
    try:
        await ready
    except BaseException:
        transport.abort()
        raise


class _AcceptedTls(sslproto.SSLProtocol):
    """TLS of a connection whose client is not authenticated yet."""

    max_size = 32 << 10
    """The bytes of its read buffer; asyncio's own has 256 KiB before the first byte arrives."""

    def _on_handshake_complete(self, handshake_exc: BaseException | None) -> None:
        transport: Any = self._transport
        if handshake_exc is not None and transport is not None:
            # The alert that tells the client the reason; asyncio does not send it.
            transport.write(self._outgoing.read())  # type: ignore[attr-defined]  # typeshed lacks it
        super()._on_handshake_complete(handshake_exc)


def _bound(
    family: socket.AddressFamily, address: tuple[object, ...] | str, *, alone: bool
) -> socket.socket:
    """`alone`: an IPv6 address takes no IPv4 connections."""
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family != socket.AF_UNIX:
            # accepted ones inherit it
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A restarted daemon must get its port back while old connections are in TIME_WAIT;
        # SO_REUSEPORT would let two daemons share it unnoticed.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, alone)
        bound.setblocking(False)  # noqa: FBT003 - positional in the library
        bound.bind(address)
        bound.listen(_BACKLOG)
    except OSError:
        bound.close()
        raise
    return bound


def peer_text(peer: object) -> str:
    """A socket's peer name as gRPC writes it: `ipv4:127.0.0.1:1234`."""
    if not isinstance(peer, tuple):
        return "unix:"
    return f"ipv6:[{peer[0]}]:{peer[1]}" if ":" in peer[0] else f"ipv4:{peer[0]}:{peer[1]}"


def client_address(peer: object) -> str:
    """The key by which connections of `peer`, a socket's peer name, are counted; empty for a Unix
    socket's.
    """
    if not isinstance(peer, tuple):
        return ""
    # a link-local address may name its interface
    host = str(peer[0]).partition("%")[0]
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address) >> _HOST_BITS << _HOST_BITS, 128 - _HOST_BITS)))


class Waiting:
    """Queues, by address, of connections that are accepted and not set up yet. When there are more
    than `most`, the newest one of the longest queue is dropped.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self._queues: OrderedDict[str, deque[socket.socket]] = OrderedDict()

    def __len__(self) -> int:
        return self._count

    def add(self, address: str, accepted: socket.socket) -> socket.socket | None:
        """Queue a connection; returns the one that is dropped for it, which may be itself, if any;
        the caller closes it.
        """
        self._queues.setdefault(address, deque()).append(accepted)
        self._count += 1
        return self._last_of_longest() if self._count > self._most else None

    def next(self) -> tuple[str, socket.socket]:
        """Take the next connection, with its address; there must be one."""
        # One of the first address, which then moves behind all others.
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
    """Accepts connections for a server. `connect` takes over an accepted one with its address; it
    must neither block nor raise.
    """

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
                # Most likely the process is out of file descriptors. The connection stays in the
                # kernel's queue, so an attempt without a pause would fail again, and spin.
                await asyncio.sleep(_OUT_OF_FILES_S)
            # `sock_accept` does not wait while there is one more
            await asyncio.sleep(0)

    def _add(self, accepted: socket.socket, peer: object) -> None:
        accepted.setblocking(False)  # noqa: FBT003 - positional in the library
        dropped = self._waiting.add(client_address(peer), accepted)
        if dropped is not None:
            REFUSED.inc()
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
