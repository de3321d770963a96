"""One call's half of a connection: what it may send and receive, and how it ends. What it means is its subclasses'.

Invariants:
1. No DATA is sent beyond the peer's windows, and none is accepted beyond those we gave; a call whose messages nobody
   takes is given no more.
2. A stream ends once: by its trailers (`finish`), or because it was reset or its connection ended (`abort`). After
   `closed` nothing of it is sent and its connection has forgotten it.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

import grpc

from server.rpc.errors import StatusError
from server.rpc.http2 import response_blocks
from server.rpc.http2.frames import (
    DATA,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    HEADER,
    HEADERS,
    MAX_WINDOW,
    ErrorCode,
    StreamFault,
    frame,
    header_block,
    rst_stream,
    window_update,
)
from server.rpc.http2.messages import PREFIX_BYTES

if TYPE_CHECKING:
    from server.rpc.http2.connection import Connection

STREAM_WINDOW = 1 << 20
"""Bytes of DATA a call may be sent ahead of whoever reads it; SETTINGS say so."""
FRAME_COST_BYTES = 256
"""What a DATA frame counts beyond its bytes, of what one turn may write: a peer may let us send a byte at a time."""
MAX_UNSENT_BYTES = 256 << 10
"""What of its answers may wait for the peer before whoever writes them has to wait."""

STOPPING = "the server is stopping; ask another one, or again"
_FULL = "too many bytes of unfinished requests are in memory; slow down and try again"

_UNREAD = (
    "the call was carried out, but its answer of {} bytes is not kept: {} bytes of answers wait to be read; "
    "read them, or ask for less at a time"
)

_HEAD = HEADER.pack(len(response_blocks.HEAD) << 8 | HEADERS, END_HEADERS, 0)[:5]
_TAIL = HEADER.pack(len(response_blocks.TRAILERS_OK) << 8 | HEADERS, END_HEADERS | END_STREAM, 0)[:5]
_HEAD_BLOCK, _TAIL_BLOCK = response_blocks.HEAD, response_blocks.TRAILERS_OK


class Stream(ABC):
    """A call under way."""

    __slots__ = ("_credit", "_head_sent", "_trailers", "_unsent", "closed", "connection", "held", "number", "received",
                 "remote_closed", "rest", "unsent_bytes", "window")  # fmt: skip

    def __init__(self, connection: "Connection", number: int) -> None:
        self.connection = connection
        self.number = number
        self.window = connection.initial_window
        """Bytes of DATA the peer still takes; negative after it made its windows smaller."""
        self.held = self.unsent_bytes = self.received = 0
        self.rest: tuple[float, int] | None = None
        """Since when, and after how many received bytes, the rest of a request is awaited (`Link.tick` sets it)."""
        self.remote_closed = self.closed = self._head_sent = False
        self._credit = STREAM_WINDOW
        self._unsent: deque[bytes | memoryview] | None = None
        self._trailers = b""

    @abstractmethod
    def receive(self, data: bytes, *, ended: bool) -> None:
        """DATA came, in any cut; `ended`: it was the last.

        Raises:
            StatusError: the call cannot go on.
        """

    def aborted(self) -> None:
        """The call ended without an answer: the peer gave it up, or is gone."""
        return

    def awaits_rest(self) -> bool:
        """Whether the peer has begun a request that it has yet to finish."""
        return False

    def writable(self) -> None:
        """What waited for the peer has become less, or the connection takes more."""
        return

    def retire(self) -> None:
        """No more calls are taken: one that waits for its client only may end now."""
        return

    def stop(self) -> None:
        """The daemon stops now."""
        self.finish(grpc.StatusCode.UNAVAILABLE, STOPPING)

    def hold(self, size: int) -> None:
        """So many bytes of its requests are in memory.

        Raises:
            StatusError: that, with what other calls hold, is too much.
        """
        change = 0 if self.closed else size - self.held
        self.held += change
        if not self.connection.host.hold(change) and change > 0:
            raise StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, _FULL)

    def take_credit(self, size: int) -> None:
        """Account for `size` received bytes.

        Raises:
            StreamFault: more than there was room for, or after the end.
        """
        if self.remote_closed:
            raise StreamFault(ErrorCode.STREAM_CLOSED, "DATA after the end of its stream")
        self._credit -= size
        self.received += size
        if self._credit < 0:
            raise StreamFault(ErrorCode.FLOW_CONTROL_ERROR, "more DATA than the window of its stream")

    def give_credit(self) -> None:
        """Let the peer send more, once half of the window is used."""
        if self._credit < STREAM_WINDOW // 2 and not self.remote_closed and not self.closed:
            self.connection.send(window_update(self.number, STREAM_WINDOW - self._credit))
            self._credit = STREAM_WINDOW

    def answer(self, message: bytes) -> None:
        """All of a call's answer: headers, one message, status OK; in one piece where the windows allow it."""
        connection = self.connection
        size = len(message) + PREFIX_BYTES
        if self._head_sent or size > min(self.window, connection.window, connection.room, DEFAULT_WINDOW // 4):
            self.send_message(message)
            self.finish(grpc.StatusCode.OK)
            return
        connection.window -= size
        connection.room -= size + FRAME_COST_BYTES
        connection.answers += 1
        number = self.number.to_bytes(4)
        data = (size << 8).to_bytes(4) + b"\0" + number + (size - PREFIX_BYTES).to_bytes(PREFIX_BYTES)
        connection.send(b"".join((_HEAD, number, _HEAD_BLOCK, data, message, _TAIL, number, _TAIL_BLOCK)))
        self._end()

    def send_head(self, metadata: Iterable[tuple[str, str | bytes]] = ()) -> None:
        """The headers, unless they are sent."""
        if not self._head_sent and not self.closed:
            self._head_sent = True
            self.connection.send(header_block(self.number, response_blocks.head(metadata), end_stream=False))

    def send_message(self, message: bytes) -> None:
        """One message, now or when the peer has room."""
        if self.finishing:
            return
        connection = self.connection
        size = len(message) + PREFIX_BYTES
        if connection.unsent_bytes and connection.unsent_bytes + size > connection.max_unsent_bytes:
            self.finish(grpc.StatusCode.RESOURCE_EXHAUSTED, _UNREAD.format(size, connection.unsent_bytes))
            return
        self.send_head()
        connection.answers += 1
        if self._unsent or size > min(self.window, connection.window, connection.room, DEFAULT_WINDOW // 4):
            self._queue(len(message).to_bytes(PREFIX_BYTES) + message)
            return
        self.window -= size
        connection.window -= size
        connection.room -= size + FRAME_COST_BYTES
        header = HEADER.pack(size << 8 | DATA, 0, self.number)
        connection.send(b"%b%b%b" % (header, len(message).to_bytes(PREFIX_BYTES), message))

    def finish(self, status: grpc.StatusCode, text: str = "", metadata: Iterable[tuple[str, str | bytes]] = ()) -> None:
        """End the call when what it has sent is on its way; the first status is the one that counts."""
        if self.closed or self._trailers:
            return
        block = response_blocks.trailers(status, text, metadata)
        self._trailers = block if self._head_sent else response_blocks.HEAD + block
        if not self._unsent:
            self._send_trailers()
        else:
            self.connection.unread_bytes += self.unsent_bytes

    @property
    def finishing(self) -> bool:
        """Whether the call has its status, or needs none any more."""
        return self.closed or bool(self._trailers)

    def abort(self) -> None:
        """The peer reset the stream, or is gone: forget what is unsent."""
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
        if self._unsent and self.window > 0:  # windows may grow by a byte at a time: they are looked at once a turn
            self.connection.waiting[self.number] = self
            self.connection.look_again()

    def drain(self) -> None:
        """Send what the windows allow."""
        unsent, connection = self._unsent, self.connection
        while unsent:
            allowed = min(self.window, connection.window, connection.room, connection.peer_frame_bytes)
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
            connection.unread_bytes += change
        connection.host.buffer(change)

    def _send_trailers(self) -> None:
        if len(self._trailers) < DEFAULT_WINDOW // 4:
            self.connection.send(frame(HEADERS, END_HEADERS | END_STREAM, self.number, self._trailers))
        else:
            self.connection.send(header_block(self.number, self._trailers, end_stream=True))
        self._end()

    def _end(self) -> None:
        if not self.remote_closed:
            self.connection.send(rst_stream(self.number, ErrorCode.NO_ERROR))
        self._release()

    def _release(self) -> None:
        self.closed = True
        self.connection.host.hold(-self.held)
        self.held = 0
        if self.unsent_bytes:
            self._count_unsent(-self.unsent_bytes)
        self.connection.forget(self)
