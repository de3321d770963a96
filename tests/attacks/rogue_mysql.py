"""A server that speaks MySQL's protocol only to get the client's password or files;
whatever comes is kept.
"""

import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

SALT = b"12345678", b"123456789012"
PUBLIC_KEY = b"\x01-----BEGIN PUBLIC KEY-----\nAA==\n-----END PUBLIC KEY-----\n"
OK = b"\0\0\0\x02\0\0\0"
_LONG_PASSWORD, _PROTOCOL, _SECURE, _PLUGINS, _LENENC, _TLS = (
    0x1,
    0x200,
    0x8000,
    0x80000,
    0x200000,
    0x800,
)


def switch(plugin: str, data: bytes = SALT[0] + SALT[1] + b"\0") -> bytes:
    """AuthSwitchRequest."""
    return b"\xfe" + plugin.encode() + b"\0" + data


@dataclass
class RogueServer:
    """`received` holds what each client sent after the answer of that number; 0: its login."""

    port: int
    received: list[bytes] = field(default_factory=list)


@contextlib.contextmanager
def rogue_server(
    plugin: str,
    answers: Sequence[bytes],
    tls: ssl.SSLContext | None = None,
    *,
    repeat_last: bool = False,
) -> Iterator[RogueServer]:
    """One that names `plugin` in its greeting, then gives `answers`, whatever it is told."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = RogueServer(int(listener.getsockname()[1]))
        arguments = (listener, server, plugin, answers, tls, repeat_last)
        thread = threading.Thread(target=_serve, args=arguments, daemon=True)
        thread.start()
        yield server
        thread.join(30)


def _serve(
    listener: socket.socket,
    server: RogueServer,
    plugin: str,
    answers: Sequence[bytes],
    tls: ssl.SSLContext | None,
    repeat_last: bool,
) -> None:
    client, _ = listener.accept()
    client.settimeout(30)
    with contextlib.suppress(OSError, ssl.SSLError), contextlib.ExitStack() as stack:
        stack.callback(client.close)
        client.sendall(_packet(0, _greeting(plugin, with_tls=tls is not None)))
        if tls is not None:
            _exactly(client, 36)  # SSLRequest
            client = tls.wrap_socket(client, server_side=True)
            stack.callback(client.close)
        number, payload = _read(client)
        server.received.append(payload)
        sequence = list(answers)
        while sequence:
            answer = sequence[0] if repeat_last and len(sequence) == 1 else sequence.pop(0)
            client.sendall(_packet(number + 1, answer))
            number, payload = _read(client)
            server.received.append(payload)


def _greeting(plugin: str, *, with_tls: bool) -> bytes:
    caps = _LONG_PASSWORD | _PROTOCOL | _SECURE | _PLUGINS | _LENENC | (_TLS if with_tls else 0)
    return (
        b"\x0a10.11.6-MariaDB\0"
        + struct.pack("<I", 7)
        + SALT[0]
        + b"\0"
        + struct.pack("<H", caps & 0xFFFF)
        + b"\x2d"
        + struct.pack("<H", 2)
        + struct.pack("<H", caps >> 16)
        + b"\x15"
        + bytes(10)
        + SALT[1]
        + b"\0"
        + plugin.encode()
        + b"\0"
    )


def _packet(number: int, payload: bytes) -> bytes:
    return struct.pack("<I", len(payload) | (number & 0xFF) << 24) + payload


def _read(client: socket.socket) -> tuple[int, bytes]:
    (head,) = struct.unpack("<I", _exactly(client, 4))
    return head >> 24, _exactly(client, head & 0xFFFFFF)


def _exactly(client: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = client.recv(size - len(data))
        if not part:
            raise ConnectionResetError
        data += part
    return data
