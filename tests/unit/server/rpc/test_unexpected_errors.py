"""Exceptions that nobody expects: whichever entry point of a connection meets one,
that connection ends, no more.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from kvproto import kvrpcpb_pb2 as kvrpcpb
from kvproto import tikvpb_pb2 as tikvpb
from structlog.testing import capture_logs

from server.rpc.client import connect
from server.rpc.config import Engine
from server.rpc.http2 import link as link_module
from server.rpc.http2.batched import BatchedCall, BatchedStream
from server.rpc.http2.connection import Connection
from server.rpc.http2.handled import HandledCall
from server.rpc.http2.link import ServerProtocol
from server.rpc.listener import ERRORS
from server.rpc.server import RpcServer

TIKV = tikvpb.DESCRIPTOR.services_by_name["Tikv"]
BATCHED, HANDLED, STREAM = "/tikvpb.Tikv/KvGet", "/tikvpb.Tikv/RawGet", "/tikvpb.Tikv/BatchCommands"


class UnexpectedError(Exception):
    """A defect."""


class Servicer:
    """Defects by the key of the request."""

    async def RawGet(self, request: kvrpcpb.RawGetRequest, context: Any) -> kvrpcpb.RawGetResponse:
        if request.key == b"callback":
            context.add_done_callback(_fail)
        elif request.key == b"trailers":
            context.set_trailing_metadata((("key", None),))
        elif request.key == b"status":
            context.set_code("no status")
        elif request.key == b"raises":
            raise UnexpectedError
        elif request.key == b"no message":
            return None  # type: ignore[return-value]
        return kvrpcpb.RawGetResponse(value=request.key)


async def batch(requests: Sequence[bytes]) -> Any:
    if b"raises" in requests:
        raise UnexpectedError
    return ["no bytes" if request == b"wrong type" else request for request in requests]


def _fail(*_: Any, **__: Any) -> None:
    raise UnexpectedError


@asynccontextmanager
async def serving() -> AsyncIterator[str]:
    server = RpcServer(suited=Engine.NATIVE)
    server.add_service(TIKV, Servicer(), {"KvGet": batch, "BatchCommands": batch})
    async with server.listen("127.0.0.1:0") as bound:
        yield bound


async def outcome(bound: str, method: str, body: bytes) -> str:
    alone = [
        ("grpc.use_local_subchannel_pool", 1)
    ]  # the connection that ended is not taken for this one's
    async with grpc.aio.insecure_channel(bound, alone) as channel:
        return await outcome_of(channel, method, body)


async def outcome_of(channel: grpc.aio.Channel, method: str, body: bytes) -> str:
    try:
        if method == STREAM:
            call = channel.stream_stream(STREAM)()
            await call.write(body)
            answer = await call.read()
        else:
            answer = await channel.unary_unary(method)(body, timeout=60)
    except grpc.aio.AioRpcError as err:
        return err.code().name
    return "answered" if answer is not grpc.aio.EOF else "ended"


def get(key: bytes) -> bytes:
    return kvrpcpb.RawGetRequest(key=key).SerializeToString()


@pytest.fixture
def errors() -> Callable[[], float]:
    """How many connections ended this way since the test began."""
    before = ERRORS._value.get()
    return lambda: ERRORS._value.get() - before


@pytest.mark.parametrize(
    ("method", "body"),
    [
        (BATCHED, b"wrong type"),
        (STREAM, b"wrong type"),
        (HANDLED, get(b"callback")),
        (HANDLED, get(b"trailers")),
        (HANDLED, get(b"status")),
    ],
)
async def test_an_answer_that_cannot_be_sent_ends_its_connection_only(
    method: str, body: bytes, errors: Callable[[], float]
) -> None:
    async with serving() as bound, connect(bound) as bystander:
        assert await bystander.unary_unary(BATCHED)(b"k") == b"k"
        with capture_logs() as logs:
            await outcome(bound, method, body)
            async with asyncio.timeout(60):
                while not errors():  # noqa: ASYNC110 - a done callback comes after the answer
                    await asyncio.sleep(0.01)
        assert errors() == 1
        assert [one["event"] for one in logs] == ["a connection ended by an unexpected error"]
        assert logs[0]["exc_info"]
        assert await bystander.unary_unary(BATCHED)(b"k") == b"k"


@pytest.mark.parametrize("body", [b"raises", b"no message"])
async def test_a_handler_that_fails_ends_its_call_only(
    body: bytes, errors: Callable[[], float]
) -> None:
    async with serving() as bound, connect(bound) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await channel.unary_unary(HANDLED)(get(body))
        assert failed.value.code() is grpc.StatusCode.INTERNAL
        assert await channel.unary_unary(BATCHED)(b"k") == b"k"
    assert not errors()


@pytest.mark.usefixtures("engine")
async def test_a_batch_function_that_fails_ends_its_batch_only() -> None:
    async with serving() as bound, connect(bound) as channel:
        with capture_logs() as logs, pytest.raises(grpc.aio.AioRpcError) as failed:
            await channel.unary_unary(BATCHED)(b"raises")
        assert failed.value.code() is grpc.StatusCode.INTERNAL
        [logged] = [one for one in logs if one["event"] == "unexpected exception"]
        assert logged["where"] == "tikvpb.Tikv/KvGet"
        assert f"id {logged['id']}" in (failed.value.details() or "")
        assert await channel.unary_unary(BATCHED)(b"k") == b"k"


@pytest.mark.parametrize(
    ("owner", "name", "method"),
    [
        (link_module, "_peer", BATCHED),
        (Connection, "_receive", BATCHED),
        (Connection, "take", BATCHED),
        (BatchedCall, "receive", BATCHED),
        (BatchedCall, "answer", BATCHED),
        (BatchedStream, "receive", STREAM),
        (HandledCall, "receive", HANDLED),
        (HandledCall, "finish", HANDLED),
        (HandledCall, "_conclude", HANDLED),
        (ServerProtocol, "_tick", BATCHED),
    ],
)
async def test_each_entry_point_of_a_connection_ends_it_alone(
    owner: Any, name: str, method: str, errors: Callable[[], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.rpc.http2.server._TICK_S", 0.05)
    async with serving() as bound:
        with monkeypatch.context() as broken, capture_logs() as logs:
            broken.setattr(owner, name, _fail)
            async with connect(bound) as channel, asyncio.timeout(60), asyncio.TaskGroup() as tasks:
                calling = tasks.create_task(outcome_of(channel, method, get(b"k")))
                while not errors():  # noqa: ASYNC110 - nobody tells when a connection is gone
                    await asyncio.sleep(0.01)
                # A GOAWAY that meets the start of a call can leave gRPC's channel idle with the
                # call in it (1 of 200).
                calling.cancel()
            assert [one["event"] for one in logs].count(
                "a connection ended by an unexpected error"
            ) == errors()
        assert await outcome(bound, BATCHED, b"k") == "answered"
        assert await outcome(bound, HANDLED, get(b"k")) == "answered"


async def test_a_socket_that_cannot_be_set_up_is_not_the_end(
    errors: Callable[[], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving() as bound:
        loop: Any = asyncio.get_running_loop()

        async def broken(_: Any, accepted: Any, **__: Any) -> Any:
            accepted.close()
            raise UnicodeDecodeError(
                "utf-8", b"\xff", 0, 1, "as the ssl module says of a name in a certificate"
            )

        with monkeypatch.context() as patched:
            patched.setattr(loop, "connect_accepted_socket", broken)
            reader, writer = await asyncio.open_connection(*bound.split(":"))
            async with asyncio.timeout(60):
                assert await reader.read() == b""
            writer.close()
        assert errors() == 1
        assert await outcome(bound, BATCHED, b"k") == "answered"
