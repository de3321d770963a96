"""gRPC's interop cases, with grpcio's client; grpc-go's is run by hand (`tests.interop`)."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from server.rpc.config import Engine
from tests.interop import ECHO_INITIAL, ECHO_TRAILING, MESSAGES, SERVICE, serving

LARGE_REQUEST, LARGE_ANSWER = 271_828, 314_159
REQUEST_SIZES, ANSWER_SIZES = (27_182, 8, 1_828, 45_904), (31_415, 9, 2_653, 58_979)
TEXT = "\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP 😈\t\n"
TIMEOUT_S = 60


@pytest.fixture
async def channel(engine: Engine) -> AsyncIterator[grpc.aio.Channel]:
    async with serving(engine) as bound, grpc.aio.insecure_channel(bound) as opened:
        yield opened


def call(
    channel: grpc.aio.Channel, name: str, request: str, answer: str, service: str = SERVICE
) -> Any:
    """The call of this method, whose shape its name says."""
    shape = {
        "StreamingOutputCall": channel.unary_stream,
        "StreamingInputCall": channel.stream_unary,
        "FullDuplexCall": channel.stream_stream,
        "HalfDuplexCall": channel.stream_stream,
    }.get(name, channel.unary_unary)
    return shape(
        f"/{service}/{name}",
        request_serializer=MESSAGES[request].SerializeToString,
        response_deserializer=MESSAGES[answer].FromString,
    )


def unary(channel: grpc.aio.Channel) -> Any:
    return call(channel, "UnaryCall", "SimpleRequest", "SimpleResponse")


def client_stream(channel: grpc.aio.Channel) -> Any:
    names = "StreamingInputCallRequest", "StreamingInputCallResponse"
    return call(channel, "StreamingInputCall", *names)


def streamed(channel: grpc.aio.Channel, name: str) -> Any:
    return call(channel, name, "StreamingOutputCallRequest", "StreamingOutputCallResponse")


def payload(size: int) -> Any:
    return MESSAGES["Payload"](body=bytes(size))


def asking(*sizes: int, sent: int = 0, interval_us: int = 0) -> Any:
    """A request for answers of these sizes."""
    parameters = [
        MESSAGES["ResponseParameters"](size=size, interval_us=interval_us) for size in sizes
    ]
    return MESSAGES["StreamingOutputCallRequest"](
        response_parameters=parameters, payload=payload(sent)
    )


def large() -> Any:
    return MESSAGES["SimpleRequest"](response_size=LARGE_ANSWER, payload=payload(LARGE_REQUEST))


async def test_an_empty_message(channel: grpc.aio.Channel) -> None:
    answer = await call(channel, "EmptyCall", "Empty", "Empty")(MESSAGES["Empty"]())
    assert answer == MESSAGES["Empty"]()


@pytest.mark.parametrize("compression", [None, grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_a_large_message_and_a_compressed_one(
    channel: grpc.aio.Channel, compression: grpc.Compression | None
) -> None:
    answer = await unary(channel)(large(), compression=compression, timeout=TIMEOUT_S)
    assert answer.payload == payload(LARGE_ANSWER)


@pytest.mark.parametrize("compression", [None, grpc.Compression.Gzip])
async def test_a_stream_of_requests(
    channel: grpc.aio.Channel, compression: grpc.Compression | None
) -> None:
    requests = [
        MESSAGES["StreamingInputCallRequest"](payload=payload(size)) for size in REQUEST_SIZES
    ]
    answer = await client_stream(channel)(
        iter(requests), compression=compression, timeout=TIMEOUT_S
    )
    assert answer.aggregated_payload_size == sum(REQUEST_SIZES)


async def test_a_stream_of_answers(channel: grpc.aio.Channel) -> None:
    answers = streamed(channel, "StreamingOutputCall")(asking(*ANSWER_SIZES), timeout=TIMEOUT_S)
    assert [len(answer.payload.body) async for answer in answers] == [*ANSWER_SIZES]


async def test_each_request_has_its_answer_before_the_next_one(channel: grpc.aio.Channel) -> None:
    stream = streamed(channel, "FullDuplexCall")(timeout=TIMEOUT_S)
    for size, sent in zip(ANSWER_SIZES, REQUEST_SIZES, strict=True):
        await stream.write(asking(size, sent=sent))
        assert len((await stream.read()).payload.body) == size
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF
    assert await stream.code() is grpc.StatusCode.OK


async def test_answers_after_all_requests(channel: grpc.aio.Channel) -> None:
    requests = [asking(size) for size in ANSWER_SIZES]
    answers = streamed(channel, "HalfDuplexCall")(iter(requests), timeout=TIMEOUT_S)
    assert [len(answer.payload.body) async for answer in answers] == [*ANSWER_SIZES]


async def test_a_stream_without_messages(channel: grpc.aio.Channel) -> None:
    stream = streamed(channel, "FullDuplexCall")(timeout=TIMEOUT_S)
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF
    assert await stream.code() is grpc.StatusCode.OK


async def test_a_call_cancelled_before_it_sends(channel: grpc.aio.Channel) -> None:
    stream = client_stream(channel)(timeout=TIMEOUT_S)
    stream.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stream
    assert await stream.code() is grpc.StatusCode.CANCELLED
    assert (await unary(channel)(large(), timeout=TIMEOUT_S)).payload == payload(LARGE_ANSWER)


async def test_a_call_cancelled_after_its_first_answer(channel: grpc.aio.Channel) -> None:
    stream = streamed(channel, "FullDuplexCall")(timeout=TIMEOUT_S)
    await stream.write(asking(ANSWER_SIZES[0], sent=REQUEST_SIZES[0]))
    await stream.read()
    stream.cancel()
    assert await stream.code() is grpc.StatusCode.CANCELLED
    assert (await unary(channel)(large(), timeout=TIMEOUT_S)).payload == payload(LARGE_ANSWER)


async def test_a_deadline_passes_while_the_server_sleeps(channel: grpc.aio.Channel) -> None:
    request = asking(ANSWER_SIZES[0], interval_us=60_000_000)
    stream = streamed(channel, "StreamingOutputCall")(request, timeout=0.001)
    assert await stream.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("text", ["test status message", TEXT], ids=["plain", "odd"])
async def test_a_status_and_its_text(channel: grpc.aio.Channel, text: str) -> None:
    status = MESSAGES["EchoStatus"](code=grpc.StatusCode.UNKNOWN.value[0], message=text)
    with pytest.raises(grpc.aio.AioRpcError) as one:
        await unary(channel)(MESSAGES["SimpleRequest"](response_status=status), timeout=TIMEOUT_S)
    stream = streamed(channel, "FullDuplexCall")(timeout=TIMEOUT_S)
    await stream.write(MESSAGES["StreamingOutputCallRequest"](response_status=status))
    await stream.done_writing()
    with pytest.raises(grpc.aio.AioRpcError) as many:
        await stream.read()
    for error in (one.value, many.value):
        assert (error.code(), error.details()) == (grpc.StatusCode.UNKNOWN, text)


async def test_metadata_come_back_in_headers_and_trailers(channel: grpc.aio.Channel) -> None:
    sent = (ECHO_INITIAL, "test_initial_metadata_value"), (ECHO_TRAILING, b"\xab\xab\xab\x00,")
    one = unary(channel)(large(), metadata=sent, timeout=TIMEOUT_S)
    await one
    many = streamed(channel, "FullDuplexCall")(metadata=sent, timeout=TIMEOUT_S)
    await many.write(asking(LARGE_ANSWER))
    await many.done_writing()
    assert len([answer async for answer in many]) == 1
    for made in (one, many):
        assert sent[0] in tuple(await made.initial_metadata())
        assert sent[1] in tuple(await made.trailing_metadata())


@pytest.mark.parametrize(
    ("service", "method"),
    [(SERVICE, "UnimplementedCall"), ("grpc.testing.UnimplementedService", "UnimplementedCall")],
)
async def test_what_is_not_there_is_unimplemented(
    channel: grpc.aio.Channel, service: str, method: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call(channel, method, "Empty", "Empty", service)(
            MESSAGES["Empty"](), timeout=TIMEOUT_S
        )
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
