"""One listener: services built from their descriptors, batch routes, health, reflection, limits, TLS, drain.

A service's methods are looked up by name: a batch route if one is given, else the servicer's coroutine of that name;
a method that has neither answers UNIMPLEMENTED. Errors of `storage.model.errors` become statuses here.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import structlog
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from server.rpc.credentials import SecurityConfig, server_credentials
from server.rpc.errors import status_of
from server.rpc.front import BatchHandler, Route
from storage.model.errors import TidemarkError, UnavailableError

MAX_MESSAGE_BYTES = 256 << 20
_DRAIN_SECONDS = 5.0
_OPTIONS = (
    ("grpc.so_reuseport", 0),  # a busy port must be an error, not a second listener
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
)

_log = structlog.get_logger(__name__)


class PortInUseError(UnavailableError):
    """The address cannot be listened on."""

    code = "ErrPortInUse"


class RpcServer:
    """A gRPC listener; add services, then `async with server.listen(addr) as bound`."""

    def __init__(self, security: SecurityConfig | None = None) -> None:
        self._credentials = server_credentials(security or SecurityConfig())
        self._server = grpc.aio.server(options=_OPTIONS)
        self._routes: list[Route] = []
        self._names = [reflection.SERVICE_NAME, health.SERVICE_NAME]
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    def add_service(
        self, service: ServiceDescriptor, servicer: object, batch: Mapping[str, BatchHandler] | None = None
    ) -> None:
        """Serve `service`: methods in `batch` by batch functions, the others by `servicer`'s coroutines."""
        handlers, routes = method_handlers(service, servicer, batch)
        self._routes += routes
        generic = grpc.method_handlers_generic_handler(service.full_name, handlers)
        self._server.add_generic_rpc_handlers((generic,))
        self._names.append(service.full_name)

    def add_proxy(self, handler: "grpc.GenericRpcHandler[Any, Any]") -> None:
        """Serve the methods `handler` knows, as bytes; it speaks for services this process has no stubs of."""
        self._server.add_generic_rpc_handlers((handler,))

    @asynccontextmanager
    async def listen(self, addr: str) -> AsyncIterator[str]:
        """Listen on `host:port` (port 0: any) for the block; yields the bound address, drains on the way out.

        Raises:
            PortInUseError: the address is taken or not ours.
        """
        reflection.enable_server_reflection(tuple(self._names), self._server)
        port = self._bind(addr)
        bound = f"{addr.rpartition(':')[0]}:{port}"
        async with asyncio.TaskGroup() as tasks:
            routes = [tasks.create_task(route.run(), name=route.name) for route in self._routes]
            await self._server.start()
            for name in ("", *self._names):
                await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
            try:
                yield bound
            finally:
                await self._health.enter_graceful_shutdown()
                await self._server.stop(_DRAIN_SECONDS)
                for task in routes:
                    task.cancel()

    def _bind(self, addr: str) -> int:
        try:
            if self._credentials is None:
                return self._server.add_insecure_port(addr)
            return self._server.add_secure_port(addr, self._credentials)
        except RuntimeError as err:
            raise PortInUseError(
                f"cannot listen on {addr}: it is in use or not an address of this machine; "
                "stop the other process or choose another address"
            ) from err


def method_handlers(
    service: ServiceDescriptor, servicer: object, batch: Mapping[str, BatchHandler] | None = None
) -> tuple[dict[str, Any], list[Route]]:
    """Handlers by method name, and the routes of the batched ones: whoever serves them runs these."""
    handlers: dict[str, Any] = {}
    routes: list[Route] = []
    for method in service.methods:
        if batch and method.name in batch:
            routes.append(Route(f"{service.full_name}/{method.name}", batch[method.name]))
            handlers[method.name] = grpc.unary_unary_rpc_method_handler(_batched(routes[-1]))
        elif hasattr(servicer, method.name):
            handlers[method.name] = _handler(method, getattr(servicer, method.name))
    return handlers, routes


def _batched(route: Route) -> Callable[[bytes, grpc.aio.ServicerContext[Any, Any]], Awaitable[bytes]]:
    async def call(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        answer = await route.call(request)
        if isinstance(answer, TidemarkError):
            await context.abort(*status_of(answer))
        assert isinstance(answer, bytes)
        return answer

    return call


def _handler(method: MethodDescriptor, function: Callable[..., Any]) -> Any:
    request = message_factory.GetMessageClass(method.input_type)
    response = message_factory.GetMessageClass(method.output_type)
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[method.client_streaming, method.server_streaming]
    guarded = _guarded_stream(function) if method.server_streaming else _guarded(function)
    return make(guarded, request_deserializer=request.FromString, response_serializer=response.SerializeToString)


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await function(request, context)
        except TidemarkError as err:
            await context.abort(*status_of(err))

    return call


def _guarded_stream(function: Callable[..., Any]) -> Callable[..., Any]:
    """Writes itself instead of yielding: whatever interrupts it, a slow reader too, is seen here."""

    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        try:
            async for message in function(request, context):
                await context.write(message)
        except TidemarkError as err:
            await context.abort(*status_of(err))

    return call
