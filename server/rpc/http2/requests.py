"""HEADERS and CONTINUATION: the header blocks of a connection, and the calls that they open, or end.

Invariants:
1. Every header block is decoded, in order, whoever refuses its stream.
2. A block is bounded, in frames and in bytes, and nothing comes between its frames.
"""

from typing import TYPE_CHECKING

import grpc

from server.rpc.errors import StatusError
from server.rpc.http2 import frames, response_blocks
from server.rpc.http2.control import FrameHandler
from server.rpc.http2.frames import ConnectionFault, ErrorCode, StreamFault
from server.rpc.http2.header_blocks import HeaderDecoder, OversizedHeadersError
from server.rpc.http2.host import Bounds
from server.rpc.http2.request_head import HttpRefusalError, read_head

if TYPE_CHECKING:
    from server.rpc.http2.connection import Connection

_MAX_BLOCK_FRAMES = 64


class Requests:
    """Their handlers, over the state of a connection."""

    def __init__(self, connection: "Connection", bounds: Bounds) -> None:
        self.unfinished: tuple[int, int, bytearray, int] | None = None
        """A block whose end is yet to come: its stream, the flags of its HEADERS, its bytes, and in how many frames."""
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
            self._refuse_call(number, StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, text), ended=ended)
        except StatusError as err:
            self._refuse_call(number, err, ended=ended)
        else:
            connection.streams[number] = stream
            if ended:
                connection.deliver(stream, b"", ended=True)

    def _trailers(self, number: int, block: bytes, *, ended: bool) -> None:
        """HEADERS of a stream that was open before: they can only end it; what they say is nobody's business."""
        try:
            self._decoder.fields(block)
        except OversizedHeadersError as err:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "trailers that are too large") from err
        stream = self._connection.streams.get(number)
        if stream is None or stream.remote_closed:
            raise ConnectionFault(ErrorCode.STREAM_CLOSED, f"HEADERS of stream {number}, which is closed")
        if not ended:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, "headers in the middle of a call")
        self._connection.deliver(stream, b"", ended=True)

    def _refuse_call(self, number: int, err: StatusError, *, ended: bool) -> None:
        self._refuse(number, response_blocks.HEAD + response_blocks.trailers(err.status, err.message), ended=ended)

    def _refuse(self, number: int, block: bytes, *, ended: bool) -> None:
        self._connection.send(frames.header_block(number, block, end_stream=True))
        if not ended:
            self._connection.send(frames.rst_stream(number, ErrorCode.NO_ERROR))
