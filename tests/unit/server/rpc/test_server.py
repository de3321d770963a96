"""The listener over real sockets: coroutines, batch routes, statuses, health, reflection,
a busy port, drain.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from kvproto import kvrpcpb_pb2 as kvrpcpb
from kvproto import tikvpb_pb2 as tikvpb
from kvproto.tikvpb_pb2_grpc import TikvStub

from server.rpc.client import connect
from server.rpc.front import Answer
from server.rpc.server import PortInUseError, RpcServer
from storage.model.errors import ConflictError, InvalidError

pytestmark = pytest.mark.usefixtures("engine")

TIKV = tikvpb.DESCRIPTOR.services_by_name["Tikv"]


class Servicer:
    """One coroutine, one stream; both refuse what is empty."""

    def __init__(self) -> None:
        self.entered, self.leave = asyncio.Event(), asyncio.Event()
        self.leave.set()

    async def RawGet(self, request: kvrpcpb.RawGetRequest, _: Any) -> kvrpcpb.RawGetResponse:
        self.entered.set()
        await self.leave.wait()
        if not request.key:
            raise ConflictError("empty key")
        return kvrpcpb.RawGetResponse(value=request.key)

    async def BatchCommands(
        self, requests: Any, _: Any
    ) -> AsyncIterator[tikvpb.BatchCommandsResponse]:
        async for request in requests:
            if not request.request_ids:
                raise InvalidError("no ids")
            yield tikvpb.BatchCommandsResponse(request_ids=request.request_ids)


async def upper(requests: Sequence[bytes]) -> Sequence[Answer]:
    answers: list[Answer] = []
    for request in requests:
        key = kvrpcpb.GetRequest.FromString(request).key
        answers.append(
            kvrpcpb.GetResponse(value=key.upper()).SerializeToString()
            if key
            else InvalidError("no key")
        )
    return answers


@asynccontextmanager
async def serving(
    servicer: Servicer | None = None,
) -> AsyncIterator[tuple[Any, grpc.aio.Channel, str]]:
    server = RpcServer()
    server.add_service(TIKV, servicer or Servicer(), {"KvGet": upper})
    async with server.listen("127.0.0.1:0") as bound, connect(bound) as channel:
        yield TikvStub(channel), channel, bound


async def test_coroutines_and_batch_routes_answer_the_same_way() -> None:
    async with serving() as (stub, _, bound):
        assert not bound.endswith(":0")
        assert (await stub.RawGet(kvrpcpb.RawGetRequest(key=b"k"))).value == b"k"
        async with asyncio.TaskGroup() as tasks:
            calls = [tasks.create_task(ask(stub, b"k%d" % number)) for number in range(50)]
        assert [call.result() for call in calls] == [b"K%d" % number for number in range(50)]


async def ask(stub: Any, key: bytes) -> bytes:
    return bytes((await stub.KvGet(kvrpcpb.GetRequest(key=key))).value)


async def test_our_errors_are_statuses_on_every_kind_of_method() -> None:
    async with serving() as (stub, _, _bound):
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await stub.RawGet(kvrpcpb.RawGetRequest())
        assert (unary.value.code(), unary.value.details()) == (
            grpc.StatusCode.ABORTED,
            "[TM:ErrConflict] empty key",
        )
        with pytest.raises(grpc.aio.AioRpcError) as batched:
            await ask(stub, b"")
        assert batched.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError) as stream:
            async for _ in stub.BatchCommands(iter([tikvpb.BatchCommandsRequest()])):
                pass
        assert stream.value.details() == "[TM:ErrInvalidArgument] no ids"


async def test_a_stream_answers_message_by_message() -> None:
    async with serving() as (stub, _, _bound):
        sent = [tikvpb.BatchCommandsRequest(request_ids=[number]) for number in (1, 2, 3)]
        assert [list(it.request_ids) async for it in stub.BatchCommands(iter(sent))] == [
            [1],
            [2],
            [3],
        ]


async def test_a_method_nobody_serves_is_unimplemented() -> None:
    async with serving() as (stub, _, _bound):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.KvScan(kvrpcpb.ScanRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_health_and_reflection_know_the_service() -> None:
    async with serving() as (_, channel, _bound):
        for name in ("", "tikvpb.Tikv"):
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=name)
            )
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        names = [
            service.name
            async for answer in stub.ServerReflectionInfo(asked)
            for service in answer.list_services_response.service
        ]
        assert "tikvpb.Tikv" in names


async def test_reflection_v1_answers_as_v1alpha_does() -> None:
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="tikvpb.Tikv"),
        reflection_pb2.ServerReflectionRequest(
            file_containing_symbol="grpc.reflection.v1.ServerReflection"
        ),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="no.such.Symbol"),
        reflection_pb2.ServerReflectionRequest(),
    ]

    async with serving() as (_, channel, _bound):
        answers: dict[str, list[Any]] = {}
        for version in ("v1alpha", "v1"):
            call = channel.stream_stream(
                f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
                request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )
            answers[version] = [answer async for answer in call(iter(asked), timeout=60)]

    assert answers["v1"] == answers["v1alpha"]
    listed, _, own, unknown, _ = answers["v1"]
    names = {service.name for service in listed.list_services_response.service}
    assert {
        "tikvpb.Tikv",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    } <= names
    file = descriptor_pb2.FileDescriptorProto.FromString(
        own.file_descriptor_response.file_descriptor_proto[0]
    )
    assert file.service[0].method[0].input_type == ".grpc.reflection.v1.ServerReflectionRequest"
    assert unknown.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


async def test_a_busy_port_is_one_clear_error() -> None:
    async with serving() as (_, _channel, bound):
        with pytest.raises(PortInUseError, match=f"cannot listen on {bound}: it is in use"):
            async with RpcServer().listen(bound):
                pass


async def test_a_call_that_is_under_way_is_answered_before_the_listener_closes() -> None:
    servicer = Servicer()
    servicer.leave.clear()
    server = RpcServer()
    server.add_service(TIKV, servicer)
    async with asyncio.TaskGroup() as tasks:
        async with server.listen("127.0.0.1:0") as bound:
            channel = connect(bound)
            under_way = tasks.create_task(one(channel))
            await servicer.entered.wait()
            asyncio.get_running_loop().call_later(0.05, servicer.leave.set)
        assert await under_way == b"k"
    await channel.close()


async def one(channel: grpc.aio.Channel) -> bytes:
    return bytes((await TikvStub(channel).RawGet(kvrpcpb.RawGetRequest(key=b"k"))).value)
