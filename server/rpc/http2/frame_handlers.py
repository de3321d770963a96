"""What the frames of a connection do that are not DATA: those about the connection itself,
and header blocks.

`Control` handles SETTINGS, PING, GOAWAY, and those that ask for nothing we have. `Requests` handles
HEADERS and CONTINUATION: the calls that header blocks open, or end. Invariants:

1. Every header block is decoded, in order, whoever refuses its stream.
2. A block is bounded, in frames and in bytes, and nothing comes between its frames.
"""

from collections.abc import Callable

import grpc

from server.rpc.errors import StatusError
from server.rpc.http2 import frames, response_blocks
from server.rpc.http2.frames import ConnectionFault, ErrorCode, StreamFault
from server.rpc.http2.header_blocks import HeaderDecoder, OversizedHeadersError
from server.rpc.http2.peer import Bounds, TokenBucket
from server.rpc.http2.request_head import HttpRefusalError, read_head
from server.rpc.http2.stream import ConnectionState, Stream

FrameHandler = Callable[[int, int, bytes], None]
"""Of flags, stream and payload."""

_SETTINGS, _SETTINGS_PER_S = 50, 1
_ENABLE_PUSH, _INITIAL_WINDOW, _MAX_FRAME = 2, 4, 5


class Control:
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
        """By the type of frame."""
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
        for key, value in values.items():
            _check(key, value)
        self._connection.peer_frame_bytes = values.get(
            _MAX_FRAME, self._connection.peer_frame_bytes
        )
        if _INITIAL_WINDOW in values:
            self._change_window(values[_INITIAL_WINDOW])
        self._connection.ready = True
        self._connection.send(frames.frame(frames.SETTINGS, frames.ACK, 0))

    def _change_window(self, value: int) -> None:
        change, self._connection.initial_window = value - self._connection.initial_window, value
        for stream in list(self._connection.streams.values()):
            self._grow(stream, change)

    def _grow(self, stream: Stream, change: int) -> None:
        try:
            stream.grow(change)
        except StreamFault as fault:
            raise ConnectionFault(fault.code, str(fault)) from fault

    def _on_ping(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PING of one stream")
        if len(payload) != 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "PING of another length than eight")
        if flags & frames.ACK:
            self._connection.awaited_pong = False
            return
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


_MAX_BLOCK_FRAMES = 64


class Requests:
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
        """By the type of frame."""
        return {frames.HEADERS: self._on_headers, frames.CONTINUATION: self._on_continuation}

    def _on_headers(self, flags: int, number: int, payload: bytes) -> None:
        if not number & 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"clients do not open stream {number}")
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
        connection.last_stream = number
        try:
            head, timeout_s = self._decoder.request(block)
            if connection.draining or len(connection.streams) >= self._bounds.streams:
                raise StreamFault(ErrorCode.REFUSED_STREAM, "no more streams")
            stream = connection.host.open(connection, number, head, timeout_s)
        except HttpRefusalError as refusal:
            self._refuse(number, response_blocks.http_status(refusal.status), ended=ended)
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
        """HEADERS of a stream that was open before: they can only end it;
        what they say is nobody's business.
        """
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
            response_blocks.HEAD + response_blocks.trailers(err.status, err.message),
            ended=ended,
        )

    def _refuse(self, number: int, block: bytes, *, ended: bool) -> None:
        self._connection.send(frames.header_block(number, block, end_stream=True))
        if not ended:
            self._connection.send(frames.rst_stream(number, ErrorCode.NO_ERROR))
