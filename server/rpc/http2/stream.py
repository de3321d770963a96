"""One HTTP/2 stream, and the state of a connection that its streams share.

A `Stream` does a call's flow control, sending and ending; its subclasses handle the messages
(`batched.BatchedCall`, `batched.BatchedStream`, `handled.HandledCall`). `ConnectionState` has the
connection's windows, the queue of bytes to send, and the open streams; `connection.Connection` adds
the receiving half. Invariants:

1. No DATA is sent beyond the peer's windows, and none is accepted beyond ours; the window of a call
   whose messages are not read is not renewed.
2. A stream ends once: by its trailers (`finish`), or because it was reset or its connection ended
   (`abort`). Once `closed` is set, nothing of it is sent, and its connection does not list it.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Protocol

import grpc

from server.rpc.errors import StatusError
from server.rpc.http2 import headers
from server.rpc.http2.frames import (
    DATA,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    HEADER,
    HEADERS,
    MAX_FRAME_BYTES,
    MAX_WINDOW,
    PING,
    ConnectionFault,
    ErrorCode,
    StreamFault,
    frame,
    goaway,
    header_block,
    rst_stream,
    window_update,
)
from server.rpc.http2.headers import RequestHead
from server.rpc.http2.messages import PREFIX_BYTES
from server.rpc.http2.peer import UNKNOWN_PEER, Bounds, TokenBucket

STREAM_WINDOW = 1 << 20
"""How many bytes of DATA a call may receive ahead of its reader; announced by SETTINGS."""
FRAME_COST_BYTES = 256
"""The overhead of a DATA frame in bytes, counted towards the limit of a turn: a peer may make us
send one byte at a time.
"""
MAX_UNSENT_BYTES = 256 << 10
"""The bytes of its answers that may wait for the peer before their writer has to wait."""
ROOM_BYTES = 128 << 10
"""The bytes of answers that go to the socket in one turn of the loop, if it takes them."""
MAX_UNREAD_BYTES = 1 << 20
"""While more than this of finished calls' answers waits for the peer,
no handler of another unary call starts.
"""
_EMPTY, _EMPTY_PER_S = 1000, 10

STOPPING = "the server is stopping; ask another one, or again"
_FULL = "too many bytes of unfinished requests are in memory; slow down and try again"

_UNREAD = (
    "the call was carried out, but its answer of {} bytes is not kept: {} bytes of answers wait "
    "to be read; read them, or ask for less at a time"
)

_HEAD = HEADER.pack(len(headers.RESPONSE_HEAD) << 8 | HEADERS, END_HEADERS, 0)[:5]
_TAIL = HEADER.pack(len(headers.TRAILERS_OK) << 8 | HEADERS, END_HEADERS | END_STREAM, 0)[:5]
_HEAD_BLOCK, _TAIL_BLOCK = headers.RESPONSE_HEAD, headers.TRAILERS_OK


class StreamHost(Protocol):
    """The listener, as a connection needs it."""

    def open(
        self, connection: "ConnectionState", number: int, head: RequestHead, timeout_s: float | None
    ) -> "Stream":
        """The stream of a new call.

        Raises:
            StatusError: it is refused.
        """

    def released(self) -> None:
        """A stream that `open` gave has ended."""

    def report_error(self, connection: "ConnectionState", err: Exception) -> None:
        """Log and count an unexpected exception that ended a connection. Must not raise."""

    def start_handler(self, call: "Stream") -> None:
        """Let a unary call's handler start, now or when its turn comes: see `HandlerStarter`."""

    def resume_handlers(self, connection: "ConnectionState") -> None:
        """The peer has read answers: handlers of its calls that wait in `connection.starting` may
        start.
        """

    def turn_s(self) -> float:
        """The time for which one connection may handle received frames before the others have their
        turn.
        """

    def count_behind(self, change: int) -> None:
        """One connection more (1) or less (-1) has received more than it handled in its turn."""

    def count_buffered_bytes(self, change: int) -> None:
        """Count bytes that wait for a peer to read them, or for their connection's turn."""

    def count_request_bytes(self, change: int) -> bool:
        """Count bytes of requests that are incomplete or unread; False: the limit is exceeded."""


class Stream(ABC):
    """A call under way; belongs to the event loop of its connection."""

    __slots__ = (
        "_credit",
        "_head_sent",
        "_trailers",
        "_unsent",
        "closed",
        "connection",
        "number",
        "received",
        "recheck_head",
        "remote_closed",
        "request_bytes",
        "rest",
        "unsent_bytes",
        "window",
    )

    def __init__(self, connection: "ConnectionState", number: int) -> None:
        self.connection = connection
        self.number = number
        self.window = connection.initial_window
        """Bytes of DATA the peer still takes; negative after it made its windows smaller."""
        self.request_bytes = self.unsent_bytes = self.received = 0
        self.rest: tuple[float, int] | None = None
        """Since when, and after how many received bytes,
        the rest of a request is awaited (`Link.tick` sets it).
        """
        self.remote_closed = self.closed = self._head_sent = False
        self._credit = STREAM_WINDOW
        self.recheck_head: RequestHead | None = None
        """The call's head, if the call must end once its client may not make it any more; else
        None.
        """
        self._unsent: deque[bytes | memoryview] | None = None
        self._trailers = b""

    @abstractmethod
    def receive(self, data: bytes, *, ended: bool) -> None:
        """DATA came, in any cut; `ended`: it was the last.

        Raises:
            StatusError: the call cannot go on.
        """

    def deliver(self, data: bytes, *, ended: bool) -> None:
        """Take a piece of the request from the peer; a fault in it ends the call."""
        self.remote_closed = ended
        try:
            self.receive(data, ended=ended)
        except StatusError as err:
            self.finish(err.status, str(err))

    def aborted(self) -> None:
        """The call ended without an answer: the peer gave it up, or is gone."""
        return

    def start(self) -> None:
        """Let the handler of a unary call begin; calls without one have nothing to start."""
        return

    def awaits_rest(self) -> bool:
        """Whether the peer has begun a request that is not complete."""
        return False

    def writable(self) -> None:
        """Called when fewer bytes wait for the peer, or the connection takes more."""
        return

    def retire(self) -> None:
        """No more calls are taken: one that waits for its client only may end now."""
        return

    def stop(self) -> None:
        """End the call with UNAVAILABLE: the server stops now."""
        self.finish(grpc.StatusCode.UNAVAILABLE, STOPPING)

    def set_request_bytes(self, size: int) -> None:
        """Set how many bytes of the call's requests are in memory.

        Raises:
            StatusError: with those of all other calls they are beyond the listener's bound.
        """
        change = 0 if self.closed else size - self.request_bytes
        self.request_bytes += change
        # Giving back is never refused, even while all calls together are above the bound.
        if not self.connection.host.count_request_bytes(change) and change > 0:
            raise StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, _FULL)

    def take_credit(self, size: int) -> None:
        """Account for `size` received bytes of DATA.

        Raises:
            StreamFault: they exceed the window that the peer was given, or follow END_STREAM.
        """
        if self.remote_closed:
            raise StreamFault(ErrorCode.STREAM_CLOSED, "DATA after the end of its stream")
        self._credit -= size
        self.received += size
        if self._credit < 0:
            raise StreamFault(
                ErrorCode.FLOW_CONTROL_ERROR, "more DATA than the window of its stream"
            )

    def give_credit(self) -> None:
        """Let the peer send more, once half of the window is used."""
        # Not with every DATA frame: that would double the frames of a large request.
        if self._credit < STREAM_WINDOW // 2 and not self.remote_closed and not self.closed:
            self.connection.send(window_update(self.number, STREAM_WINDOW - self._credit))
            self._credit = STREAM_WINDOW

    def answer(self, message: bytes) -> None:
        """All of a call's answer: headers, one message, status OK;
        in one piece where the windows allow it.
        """
        connection = self.connection
        size = len(message) + PREFIX_BYTES
        # The usual unary answer: headers, message and trailers in one write. What does not fit the
        # windows, or is longer than a frame, takes the slow way.
        if self._head_sent or size > min(
            self.window, connection.window, connection.room, DEFAULT_WINDOW // 4
        ):
            self.send_message(message)
            self.finish(grpc.StatusCode.OK)
            return
        connection.window -= size
        connection.room -= size + FRAME_COST_BYTES
        connection.answers += 1
        number = self.number.to_bytes(4)
        data = (
            (size << 8).to_bytes(4) + b"\0" + number + (size - PREFIX_BYTES).to_bytes(PREFIX_BYTES)
        )
        connection.send(
            b"".join((_HEAD, number, _HEAD_BLOCK, data, message, _TAIL, number, _TAIL_BLOCK))
        )
        self._end()

    def send_head(self, metadata: Iterable[tuple[str, str | bytes]] = ()) -> None:
        """The headers, unless they are sent."""
        if not self._head_sent and not self.closed:
            self._head_sent = True
            self.connection.send(
                header_block(self.number, headers.response_head(metadata), end_stream=False)
            )

    def send_message(self, message: bytes) -> None:
        """One message, now or when the peer has room."""
        self.send_messages(len(message).to_bytes(PREFIX_BYTES) + message, 1)

    def send_messages(self, messages: bytes, count: int) -> None:
        """Send messages, each behind its length prefix, now or when the peer's window allows it."""
        if self.finishing:
            return
        connection = self.connection
        size = len(messages)
        # A single answer of any size is sent; only what comes on top of unread ones is bounded.
        if connection.unsent_bytes and connection.unsent_bytes + size > connection.max_unsent_bytes:
            self.finish(
                grpc.StatusCode.RESOURCE_EXHAUSTED, _UNREAD.format(size, connection.unsent_bytes)
            )
            return
        self.send_head()
        connection.answers += count
        if self._unsent or size > min(
            self.window, connection.window, connection.room, DEFAULT_WINDOW // 4
        ):
            self._queue(messages)
            return
        self.window -= size
        connection.window -= size
        connection.room -= size + FRAME_COST_BYTES
        connection.send(HEADER.pack(size << 8 | DATA, 0, self.number) + messages)

    def finish(
        self,
        status: grpc.StatusCode,
        text: str = "",
        metadata: Iterable[tuple[str, str | bytes]] = (),
    ) -> None:
        """End the call once its messages are sent; the first status counts."""
        if self.closed or self._trailers:
            return
        # Without headers sent before, the trailers are all there is ("Trailers-Only" in gRPC's
        # protocol), and one frame.
        block = headers.trailers(status, text, metadata)
        # Kept until the queued DATA is out: trailers end the stream, and DATA behind them would
        # break the protocol.
        self._trailers = block if self._head_sent else headers.RESPONSE_HEAD + block
        if not self._unsent:
            self._send_trailers()
        else:
            self.connection.unread_bytes += self.unsent_bytes

    @property
    def finishing(self) -> bool:
        """Whether the call has its status, or needs none any more."""
        return self.closed or bool(self._trailers)

    def abort(self) -> None:
        """Drop unsent bytes: the peer reset the stream, or is gone."""
        if not self.closed:
            self._release()
            self._unsent = None
            self.aborted()

    def grow(self, increment: int) -> None:
        """The peer takes `increment` more bytes.

        Raises:
            StreamFault: its window would be larger than windows can be.
        """
        self.window += increment
        if self.window > MAX_WINDOW:
            raise StreamFault(ErrorCode.FLOW_CONTROL_ERROR, "a window of more than 2^31 - 1 bytes")
        # Windows may grow by a byte at a time, so streams that wait for one are served once a turn.
        if self._unsent and self.window > 0:
            self.connection.waiting[self.number] = self
            self.connection.look_again()

    def drain(self) -> None:
        """Send as much as the windows allow."""
        unsent, connection = self._unsent, self.connection
        while unsent:
            allowed = min(
                self.window, connection.window, connection.room, connection.peer_frame_bytes
            )
            if allowed <= 0:
                if self.window > 0:
                    connection.waiting[self.number] = self
                return
            self._send_part(unsent, allowed)
        connection.waiting.pop(self.number, None)
        if self._trailers and not self.closed:
            self._send_trailers()

    def _send_part(self, unsent: deque[bytes | memoryview], allowed: int) -> None:
        connection, part = self.connection, unsent.popleft()
        if len(part) > allowed:
            rest = memoryview(part)
            part = rest[:allowed]
            unsent.appendleft(rest[allowed:])
        size = len(part)
        self.window -= size
        connection.window -= size
        connection.room -= size + FRAME_COST_BYTES
        self._count_unsent(-size)
        connection.send(HEADER.pack(size << 8 | DATA, 0, self.number))
        connection.send(part)
        if self.unsent_bytes <= MAX_UNSENT_BYTES < self.unsent_bytes + size:
            self.writable()

    def _queue(self, data: bytes) -> None:
        if self._unsent is None:
            self._unsent = deque()
        self._unsent.append(data)
        self._count_unsent(len(data))
        self.drain()

    def _count_unsent(self, change: int) -> None:
        connection = self.connection
        self.unsent_bytes += change
        connection.unsent_bytes += change
        if self._trailers:
            # The trailers are set: the handler has finished, and only the peer delays the end.
            connection.unread_bytes += change
        connection.host.count_buffered_bytes(change)

    def _send_trailers(self) -> None:
        if len(self._trailers) < DEFAULT_WINDOW // 4:
            self.connection.send(
                frame(HEADERS, END_HEADERS | END_STREAM, self.number, self._trailers)
            )
        else:
            self.connection.send(header_block(self.number, self._trailers, end_stream=True))
        self._end()

    def _end(self) -> None:
        if not self.remote_closed:
            # The peer is still sending its request, which nobody will read.
            self.connection.send(rst_stream(self.number, ErrorCode.NO_ERROR))
        self._release()

    def _release(self) -> None:
        self.closed = True
        self.connection.host.count_request_bytes(-self.request_bytes)
        self.request_bytes = 0
        if self.unsent_bytes:
            self._count_unsent(-self.unsent_bytes)
        self.connection.remove_stream(self)


class ConnectionState:
    """A connection's state for its calls and frame handlers: the open streams, and the bytes to
    send.
    """

    def __init__(
        self, host: StreamHost, bounds: Bounds, clock: Callable[[], float], wake: Callable[[], None]
    ) -> None:
        """`wake` is called when there are bytes to send and no turn is due."""
        self.streams: dict[int, Stream] = {}
        self.waiting: OrderedDict[int, Stream] = OrderedDict()
        """Streams whose DATA may go out in the next turn, window and socket allowing; not those
        without a window.
        """
        self.starting: OrderedDict[int, Stream] = OrderedDict()
        """Unary calls whose handlers wait for their turn."""
        self.gated = False
        """Whether requests wait until the peer has read answers."""
        self.unpacking: OrderedDict[int, Stream] = OrderedDict()
        """Streams with a compressed message that needs more turns."""
        self.room = ROOM_BYTES
        """Bytes of DATA that may still be written in this turn; 0 while the socket is full."""
        self.last_stream = 0
        """The greatest number of a stream that the peer has opened."""
        self.window = self.initial_window = DEFAULT_WINDOW
        self.peer_frame_bytes = MAX_FRAME_BYTES
        self.unsent_bytes = 0
        """The bytes of answers that wait for the peer."""
        self.max_unsent_bytes = bounds.unsent_bytes
        self.unread_bytes = 0
        """The part of those that belongs to calls whose handlers have finished."""
        self.answers = 0
        """Messages sent; pings between them are no flood."""
        self.ready = False
        """The peer's preface and settings were seen."""
        self.failed: ConnectionFault | None = None
        self.awaiting_ping_ack = self.congested = self.draining = False
        """`congested`: the socket's send buffer is full."""
        self.peer = UNKNOWN_PEER
        self.host = host
        self.empty_frames = TokenBucket(
            "too many frames that say nothing", _EMPTY, _EMPTY_PER_S, clock
        )
        self._wake = wake
        self._armed = True
        self._out: list[bytes | memoryview] = []
        self._crashed = False

    def send(self, data: bytes | memoryview) -> None:
        """Queue whole frames, or the parts of one in their order."""
        self._out.append(data)
        if not self._armed:
            self._armed = True
            self._wake()

    def take(self) -> bytes:
        """Take all bytes that are to be written now."""
        self._armed = True
        # In the order in which they began to wait; one that is not done is appended again, so a
        # large answer delays the others by one turn at most.
        while self.waiting and self.window > 0 and self.room > 0:
            self.waiting.popitem(last=False)[1].drain()
        if self.gated and self.unread_bytes <= MAX_UNREAD_BYTES:
            self.host.resume_handlers(self)
        # From here on a `send` outside of a read, as by a handler's task, wakes the host itself.
        self._armed = False
        out, self._out = self._out, []
        if not self.congested:
            self.room = ROOM_BYTES
            if self.waiting and self.window > 0:
                self.look_again()
        return b"".join(out)

    def make_room(self) -> None:
        """Let the next turn write as much again, and resume streams that wait for that."""
        self.room = ROOM_BYTES
        if self.waiting and self.window > 0:
            self.look_again()

    def look_again(self) -> None:
        """Have `take` called soon, which resumes the waiting streams."""
        if not self._armed:
            self._armed = True
            self._wake()

    def fail(self, fault: ConnectionFault) -> None:
        """End the connection: GOAWAY says why, and its calls are aborted."""
        self.send(goaway(self.last_stream, fault.code, fault.text))
        self.failed = fault
        self.abort()

    def crash(self, err: Exception) -> None:
        """End this connection, and nothing else, after an unexpected exception in its code;
        log and count the first.
        """
        if self._crashed:
            return
        self._crashed = True
        # Before anything is sent: if writing fails, too, the first cause is in the log.
        self.host.report_error(self, err)
        self._out.clear()  # the exception may have left half a frame
        fault = ConnectionFault(
            ErrorCode.INTERNAL_ERROR, "internal error: the server's log has the cause"
        )
        self.send(goaway(self.last_stream, fault.code, fault.text))
        self.failed = self.failed or fault
        self.abort()

    def abort(self) -> None:
        """Abort all calls: the peer is gone."""
        for stream in list(self.streams.values()):
            try:
                stream.abort()
            except Exception as err:  # noqa: BLE001 - one broken call must not keep the others from ending
                self.remove_stream(stream)
                self.host.count_request_bytes(-stream.request_bytes)
                self.crash(err)

    def drain(self) -> None:
        """Take no more calls; those under way go on."""
        if not self.draining:
            self.draining = True
            # The greatest number there is: calls that are on their way to us are still served, as
            # RFC 9113 §6.8 advises for a graceful end.
            self.send(goaway(MAX_WINDOW, ErrorCode.NO_ERROR))
            for stream in list(self.streams.values()):
                stream.retire()

    def ping(self) -> None:
        """Send PING; `awaiting_ping_ack` is true until the ACK arrives."""
        self.awaiting_ping_ack = True
        self.send(frame(PING, 0, 0, bytes(8)))

    def remove_stream(self, stream: Stream) -> None:
        """Drop a finished stream and free its slot."""
        if self.streams.pop(stream.number, None) is not None:
            self.host.released()
        for places in (self.waiting, self.starting, self.unpacking):
            if places:
                places.pop(stream.number, None)

    def resumed(self) -> None:
        """The socket's send buffer has room again."""
        self.congested = False
        self.make_room()
        for stream in list(self.streams.values()):
            stream.writable()
