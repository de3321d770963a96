"""One HTTP/2 connection (RFC 9113), without sockets and clocks: bytes come in, frames go out,
calls are opened at its host.

`Connection` cuts what is received into frames, and handles those that move bytes of calls: DATA,
RST_STREAM, WINDOW_UPDATE. `ControlFrames` handles those about the connection itself: SETTINGS,
PING, GOAWAY, and those that ask for nothing we have. `HeaderFrames` handles HEADERS and
CONTINUATION: the calls that header blocks open, or end.

Invariants:
1. Whatever bytes come, `receive` ends in one of three ways: the frames are handled, one stream is
   reset, or the connection fails with GOAWAY and ignores all later bytes. It raises nothing: an
   unexpected exception, too, ends this connection only (`crash`), whichever callback, timer,
   handler or route met it.
2. The memory that a peer can take is bounded: one frame, one header block, the streams that the
   host admits, and for each of them its window. Frames that cost the peer nothing and make us
   answer (SETTINGS, PING, resets) are bounded by token buckets.
3. Every header block is decoded, in order, whoever refuses its stream: the HPACK table must see it.
4. A header block is bounded, in frames and in bytes, and nothing comes between its frames.
"""

from collections.abc import Callable

import grpc

from server.rpc.errors import StatusError
from server.rpc.http2 import frames, headers
from server.rpc.http2.frames import ConnectionFault, ErrorCode, StreamFault
from server.rpc.http2.headers import (
    HeaderDecoder,
    HttpRefusalError,
    OversizedHeadersError,
    read_head,
)
from server.rpc.http2.peer import Bounds, TokenBucket
from server.rpc.http2.stream import STREAM_WINDOW, ConnectionState, Stream, StreamHost

CONNECTION_WINDOW = 16 << 20
_CHECKED_BYTES, _FRAME_COST_BYTES = 4096, 256
"""After so many bytes the clock is read, to end the turn in time; a frame counts for its payload
and the second of these.
"""
_RESETS, _RESETS_PER_S = 20_000, 1000
FrameHandler = Callable[[int, int, bytes], None]
"""Takes flags, stream and payload."""
_SETTINGS, _SETTINGS_PER_S = 50, 1
_ENABLE_PUSH, _INITIAL_WINDOW, _MAX_FRAME = 2, 4, 5
_MAX_BLOCK_FRAMES = 64


class Connection(ConnectionState):
    """The receiving half of a connection: handles frames by their type. Its streams use it through
    `ConnectionState`.
    """

    def __init__(
        self, host: StreamHost, bounds: Bounds, clock: Callable[[], float], wake: Callable[[], None]
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
        self._header_frames = HeaderFrames(self, bounds)
        self._resets = TokenBucket("too many calls opened and reset", _RESETS, _RESETS_PER_S, clock)
        self._handlers: dict[int, FrameHandler] = {
            frames.DATA: self._on_data,
            frames.RST_STREAM: self._on_rst_stream,
            frames.WINDOW_UPDATE: self._on_window_update,
            **self._header_frames.handlers(),
            **ControlFrames(self, bounds.pings, bounds.pings_per_s, clock).handlers(),
        }
        self._introduce()

    @property
    def backlog_bytes(self) -> int:
        """Received and not handled yet."""
        return len(self._rest)

    @property
    def header_block_stream(self) -> int:
        """The stream whose header block is unfinished; 0: none is."""
        unfinished = self._header_frames.unfinished
        return unfinished[0] if unfinished else 0

    def receive(self, data: bytes) -> None:
        """Take bytes of the peer; bytes to send at once are in `take` afterwards."""
        self._rest = self._rest + data if self._rest else data
        self.proceed()

    def proceed(self) -> None:
        """Handle received bytes for one turn; `behind` is true if there are more."""
        if self.failed:
            self._rest, self.behind = b"", False
            return
        # While armed, `send` does not wake the host: it writes all that this read brings in one
        # piece afterwards. A wake-up for each answer would cost more than the answer.
        self._armed = True
        try:
            self._receive(self._rest, self._clock() + self.host.turn_s())
        except ConnectionFault as fault:
            self.fail(fault)
        except Exception as err:  # noqa: BLE001 - see invariant 1
            self.crash(err)

    def abort(self) -> None:
        """Note that the peer is gone: end its calls, and drop its unhandled bytes."""
        self._rest, self.behind = b"", False
        super().abort()

    def _introduce(self) -> None:
        # The stream window is far above HTTP/2's default of 64 KiB, which would cost a round trip
        # for each larger request.
        values = {3: self._bounds.streams, 4: STREAM_WINDOW, 6: self._bounds.metadata_bytes}
        self.send(frames.settings(values))
        self.send(frames.window_update(0, CONNECTION_WINDOW - frames.DEFAULT_WINDOW))

    def _receive(self, data: bytes, until_s: float) -> None:
        # One loop over local names: at 128 callers a read brings hundreds of frames, and this is
        # most of what a frame costs.
        at, size, unpack, clock = 0, len(data), frames.HEADER.unpack_from, self._clock
        unchecked = _CHECKED_BYTES  # read the clock after the first frame, which may be expensive
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
            # Checked before the frame is complete: its sender must not make us buffer what will be
            # refused.
            if word >> 8 > frames.MAX_FRAME_BYTES:
                raise ConnectionFault(
                    ErrorCode.FRAME_SIZE_ERROR, "a frame of more than 16,384 bytes"
                )
            # An incomplete frame stays, header included, until the next read brings its rest.
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
                # The rest waits for a later turn, so that one peer's burst does not hold up the
                # other connections.
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
        block = self._header_frames.unfinished
        # RFC 9113 §6.10: nothing may come between HEADERS and CONTINUATION, not even frames of
        # other streams; the HPACK decoder needs the blocks in order.
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
        # The whole payload counts, padding too (RFC 9113 §6.1), and also for a stream that is gone:
        # otherwise the connection's window would shrink with every call that ends early.
        self._take_credit(size)
        if flags & frames.PADDED:
            payload = frames.unpadded(payload, flags)
        stream = self.streams.get(number)
        if stream is None:
            self._check_not_idle(number)  # closed: what was on its way is lost
            return
        stream.take_credit(size)
        ended = bool(flags & frames.END_STREAM)
        if not payload and not ended:
            self.empty_frames.spend()
        stream.deliver(payload, ended=ended)

    def _take_credit(self, size: int) -> None:
        """Take DATA's bytes from the connection's window, and give them back at once: a slow call
        holds up itself by its own window, not its neighbours.
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
        # Opening and resetting calls at full speed costs the peer nothing and us a call each
        # (CVE-2023-44487, "rapid reset"); the resets that we send count, too.
        self._resets.spend()
        stream = self.streams.get(number)
        if stream is not None:
            # Set first: a stream that the peer has reset must not be answered with RST_STREAM
            # again.
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
        # A window update that overflows a stream ends that stream; one of stream 0 ends the
        # connection (RFC 9113 §6.9.1).
        self.window += increment
        if not increment:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a window that grows by nothing")
        if self.window > frames.MAX_WINDOW:
            raise ConnectionFault(
                ErrorCode.FLOW_CONTROL_ERROR, "a window of more than 2^31 - 1 bytes"
            )
        if self.waiting:
            self.look_again()


class ControlFrames:
    """Handlers of frames about the connection."""

    def __init__(
        self,
        connection: ConnectionState,
        pings: int,
        pings_per_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._connection = connection
        self._pings = TokenBucket("too_many_pings", pings, pings_per_s, clock)
        self._pinged_at_answers = 0
        self._settings = TokenBucket("too many SETTINGS", _SETTINGS, _SETTINGS_PER_S, clock)

    def handlers(self) -> dict[int, FrameHandler]:
        """The functions that handle frames, by type."""
        return {
            frames.PRIORITY: self._on_priority,
            frames.SETTINGS: self._on_settings,
            frames.PUSH_PROMISE: self._on_push_promise,
            frames.PING: self._on_ping,
            frames.GOAWAY: self._on_goaway,
        }

    def _on_settings(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "SETTINGS of one stream")
        if flags & frames.ACK:
            if payload:
                raise ConnectionFault(
                    ErrorCode.FRAME_SIZE_ERROR, "an acknowledgement with settings in it"
                )
            return
        self._settings.spend()
        # the last of each counts, and is applied once
        values = dict(frames.setting_pairs(payload))
        # All values are checked before the first is applied: a connection that fails must not have
        # changed its windows.
        for key, value in values.items():
            _check(key, value)
        self._connection.peer_frame_bytes = values.get(
            _MAX_FRAME, self._connection.peer_frame_bytes
        )
        if _INITIAL_WINDOW in values:
            self._change_window(values[_INITIAL_WINDOW])
        # The preface is over; from now on other frames than SETTINGS are understood.
        self._connection.ready = True
        self._connection.send(frames.frame(frames.SETTINGS, frames.ACK, 0))

    def _change_window(self, value: int) -> None:
        # A change of the initial window changes the windows of all open streams, maybe below zero
        # (RFC 9113 §6.9.2).
        change, self._connection.initial_window = value - self._connection.initial_window, value
        for stream in list(self._connection.streams.values()):
            self._grow(stream, change)

    def _grow(self, stream: Stream, change: int) -> None:
        try:
            stream.grow(change)
        except StreamFault as fault:
            # The SETTINGS frame is to blame, which belongs to no stream, so the connection ends.
            raise ConnectionFault(fault.code, str(fault)) from fault

    def _on_ping(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PING of one stream")
        if len(payload) != 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "PING of another length than eight")
        if flags & frames.ACK:
            self._connection.awaiting_ping_ack = False
            return
        # As in gRPC's C core, answers in between make pings legitimate: clients measure bandwidth
        # with a ping for each of them.
        if self._connection.answers != self._pinged_at_answers:
            self._pinged_at_answers = self._connection.answers
            self._pings.refill()
        self._pings.spend()
        self._connection.send(frames.frame(frames.PING, frames.ACK, 0, payload))

    def _on_goaway(self, _flags: int, number: int, payload: bytes) -> None:
        if number:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "GOAWAY of one stream")
        if len(payload) < 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY that is too short")

    def _on_priority(self, _flags: int, number: int, payload: bytes) -> None:
        if not number:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PRIORITY of no stream")
        self._connection.empty_frames.spend()
        if len(payload) != 5:
            raise StreamFault(ErrorCode.FRAME_SIZE_ERROR, "PRIORITY of another length than five")
        if int.from_bytes(payload[:4]) & frames.MAX_WINDOW == number:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, "a stream that depends on itself")

    def _on_push_promise(self, _flags: int, _number: int, _payload: bytes) -> None:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "clients do not push")


def _check(key: int, value: int) -> None:
    if key == _ENABLE_PUSH and value > 1:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH is 0 or 1")
    if key == _INITIAL_WINDOW and value > frames.MAX_WINDOW:
        raise ConnectionFault(
            ErrorCode.FLOW_CONTROL_ERROR, "an initial window of more than 2^31 - 1 bytes"
        )
    if key == _MAX_FRAME and not frames.MAX_FRAME_BYTES <= value < 1 << 24:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a largest frame that HTTP/2 does not have")


class HeaderFrames:
    """Handlers of header blocks."""

    def __init__(self, connection: ConnectionState, bounds: Bounds) -> None:
        self.unfinished: tuple[int, int, bytearray, int] | None = None
        """A block whose end is yet to come: its stream, the flags of its HEADERS, its bytes,
        and in how many frames.
        """
        self._connection = connection
        self._bounds = bounds
        self._decoder = HeaderDecoder(bounds.metadata_bytes, read_head)

    def handlers(self) -> dict[int, FrameHandler]:
        """The functions that handle frames, by type."""
        return {frames.HEADERS: self._on_headers, frames.CONTINUATION: self._on_continuation}

    def _on_headers(self, flags: int, number: int, payload: bytes) -> None:
        if not number & 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"clients do not open stream {number}")
        # Only these flags make the payload longer than the block; real clients set neither.
        if flags & (frames.PADDED | frames.PRIORITIZED):
            payload = frames.prioritized(number, frames.unpadded(payload, flags), flags)
        if flags & frames.END_HEADERS:
            self._request(number, payload, ended=bool(flags & frames.END_STREAM))
        else:
            self.unfinished = (number, flags, bytearray(payload), 1)

    def _on_continuation(self, flags: int, number: int, payload: bytes) -> None:
        if self.unfinished is None:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "CONTINUATION of nothing")
        _, begun, block, count = self.unfinished
        block += payload
        # Bounded in frames as well as in bytes: empty CONTINUATION frames without end cost time and
        # no bytes (CVE-2024-27316).
        if count >= _MAX_BLOCK_FRAMES or len(block) > 4 * self._bounds.metadata_bytes:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "a header block without end")
        self.unfinished = (number, begun, block, count + 1)
        if flags & frames.END_HEADERS:
            self.unfinished = None
            self._request(number, bytes(block), ended=bool(begun & frames.END_STREAM))

    def _request(self, number: int, block: bytes, *, ended: bool) -> None:
        connection = self._connection
        if number <= connection.last_stream:
            self._trailers(number, block, ended=ended)
            return
        # Before the head is understood: a refused stream, too, is no longer idle, and its number
        # must not be used again.
        connection.last_stream = number
        try:
            # Decoded even if the stream is refused in the next line: the block may change the table
            # that later ones refer to.
            head, timeout_s = self._decoder.request(block)
            if connection.draining or len(connection.streams) >= self._bounds.streams:
                raise StreamFault(ErrorCode.REFUSED_STREAM, "no more streams")
            stream = connection.host.open(connection, number, head, timeout_s)
        except HttpRefusalError as refusal:
            self._refuse(number, headers.http_status(refusal.status), ended=ended)
        except OversizedHeadersError:
            text = f"received metadata of more than {self._bounds.metadata_bytes} bytes"
            self._refuse_call(
                number, StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, text), ended=ended
            )
        except StatusError as err:
            self._refuse_call(number, err, ended=ended)
        else:
            connection.streams[number] = stream
            if ended:
                stream.deliver(b"", ended=True)

    def _trailers(self, number: int, block: bytes, *, ended: bool) -> None:
        """Handle HEADERS of an open stream: they can only end it, and their fields are ignored."""
        try:
            self._decoder.fields(block)
        except OversizedHeadersError as err:
            raise ConnectionFault(
                ErrorCode.ENHANCE_YOUR_CALM, "trailers that are too large"
            ) from err
        stream = self._connection.streams.get(number)
        if stream is None or stream.remote_closed:
            raise ConnectionFault(
                ErrorCode.STREAM_CLOSED, f"HEADERS of stream {number}, which is closed"
            )
        if not ended:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, "headers in the middle of a call")
        stream.deliver(b"", ended=True)

    def _refuse_call(self, number: int, err: StatusError, *, ended: bool) -> None:
        self._refuse(
            number,
            headers.RESPONSE_HEAD + headers.trailers(err.status, str(err)),
            ended=ended,
        )

    def _refuse(self, number: int, block: bytes, *, ended: bool) -> None:
        self._connection.send(frames.header_block(number, block, end_stream=True))
        if not ended:
            # The answer is complete before the request is: NO_ERROR tells the peer to stop sending
            # without taking the answer for a failure (RFC 9113 §8.1).
            self._connection.send(frames.rst_stream(number, ErrorCode.NO_ERROR))
