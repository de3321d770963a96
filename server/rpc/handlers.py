"""gRPC handlers from a service's descriptor: messages parsed, hot calls batched,
our errors as statuses.

A method is looked up by name: a batch function if one is given, else the servicer's coroutine of
that name. Whatever a client sends, garbage too, ends at most its own call: no error of parsing
reaches a task that others depend on.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any, NamedTuple

import grpc
import grpc.aio
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError

from server.rpc.errors import StatusError, status_of
from server.rpc.front import BatchHandler, ClosedError, Route
from storage.defect import request_error
from storage.model.errors import TidemarkError

Context = grpc.aio.ServicerContext[Any, Any]
_ENDED = (grpc.aio.BaseError, grpc.aio.UsageError, grpc.RpcError)
"""What gRPC raises in a handler whose call was aborted, or whose client is gone."""


class MalformedRequestError(StatusError):
    """Bytes that are no message of their kind."""

    def __init__(self, err: DecodeError) -> None:
        super().__init__(grpc.StatusCode.INTERNAL, f"grpc: error unmarshalling request: {err}")


class BatchedMethod(NamedTuple):
    """A gRPC handler that puts its calls on a route;
    an engine that knows `route` needs none of its coroutines.

    Of a method that streams both ways every request is answered by one message, in order; an error
    ends the call.
    """

    route: Route
    request_streaming: bool
    response_streaming: bool
    unary_unary: Any = None
    stream_stream: Any = None
    request_deserializer: Any = None
    response_serializer: Any = None
    unary_stream: Any = None
    stream_unary: Any = None


def method_handlers(
    service: ServiceDescriptor,
    servicer: object,
    batch: Mapping[str, BatchHandler] | None = None,
    refusal: Callable[[], TidemarkError] = ClosedError,
) -> tuple[dict[str, Any], list[Route]]:
    """Handlers by method name, and the routes of the batched ones: whoever serves them runs these.

    `refusal` makes the answer to calls that wait on a route when it is run no more.
    """
    handlers: dict[str, Any] = {}
    routes: list[Route] = []
    for method in service.methods:
        if batch and method.name in batch:
            routes.append(Route(f"{service.full_name}/{method.name}", batch[method.name], refusal))
            handlers[method.name] = _batched(method, routes[-1])
        elif hasattr(servicer, method.name):
            handlers[method.name] = _handler(method, getattr(servicer, method.name))
    return handlers, routes


def _batched(method: MethodDescriptor, route: Route) -> BatchedMethod:
    async def call(request: bytes, context: Context) -> bytes:
        answer = await route.call(request)
        if isinstance(answer, TidemarkError):
            await context.abort(*status_of(answer))
        assert isinstance(answer, bytes)
        return answer

    async def answered(requests: AsyncIterator[bytes], context: Context) -> None:
        async with aclosing(aiter(requests)) as raws:  # type: ignore[type-var]  # gRPC's is a generator
            async for request in raws:
                await context.write(await call(request, context))

    assert method.client_streaming == method.server_streaming, (
        f"{method.full_name} cannot be batched"
    )
    if method.client_streaming:
        return BatchedMethod(
            route, request_streaming=True, response_streaming=True, stream_stream=answered
        )
    return BatchedMethod(route, request_streaming=False, response_streaming=False, unary_unary=call)


def _handler(method: MethodDescriptor, function: Callable[..., Any]) -> Any:
    response = message_factory.GetMessageClass(method.output_type)
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[method.client_streaming, method.server_streaming]
    served = _streaming(function) if method.server_streaming else function
    kind = message_factory.GetMessageClass(method.input_type)
    guard = _guarded_stream if method.client_streaming else _guarded
    return make(
        guard(served, kind, method.full_name), response_serializer=response.SerializeToString
    )


def _streaming(function: Callable[..., Any]) -> Callable[..., Any]:
    """Writes itself instead of yielding: whatever interrupts it, a slow reader too, is seen here.

    Headers go first and alone: gRPC cannot end a call with a status that is interrupted while they
    are on their way.
    """

    async def call(request: Any, context: Context) -> None:
        await context.send_initial_metadata(())
        async for message in function(request, context):
            await context.write(message)

    return call


def _guarded(function: Callable[..., Any], kind: type[Any], method: str) -> Callable[..., Any]:
    async def call(raw: bytes, context: Context) -> Any:
        try:
            return await function(_parsed(kind, raw), context)
        except _ENDED:
            raise
        except Exception as err:  # noqa: BLE001 - whatever a request meets, it ends that request only
            await context.abort(*status_of(request_error(err, method)))

    return call


def _guarded_stream(
    function: Callable[..., Any], kind: type[Any], method: str
) -> Callable[..., Any]:
    async def call(raws: AsyncIterator[bytes], context: Context) -> Any:
        requests = _Requests(kind, raws)
        try:
            answer = await function(requests, context)
            if requests.fault:
                # where the cancellation that is under way arrives
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            if requests.fault is None:
                raise
            requests.call.uncancel()
            await context.abort(*status_of(requests.fault))
        except _ENDED:
            raise
        except Exception as err:  # noqa: BLE001 - whatever a request meets, it ends that request only
            await context.abort(*status_of(request_error(err, method)))
        return answer

    return call


class _Requests:
    """The messages of one stream; one that cannot be parsed ends the call,
    and looks like an end to other tasks.
    """

    def __init__(self, kind: type[Any], raws: AsyncIterator[bytes]) -> None:
        self.fault: MalformedRequestError | None = None
        task = asyncio.current_task()
        assert task is not None, "gRPC calls handlers in tasks"
        self.call = task
        self._kind = kind
        self._raws = aiter(raws)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        raw = await anext(self._raws)
        try:
            return _parsed(self._kind, raw)
        except MalformedRequestError as err:
            self.fault = err
            if asyncio.current_task() is self.call:
                raise
            self.call.cancel()
            raise StopAsyncIteration from err


def _parsed(kind: type[Any], raw: bytes) -> Any:
    try:
        return kind.FromString(raw)
    except DecodeError as err:
        raise MalformedRequestError(err) from err
