"""What the listener in front of gRPC's own engine tells of a handshake, however the sides end."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

import pytest
from structlog.testing import capture_logs

from server.routes import Answer, Request
from server.rpc.config import Limits
from server.rpc.credentials import SecurityConfig, listener_tls
from server.rpc.grpcio_front import GrpcioFront
from server.rpc.http1 import Http1Front
from tests.unit.server.certificates import Certificates


def record(kind: int, size: int) -> bytes:
    return bytes((kind, 3, 3)) + size.to_bytes(2) + bytes(size)


HELLO = record(22, 200)
FLIGHT = record(23, 700)


async def nothing(_: Request) -> Answer:
    return Answer(404, b"")


class Ends(NamedTuple):
    """Both ends of one connection that is passed on."""

    client: socket.socket
    server: socket.socket


@asynccontextmanager
async def passed_on(security: SecurityConfig) -> AsyncIterator[Ends]:
    """A connection whose client has sent its certificate, which nobody has read yet."""
    front = GrpcioFront(Http1Front(nothing), listener_tls(security, "http/1.1"), Limits())
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(front.address.removeprefix("unix:"))
        listener.listen()
        listener.setblocking(False)
        port = front.bind("127.0.0.1:0")
        async with asyncio.TaskGroup() as tasks:
            front.start(tasks)
            client = socket.create_connection(("127.0.0.1", port))
            client.sendall(HELLO)
            server, _ = await loop.sock_accept(listener)
            with client, server:
                client.setblocking(False)
                server.setblocking(False)
                assert await loop.sock_recv(server, 1 << 16) == HELLO
                server.sendall(HELLO)
                assert await loop.sock_recv(client, 1 << 16) == HELLO
                client.sendall(FLIGHT)
                while not readable(server):  # noqa: ASYNC110 - nobody tells without reading
                    await asyncio.sleep(0)
                yield Ends(client, server)
            front.stop_accepting()
            await front.stop()


def readable(connection: socket.socket) -> bool:
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False


async def ended(connection: socket.socket) -> None:
    """Return when the other side has closed it."""
    with suppress(ConnectionError):
        while await asyncio.get_running_loop().sock_recv(connection, 1 << 16):
            pass


@pytest.fixture(scope="module")
def security(tmp_path_factory: pytest.TempPathFactory) -> SecurityConfig:
    return Certificates(tmp_path_factory.mktemp("tls")).security(ca=True)


async def test_a_server_that_closes_while_the_client_speaks_has_refused_it(security) -> None:
    with capture_logs() as logs:
        async with passed_on(security) as (client, server):
            server.shutdown(socket.SHUT_RD)  # so that it is found out by writing, not by reading
            client.sendall(FLIGHT)
            await ended(client)
    assert [line["reason"] for line in logs if "TLS handshake" in line["event"]] == [
        "its certificate is not accepted"
    ]


async def test_a_client_that_goes_while_the_server_speaks_has_not_failed(security) -> None:
    with capture_logs() as logs:
        async with passed_on(security) as (client, server):
            server.sendall(FLIGHT[:100])
            client.close()
            await ended(server)
    assert [line for line in logs if "TLS handshake" in line["event"]] == []
