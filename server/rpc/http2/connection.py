"""One HTTP/2 connection, without sockets and clocks: bytes come in, frames go out,
calls are opened for its host.

Invariants:
1. Whatever bytes come, `receive` ends in one of three ways: the frames are understood, one stream
   is reset, or the connection fails with GOAWAY and hears nothing more. It raises nothing: an
   unexpected exception, too, ends this connection only (`crash`), whichever callback, timer,
   handler or route met it.
2. What a peer can make us hold is bounded: one frame, one header block, the streams the host
   admits, and for each what its window lets in. What it can make us send without end
   (acknowledgements) is bounded by token buckets.
"""

from collections.abc import Callable

from server.rpc.http2 import frames
from server.rpc.http2.frame_handlers import Control, FrameHandler, Requests
from server.rpc.http2.frames import ConnectionFault, ErrorCode, StreamFault
from server.rpc.http2.peer import Bounds, TokenBucket
from server.rpc.http2.stream import STREAM_WINDOW, ConnectionState, Host

CONNECTION_WINDOW = 16 << 20
_CHECKED_BYTES, _FRAME_COST_BYTES = 4096, 256
"""After so many bytes, each frame counting some more, the clock is looked at: is the turn over?"""
_RESETS, _RESETS_PER_S = 20_000, 1000


class Connection(ConnectionState):
    """What a connection receives, over what its calls know of it."""

    def __init__(
        self, host: Host, bounds: Bounds, clock: Callable[[], float], wake: Callable[[], None]
    ) -> None:
        """See `ConnectionState`; the preface's answer is in `take` at once."""
        super().__init__(host, bounds, clock, wake)
        self.behind = False
        """More was received than handled in this turn; `proceed` goes on."""
        self.progress = 0
        """Grows when frames are complete."""
        self._bounds = bounds
        self._clock = clock
        self._rest = b""
        self._credit = CONNECTION_WINDOW
        self._preface_seen = False
        self._requests = Requests(self, bounds)
        self._resets = TokenBucket("too many calls opened and reset", _RESETS, _RESETS_PER_S, clock)
        self._handlers: dict[int, FrameHandler] = {
            frames.DATA: self._on_data,
            frames.RST_STREAM: self._on_rst_stream,
            frames.WINDOW_UPDATE: self._on_window_update,
            **self._requests.handlers(),
            **Control(self, bounds.pings, bounds.pings_per_s, clock).handlers(),
        }
        self._introduce()

    @property
    def backlog_bytes(self) -> int:
        """Received and not handled yet."""
        return len(self._rest)

    @property
    def header_block_stream(self) -> int:
        """The stream whose header block is unfinished; 0: none is."""
        unfinished = self._requests.unfinished
        return unfinished[0] if unfinished else 0

    def receive(self, data: bytes) -> None:
        """Bytes of the peer; what they ask to be sent at once is in `take` afterwards."""
        self._rest = self._rest + data if self._rest else data
        self.proceed()

    def proceed(self) -> None:
        """Handle what was received, for as long as a turn is;
        `behind` says whether there is more.
        """
        if self.failed:
            self._rest, self.behind = b"", False
            return
        self._armed = True
        try:
            self._receive(self._rest, self._clock() + self.host.turn_s())
        except ConnectionFault as fault:
            self.fail(fault)
        except Exception as err:  # noqa: BLE001 - see invariant 1
            self.crash(err)

    def abort(self) -> None:
        """The peer is gone: its calls are given up, and what it sent and was not handled is
        forgotten.
        """
        self._rest, self.behind = b"", False
        super().abort()

    def _introduce(self) -> None:
        values = {3: self._bounds.streams, 4: STREAM_WINDOW, 6: self._bounds.metadata_bytes}
        self.send(frames.settings(values))
        self.send(frames.window_update(0, CONNECTION_WINDOW - frames.DEFAULT_WINDOW))

    def _receive(self, data: bytes, until_s: float) -> None:
        at, size, unpack, clock = 0, len(data), frames.HEADER.unpack_from, self._clock
        unchecked = _CHECKED_BYTES  # the first frame may be the dear one
        self.behind = False
        if self.unpacking:
            self._unpack(until_s)
        if not self._preface_seen:
            at = self._preface(data)
            if not at:
                self._rest = data
                return
        while size - at >= frames.HEADER_BYTES:
            word, flags, number = unpack(data, at)
            at += frames.HEADER_BYTES
            end = at + (word >> 8)
            if word >> 8 > frames.MAX_FRAME_BYTES:
                raise ConnectionFault(
                    ErrorCode.FRAME_SIZE_ERROR, "a frame of more than 16,384 bytes"
                )
            if end > size:
                at -= frames.HEADER_BYTES
                break
            self._take(word & 0xFF, flags, number & frames.MAX_WINDOW, data[at:end])
            at = end
            unchecked += _FRAME_COST_BYTES + (word >> 8)
            if unchecked > _CHECKED_BYTES:
                unchecked = 0
                if self.failed:
                    return
                if clock() > until_s:
                    self.behind = True
                    break
        if at:
            self.progress += 1
        self._rest = data[at:]
        self.behind = self.behind or bool(self.unpacking)

    def _unpack(self, until_s: float) -> None:
        """Go on with compressed messages, each by a slice."""
        for stream in list(self.unpacking.values()):
            self.unpacking.pop(stream.number, None)
            stream.deliver(b"", ended=stream.remote_closed)
            if self._clock() > until_s:
                return

    def _preface(self, data: bytes) -> int:
        seen = data[: len(frames.PREFACE)]
        if not frames.PREFACE.startswith(seen):
            raise ConnectionFault(
                ErrorCode.PROTOCOL_ERROR, "this is not HTTP/2: the connection preface is missing"
            )
        if len(seen) < len(frames.PREFACE):
            return 0
        self._preface_seen = True
        return len(frames.PREFACE)

    def _take(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        block = self._requests.unfinished
        if block is not None and (kind != frames.CONTINUATION or number != block[0]):
            raise ConnectionFault(
                ErrorCode.PROTOCOL_ERROR, "a frame between HEADERS and their CONTINUATION"
            )
        if not self.ready and kind != frames.SETTINGS:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        handler = self._handlers.get(kind)
        if handler is None:
            # frames of extensions are ignored, but not without end
            self.empty_frames.spend()
            return
        try:
            handler(flags, number, payload)
        except StreamFault as fault:
            self._reset(number, fault.code)

    def _reset(self, number: int, code: ErrorCode) -> None:
        self._resets.spend()
        self.send(frames.rst_stream(number, code))
        stream = self.streams.get(number)
        if stream is not None:
            stream.abort()

    def _on_data(self, flags: int, number: int, payload: bytes) -> None:
        size = len(payload)
        self._take_credit(size)
        stream = self.streams.get(number)
        if stream is None:
            self._check_not_idle(number)  # closed: what was on its way is lost
            return
        stream.take_credit(size)
        if flags & frames.PADDED:
            payload = frames.unpadded(payload, flags)
        ended = bool(flags & frames.END_STREAM)
        if not payload and not ended:
            self.empty_frames.spend()
        stream.deliver(payload, ended=ended)

    def _take_credit(self, size: int) -> None:
        """Of the whole connection, which is given back at once: slow calls hold up themselves,
        not their neighbours.
        """
        self._credit -= size
        if self._credit < CONNECTION_WINDOW // 2:
            if self._credit < 0:
                raise ConnectionFault(
                    ErrorCode.FLOW_CONTROL_ERROR, "more DATA than the window of the connection"
                )
            self.send(frames.window_update(0, CONNECTION_WINDOW - self._credit))
            self._credit = CONNECTION_WINDOW

    def _check_not_idle(self, number: int) -> None:
        if number > self.last_stream or not number & 1:
            raise ConnectionFault(
                ErrorCode.PROTOCOL_ERROR, f"a frame of stream {number}, which was never opened"
            )

    def _on_rst_stream(self, _flags: int, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(
                ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM of another length than four"
            )
        self._check_not_idle(number)
        self._resets.spend()
        stream = self.streams.get(number)
        if stream is not None:
            stream.remote_closed = True
            stream.abort()

    def _on_window_update(self, _flags: int, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(
                ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE of another length than four"
            )
        increment = int.from_bytes(payload) & frames.MAX_WINDOW
        if number:
            self._check_not_idle(number)
            if not increment:
                raise StreamFault(ErrorCode.PROTOCOL_ERROR, "a window that grows by nothing")
            stream = self.streams.get(number)
            if stream is not None:
                stream.grow(increment)
            return
        self.window += increment
        if not increment:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a window that grows by nothing")
        if self.window > frames.MAX_WINDOW:
            raise ConnectionFault(
                ErrorCode.FLOW_CONTROL_ERROR, "a window of more than 2^31 - 1 bytes"
            )
        if self.waiting:
            self.look_again()
