"""One HTTP/2 connection, without sockets and clocks: bytes come in, frames go out, calls are opened for its host.

Invariants:
1. Whatever bytes come, `receive` ends in one of three ways: the frames are understood, one stream is reset, or the
   connection fails with GOAWAY and hears nothing more. It raises nothing.
2. What a peer can make us hold is bounded: one frame, one header block, the streams the host admits, and for each what
   its window lets in. What it can make us send without end (acknowledgements) is bounded by patience.
"""

from collections.abc import Callable

from server.rpc.errors import StatusError
from server.rpc.http2 import frames
from server.rpc.http2.control import Control, FrameHandler
from server.rpc.http2.flood import Patience
from server.rpc.http2.frames import ConnectionFault, ErrorCode, StreamFault
from server.rpc.http2.host import UNKNOWN_PEER, Bounds, Host
from server.rpc.http2.requests import Requests
from server.rpc.http2.stream import STREAM_WINDOW, Stream

CONNECTION_WINDOW = 16 << 20
_RESETS, _RESETS_PER_S = 20_000, 1000
_EMPTY, _EMPTY_PER_S = 1000, 10


class Connection:
    """The protocol's state; `wake` is called when there is something to send and nobody is about to look."""

    def __init__(self, host: Host, bounds: Bounds, clock: Callable[[], float], wake: Callable[[], None]) -> None:
        self.streams: dict[int, Stream] = {}
        self.waiting: dict[int, Stream] = {}
        """Those whose DATA waits for the window of all; not those that wait for their own."""
        self.window = self.initial_window = frames.DEFAULT_WINDOW
        self.peer_frame_bytes = frames.MAX_FRAME_BYTES
        self.unsent_bytes = 0
        self.answers = 0
        """Messages sent; pings between them are no flood."""
        self.ready = False
        """The peer's preface and settings were seen."""
        self.failed: ConnectionFault | None = None
        self.awaited_pong = self.congested = False
        """`congested`: the socket takes no more for now."""
        self.peer = UNKNOWN_PEER
        self.host = host
        self._bounds = bounds
        self._wake = wake
        self._armed = True
        self._out: list[bytes | memoryview] = []
        self._rest = b""
        self._credit = CONNECTION_WINDOW
        self.draining = self._preface_seen = False
        self._requests = Requests(self, bounds)
        self._resets = Patience("too many calls opened and reset", _RESETS, _RESETS_PER_S, clock)
        self.empty = Patience("too many frames that say nothing", _EMPTY, _EMPTY_PER_S, clock)
        self._handlers: dict[int, FrameHandler] = {
            frames.DATA: self._on_data,
            frames.RST_STREAM: self._on_rst_stream,
            frames.WINDOW_UPDATE: self._on_window_update,
            **self._requests.handlers(),
            **Control(self, bounds.pings, bounds.pings_per_s, clock).handlers(),
        }
        self._introduce()

    def send(self, data: bytes | memoryview) -> None:
        """Queue whole frames, or the parts of one in their order."""
        self._out.append(data)
        if not self._armed:
            self._armed = True
            self._wake()

    def take(self) -> bytes:
        """What is to be written now, all of it."""
        self._armed = False
        out, self._out = self._out, []
        return b"".join(out)

    def receive(self, data: bytes) -> None:
        """Bytes of the peer; what they ask to be sent at once is in `take` afterwards."""
        if self.failed:
            return
        self._armed = True
        try:
            self._receive(self._rest + data if self._rest else data)
        except ConnectionFault as fault:
            self.fail(fault)

    def fail(self, fault: ConnectionFault) -> None:
        """End it: GOAWAY says why, its calls are given up."""
        self.send(frames.goaway(self._requests.last_stream, fault.code, fault.text))
        self.failed = fault
        self._rest = b""
        self.abort()

    def abort(self) -> None:
        """The peer is gone: its calls are given up."""
        for stream in list(self.streams.values()):
            stream.abort()

    def drain(self) -> None:
        """Take no more calls; those under way go on."""
        if not self.draining:
            self.draining = True
            self.send(frames.goaway(frames.MAX_WINDOW, ErrorCode.NO_ERROR))
            for stream in list(self.streams.values()):
                stream.retire()

    def ping(self) -> None:
        """Ask the peer for a sign of life; `awaited_pong` until it comes."""
        self.awaited_pong = True
        self.send(frames.frame(frames.PING, 0, 0, bytes(8)))

    def forget(self, stream: Stream) -> None:
        """A stream ended."""
        if self.streams.pop(stream.number, None) is not None:
            self.host.released()
        self.waiting.pop(stream.number, None)

    def resumed(self) -> None:
        """The socket takes more again."""
        self.congested = False
        for stream in list(self.streams.values()):
            stream.writable()

    def deliver(self, stream: Stream, data: bytes, *, ended: bool) -> None:
        """What the peer says in a call, and whether it says more; what is wrong with it ends the call."""
        stream.remote_closed = ended
        try:
            stream.receive(data, ended=ended)
        except StatusError as err:
            stream.finish(err.status, err.message)

    def _introduce(self) -> None:
        values = {3: self._bounds.streams, 4: STREAM_WINDOW, 6: self._bounds.metadata_bytes}
        self.send(frames.settings(values))
        self.send(frames.window_update(0, CONNECTION_WINDOW - frames.DEFAULT_WINDOW))

    def _receive(self, data: bytes) -> None:
        at, size, unpack = 0, len(data), frames.HEADER.unpack_from
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
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "a frame of more than 16,384 bytes")
            if end > size:
                at -= frames.HEADER_BYTES
                break
            self._take(word & 0xFF, flags, number & frames.MAX_WINDOW, data[at:end])
            at = end
        self._rest = data[at:]

    def _preface(self, data: bytes) -> int:
        seen = data[: len(frames.PREFACE)]
        if not frames.PREFACE.startswith(seen):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "this is not HTTP/2: the connection preface is missing")
        if len(seen) < len(frames.PREFACE):
            return 0
        self._preface_seen = True
        return len(frames.PREFACE)

    def _take(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        block = self._requests.unfinished
        if block is not None and (kind != frames.CONTINUATION or number != block[0]):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a frame between HEADERS and their CONTINUATION")
        if not self.ready and kind != frames.SETTINGS:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        handler = self._handlers.get(kind)
        if handler is None:
            self.empty.spend()  # frames of extensions are ignored, but not without end
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
            self.empty.spend()
        self.deliver(stream, payload, ended=ended)

    def _take_credit(self, size: int) -> None:
        """Of the whole connection, which is given back at once: slow calls hold up themselves, not their neighbours."""
        self._credit -= size
        if self._credit < CONNECTION_WINDOW // 2:
            if self._credit < 0:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "more DATA than the window of the connection")
            self.send(frames.window_update(0, CONNECTION_WINDOW - self._credit))
            self._credit = CONNECTION_WINDOW

    def _check_not_idle(self, number: int) -> None:
        if number > self._requests.last_stream or not number & 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"a frame of stream {number}, which was never opened")

    def _on_rst_stream(self, _flags: int, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM of another length than four")
        self._check_not_idle(number)
        self._resets.spend()
        stream = self.streams.get(number)
        if stream is not None:
            stream.remote_closed = True
            stream.abort()

    def _on_window_update(self, _flags: int, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE of another length than four")
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
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "a window of more than 2^31 - 1 bytes")
        for waiting in list(self.waiting.values()):
            if self.window <= 0:
                break
            waiting.drain()
