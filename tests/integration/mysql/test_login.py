"""Logins at a server that is none: it says what a MySQL 9.7 was seen to say, byte by byte."""

import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.changefeed.source import SourceUri
from server.puller.mysql.session.connection import log_in
from server.puller.mysql.session.errors import MySqlLoginError
from server.puller.mysql.session.options import MySqlOptions

PLUGIN = b"caching_sha2_password\0"
GREETING = (
    b"\x0a9.7.4\0"
    + struct.pack("<I", 8)
    + b"\x11" * 8
    + b"\0\xff\xff\xff\x02\0\xff\xdf\x15"
    + bytes(10)
    + b"\x22" * 12
) + b"\0"
ASKS_FOR_THE_PASSWORD = b"\x01\x04"
"""The server has no hash of it in its cache yet, so it wants all of it."""
PUBLIC_KEY = b"\x01-----BEGIN PUBLIC KEY-----\nAA==\n-----END PUBLIC KEY-----\n"


@pytest.fixture
def server() -> Iterator[int]:
    """The port of one that does not speak TLS and takes one login."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_serve, args=(listener,), daemon=True)
        thread.start()
        yield int(listener.getsockname()[1])
    thread.join(60)


def _serve(listener: socket.socket) -> None:
    client, _ = listener.accept()
    with client:
        client.settimeout(60)
        client.sendall(_packet(0, GREETING + PLUGIN))
        number = 1
        for answer in (ASKS_FOR_THE_PASSWORD, PUBLIC_KEY):
            if not client.recv(1 << 16):
                return
            client.sendall(_packet(number + 1, answer))
            number += 2
        client.recv(1 << 16)


def _packet(number: int, payload: bytes) -> bytes:
    return struct.pack("<I", len(payload) | number << 24) + payload


def test_a_password_that_goes_by_tls_only_is_refused_with_the_option_that_helps(
    server: int, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret\n")
    uri = f"mysql://cdc@127.0.0.1:{server}?password-file={secret}"
    with pytest.raises(MySqlLoginError, match="tls=verify and ca=") as refused:
        log_in(MySqlOptions.of(SourceUri.parse(uri)))
    assert "s3cret" not in str(refused.value)
