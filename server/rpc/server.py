"""One listener: services, health, reflection, limits, TLS, drain; what nobody serves answers UNIMPLEMENTED."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

import grpc
import grpc.aio
import structlog
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
from grpc_reflection.v1alpha._async import ReflectionServicer

from server.rpc.credentials import SecurityConfig, server_credentials, server_tls
from server.rpc.engine import Engine, chosen
from server.rpc.errors import unknown
from server.rpc.front import BatchHandler, Route
from server.rpc.handlers import method_handlers
from server.rpc.http2.server import NativeServer
from server.rpc.limits import Limits
from storage.model.errors import UnavailableError

_DRAIN_SECONDS = 5.0
_ONE_LISTENER = ("grpc.so_reuseport", 0)  # a busy port must be an error, not a second listener

_log = structlog.get_logger(__name__)


class PortInUseError(UnavailableError):
    """The address cannot be listened on."""

    code = "ErrPortInUse"


class _Server(Protocol):
    """What an engine does."""

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Any]) -> None: ...

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[Any]) -> None: ...

    def bind(self, address: str) -> int: ...

    async def start(self, tasks: asyncio.TaskGroup) -> None: ...

    async def stop(self, grace_s: float) -> None: ...


class _GrpcioServer:
    """gRPC's own engine."""

    def __init__(self, limits: Limits, credentials: grpc.ServerCredentials | None) -> None:
        self._credentials = credentials
        self._server = grpc.aio.server(options=[_ONE_LISTENER, *limits.options()], maximum_concurrent_rpcs=limits.calls)

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Any]) -> None:
        """The same handlers as the generic one's."""

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[Any]) -> None:
        self._server.add_generic_rpc_handlers(tuple(generic_rpc_handlers))

    def bind(self, address: str) -> int:
        try:
            if self._credentials is None:
                return self._server.add_insecure_port(address)
            return self._server.add_secure_port(address, self._credentials)
        except RuntimeError as err:
            raise OSError(str(err)) from err

    async def start(self, _tasks: asyncio.TaskGroup) -> None:
        self._server.add_generic_rpc_handlers((_Unknown(),))
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        await self._server.stop(grace_s)


def _server(engine: Engine, security: SecurityConfig, limits: Limits) -> _Server:
    if engine is Engine.NATIVE:
        return NativeServer(limits, server_tls(security))
    return _GrpcioServer(limits, server_credentials(security))


class RpcServer:
    """A gRPC listener; add services, then `async with server.listen(addr) as bound`."""

    def __init__(
        self, security: SecurityConfig | None = None, limits: Limits | None = None, suited: Engine = Engine.GRPCIO
    ) -> None:
        """`suited`: the engine to use, if none was chosen for the process."""
        self._server = _server(chosen(suited), security or SecurityConfig(), limits or Limits())
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
        self._server.add_registered_method_handlers(service.full_name, handlers)
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
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(ReflectionServicer(self._names), self._server)
        port = self._bind(addr)
        bound = f"{addr.rpartition(':')[0]}:{port}"
        async with asyncio.TaskGroup() as tasks:
            routes = [tasks.create_task(route.run(), name=route.name) for route in self._routes]
            await self._server.start(tasks)
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
            return self._server.bind(addr)
        except OSError as err:
            raise PortInUseError(
                f"cannot listen on {addr}: it is in use or not an address of this machine; "
                "stop the other process or choose another address"
            ) from err


class _Unknown(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs only
    """Handles what nobody else does, with gRPC's usual words."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """A handler that refuses."""
        text = unknown(handler_call_details.method)

        async def refuse(_requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, text)

        return grpc.stream_stream_rpc_method_handler(refuse)
