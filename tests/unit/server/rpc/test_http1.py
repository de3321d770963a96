"""HTTP/1.1 beside gRPC on one listener: what hostile clients of the one may take from the other,
with each engine.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from server.routes import Answer, Request
from server.rpc.client import connect
from server.rpc.grpcio_front import offered_protocols, wants_http1
from server.rpc.http1 import MAX_CONNECTIONS, MAX_HEADER_BYTES, Serve, begins_like_http1
from server.rpc.server import RpcServer

LARGE = 1 << 20


class Served:
    """Answers with the path; below `/large` with a lot more; counts."""

    def __init__(self) -> None:
        self.count = 0

    async def __call__(self, request: Request) -> Answer:
        self.count += 1
        return Answer(200, b"x" * LARGE if request.path == "/large" else request.path.encode())


@asynccontextmanager
async def serving(served: Serve) -> AsyncIterator[tuple[str, grpc.aio.Channel]]:
    server = RpcServer()
    server.serve_http1(served)
    async with server.listen("127.0.0.1:0") as bound, connect(bound) as channel:
        yield bound, channel


async def grpc_answers(channel: grpc.aio.Channel) -> bool:
    answer = await health_pb2_grpc.HealthStub(channel).Check(
        health_pb2.HealthCheckRequest(), timeout=30
    )
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def get(bound: str, path: str, headers: str = "") -> bytes:
    host, _, port = bound.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n{headers}Connection: close\r\n\r\n".encode())
    try:
        return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.usefixtures("engine")
async def test_pages_of_other_sites_are_not_answered() -> None:
    served = Served()
    async with serving(served) as (bound, _):
        for origin in ("http://elsewhere", "null", "http://x.elsewhere", "x"):
            assert b" 403 " in await get(bound, "/api", f"Origin: {origin}\r\n")
        assert served.count == 0
        assert b" 200 " in await get(bound, "/api", "Origin: http://x\r\n")


@pytest.mark.usefixtures("engine")
async def test_a_body_with_two_lengths_is_not_read() -> None:
    """A proxy may have taken the other one."""
    served = Served()
    async with serving(served) as (bound, _):
        both = "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n"
        answer = await get(bound, "/api", both)
        assert b" 400 " in answer
        assert b"send one of them" in answer
        assert served.count == 0


@pytest.mark.usefixtures("engine")
async def test_handlers_know_where_a_request_comes_from() -> None:
    async def peer(request: Request) -> Answer:
        return Answer(200, request.peer.encode())

    async with serving(peer) as (bound, _):
        assert re.search(rb"\r\n\r\nipv4:127\.0\.0\.1:\d+$", await get(bound, "/api"))


@pytest.mark.usefixtures("engine")
async def test_idle_connections_make_room_for_who_asks() -> None:
    served = Served()
    async with serving(served) as (bound, channel):
        host, _, port = bound.rpartition(":")
        idle = []
        for number in range(MAX_CONNECTIONS + 20):
            source = (
                f"127.0.0.{2 + number % 4}",
                0,
            )  # one address may have only a part of a listener's connections
            reader, writer = await asyncio.open_connection(host, int(port), local_addr=source)
            writer.write(
                b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"
                if number % 2
                else b"GET /never HTTP/1.1\r\nHo"
            )
            idle.append((reader, writer))
        assert (await get(bound, "/b")).endswith(b"/b")
        assert await grpc_answers(channel)
        for _, writer in idle:
            writer.transport.abort()


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("pause", [False, True], ids=["one read", "several"])
async def test_headers_beyond_the_bound_are_refused_however_they_come(pause: bool) -> None:
    served = Served()
    async with serving(served) as (bound, channel):
        host, _, port = bound.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = b"GET /a HTTP/1.1\r\nHost: x\r\nX: %s\r\n" % (b"y" * MAX_HEADER_BYTES)
        writer.write(head if pause else head + b"\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 431 ")
        writer.close()
        assert await grpc_answers(channel)
        assert served.count == 0
        assert (await get(bound, "/" + "z" * (MAX_HEADER_BYTES - 200))).endswith(b"zz")


@pytest.mark.usefixtures("engine")
async def test_answers_that_nobody_reads_are_not_made() -> None:
    served = Served()
    async with serving(served) as (bound, channel):
        host, _, port = bound.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1)
        writer.write(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n" * 500)
        before = -1
        while served.count != before:  # until it makes no more of them
            before = served.count
            for _ in range(20):
                assert (await get(bound, "/b")).endswith(b"/b")
                served.count -= 1
        assert 1 <= served.count < 50
        assert await grpc_answers(channel)
        writer.transport.abort()


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (b"G", None),
        (b"GET ", True),
        (b"PATCH /", True),
        (b"P", None),
        (b"PR", False),
        (b"PRI * ", False),
        (b"\x16\x03", False),
    ],
)
def test_the_first_bytes_tell_http1_from_http2(first: bytes, expected: bool | None) -> None:
    assert begins_like_http1(first) is expected


def hello(*protocols: bytes, cut: int | None = None) -> bytes:
    """A ClientHello with these protocols in ALPN, behind another extension."""
    names = b"".join(bytes([len(name)]) + name for name in protocols)
    listed = len(names).to_bytes(2) + names
    alpn = b"\0\x10" + len(listed).to_bytes(2) + listed if protocols else b""
    extensions = b"\0\0\0\x03abc" + alpn
    body = (
        b"\3\3"
        + bytes(32)
        + b"\x02id"
        + b"\0\x02\x13\x01"
        + b"\x01\0"
        + len(extensions).to_bytes(2)
        + extensions
    )
    handshake = b"\x01" + len(body).to_bytes(3) + body
    return (b"\x16\3\1" + len(handshake).to_bytes(2) + handshake)[:cut]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (hello(b"h2"), False),
        (hello(b"http/1.1"), True),
        (hello(b"h2", b"http/1.1"), True),
        (hello(b"grpc-exp", b"h2"), False),
        (hello(), True),
        (hello(b"h2", cut=4), None),
        (hello(b"h2", cut=-1), None),
        (b"GET / HTTP/1.1", False),
        (b"\x16\3\1\0\4\x01\xff\xff\xff", False),
    ],
)
def test_a_client_hello_tells_who_wants_http1(data: bytes, expected: bool | None) -> None:
    assert wants_http1(data) is expected


def test_a_client_hello_that_lies_about_its_sizes_is_survived() -> None:
    whole = hello(b"h2", b"http/1.1")
    for at in range(9, len(whole)):
        for byte in (0, 0x7F, 0xFF):
            offered_protocols(whole[:at] + bytes([byte]) + whole[at + 1 :])
