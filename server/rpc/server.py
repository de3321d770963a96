"""One listener: services, health, reflection, limits, TLS, drain; unknown methods answer
UNIMPLEMENTED.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Protocol

import grpc
import grpc.aio
import structlog
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha._async import ReflectionServicer

from server.rpc.access_list import Access
from server.rpc.call_access import AccessInterceptor, CallAccess
from server.rpc.config import Engine, Limits, chosen, connections_per_address
from server.rpc.connection_guard import ConnectionGuard
from server.rpc.credentials import (
    AllowedNames,
    SecurityConfig,
    grpcio_credentials,
    listener_tls,
)
from server.rpc.errors import unknown
from server.rpc.front import BatchHandler, CallQueue, Route, method_handlers
from server.rpc.grpcio_front import GrpcioFront, passed_on
from server.rpc.http1 import Http1Front, Serve
from server.rpc.http2.server import NativeServer
from server.rpc.listener import warn_if_open
from storage.model.errors import UnavailableError

_DRAIN_SECONDS = 5.0
_REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
"""grpcio-reflection has v1alpha only; grpcurl, grpcui and Postman ask for v1 first,
some for nothing else.
"""
# a busy port must be an error, not a second listener
_ONE_LISTENER = ("grpc.so_reuseport", 0)

_log = structlog.get_logger(__name__)


class PortInUseError(UnavailableError):
    """The address cannot be listened on."""

    code = "ErrPortInUse"


class _Server(Protocol):
    """A gRPC server of either engine."""

    def serve_http1(self, front: Http1Front) -> None: ...

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: Mapping[str, Any]
    ) -> None: ...

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[Any]) -> None: ...

    def bind(self, address: str) -> int: ...

    async def start(self, tasks: asyncio.TaskGroup) -> None: ...

    async def stop(self, grace_s: float) -> None: ...


class _GrpcioServer:
    """gRPC's own engine."""

    def __init__(
        self, limits: Limits, security: SecurityConfig, allowed: AllowedNames, access: CallAccess
    ) -> None:
        self._limits = limits
        self._security = security
        self._credentials = grpcio_credentials(security)
        self._front: GrpcioFront | None = None
        self._guard: ConnectionGuard | None = None
        self._guarding: asyncio.Task[None] | None = None
        self._server = grpc.aio.server(
            options=[_ONE_LISTENER, *limits.options()],
            maximum_concurrent_rpcs=limits.calls,
            interceptors=[AccessInterceptor(allowed, access)] if allowed or access else None,
        )

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: Mapping[str, Any]
    ) -> None:
        """The same handlers as the generic one's."""

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[Any]) -> None:
        self._server.add_generic_rpc_handlers(tuple(generic_rpc_handlers))

    def serve_http1(self, front: Http1Front) -> None:
        self._put_front(front)

    def _put_front(self, http1: Http1Front | None) -> None:
        self._limits = passed_on(self._limits)
        self._front = GrpcioFront(http1, listener_tls(self._security, "http/1.1"), self._limits)

    def bind(self, address: str) -> int:
        if self._front is None and self._credentials is not None:
            self._put_front(None)
        if self._front is None:
            port = self._bind(address)
        else:
            port = self._front.bind(address)
            self._bind(self._front.address)
        if not address.startswith("unix:"):
            self._guard = ConnectionGuard(port, self._limits)
        return port

    def _bind(self, address: str) -> int:
        try:
            if self._credentials is None:
                return self._server.add_insecure_port(address)
            return self._server.add_secure_port(address, self._credentials)
        except RuntimeError as err:
            raise OSError(str(err)) from err

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        # Added last: handlers are asked in order, and this one refuses whatever is left.
        self._server.add_generic_rpc_handlers((_Unknown(),))
        await self._server.start()
        if self._front is not None:
            self._front.start(tasks)
        if self._guard is not None:
            self._guarding = tasks.create_task(self._guard.run(), name="connection-guard")

    async def stop(self, grace_s: float) -> None:
        if self._front is not None:
            self._front.stop_accepting()
        await self._server.stop(grace_s)
        if self._front is not None:
            await self._front.stop()
        if self._guarding is not None:
            self._guarding.cancel()


def _server(
    engine: Engine,
    security: SecurityConfig,
    limits: Limits,
    allowed: AllowedNames,
    access: CallAccess,
) -> _Server:
    if engine is Engine.NATIVE:
        return NativeServer(limits, listener_tls(security, "h2"), allowed, access)
    return _GrpcioServer(limits, security, allowed, access)


class RpcServer:
    """A gRPC listener; add services, then `async with server.listen(addr) as bound`."""

    def __init__(
        self,
        security: SecurityConfig | None = None,
        limits: Limits | None = None,
        suited: Engine = Engine.GRPCIO,
        access: Access | None = None,
    ) -> None:
        """`suited`: the engine to use, if none was chosen for the process; `access`: the rights of
        clients, if the listener checks them (`server.rpc.call_access`).
        """
        limits = limits or Limits()
        limits = replace(
            limits,
            connections_per_address=limits.connections_per_address or connections_per_address(),
        )
        security = security or SecurityConfig()
        self._has_tls = security.enabled
        self._allowed = AllowedNames(security.cert_allowed_cn)
        self._access = CallAccess(access)
        self._server = _server(chosen(suited), security, limits, self._allowed, self._access)
        self._routes: list[Route] = []
        self._names = [reflection.SERVICE_NAME, health.SERVICE_NAME]
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    def add_service(
        self,
        service: ServiceDescriptor,
        servicer: object,
        batch: Mapping[str, BatchHandler] | None = None,
        queues: Mapping[str, CallQueue] | None = None,
    ) -> None:
        """Serve `service`: methods in `batch` by batch functions, calls of those in `queues` go
        there, and the others by `servicer`'s coroutines.
        """
        handlers, routes = method_handlers(service, servicer, batch, queues=queues)
        self._routes += routes
        generic = grpc.method_handlers_generic_handler(service.full_name, handlers)
        self._server.add_generic_rpc_handlers((generic,))
        self._server.add_registered_method_handlers(service.full_name, handlers)
        self._names.append(service.full_name)

    def add_generic_handler(self, handler: "grpc.GenericRpcHandler[Any, Any]") -> None:
        """Serve the methods `handler` knows, as bytes;
        it speaks for services this process has no stubs of.
        """
        self._server.add_generic_rpc_handlers((handler,))

    def serve_http1(self, serve: Serve) -> None:
        """Answer HTTP/1.1 on the same port, to clients that its certificates admit; call it before
        `listen`.
        """
        self._server.serve_http1(Http1Front(serve, self._allowed, self._access))

    @asynccontextmanager
    async def listen(self, addr: str) -> AsyncIterator[str]:
        """Listen on `host:port` (port 0: any) for the block; yields the bound address,
        drains on the way out.

        Raises:
            PortInUseError: the address is taken or not ours.
        """
        self._add_reflection()
        port = self._bind(addr)
        bound = f"{addr.rpartition(':')[0]}:{port}"
        warn_if_open(addr, has_tls=self._has_tls)
        async with asyncio.TaskGroup() as tasks:
            routes = [tasks.create_task(route.run(), name=route.name) for route in self._routes]
            await self._server.start(tasks)
            for name in ("", *self._names):
                await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
            try:
                yield bound
            finally:
                # Load balancers and probes must see NOT_SERVING before the first call is refused.
                await self._health.enter_graceful_shutdown()
                await self._server.stop(_DRAIN_SECONDS)
                # After the engine: calls that wait on a route are answered until the drain is over.
                for task in routes:
                    task.cancel()

    def _add_reflection(self) -> None:
        """Serve reflection as v1alpha, and under the name of v1,
        whose messages are the same on the wire.
        """
        _describe_reflection_v1()
        servicer = ReflectionServicer([*self._names, _REFLECTION_V1])
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, self._server)
        handler = grpc.stream_stream_rpc_method_handler(
            servicer.ServerReflectionInfo,
            request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
            response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
        handlers = {"ServerReflectionInfo": handler}
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(_REFLECTION_V1, handlers),)
        )
        self._server.add_registered_method_handlers(_REFLECTION_V1, handlers)

    def _bind(self, addr: str) -> int:
        try:
            return self._server.bind(addr)
        except OSError as err:
            raise PortInUseError(
                f"cannot listen on {addr}: it is in use or not an address of this machine; "
                "stop the other process or choose another address"
            ) from err


def _describe_reflection_v1() -> None:
    """Put a descriptor of v1 in the pool, v1alpha's with another package,
    so that v1 can be described like the rest.
    """
    pool = descriptor_pool.Default()
    try:
        pool.FindServiceByName(_REFLECTION_V1)
    except KeyError:
        v1alpha = reflection_pb2.DESCRIPTOR
        package = _REFLECTION_V1.rpartition(".")[0]
        described = descriptor_pb2.FileDescriptorProto()
        v1alpha.CopyToProto(described)
        text = text_format.MessageToString(described).replace(v1alpha.package, package)
        v1 = text_format.Parse(text, descriptor_pb2.FileDescriptorProto())
        v1.name = v1alpha.name.replace("v1alpha", "v1")
        pool.AddSerializedFile(v1.SerializeToString())


class _Unknown(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs only
    """Answers calls of unknown methods, with gRPC's usual words."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """A handler that refuses."""
        text = unknown(handler_call_details.method)

        async def refuse(_requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, text)

        return grpc.stream_stream_rpc_method_handler(refuse)
