"""A client of one connection, in memory: frames written by hand, and read back as they come."""

from dataclasses import dataclass, field
from typing import Any

import grpc
from hpack import Decoder, Encoder

from server.rpc.errors import StatusError
from server.rpc.http2 import frames
from server.rpc.http2.connection import Connection
from server.rpc.http2.frames import ErrorCode, frame
from server.rpc.http2.headers import RequestHead
from server.rpc.http2.messages import MessageReader
from server.rpc.http2.peer import Bounds
from server.rpc.http2.stream import Stream

METHOD = "/tikvpb.Tikv/RawGet"
BOUNDS = Bounds(
    metadata_bytes=16 << 10, streams=100, pings=20, pings_per_s=1, unsent_bytes=64 << 20
)
CALL = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", METHOD),
    (":authority", "here"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
)


@dataclass
class Frame:
    """One that came back."""

    kind: int
    flags: int
    stream: int
    payload: bytes

    @property
    def code(self) -> ErrorCode:
        """Of RST_STREAM and GOAWAY."""
        return ErrorCode(
            int.from_bytes(self.payload[4:8] if self.kind == frames.GOAWAY else self.payload)
        )


class Echo(Stream):
    """Answers with the messages of its call, joined; or, of `/hold`, not by itself."""

    __slots__ = ("got", "head", "reader", "was_aborted")

    def __init__(self, connection: Connection, number: int, head: RequestHead) -> None:
        super().__init__(connection, number)
        self.head = head
        self.reader = MessageReader(1 << 20, head.encoding)
        self.got: list[bytes] = []
        self.was_aborted = False

    def receive(self, data: bytes, *, ended: bool) -> None:
        self.got += self.reader.feed(data)
        self.set_request_bytes(self.reader.buffered_bytes)
        self.give_credit()
        if self.reader.pending:
            self.connection.unpacking[self.number] = self
        elif ended and self.head.method != "/hold":
            self.answer(b"".join(self.got))

    def awaits_rest(self) -> bool:
        return not self.remote_closed

    def aborted(self) -> None:
        self.was_aborted = True


@dataclass
class EchoHost:
    """Opens echoes, `most` at a time."""

    most: int = 1000
    max_request_bytes: int = 1 << 30
    opened: list[Echo] = field(default_factory=list)
    open_now: int = 0
    request_bytes: int = 0
    turn: float = 60.0
    behind: int = 0
    buffered: int = 0
    errors: list[Exception] = field(default_factory=list)

    def open(
        self, connection: Connection, number: int, head: RequestHead, timeout_s: float | None
    ) -> Stream:
        if self.open_now >= self.most:
            raise StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, "no more")
        self.open_now += 1
        self.opened.append(Echo(connection, number, head))
        return self.opened[-1]

    def released(self) -> None:
        self.open_now -= 1

    def report_error(self, connection: Connection, err: Exception) -> None:
        self.errors.append(err)

    def start_handler(self, call: Any) -> None:
        call.start()

    def resume_handlers(self, connection: Connection) -> None:
        connection.gated = False

    def turn_s(self) -> float:
        return self.turn

    def count_behind(self, change: int) -> None:
        self.behind += change

    def count_buffered_bytes(self, change: int) -> None:
        self.buffered += change

    def count_request_bytes(self, change: int) -> bool:
        self.request_bytes += change
        return self.request_bytes <= self.max_request_bytes


class Client:
    """Speaks to one connection; `now_s` is its clock."""

    def __init__(self, host: Any = None, bounds: Bounds = BOUNDS, *, ready: bool = True) -> None:
        self.host: Any = host or EchoHost()
        self.now_s = 0.0
        self.woken = 0
        self.connection = Connection(self.host, bounds, lambda: self.now_s, self._wake)
        self.encoder, self._decoder = Encoder(), Decoder()
        if ready:
            self.send(frames.PREFACE + frames.settings({}))
            self.take()

    def _wake(self) -> None:
        self.woken += 1

    def send(self, *data: bytes) -> "Client":
        for part in data:
            self.connection.receive(part)
        return self

    def take(self) -> list[Frame]:
        """All frames since the last look."""
        data, found = b"", []
        while part := self.connection.take():
            data += part
        while data:
            word, flags, stream = frames.HEADER.unpack_from(data)
            end = frames.HEADER_BYTES + (word >> 8)
            assert len(data) >= end, "a frame was cut"
            found.append(Frame(word & 0xFF, flags, stream, data[frames.HEADER_BYTES : end]))
            data = data[end:]
        return found

    def kinds(self) -> list[int]:
        return [one.kind for one in self.take()]

    def block(self, *more: tuple[str, str], fields: Any = CALL) -> bytes:
        return self.encoder.encode([*fields, *more])

    def headers(
        self, stream: int, *more: tuple[str, str], end_stream: bool = False, path: str = METHOD
    ) -> bytes:
        fields = [(name, path if name == ":path" else value) for name, value in CALL]
        flags = frames.END_HEADERS | (frames.END_STREAM if end_stream else 0)
        return frame(frames.HEADERS, flags, stream, self.block(*more, fields=fields))

    def call(self, stream: int, body: bytes, *more: tuple[str, str]) -> bytes:
        """A whole unary call."""
        return self.headers(stream, *more) + data(stream, message(body), end_stream=True)

    def answer(self, stream: int) -> tuple[dict[str, str], bytes]:
        """All that came for a stream: headers and trailers together, and its messages."""
        fields: dict[str, str] = {}
        body = b""
        for one in self.take():
            if one.kind in (frames.HEADERS, frames.CONTINUATION):
                decoded = {
                    str(name): str(value) for name, value in self._decoder.decode(one.payload)
                }
                fields |= decoded if one.stream == stream else {}
            elif one.kind == frames.DATA and one.stream == stream:
                body += one.payload
        return fields, body


def data(stream: int, payload: bytes, *, end_stream: bool = False, flags: int = 0) -> bytes:
    return frame(frames.DATA, flags | (frames.END_STREAM if end_stream else 0), stream, payload)


def message(body: bytes, flag: int = 0) -> bytes:
    return bytes([flag]) + len(body).to_bytes(4) + body
