"""A connection's socket and its clock.

`ServerProtocol` is asyncio's protocol of one accepted TCP or TLS connection: it passes received
bytes to its `Connection` at once, writes what a turn produced in one piece, and stops reading while
the connection has unhandled bytes or its peer does not read. `NativeServer` calls `tick` every two
seconds, which enforces the deadlines below: a peer that is silent, idle, slow or gone is closed.
Whatever goes wrong ends this connection only.
"""

import asyncio
import ssl
import time
from collections.abc import Mapping
from typing import Any

import grpc
from prometheus_client import Counter

from server.rpc.credentials import common_names
from server.rpc.http2.connection import Connection
from server.rpc.http2.frames import ConnectionFault, ErrorCode
from server.rpc.http2.peer import Bounds, Peer
from server.rpc.http2.stream import StreamHost
from server.rpc.listener import peer_text

_FAULTS = Counter(
    "tidemark_rpc_connection_faults_total",
    "Connections ended because their peer broke HTTP/2",
    ["code"],
)

_PING_AFTER_S, _PONG_WITHIN_S = 30.0, 10.0
"""A peer that sent nothing for so long is pinged, and cut off without an answer in time."""
_INTRODUCED_WITHIN_S = 10.0
"""From the accepting to the peer's SETTINGS, TLS included."""
_CLOSED_WITHIN_S = 10.0
"""For a peer to take the last bytes of a connection that is being closed."""
_IDLE_S = 30 * 60.0
"""A connection without calls for so long is drained and closed."""
_HEADERS_WITHIN_S = 10.0
_FRAME_WITHIN_S = 30.0
"""From the first to the last byte of a header block, and of any frame."""
_REQUEST_WITHIN_S, _REQUEST_BYTES_PER_S = 30.0, 4096
"""A request must be complete within the first, and one second more for each so many bytes."""
_EVICTABLE_AFTER_S = 1.0
"""A connection without calls for so long may be closed to make room for another one."""
_IDENTITY_KINDS = ("DNS", "URI", "email", "IP Address")
"""The names that the `ssl` module has for them."""


class ServerProtocol(asyncio.Protocol):
    """One TCP or TLS connection; it is in `links` from when it is accepted until it is lost, when
    `closed` is done.
    """

    def __init__(self, host: StreamHost, bounds: Bounds, links: "set[ServerProtocol]") -> None:
        self._loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self._links = links
        self._host = host
        self.connection = Connection(host, bounds, time.monotonic, self._wake)
        self.setting_up: asyncio.Task[None] | None = None
        """The task that makes the transport, and waits until it is closed."""
        self._leaving = False
        self._transport: asyncio.Transport | None = None
        self._began_s = self._heard_s = self.called_s = time.monotonic()
        self._pinged_s = self._closing_s = 0.0
        self._last_stream = 0
        self._behind = self._proceeding = False
        self._backlog_bytes = self._written_bytes = 0
        self._partial = StallDetector(_FRAME_WITHIN_S)
        self._header_block = StallDetector(_HEADERS_WITHIN_S)
        links.add(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin, unless TLS agreed on another protocol."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        try:
            self.connection.peer = _peer(transport)
            tls = transport.get_extra_info("ssl_object")
            # RFC 9113 §3.2: over TLS, HTTP/2 is spoken only where ALPN agreed on it.
            if isinstance(tls, ssl.SSLObject) and tls.selected_alpn_protocol() != "h2":
                self._shut()
                return
        except Exception as err:  # noqa: BLE001 - asyncio would raise it in the task that accepts connections
            self.connection.crash(err)
        self.flush()

    def data_received(self, data: bytes) -> None:
        """See `Connection.receive`."""
        self._heard_s = time.monotonic()
        self.connection.receive(data)
        if self.connection.last_stream != self._last_stream:
            self._last_stream = self.connection.last_stream
            self.called_s = self._heard_s
        self._end_turn()

    def _proceed(self) -> None:
        """The next turn of a connection that has more to handle."""
        self._proceeding = False
        if self._transport is None:
            return
        self.connection.proceed()
        self._end_turn()

    def _end_turn(self) -> None:
        if self.connection.behind or self._behind:
            self._count_backlog()
        self.flush()

    def _count_backlog(self) -> None:
        behind = self.connection.behind and self._transport is not None
        size = self.connection.backlog_bytes if behind else 0
        self._host.count_buffered_bytes(size - self._backlog_bytes)
        self._backlog_bytes = size
        if behind != self._behind:
            self._behind = behind
            self._host.count_behind(1 if behind else -1)
            self._regulate()
        if behind and not self._proceeding:
            self._proceeding = True
            self._loop.call_soon(self._proceed)

    def _regulate(self) -> None:
        """Stop reading while received bytes are unhandled, or the peer does not read ours."""
        if self._transport is None:
            return
        if self._behind or self.connection.congested:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def eof_received(self) -> bool:
        """Close the connection: gRPC's clients use no half-closed ones."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is closed: abort the calls and give back the bytes that were counted."""
        del exc
        self._transport = None
        self._links.discard(self)
        if not self.closed.done():
            self.closed.set_result(None)
        self._uncount()
        self._count_backlog()
        self.connection.abort()

    def pause_writing(self) -> None:
        """The socket's send buffer is full: stop reading until the peer has read."""
        self.connection.congested = True
        self.connection.room = 0
        self._regulate()

    def resume_writing(self) -> None:
        """The socket's send buffer has room again: go on reading and writing."""
        try:
            self.connection.resumed()
            self._regulate()
        except Exception as err:  # noqa: BLE001 - a callback of this connection ends this connection only
            self.connection.crash(err)

    def flush(self) -> None:
        """Write the connection's pending bytes; close it if it has failed. Raises nothing."""
        try:
            self._flush()
        except Exception as err:  # noqa: BLE001 - a callback of this connection ends this connection only
            self.connection.crash(err)
            self.cut()

    def _flush(self) -> None:
        data = self.connection.take()
        if self._transport is None or self._closing_s:
            return
        if data:
            self._transport.write(data)
            waiting = self._transport.get_write_buffer_size()
            if waiting != self._written_bytes:
                self._host.count_buffered_bytes(waiting - self._written_bytes)
                self._written_bytes = waiting
        if self.connection.failed:
            _FAULTS.labels(self.connection.failed.code.name).inc()
            self._shut()

    def tick(self, now_s: float) -> None:
        """Enforce the deadlines: ping a silent peer, close one that has vanished or is idle,
        end requests that stall.
        """
        try:
            self._tick(now_s)
        except Exception as err:  # noqa: BLE001 - one timer looks after all connections
            self.connection.crash(err)
            self.cut()

    def _tick(self, now_s: float) -> None:
        connection = self.connection
        if connection.streams:
            self.called_s = now_s
        if self._transport is None or self._closing_s:
            since_s = self._closing_s or self._began_s
            if now_s - since_s > _CLOSED_WITHIN_S:
                self.cut()
        elif self._is_stalled(now_s):
            self.refuse("a frame or a header block that does not end")
        elif not connection.ready:
            if now_s - self._began_s > _INTRODUCED_WITHIN_S:
                self.cut()
        elif not self._behind:  # else its frames, a PING's answer too, may be unhandled yet
            self._end_silence(now_s)
            self._end_slow_requests(now_s)

    def _end_silence(self, now_s: float) -> None:
        connection = self.connection
        # Nothing else notices a peer that vanished without FIN: TCP does not, while nobody sends.
        if connection.awaiting_ping_ack:
            if now_s - self._pinged_s > _PONG_WITHIN_S:
                self.cut()
        elif now_s - self.called_s > _IDLE_S:
            connection.drain()
            self.close()
        elif now_s - self._heard_s > _PING_AFTER_S:
            self._pinged_s = now_s
            connection.ping()

    def _is_stalled(self, now_s: float) -> bool:
        connection = self.connection
        if self._behind or not connection.ready:
            return False
        block = self._header_block.lasts(connection.header_block_stream, now_s)
        return block or self._partial.lasts(
            connection.progress if connection.backlog_bytes else 0, now_s
        )

    def _end_slow_requests(self, now_s: float) -> None:
        """End calls whose request began and does not go on, or by too few bytes a second."""
        for stream in list(self.connection.streams.values()):
            if not stream.awaits_rest():
                stream.rest = None
            elif stream.rest is None:
                # The time counts from the first look that finds the request unfinished, so the
                # bound is two seconds loose.
                stream.rest = (now_s, stream.received)
            else:
                since_s, received = stream.rest
                if (
                    now_s - since_s
                    > _REQUEST_WITHIN_S + (stream.received - received) / _REQUEST_BYTES_PER_S
                ):
                    stream.finish(
                        grpc.StatusCode.DEADLINE_EXCEEDED,
                        "the request does not end: send it faster",
                    )

    @property
    def buffered_bytes(self) -> int:
        """The bytes that wait here for the peer to read them, or for this connection's turn."""
        return self.connection.unsent_bytes + self._backlog_bytes + self._written_bytes

    @property
    def evictable(self) -> bool:
        """Whether it can be closed to make room: it has no calls, and never had one or had its last
        a while ago.
        """
        if self._leaving or self._closing_s or self.connection.streams:
            return False
        return not self._last_stream or time.monotonic() - self.called_s > _EVICTABLE_AFTER_S

    def leave(self) -> None:
        """Make room for another connection: GOAWAY tells the peer to reconnect for its
        next call.
        """
        self._leaving = True
        if self.connection.ready:
            self.connection.drain()
            self.close()
        else:
            self.cut()

    def refuse(self, text: str) -> None:
        """Close the connection at once; GOAWAY says why."""
        self.connection.fail(ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, text))
        self.flush()
        self.cut()

    def drain(self) -> None:
        """Take no more calls; a connection that is still being set up is closed."""
        if self._transport is None:
            self.cut()
            return
        try:
            self.connection.drain()
        except Exception as err:  # noqa: BLE001 - one connection must not keep the daemon from stopping
            self.connection.crash(err)

    def close(self) -> None:
        """Close the connection when everything is written."""
        self.flush()
        self._shut()

    def cut(self) -> None:
        """Close the connection now, whatever is unwritten."""
        if self._transport is not None:
            self._transport.abort()
            # Not in `connection_lost`, which comes in a later turn: until then the listener would
            # close more and more connections to make room.
            self._uncount()
        elif self.setting_up is not None:
            self.setting_up.cancel()

    def _uncount(self) -> None:
        """Give back the counted bytes: nothing of them is kept."""
        self._host.count_buffered_bytes(-self._written_bytes - self._backlog_bytes)
        self._written_bytes = self._backlog_bytes = 0

    def _shut(self) -> None:
        """Close it once the peer has taken the written bytes, or will not."""
        # `close` lets the transport write what it has; `tick` cuts it off if the peer does not take
        # it.
        if self._transport is not None and not self._closing_s:
            self._closing_s = time.monotonic()
            self._transport.close()

    def _wake(self) -> None:
        self._loop.call_soon(self.flush)


class StallDetector:
    """Detects that a value has not changed for too long."""

    __slots__ = ("_mark", "_since_s", "_within_s")

    def __init__(self, within_s: float) -> None:
        self._within_s = within_s
        self._mark = 0
        self._since_s = 0.0

    def lasts(self, mark: int, now_s: float) -> bool:
        """Whether `mark` has been the same for more than `within_s`: it must change with each
        progress, and be 0 while nothing is awaited.
        """
        if mark != self._mark:
            self._mark, self._since_s = mark, now_s
        return bool(mark) and now_s - self._since_s > self._within_s


def _peer(transport: asyncio.Transport) -> Peer:
    certificate = transport.get_extra_info("peercert")
    return Peer(
        peer_text(transport.get_extra_info("peername")),
        auth_context(certificate or {}) if transport.get_extra_info("ssl_object") else {},
    )


def auth_context(certificate: Mapping[str, Any]) -> dict[str, tuple[bytes, ...]]:
    """Translate the result of `ssl.SSLObject.getpeercert` into gRPC's names.

    A subjectAltName may be of any kind (RFC 5280 §4.2.1.6), and the value of a directoryName is a
    tuple. As gRPC does, only DNS names, URIs, mail and IP addresses are the client's identities.
    """
    auth: dict[str, tuple[bytes, ...]] = {"transport_security_type": (b"ssl",)}
    common = common_names(certificate)
    alternative = tuple(
        value.encode()
        for kind, value in certificate.get("subjectAltName", ())
        if kind in _IDENTITY_KINDS
    )
    if common:
        auth["x509_common_name"] = common
    if alternative:
        auth["x509_subject_alternative_name"] = alternative
    return auth
