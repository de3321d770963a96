"""What handlers may do with their calls, and what clients see of it: the same with each engine."""

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
from server.rpc.front import Answer, Messages
from server.rpc.server import RpcServer
from storage.model.errors import InvalidError

pytestmark = pytest.mark.usefixtures("engine")

TIKV = tikvpb.DESCRIPTOR.services_by_name["Tikv"]
Request, Response = kvrpcpb.RawGetRequest, kvrpcpb.RawGetResponse
BatchRequest, BatchResponse = tikvpb.BatchCommandsRequest, tikvpb.BatchCommandsResponse


class Servicer:
    """Does what each test says, as `RawGet` or as `BatchCommands`."""

    def __init__(self, unary: Any = None, stream: Any = None) -> None:
        if unary:
            self.RawGet = unary
        if stream:
            self.BatchCommands = stream


@asynccontextmanager
async def serving(unary: Any = None, stream: Any = None) -> AsyncIterator[grpc.aio.Channel]:
    server = RpcServer()
    server.add_service(TIKV, Servicer(unary, stream))
    async with server.listen("127.0.0.1:0") as bound, connect(bound) as channel:
        yield channel


def raw_get(channel: grpc.aio.Channel) -> Any:
    return channel.unary_unary(
        "/tikvpb.Tikv/RawGet", Request.SerializeToString, Response.FromString
    )


def commands(channel: grpc.aio.Channel) -> Any:
    return channel.stream_stream(
        "/tikvpb.Tikv/BatchCommands", BatchRequest.SerializeToString, BatchResponse.FromString
    )  # fmt: skip


async def test_metadata_goes_both_ways_text_and_bytes() -> None:
    seen: dict[str, Any] = {}

    async def unary(request: Any, context: Any) -> Any:
        seen.update(context.invocation_metadata())
        await context.send_initial_metadata((("head", "h"), ("head-bin", b"\0\xff")))
        context.set_trailing_metadata((("tail", "t"), ("tail-bin", b"\xff\0\xff")))
        return Response(value=request.key)

    async with serving(unary) as channel:
        call = raw_get(channel)(Request(key=b"k"), metadata=(("mine", "m"), ("mine-bin", b"\1\2")))
        assert (await call).value == b"k"
        assert (seen["mine"], seen["mine-bin"]) == ("m", b"\1\2")
        head, tail = dict(await call.initial_metadata()), dict(await call.trailing_metadata())
        assert (head["head"], head["head-bin"]) == ("h", b"\0\xff")
        assert (tail["tail"], tail["tail-bin"]) == ("t", b"\xff\0\xff")


async def test_abort_ends_a_call_with_status_text_and_metadata() -> None:
    async def unary(_: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "é\n100 %", (("why", "so"),))

    async with serving(unary) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await raw_get(channel)(Request())
        assert (failed.value.code(), failed.value.details()) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "é\n100 %",
        )
        assert dict(failed.value.trailing_metadata())["why"] == "so"


async def test_a_status_may_be_set_and_returned() -> None:
    async def unary(_: Any, context: Any) -> Any:
        context.set_code(grpc.StatusCode.DATA_LOSS)
        context.set_details("some of it")
        return Response()

    async with serving(unary) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await raw_get(channel)(Request())
        assert (failed.value.code(), failed.value.details()) == (
            grpc.StatusCode.DATA_LOSS,
            "some of it",
        )


async def test_a_defect_of_a_handler_ends_its_call_only() -> None:
    async def unary(request: Any, _: Any) -> Any:
        return Response(value=bytes([1 // len(request.key)]))

    async with serving(unary) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await raw_get(channel)(Request())
        assert failed.value.code() is grpc.StatusCode.INTERNAL
        assert "unexpected ZeroDivisionError" in (failed.value.details() or "")
        assert (await raw_get(channel)(Request(key=b"k"))).value == b"\1"


async def test_a_deadline_is_known_and_interrupts_the_handler() -> None:
    left: list[float] = []
    interrupted = asyncio.Event()

    async def unary(_: Any, context: Any) -> Any:
        left.append(context.time_remaining())
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            interrupted.set()
            raise

    async with serving(unary) as channel:
        # Where the machine stands still for a moment, it passes before the handler begins.
        while not left:
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await raw_get(channel)(Request(), timeout=2)
            assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        async with asyncio.timeout(60):
            await interrupted.wait()
    assert 0 < left[0] < 4


async def test_no_deadline_is_none() -> None:
    async def unary(_: Any, context: Any) -> Any:
        assert context.time_remaining() is None
        return Response(value=context.peer().encode())

    async with serving(unary) as channel:
        assert (await raw_get(channel)(Request())).value.startswith(b"ipv4:127.0.0.1:")


@pytest.mark.parametrize("how", ["cancel", "disconnect"])
async def test_a_client_that_leaves_interrupts_the_handler(how: str) -> None:
    inside, interrupted = asyncio.Event(), asyncio.Event()

    async def stream(requests: Any, _: Any) -> AsyncIterator[Any]:
        try:
            async for _request in requests:
                inside.set()
                yield BatchResponse()
        finally:
            interrupted.set()

    async with serving(stream=stream) as channel:
        call = commands(channel)()
        await call.write(BatchRequest())
        await inside.wait()
        if how == "cancel":
            call.cancel()
        else:
            await channel.close()
        async with asyncio.timeout(60):
            await interrupted.wait()


async def test_many_answers_yielded_together_arrive_one_by_one_and_in_order() -> None:
    sizes = [0, 1, 300, 20_000, 70_000, 300_000, 0, 5] + [100] * 3000
    answers = [
        BatchResponse(request_ids=range(number, number + size // 8))
        for number, size in enumerate(sizes)
    ]

    async def stream(requests: Any, _: Any) -> AsyncIterator[Any]:
        async for _request in requests:
            yield Messages(answer.SerializeToString() for answer in answers)
            yield BatchResponse(request_ids=[7])
            yield Messages()

    async with serving(stream=stream) as channel:
        call = commands(channel)()
        for _ in range(2):
            await call.write(BatchRequest())
            assert [await call.read() for _ in answers] == answers
            assert (await call.read()).request_ids == [7]
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


async def test_large_messages_pass_both_ways() -> None:
    async def unary(request: Any, _: Any) -> Any:
        return Response(value=request.key[::-1])

    async with serving(unary) as channel:
        body = bytes(range(256)) * (20 << 12)
        assert (await raw_get(channel)(Request(key=body))).value == body[::-1]


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_compressed_messages_are_read(compression: grpc.Compression) -> None:
    async def unary(request: Any, _: Any) -> Any:
        return Response(value=request.key)

    async with serving(unary) as channel:
        assert (
            await raw_get(channel)(Request(key=bytes(5000)), compression=compression)
        ).value == bytes(5000)


async def test_open_streams_end_when_the_listener_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.rpc.server._DRAIN_SECONDS", 0.2)

    async def stream(requests: Any, _: Any) -> AsyncIterator[Any]:
        async for _request in requests:
            yield BatchResponse()

    server = RpcServer()
    server.add_service(TIKV, Servicer(stream=stream))
    async with server.listen("127.0.0.1:0") as bound:
        channel = connect(bound)
        call = commands(channel)()
        await call.write(BatchRequest())
        assert await call.read() == BatchResponse()
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await call.read()
    assert ended.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    await channel.close()


async def test_streams_of_a_batch_route_answer_message_by_message() -> None:
    async def doubled(requests: Any) -> list[Answer]:
        asked = [BatchRequest.FromString(raw).request_ids for raw in requests]
        return [BatchResponse(request_ids=[*ids, *ids]).SerializeToString() for ids in asked]

    server = RpcServer()
    server.add_service(TIKV, object(), {"BatchCommands": doubled})
    async with server.listen("127.0.0.1:0") as bound, connect(bound) as channel:
        call = commands(channel)(
            iter([BatchRequest(request_ids=[number]) for number in range(500)])
        )
        assert [list(one.request_ids) async for one in call] == [
            [number, number] for number in range(500)
        ]
        assert await call.code() is grpc.StatusCode.OK


async def test_an_error_of_a_batch_route_ends_its_stream() -> None:
    async def refused(requests: Any) -> list[Answer]:
        return [raw if raw else InvalidError("nothing asked") for raw in requests]

    server = RpcServer()
    server.add_service(TIKV, object(), {"BatchCommands": refused})
    async with server.listen("127.0.0.1:0") as bound, connect(bound) as channel:
        call = channel.stream_stream("/tikvpb.Tikv/BatchCommands")()
        await call.write(b"\x08\1")
        assert await call.read() == b"\x08\1"
        await call.write(b"")
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await call.read()
        assert ended.value.details() == "[TM:ErrInvalidArgument] nothing asked"
