"""A gRPC load generator that costs almost nothing: HTTP/2 frames written by hand,
one task for a connection.

Only for loopback and plaintext, and only for small messages. It keeps a fixed number of calls under
way, counts what is answered with a message, and fails on anything else; what the messages say is up
to the bench to check.
"""

import asyncio
import struct
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Self

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_WINDOW = (1 << 31) - 1 - 65_535
_INITIAL_WINDOW = 65_535
_HEADER = struct.Struct(">BHBBI")


class LoadError(Exception):
    """The server reset a call, answered it without a message, or closed the connection."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    size = len(payload)
    return _HEADER.pack(size >> 16, size & 0xFFFF, kind, flags, stream) + payload


def message(body: bytes) -> bytes:
    """A gRPC message: not compressed, then its size, then itself."""
    return struct.pack(">BI", 0, len(body)) + body


def request_headers(method: str, authority: str) -> bytes:
    """An HPACK block without state: two indexed fields, then literals that no table remembers."""

    def literal(name: bytes, value: bytes) -> bytes:
        return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value

    fields = (
        (":path", f"/{method}"),
        (":authority", authority),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    )
    return b"\x83\x86" + b"".join(literal(name.encode(), value.encode()) for name, value in fields)


class Connection(asyncio.Protocol):
    """One HTTP/2 connection with `callers` closed loops;
    the clock of a call starts when its frames are written.
    """

    def __init__(
        self, headers: bytes, bodies: Iterator[bytes], callers: int, *, streaming: bool
    ) -> None:
        self._headers = headers
        self._bodies = bodies
        self._callers = callers
        self._streaming = streaming
        self._buffer = bytearray()
        self._began: dict[int, float] = {}
        self._answered: set[int] = set()
        self._next_stream = 1
        self._credit = _INITIAL_WINDOW
        self._held: list[int] = []
        self._running = True
        self.latencies: list[float] = []
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        settings = struct.pack(
            ">HIHI", 4, (1 << 31) - 1, 3, 0
        )  # initial window: all there is; no pushed streams
        transport.write(_PREFACE + frame(_SETTINGS, 0, 0, settings))
        transport.write(frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", _WINDOW)))
        for _ in range(self._callers):
            self._open()

    def stop(self) -> None:
        """Begin no more calls; `closed` is done when the last is answered."""
        self._running = False
        if self._streaming or not self._began:
            self._finish(None)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        buffer, at = self._buffer, 0
        while len(buffer) - at >= 9:
            high, low, kind, flags, stream = _HEADER.unpack_from(buffer, at)
            end = at + 9 + (high << 16 | low)
            if end > len(buffer):
                break
            self._take(kind, flags, stream, bytes(buffer[at + 9 : end]))
            at = end
        del buffer[:at]

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(exc or LoadError("the server closed the connection"))

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _DATA and payload:
            self._message(stream)
        elif kind == _HEADERS and flags & _END_STREAM:
            self._ended(stream)
        elif kind == _SETTINGS and not flags & _ACK:
            self._transport.write(frame(_SETTINGS, _ACK, 0))
        elif kind == _PING and not flags & _ACK:
            self._transport.write(frame(_PING, _ACK, 0, payload))
        elif kind == _WINDOW_UPDATE and not stream:
            self._credit += int.from_bytes(payload)
            held, self._held = self._held, []
            for waiting in held:
                self._send(waiting)
        elif kind in (_RESET, _GOAWAY):
            self._finish(
                LoadError(
                    f"the server ended stream {stream} with code {int.from_bytes(payload[-4:])}"
                )
            )

    def _message(self, stream: int) -> None:
        if not self._streaming:
            self._answered.add(stream)
            return
        self.latencies.append(time.perf_counter() - self._began[stream])
        if self._running:
            self._send(stream)

    def _ended(self, stream: int) -> None:
        if self._streaming or stream not in self._answered:
            self._finish(LoadError(f"stream {stream} ended without an answer"))
            return
        self._answered.discard(stream)
        self.latencies.append(time.perf_counter() - self._began.pop(stream))
        if self._running:
            self._open()
        elif not self._began:
            self._finish(None)

    def _open(self) -> None:
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        self._transport.write(frame(_HEADERS, _END_HEADERS, stream, self._headers))
        self._send(stream)

    def _send(self, stream: int) -> None:
        if self._credit < 1024:
            self._held.append(stream)
            return
        body = message(next(self._bodies))
        self._credit -= len(body)
        self._began[stream] = time.perf_counter()
        self._transport.write(frame(_DATA, 0 if self._streaming else _END_STREAM, stream, body))

    def _finish(self, error: Exception | None) -> None:
        if not self.closed.done():
            self._running = False
            if error is None:
                self.closed.set_result(None)
            else:
                self.closed.set_exception(error)
            self._transport.close()


class Load:
    """What a run of `seconds` measured."""

    def __init__(self, seconds: float, latencies: list[float]) -> None:
        self.seconds = seconds
        self.latencies = sorted(latencies)

    @property
    def calls(self) -> int:
        return len(self.latencies)

    def quantile_ms(self, part: float) -> float:
        return self.latencies[min(self.calls - 1, int(part * self.calls))] * 1e3

    @classmethod
    async def run(
        cls,
        address: str,
        method: str,
        bodies: Callable[[], Iterator[bytes]],
        *,
        callers: int,
        seconds: float,
        streaming: bool = False,
        measure: Callable[[], Awaitable[None]] | None = None,
    ) -> Self:
        """Keep `callers` calls of `method` under way for `seconds`, over at most four connections.

        `measure` is awaited in between when the load is up, and once more when it ends.

        Raises:
            LoadError, OSError: a call was not answered.
        """
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        headers = request_headers(method, address)
        connections: list[Connection] = []
        for share in _shares(callers):
            make = partial(Connection, headers, bodies(), share, streaming=streaming)
            _, connection = await loop.create_connection(make, host, int(port))
            connections.append(connection)
        await asyncio.sleep(min(1.0, seconds / 4))
        for connection in connections:
            connection.latencies.clear()
        if measure is not None:
            await measure()
        began = time.perf_counter()
        await asyncio.wait(
            [connection.closed for connection in connections],
            timeout=seconds,
            return_when=asyncio.FIRST_EXCEPTION,
        )
        took = time.perf_counter() - began
        if measure is not None:
            await measure()
        latencies = [latency for connection in connections for latency in connection.latencies]
        for connection in connections:
            connection.stop()
        await asyncio.gather(*(connection.closed for connection in connections))
        return cls(took, latencies)


def _shares(callers: int) -> list[int]:
    connections = min(4, callers)
    return [
        callers // connections + (number < callers % connections) for number in range(connections)
    ]
