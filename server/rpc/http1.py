"""HTTP/1.1 on a gRPC port: connections that begin like HTTP/1.1 are served by coroutines, one
request at a time per connection.

PD serves its HTTP API and gRPC on one port, and its clients expect it. h11 parses. This module
bounds the size and time of a request, the number of connections, and the bytes that all of them
buffer.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs

import h11
import structlog

from server.routes import Answer, Request, error_answer, fault
from server.rpc.access_list import ForbiddenError, UnauthenticatedError
from server.rpc.call_access import CallAccess
from server.rpc.credentials import AllowedNames, common_names
from server.rpc.listener import peer_text
from storage.model.errors import TidemarkError

MAX_HEADER_BYTES = 16 << 10
MAX_BODY_BYTES = 4 << 20
"""The limit of one request. TiDB sends the placement rules of a whole schema at once."""
MAX_BUFFERED_BYTES = 64 << 20
"""On all connections of a listener: bodies of requests that are being received or answered, and
answers that clients have not read yet. A body beyond it is refused with 503.
"""
MAX_CONNECTIONS = 512
"""Of a listener at once. One more closes the one that has been idle for the longest time; if none
is idle, it is refused with 503.
"""
REQUEST_S = 10.0
"""The time from a request's first byte to its last."""
ANSWER_S = 30.0
"""The time that the handler has for an answer, and then a slow client to read it."""
IDLE_S = 90.0
"""Between two requests of a connection; Go's clients keep theirs as long."""
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"]
METHODS = tuple(f"{method} ".encode() for method in _METHODS)

_log = structlog.get_logger(__name__)

Serve = Callable[[Request], Awaitable[Answer]]


def begins_like_http1(data: bytes) -> bool | None:
    """Whether a connection's first bytes are those of HTTP/1.1; None: more bytes are needed."""
    if any(data.startswith(method) for method in METHODS):
        return True
    return None if any(method.startswith(data) for method in METHODS) else False


class Http1Front:
    """State that all HTTP/1.1 connections of a listener share."""

    def __init__(
        self,
        serve: Serve,
        allowed: AllowedNames | None = None,
        access: CallAccess | None = None,
    ) -> None:
        self.serve = serve
        self.allowed = allowed or AllowedNames(())
        self.access = access or CallAccess()
        self.buffered_bytes = 0
        self.tasks: set[asyncio.Task[None]] = set()
        self.connections: dict[Http1Connection, None] = {}
        """The connections in the order in which they became idle, or were made."""

    def admit(self, connection: "Http1Connection") -> bool:
        """Take a connection in; False: there are `MAX_CONNECTIONS`, and none of them is idle."""
        if len(self.connections) >= MAX_CONNECTIONS:
            idle = next((one for one in self.connections if one.idle), None)
            if idle is None:
                return False
            del self.connections[idle]
            idle.abort()
        self.connections[connection] = None
        return True

    async def close(self) -> None:
        """Close all connections; answers under way are cancelled."""
        for connection in list(self.connections):
            connection.abort()
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


class ProtocolChoice(asyncio.Protocol):
    """A new connection of a listener that serves HTTP/1.1 and HTTP/2: ALPN decides which it is, and
    without TLS its first bytes.

    `http2` gets the connection only if it speaks HTTP/2. `chosen` is called when it turns out to
    speak HTTP/1.1, and `closed` when that connection is over.
    """

    def __init__(
        self, http2: asyncio.Protocol, front: Http1Front, chosen: Callable[[], None], closed: Any
    ) -> None:
        self._http2 = http2
        self._front = front
        self._chosen_http1 = chosen
        self._closed = closed
        self._transport: asyncio.Transport | None = None
        self._first = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Decide by ALPN, if there is TLS."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        tls = transport.get_extra_info("ssl_object")
        if tls is not None:
            self._choose(http1=tls.selected_alpn_protocol() != "h2")

    def data_received(self, data: bytes) -> None:
        """Decide as soon as there are enough bytes; nothing is sent to the client before."""
        self._first += data
        http1 = begins_like_http1(self._first)
        if http1 is not None:
            self._choose(http1=http1)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client disconnected before it was decided; `http2` counts the connection as over."""
        self._http2.connection_lost(exc)

    def abort(self) -> None:
        """Close the connection, whatever it has become."""
        if self._transport is not None:
            self._transport.abort()

    def _choose(self, *, http1: bool) -> None:
        assert self._transport is not None
        protocol = self._http2
        if http1:
            self._chosen_http1()
            protocol = Http1Connection(self._front, self._closed)
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        if self._first:
            protocol.data_received(self._first)


class _RefusedError(Exception):
    """The request is answered with an error, and the connection closed."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer


class Http1Connection(asyncio.Protocol):
    """One connection; `closed` is called when it is over."""

    def __init__(self, front: Http1Front, closed: Callable[[], None]) -> None:
        self._front = front
        self._closed = closed
        self._loop = asyncio.get_running_loop()
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADER_BYTES)
        self._transport: asyncio.Transport | None = None
        self._head: h11.Request | None = None
        self._body = bytearray()
        self._answering: asyncio.Task[None] | None = None
        self._common_names: tuple[bytes, ...] = ()
        self._peer = ""
        self._timer = self._loop.call_later(REQUEST_S, self.abort)
        self._in_request = True
        self._buffered_bytes = 0
        self._congested = False

    @property
    def idle(self) -> bool:
        """Whether no byte of a request has come since the last answer, or at all."""
        return not self._in_request or self._http.their_state is h11.IDLE

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin, or take over the transport of a connection whose first bytes were looked at."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if not self._front.admit(self):
            self._send(
                fault(503, "ErrServerBusy", "all connections are at work; try again"), last=True
            )
            return
        self._common_names = common_names(transport.get_extra_info("peercert") or {})
        self._peer = peer_text(transport.get_extra_info("peername"))
        if reason := self._front.allowed.refusal(self._common_names):
            self._send(fault(403, "ErrUnauthorized", reason), last=True)

    def data_received(self, data: bytes) -> None:
        """Receive bytes from the client; reading pauses while an answer is made."""
        if self._transport is None or self._transport.is_closing():
            # Of a connection that was refused before its request came; TLS hands it on.
            return
        if not self._in_request:
            self._restart_timer(REQUEST_S, in_request=True)
        try:
            self._http.receive_data(data)
        except h11.RemoteProtocolError:
            self.abort()
            return
        self._advance()

    def eof_received(self) -> bool:
        """Let an answer that is being made go out."""
        return self._answering is not None

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer and the answer, and give back the bytes that were counted."""
        del exc
        self._transport = None
        self._front.connections.pop(self, None)
        self._timer.cancel()
        self._body.clear()
        self._count()
        if self._answering is not None:
            self._answering.cancel()
        self._closed()

    def pause_writing(self) -> None:
        """The client does not read: its next request waits."""
        self._congested = True

    def resume_writing(self) -> None:
        """The client has read: go on with its next request."""
        self._congested = False
        self._count()
        answered = self._http.our_state is h11.DONE and self._http.their_state is h11.DONE
        if answered and self._transport is not None and not self._transport.is_closing():
            self._next_request()

    def _advance(self) -> None:
        try:
            while self._answering is None and self._transport is not None:
                event = self._http.next_event()
                if event in (h11.NEED_DATA, h11.PAUSED):
                    return
                self._take(event)
        except h11.RemoteProtocolError as err:
            self._send(
                fault(
                    err.error_status_hint, "ErrAPIInvalidParam", f"this is no HTTP request: {err}"
                ),
                last=True,
            )
        except _RefusedError as err:
            self._send(err.answer, last=True)

    def _take(self, event: Any) -> None:
        match event:
            case h11.Request():
                self._head = event
                self._restart_timer(REQUEST_S, in_request=True)
                self._check_size(event)
                _check_framing(event)
                _check_origin(event)
                # curl waits a second for this before it sends a body of more than a megabyte.
                if self._http.they_are_waiting_for_100_continue:
                    self._write(h11.InformationalResponse(status_code=100, headers=[]))
            case h11.Data():
                self._add(event.data)
            case h11.EndOfMessage():
                assert self._transport is not None
                # No pipelining: a second request is read when the first is answered, so each
                # connection has at most one in memory.
                self._transport.pause_reading()
                self._restart_timer(ANSWER_S, in_request=True)
                self._answering = self._loop.create_task(self._answer())
                self._front.tasks.add(self._answering)
                self._answering.add_done_callback(self._front.tasks.discard)
            case h11.ConnectionClosed():
                self._close()

    def _check_size(self, head: h11.Request) -> None:
        header_bytes = len(head.target) + sum(
            len(name) + len(value) + 4 for name, value in head.headers
        )
        # h11's own limit is checked only for headers that do not come in one read.
        if header_bytes > MAX_HEADER_BYTES:
            text = f"the headers have {header_bytes} bytes; at most {MAX_HEADER_BYTES} are taken"
            raise _RefusedError(fault(431, "ErrAPIInvalidParam", text))
        size = next((int(value) for name, value in head.headers if name == b"content-length"), 0)
        if size > MAX_BODY_BYTES:
            raise _RefusedError(_too_large(size))

    def _add(self, data: bytes) -> None:
        if len(self._body) + len(data) > MAX_BODY_BYTES:
            raise _RefusedError(_too_large(len(self._body) + len(data)))
        if self._front.buffered_bytes + len(data) > MAX_BUFFERED_BYTES:
            raise _RefusedError(
                fault(
                    503, "ErrServerBusy", "too many large requests and answers at once; try again"
                )
            )
        self._body += data
        self._count()

    async def _answer(self) -> None:
        head = self._head
        assert head is not None
        try:
            request = request_of(head, bytes(self._body), self._common_names)
            request = replace(request, peer=self._peer)
            self._front.access.check_request(request)
            async with asyncio.timeout(ANSWER_S):
                answer = await self._front.serve(request)
        except (UnauthenticatedError, ForbiddenError) as err:
            answer = error_answer(err)
        except TimeoutError:
            answer = fault(504, "ErrTimeout", "the answer took too long; try again")
        except TidemarkError as err:
            answer = fault(503, err.code, err.message)
        except Exception:  # noqa: BLE001 - the client gets an answer, the log the trace; the port lives on
            _log.exception("http handler failed", path=head.target[:256])
            answer = fault(500, "ErrInternal", "a defect of ours; see the daemon's log")
        self._answering = None
        self._send(answer, last=False)

    def _send(self, answer: Answer, *, last: bool) -> None:
        """Send it; then go on with the next request, or close."""
        self._body.clear()
        if self._transport is None:
            return
        headers = [("Content-Type", answer.content_type), ("Content-Length", str(len(answer.body)))]
        headers += [*answer.headers, *([("Connection", "close")] if last else [])]
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            reason = HTTPStatus(answer.status).phrase.encode()
            self._write(h11.Response(status_code=answer.status, headers=headers, reason=reason))
            if self._head is None or self._head.method != b"HEAD":
                self._write(h11.Data(data=answer.body))
            self._write(h11.EndOfMessage())
        self._count()
        if last or self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            self._close()
        elif self._congested:
            self._restart_timer(ANSWER_S, in_request=True)
        else:
            self._next_request()

    def _next_request(self) -> None:
        assert self._transport is not None
        self._count()
        self._head = None
        self._http.start_next_cycle()
        self._restart_timer(IDLE_S, in_request=False)
        # To the end of the order: it has just become idle, and is the last to make room.
        if self._front.connections.pop(self, self) is None:
            self._front.connections[self] = None
        self._transport.resume_reading()
        self._advance()

    def _write(self, event: Any) -> None:
        data = self._http.send(event)
        if data and self._transport is not None:
            self._transport.write(data)

    def _count(self) -> None:
        """Report to the front how many bytes wait here."""
        unread = self._transport.get_write_buffer_size() if self._transport is not None else 0
        self._front.buffered_bytes += len(self._body) + unread - self._buffered_bytes
        self._buffered_bytes = len(self._body) + unread

    def _restart_timer(self, seconds: float, *, in_request: bool) -> None:
        self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self.abort)
        self._in_request = in_request

    def _close(self) -> None:
        """Close when the client has taken the answer;
        a client that does not read is cut off later.
        """
        if self._transport is not None:
            self._restart_timer(REQUEST_S, in_request=True)
            self._transport.close()

    def abort(self) -> None:
        """Close the connection now, whatever is unwritten."""
        if self._transport is not None:
            self._transport.abort()


def _check_framing(head: h11.Request) -> None:
    """Refuse a body whose length is given twice: a proxy in front may have taken the other one, and
    what it sent as a body would be read as the next request.
    """
    names = {name for name, _ in head.headers}
    if {b"content-length", b"transfer-encoding"} <= names:
        text = "the body has a Content-Length and a Transfer-Encoding; send one of them"
        raise _RefusedError(fault(400, "ErrAPIInvalidParam", text))


def _check_origin(head: h11.Request) -> None:
    """Refuse requests from web pages of other sites: any page could otherwise send commands through
    a browser that reaches this port.
    """
    headers = {name: value for name, value in head.headers if name in (b"origin", b"host")}
    origin = headers.get(b"origin")
    if origin is not None and origin.partition(b"://")[2] != headers.get(b"host"):
        raise _RefusedError(
            fault(403, "ErrUnauthorized", "requests of web pages of other sites are not answered")
        )


def request_of(head: h11.Request, body: bytes, names: tuple[bytes, ...] = ()) -> Request:
    """A parsed head and its body as handlers take it; the path stays percent-encoded."""
    path, _, query = head.target.decode("latin-1").partition("?")
    return Request(
        head.method.decode("latin-1"),
        path,
        parse_qs(query, keep_blank_values=True),
        body,
        raw_query=query,
        authorization=next(
            (value.decode("latin-1") for name, value in head.headers if name == b"authorization"),
            "",
        ),
        common_names=names,
    )


def _too_large(size: int) -> Answer:
    return fault(
        413,
        "ErrAPIInvalidParam",
        f"the body has {size} bytes or more; at most {MAX_BODY_BYTES} are taken",
    )
