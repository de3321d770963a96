"""Who answers where a gRPC server should: each kind of wrong server is named."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from server.rpc.client import diagnose
from server.rpc.credentials import SecurityConfig
from server.rpc.server import RpcServer
from tests.ports import free_port
from tests.unit.server.certificates import Certificates

PLAIN = SecurityConfig()
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls"))


@asynccontextmanager
async def serving(serve: Serve, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """A server that does `serve` with each connection."""
    over = asyncio.Event()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
            if serve is silence:
                await over.wait()
        except OSError:
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=tls)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        over.set()
        server.close()
        await server.wait_closed()


async def silence(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    await reader.read(1)


async def hang_up(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    await reader.read(1)


async def web_page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)
    writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
    await writer.drain()


async def greeting(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"J\0\0\0\x0a8.0.36-mysql")
    await writer.drain()


@pytest.mark.parametrize(
    ("serve", "said"),
    [
        (silence, "accepts connections and never answers"),
        (hang_up, "closes the connection without an answer"),
        (
            web_page,
            "is an HTTP/1.1 server and no gRPC server: it answers 'HTTP/1.1 400 Bad Request'",
        ),
        (greeting, "is no gRPC server: it answers with b'J"),
    ],
)
async def test_a_server_that_is_none_is_named(serve: Serve, said: str) -> None:
    async with serving(serve) as address:
        assert (await diagnose(address, PLAIN)).startswith(f"{address} {said}")


async def test_nobody_is_named() -> None:
    address = f"127.0.0.1:{free_port()}"
    assert f"{address} cannot be connected to" in await diagnose(address, PLAIN)


async def test_tls_on_the_server_s_side_only_is_named(certificates: Certificates) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(
        certificates.directory / "node.pem", certificates.directory / "node.key"
    )
    async with serving(web_page, context) as address:
        assert (await diagnose(address, PLAIN)).startswith(f"{address} speaks TLS: give --ca-path")


async def test_tls_on_our_side_only_is_named(certificates: Certificates) -> None:
    async with serving(web_page) as address:
        assert (await diagnose(address, certificates.security(ca=True))).startswith(
            f"{address} speaks no TLS: leave out"
        )


async def test_a_server_that_demands_a_certificate_is_named(certificates: Certificates) -> None:
    async with RpcServer(certificates.security(ca=True)).listen("127.0.0.1:0") as address:
        assert (await diagnose(address, PLAIN)).startswith(f"{address} speaks TLS: give --ca-path")
        ca = SecurityConfig(ca_path=certificates.security(ca=True).ca_path)
        # the server's alert, or the end of the connection, whichever comes first
        assert "asks for a client's certificate: give --cert-path" in await diagnose(address, ca)


async def test_a_certificate_of_another_ca_is_named(
    certificates: Certificates, tmp_path: Path
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(
        certificates.directory / "node.pem", certificates.directory / "node.key"
    )
    async with serving(web_page, context) as address:
        answer = await diagnose(address, Certificates(tmp_path).security(ca=True))
    assert answer.startswith(f"{address} has a certificate that --ca-path does not trust")


@pytest.mark.usefixtures("engine")
async def test_a_grpc_server_is_recognised() -> None:
    async with RpcServer().listen("127.0.0.1:0") as bound:
        assert (await diagnose(bound, PLAIN)).startswith(f"{bound} speaks HTTP/2")
