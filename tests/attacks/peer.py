"""A client that writes its own frames: it may do what no library lets it do."""

import selectors
import socket
import ssl
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

from hpack import Decoder, Encoder

from server.rpc.http2 import frames
from server.rpc.http2.frames import frame
from tests.attacks.der import Authority
from tests.attacks.target import Target

WHOLE_WINDOW = frames.settings({4: frames.MAX_WINDOW}) + frames.window_update(
    0, frames.MAX_WINDOW - frames.DEFAULT_WINDOW
)
"""Lets the server send as much as HTTP/2 allows."""


class Frame(NamedTuple):
    """One that came."""

    kind: int
    flags: int
    stream: int
    payload: bytes


class Peer:
    """One connection; closed at the end of its block."""

    def __init__(
        self,
        target: Target,
        certificate: bytes | None = None,
        *,
        source: str = "",
        seconds: float = 30,
        receive_bytes: int = 0,
    ) -> None:
        """Connect, over TLS if the target has it; `source` is the address that the target sees."""
        origin = (source, 0) if source else None
        tls = _client_tls(target.authority, certificate) if target.authority else None
        self.socket = socket.create_connection(
            target.host_and_port, timeout=seconds, source_address=origin
        )
        if receive_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket)
        self._encoder, self._decoder = Encoder(), Decoder()
        self._stream = -1
        self._rest = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def introduce(self, settings: bytes = b"") -> Self:
        """Send the preface."""
        self.send(frames.PREFACE + (settings or frames.settings({})))
        return self

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def headers(
        self, path: str, *more: tuple[str, str], end_headers: bool = True, end_stream: bool = False
    ) -> bytes:
        """HEADERS of a new stream, whose number is `stream` then."""
        self._stream += 2
        fields = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", "attack"),
            ("te", "trailers"),
        ]
        block = self._encoder.encode([*fields, ("content-type", "application/grpc"), *more])
        flags = (frames.END_HEADERS if end_headers else 0) | (
            frames.END_STREAM if end_stream else 0
        )
        return frame(frames.HEADERS, flags, self._stream, block)

    @property
    def stream(self) -> int:
        return self._stream

    def request(
        self, path: str, body: bytes = b"", *more: tuple[str, str], compressed: bool = False
    ) -> bytes:
        """A whole unary call."""
        return self.headers(path, *more) + data(
            self._stream, message(body, compressed=compressed), end_stream=True
        )

    def call(self, path: str, body: bytes = b"") -> str:
        """Make a unary call: the number of its gRPC status, or why there is none."""
        try:
            self.send(self.request(path, body))
            return self._status(self._stream)
        except TimeoutError:
            return "no answer"
        except OSError:
            return "closed"

    def receive(self) -> Frame | None:
        """The next frame; None: the connection is closed."""
        header = self._read(frames.HEADER_BYTES)
        if header is None:
            return None
        word, flags, stream = frames.HEADER.unpack(header)
        payload = self._read(word >> 8)
        return None if payload is None else Frame(word & 0xFF, flags, stream, payload)

    def _status(self, stream: int) -> str:
        while (one := self.receive()) is not None:
            if one.kind == frames.HEADERS:
                fields = {
                    str(name): str(value) for name, value in self._decoder.decode(one.payload)
                }
                if one.stream == stream and "grpc-status" in fields:
                    return fields["grpc-status"]
            elif one.kind == frames.RST_STREAM and one.stream == stream:
                return f"reset {int.from_bytes(one.payload)}"
            elif one.kind == frames.GOAWAY and one.payload[4:8] != bytes(4):
                return f"goaway {int.from_bytes(one.payload[4:8])}"
        return "closed"

    def _read(self, size: int) -> bytes | None:
        while len(self._rest) < size:
            part = self.socket.recv(1 << 16)
            if not part:
                return None
            self._rest += part
        read, self._rest = self._rest[:size], self._rest[size:]
        return read


def data(stream: int, payload: bytes, *, end_stream: bool = False) -> bytes:
    """DATA, in as many frames as it needs."""
    parts = [
        payload[at : at + frames.MAX_FRAME_BYTES]
        for at in range(0, len(payload), frames.MAX_FRAME_BYTES)
    ] or [b""]
    flags = [0] * (len(parts) - 1) + [frames.END_STREAM if end_stream else 0]
    return b"".join(
        frame(frames.DATA, flag, stream, part) for flag, part in zip(flags, parts, strict=True)
    )


def message(body: bytes, *, compressed: bool = False) -> bytes:
    """gRPC's framing of a message."""
    return bytes((compressed,)) + len(body).to_bytes(4) + body


def remaining(connections: Sequence[socket.socket], *, seconds: float, most: int = 0) -> int:
    """How many the target has not ended after so long,
    or as soon as there are no more than `most`.
    """
    until_s = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        for one in connections:
            one.setblocking(False)
            selector.register(one, selectors.EVENT_READ)
        while len(selector.get_map()) > most and (rest_s := until_s - time.monotonic()) > 0:
            for key, _ in selector.select(rest_s):
                assert isinstance(key.fileobj, socket.socket)
                if _is_at_end(key.fileobj):
                    selector.unregister(key.fileobj)
        return len(selector.get_map())


def _is_at_end(one: socket.socket) -> bool:
    try:
        return not one.recv(1 << 16)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _client_tls(authority: Authority, certificate: bytes | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(authority.ca)
    context.set_alpn_protocols(["h2"])
    with tempfile.TemporaryDirectory() as directory:
        chain = Path(directory) / "chain.pem"
        chain.write_bytes(certificate or authority.node.read_bytes())
        context.load_cert_chain(chain, authority.key)
    return context
