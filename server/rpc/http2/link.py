"""A connection's socket: what comes is given to the connection at once, what it has to say is written in one piece."""

import asyncio
import ssl
import time

from server.rpc.http2 import metrics
from server.rpc.http2.connection import Connection
from server.rpc.http2.host import Bounds, Host, Peer

_PING_AFTER_S, _PONG_WITHIN_S = 30.0, 10.0
_INTRODUCED_WITHIN_S = 10.0
_CLOSED_WITHIN_S = 10.0
_IDLE_S = 30 * 60.0


class Link(asyncio.Protocol):
    """One TCP or TLS connection, in `links` while it is open; `closed` is done when it is over."""

    def __init__(self, host: Host, bounds: Bounds, links: "set[Link]") -> None:
        self._loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self._links = links
        self.connection = Connection(host, bounds, time.monotonic, self._wake)
        self._transport: asyncio.Transport | None = None
        self._began_s = self._heard_s = self._called_s = time.monotonic()
        self._pinged_s = self._closing_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin, unless TLS agreed on another protocol."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._links.add(self)
        self.connection.peer = _peer(transport)
        tls = transport.get_extra_info("ssl_object")
        if isinstance(tls, ssl.SSLObject) and tls.selected_alpn_protocol() != "h2":
            self._shut()
            return
        self.flush()

    def data_received(self, data: bytes) -> None:
        """See `Connection.receive`."""
        self._heard_s = time.monotonic()
        self.connection.receive(data)
        self.flush()

    def eof_received(self) -> bool:
        """Half a connection is none: gRPC's clients do not use it."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Whoever called has gone."""
        del exc
        self._transport = None
        self._links.discard(self)
        self.connection.abort()
        if not self.closed.done():
            self.closed.set_result(None)

    def pause_writing(self) -> None:
        """The peer does not read: nor do we, until it does."""
        self.connection.congested = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """The peer reads again."""
        if self._transport is not None:
            self._transport.resume_reading()
        self.connection.resumed()

    def flush(self) -> None:
        """Write what the connection has to say; close it when it has failed."""
        data = self.connection.take()
        if self._transport is None or self._closing_s:
            return
        if data:
            self._transport.write(data)
        if self.connection.failed:
            metrics.FAULTS.labels(self.connection.failed.code.name).inc()
            self._shut()

    def tick(self, now_s: float) -> None:
        """Look after a peer that says nothing: ping it, and let it go when it has vanished or has no use for us."""
        connection = self.connection
        if connection.streams:
            self._called_s = now_s
        if self._closing_s:
            if now_s - self._closing_s > _CLOSED_WITHIN_S:
                self.cut()
        elif not connection.ready:
            if now_s - self._began_s > _INTRODUCED_WITHIN_S:
                self.cut()
        elif connection.awaited_pong:
            if now_s - self._pinged_s > _PONG_WITHIN_S:
                self.cut()
        elif now_s - self._called_s > _IDLE_S:
            connection.drain()
            self.close()
        elif now_s - self._heard_s > _PING_AFTER_S:
            self._pinged_s = now_s
            connection.ping()

    def close(self) -> None:
        """End it when all is written."""
        self.flush()
        self._shut()

    def cut(self) -> None:
        """End it now."""
        if self._transport is not None:
            self._transport.abort()

    def _shut(self) -> None:
        """Close it when the peer has taken what is written, or will not."""
        if self._transport is not None and not self._closing_s:
            self._closing_s = time.monotonic()
            self._transport.close()

    def _wake(self) -> None:
        self._loop.call_soon(self.flush)


def _peer(transport: asyncio.Transport) -> Peer:
    name = transport.get_extra_info("peername")
    address = "unix:"
    if isinstance(name, tuple):
        address = f"ipv6:[{name[0]}]:{name[1]}" if ":" in name[0] else f"ipv4:{name[0]}:{name[1]}"
    certificate = transport.get_extra_info("peercert")
    return Peer(address, _auth(certificate) if transport.get_extra_info("ssl_object") else {})


def _auth(certificate: dict[str, object] | None) -> dict[str, tuple[bytes, ...]]:
    auth: dict[str, tuple[bytes, ...]] = {"transport_security_type": (b"ssl",)}
    subject, names = (certificate or {}).get("subject", ()), (certificate or {}).get("subjectAltName", ())
    assert isinstance(subject, tuple)
    assert isinstance(names, tuple)
    common = tuple(value.encode() for part in subject for key, value in part if key == "commonName")
    alternative = tuple(value.encode() for _, value in names)
    if common:
        auth["x509_common_name"] = common
    if alternative:
        auth["x509_subject_alternative_name"] = alternative
    return auth
