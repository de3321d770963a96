"""gRPC's own test service, `grpc.testing.TestService`, behind our listener, for the interop clients
that come with each gRPC implementation: `python -m tests.interop [--port N] [--rpc-engine NAME]`
prints its address and serves until it is ended.

The service and its cases are gRPC's ("gRPC interop test case descriptions"). Whether a call has the
right headers, trailers, status and compression is then judged by code that nobody here wrote.
`tests/unit/server/rpc/test_interop.py` runs the cases with grpcio's client.
"""

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from server.rpc.config import Engine
from server.rpc.credentials import SecurityConfig
from server.rpc.server import RpcServer

SERVICE = "grpc.testing.TestService"
ECHO_INITIAL, ECHO_TRAILING = "x-grpc-test-echo-initial", "x-grpc-test-echo-trailing-bin"
"""What a client sends under these names comes back in the headers and the trailers."""

_PACKAGE = "grpc.testing"
_FIELD = descriptor_pb2.FieldDescriptorProto
_KINDS = {
    "int32": _FIELD.TYPE_INT32,
    "bool": _FIELD.TYPE_BOOL,
    "bytes": _FIELD.TYPE_BYTES,
    "string": _FIELD.TYPE_STRING,
}
_MESSAGES = {
    "Empty": {},
    "BoolValue": {"value": (1, "bool")},
    "Payload": {"type": (1, "int32"), "body": (2, "bytes")},
    "EchoStatus": {"code": (1, "int32"), "message": (2, "string")},
    "SimpleRequest": {
        "response_size": (2, "int32"),
        "payload": (3, "Payload"),
        "response_compressed": (6, "BoolValue"),
        "response_status": (7, "EchoStatus"),
        "expect_compressed": (8, "BoolValue"),
    },
    "SimpleResponse": {"payload": (1, "Payload")},
    "StreamingInputCallRequest": {
        "payload": (1, "Payload"),
        "expect_compressed": (2, "BoolValue"),
    },
    "StreamingInputCallResponse": {"aggregated_payload_size": (1, "int32")},
    "ResponseParameters": {"size": (1, "int32"), "interval_us": (2, "int32")},
    "StreamingOutputCallRequest": {
        "response_parameters": (2, "*ResponseParameters"),
        "payload": (3, "Payload"),
        "response_status": (7, "EchoStatus"),
    },
    "StreamingOutputCallResponse": {"payload": (1, "Payload")},
}
"""The fields that our cases use, by name: number and type; `*`: repeated."""


def _message_classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="tests/interop.proto", package=_PACKAGE, syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field_name, (number, kind) in fields.items():
            field = message.field.add(name=field_name, number=number)
            field.label = _FIELD.LABEL_REPEATED if kind[0] == "*" else _FIELD.LABEL_OPTIONAL
            if kind in _KINDS:
                field.type = _KINDS[kind]
            else:
                field.type = _FIELD.TYPE_MESSAGE
                field.type_name = f".{_PACKAGE}.{kind.lstrip('*')}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _MESSAGES
    }


MESSAGES = _message_classes()


class _Handlers:
    """The service's methods."""

    async def EmptyCall(self, _: Any, context: Any) -> Any:
        await _echo_metadata(context)
        return MESSAGES["Empty"]()

    async def UnaryCall(self, request: Any, context: Any) -> Any:
        await _echo_metadata(context)
        await _end_as_asked(request, context)
        return MESSAGES["SimpleResponse"](payload=_payload(request.response_size))

    CacheableUnaryCall = UnaryCall

    async def StreamingOutputCall(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await _echo_metadata(context)
        await _end_as_asked(request, context)
        async for answer in _answers(request):
            yield answer

    async def StreamingInputCall(self, requests: AsyncIterator[Any], context: Any) -> Any:
        await _echo_metadata(context)
        size = 0
        async for request in requests:
            size += len(request.payload.body)
        return MESSAGES["StreamingInputCallResponse"](aggregated_payload_size=size)

    async def FullDuplexCall(
        self, requests: AsyncIterator[Any], context: Any
    ) -> AsyncIterator[Any]:
        await _echo_metadata(context)
        async for request in requests:
            await _end_as_asked(request, context)
            async for answer in _answers(request):
                yield answer

    async def HalfDuplexCall(
        self, requests: AsyncIterator[Any], context: Any
    ) -> AsyncIterator[Any]:
        await _echo_metadata(context)
        for request in [request async for request in requests]:
            async for answer in _answers(request):
                yield answer


def _payload(size: int) -> Any:
    return MESSAGES["Payload"](body=bytes(size))


async def _answers(request: Any) -> AsyncIterator[Any]:
    for parameters in request.response_parameters:
        await asyncio.sleep(parameters.interval_us / 1e6)
        yield MESSAGES["StreamingOutputCallResponse"](payload=_payload(parameters.size))


async def _echo_metadata(context: Any) -> None:
    sent = {name.lower(): value for name, value in context.invocation_metadata() or ()}
    if ECHO_TRAILING in sent:
        context.set_trailing_metadata(((ECHO_TRAILING, sent[ECHO_TRAILING]),))
    headers = ((ECHO_INITIAL, sent[ECHO_INITIAL]),) if ECHO_INITIAL in sent else ()
    await context.send_initial_metadata(headers)


async def _end_as_asked(request: Any, context: Any) -> None:
    status = request.response_status
    if status.code:
        code = next(each for each in grpc.StatusCode if each.value[0] == status.code)
        await context.abort(code, status.message)


class _Service(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs only
    """The methods by their paths."""

    def __init__(self) -> None:
        self._methods = {
            f"/{SERVICE}/{name}": handler for name, handler in _method_handlers().items()
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The method's handler, if the service has it."""
        return self._methods.get(handler_call_details.method)


def _method_handlers() -> dict[str, Any]:
    handlers, unary, stream = _Handlers(), "unary", "stream"
    shapes = {
        "EmptyCall": (unary, unary, "Empty", "Empty"),
        "UnaryCall": (unary, unary, "SimpleRequest", "SimpleResponse"),
        "CacheableUnaryCall": (unary, unary, "SimpleRequest", "SimpleResponse"),
        "StreamingOutputCall": (unary, stream, *_STREAMED),
        "StreamingInputCall": (
            stream,
            unary,
            "StreamingInputCallRequest",
            "StreamingInputCallResponse",
        ),
        "FullDuplexCall": (stream, stream, *_STREAMED),
        "HalfDuplexCall": (stream, stream, *_STREAMED),
    }
    return {
        name: getattr(grpc, f"{request_shape}_{response_shape}_rpc_method_handler")(
            getattr(handlers, name),
            request_deserializer=MESSAGES[request].FromString,
            response_serializer=MESSAGES[response].SerializeToString,
        )
        for name, (request_shape, response_shape, request, response) in shapes.items()
    }


_STREAMED = ("StreamingOutputCallRequest", "StreamingOutputCallResponse")


@asynccontextmanager
async def serving(
    engine: Engine, address: str = "127.0.0.1:0", security: SecurityConfig | None = None
) -> AsyncIterator[str]:
    """The test service behind a listener of this engine, for the block; yields its address."""
    server = RpcServer(security, suited=engine)
    server.add_generic_handler(_Service())
    async with server.listen(address) as bound:
        yield bound


async def _serve_forever(engine: Engine, port: int) -> None:
    async with serving(engine, f"127.0.0.1:{port}") as bound:
        print(bound, flush=True)
        await asyncio.Event().wait()


def main() -> None:
    """Serve, until Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m tests.interop")
    parser.add_argument("--port", type=int, default=0, help="where to listen (default: any)")
    parser.add_argument(
        "--rpc-engine", type=Engine, choices=list(Engine), default=Engine.NATIVE, help="whose gRPC"
    )
    arguments = parser.parse_args()
    asyncio.run(_serve_forever(arguments.rpc_engine, arguments.port))


if __name__ == "__main__":
    main()
