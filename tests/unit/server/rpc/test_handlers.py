"""Messages that are none: they end their own call with a status, and nothing else."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from kvproto import kvrpcpb_pb2 as kvrpcpb
from kvproto import tikvpb_pb2 as tikvpb

from server.rpc.client import connect
from server.rpc.server import RpcServer

pytestmark = pytest.mark.usefixtures("engine")

TIKV = tikvpb.DESCRIPTOR.services_by_name["Tikv"]
GARBAGE = b"\xff\xff\xff\xff\xff"
STREAM = "/tikvpb.Tikv/BatchCommands"


class ReadsItself:
    """Reads its stream in the task gRPC gave it."""

    async def BatchCommands(
        self, requests: Any, _: Any
    ) -> AsyncIterator[tikvpb.BatchCommandsResponse]:
        async for request in requests:
            yield tikvpb.BatchCommandsResponse(request_ids=request.request_ids)

    async def RawGet(self, request: kvrpcpb.RawGetRequest, _: Any) -> kvrpcpb.RawGetResponse:
        return kvrpcpb.RawGetResponse(value=request.key)


class ReadsElsewhere(ReadsItself):
    """Reads its streams in tasks whose failure would end the daemon,
    as the store and the etcd watches do.
    """

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks

    async def BatchCommands(
        self, requests: Any, _: Any
    ) -> AsyncIterator[tikvpb.BatchCommandsResponse]:
        found: asyncio.Queue[tikvpb.BatchCommandsRequest | None] = asyncio.Queue()
        self._tasks.create_task(self._read(requests, found))
        while (request := await found.get()) is not None:
            yield tikvpb.BatchCommandsResponse(request_ids=request.request_ids)

    async def _read(
        self, requests: Any, found: asyncio.Queue[tikvpb.BatchCommandsRequest | None]
    ) -> None:
        async for request in requests:
            found.put_nowait(request)
        found.put_nowait(None)


@asynccontextmanager
async def serving(kind: type[ReadsItself]) -> AsyncIterator[grpc.aio.Channel]:
    async with asyncio.TaskGroup() as tasks:
        server = RpcServer()
        server.add_service(TIKV, ReadsElsewhere(tasks) if kind is ReadsElsewhere else ReadsItself())
        async with server.listen("127.0.0.1:0") as bound, connect(bound) as channel:
            yield channel


async def open_ended(*messages: bytes) -> AsyncIterator[bytes]:
    for message in messages:
        yield message
    await asyncio.Event().wait()


async def answers(
    channel: grpc.aio.Channel, *messages: bytes
) -> tuple[list[bytes], grpc.StatusCode, str]:
    """What came, and how it ended; the client's half stays open, so only the server can end it."""
    call = channel.stream_stream(STREAM)(open_ended(*messages), timeout=60)
    came: list[bytes] = []
    try:
        async for answer in call:
            came = [*came, answer]
    except grpc.aio.AioRpcError as err:
        return came, err.code(), err.details() or ""
    raise AssertionError("the stream ended without an error")


@pytest.mark.parametrize("kind", [ReadsItself, ReadsElsewhere])
@pytest.mark.parametrize("good", [0, 1, 3])
async def test_garbage_in_a_stream_ends_it_with_a_status(
    kind: type[ReadsItself], good: int
) -> None:
    message = tikvpb.BatchCommandsRequest(request_ids=[7]).SerializeToString()
    async with serving(kind) as channel:
        came, code, details = await answers(channel, *[message] * good, GARBAGE)
        assert code is grpc.StatusCode.INTERNAL
        assert details.startswith("grpc: error unmarshalling request: ")
        assert len(came) == good if kind is ReadsItself else len(came) <= good
        raw = channel.unary_unary("/tikvpb.Tikv/RawGet")
        assert await raw(kvrpcpb.RawGetRequest(key=b"k").SerializeToString())


@pytest.mark.parametrize("garbage", [GARBAGE, b"\x0a\x05ab", b"\x0b"])
async def test_garbage_in_a_call_is_refused_without_our_class_names(garbage: bytes) -> None:
    async with serving(ReadsItself) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary("/tikvpb.Tikv/RawGet")(garbage)
        assert refused.value.code() is grpc.StatusCode.INTERNAL
        assert "class" not in (refused.value.details() or "")


@pytest.mark.parametrize(
    ("method", "text"), [("Nope", "tikvpb.Tikv"), ("KvScan", "tikvpb.Tikv"), ("Do", "no.Such")]
)
async def test_what_nobody_serves_is_named(method: str, text: str) -> None:
    async with serving(ReadsItself) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary(f"/{text}/{method}")(b"")
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert refused.value.details() == f"unknown method {method} for service {text}"
