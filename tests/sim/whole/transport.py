"""The in-process transport: gRPC channels and listeners between the machines of a simulation.

It stands where `server.rpc.client.connect` and `server.rpc.server.RpcServer` stand in a daemon, and
is the only thing between two daemons. Handlers are the product's own, made by
`server.rpc.front.method_handlers`; messages cross as bytes. A call may be late, doubled, refused or
lost, before its request arrived or after; late requests arrive long after their sender has given
up. A stream keeps the order of its messages, as HTTP/2 does, or breaks.
"""

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from random import Random
from types import SimpleNamespace
from typing import Any, Self

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor

from server.rpc.front import BatchHandler, CallQueue, Route, method_handlers
from tests.sim.process import Process, current_process, in_process

_QUICK_S = (0.0005, 0.01)
_LATE_S = (1.0, 20.0)
_BREAKS_S = (0.2, 8.0)
"""How long it takes until a connection that carries nothing is given up."""


def error(code: grpc.StatusCode, text: str) -> grpc.aio.AioRpcError:
    """What a call raises that ended with this status."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), text)


def _unavailable(text: str) -> grpc.aio.AioRpcError:
    return error(grpc.StatusCode.UNAVAILABLE, text)


class Net:
    """Who listens where, and what reaches whom; machines are named by what is before the colon."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self.listeners: dict[str, SimServer] = {}
        self.cuts: set[frozenset[str]] = set()
        """Pairs of machines that do not reach each other."""
        self.losses: dict[str, float] = {}
        """By machine: the share of its calls that meet with something."""
        self.calls = 0
        self._arriving: set[asyncio.Task[Any]] = set()

    def quick(self) -> float:
        """How long a message takes."""
        return self.chance.uniform(*_QUICK_S)

    def breaks(self) -> float:
        """How long it takes until a broken connection is noticed."""
        return self.chance.uniform(*_BREAKS_S)

    def reaches(self, one: str, other: str) -> bool:
        """Whether messages pass between two machines."""
        return frozenset((one, other)) not in self.cuts

    def loss(self, one: str, other: str) -> float:
        """How often a call between them meets with something."""
        return max(self.losses.get(one, 0.0), self.losses.get(other, 0.0))

    def cut_off(self, machine: str, others: list[str]) -> None:
        """Nothing passes between a machine and these others."""
        self.cuts |= {frozenset((machine, other)) for other in others}

    def heal(self, machine: str) -> None:
        """Everything passes to and from a machine."""
        self.cuts = {pair for pair in self.cuts if machine not in pair}

    def own(self, coroutine: Any) -> asyncio.Task[Any]:
        """Run what is on the network, and belongs to no process."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(coroutine, context=contextvars.Context())
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)
        return task


class SimServer:
    """Implements `server.rpc.server.RpcServer`, for the process in which it is made."""

    def __init__(self, net: Net) -> None:
        self._net = net
        process = current_process()
        assert process is not None, "a listener belongs to a process"
        self.process: Process = process
        self._generic: list[Any] = []
        self._routes: list[Route] = []
        self._running: dict[
            asyncio.Task[Any], None
        ] = {}  # a set has no order, and a seed is one story

    def add_service(
        self,
        service: ServiceDescriptor,
        servicer: object,
        batch: Mapping[str, BatchHandler] | None = None,
        queues: Mapping[str, CallQueue] | None = None,
    ) -> None:
        """See `RpcServer.add_service`."""
        handlers, routes = method_handlers(service, servicer, batch, queues=queues)
        self._routes += routes
        self._generic.append(grpc.method_handlers_generic_handler(service.full_name, handlers))

    def add_generic_handler(self, handler: Any) -> None:
        """See `RpcServer.add_generic_handler`."""
        self._generic.append(handler)

    def serve_http1(self, serve: Any) -> None:
        """Nobody speaks HTTP here."""

    @asynccontextmanager
    async def listen(self, addr: str) -> AsyncIterator[str]:
        """See `RpcServer.listen`; at its end calls that are under way end, too."""
        async with asyncio.TaskGroup() as tasks:
            routes = [tasks.create_task(route.run(), name=route.name) for route in self._routes]
            self._net.listeners[addr] = self
            try:
                yield addr
            finally:
                if self._net.listeners.get(addr) is self:
                    del self._net.listeners[addr]
                for task in [*routes, *self._running]:
                    task.cancel()

    def handler(self, method: str, metadata: Any) -> Any:
        """The handler of a method, if it has one."""
        details = SimpleNamespace(method=method, invocation_metadata=metadata)
        for generic in self._generic:
            handler = generic.service(details)
            if handler is not None:
                return handler
        return None

    def run(self, coroutine: Any) -> asyncio.Task[Any]:
        """Run a call, as a task of the process."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(coroutine, context=in_process(self.process))
        self._running[task] = None
        task.add_done_callback(self._running.pop)
        return task


class Context:
    """Implements `grpc.aio.ServicerContext`, as far as handlers need it."""

    def __init__(self, metadata: Any, send: Callable[[bytes], None]) -> None:
        self._metadata = tuple(metadata or ())
        self._send = send
        self.serializer: Any = None
        self.status: grpc.aio.AioRpcError | None = None

    def invocation_metadata(self) -> Any:
        return self._metadata

    def peer(self) -> str:
        return "sim"

    def auth_context(self) -> dict[str, Any]:
        return {}

    def time_remaining(self) -> float | None:
        return None

    async def send_initial_metadata(self, metadata: Any) -> None:
        del metadata

    async def write(self, message: Any) -> None:
        self._send(self.serializer(message) if self.serializer else message)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing: Any = ()) -> None:
        del trailing
        self.status = error(code, details)
        raise grpc.aio.AbortError("aborted")


async def _served(server: SimServer, method: str, metadata: Any, exchange: "_Exchange") -> None:
    """Run a call to its end on its server; `exchange` gets what it says."""
    context = Context(metadata, exchange.answer)
    handler = server.handler(method, metadata)
    if handler is None:
        exchange.end(error(grpc.StatusCode.UNIMPLEMENTED, f"nobody serves {method}"))
        return
    context.serializer = handler.response_serializer
    status: grpc.aio.AioRpcError | None = None
    try:
        if handler.unary_unary is not None:
            answer = await handler.unary_unary(_parsed(handler, await exchange.only()), context)
            exchange.answer(context.serializer(answer) if context.serializer else answer)
        elif handler.unary_stream is not None:
            await handler.unary_stream(_parsed(handler, await exchange.only()), context)
        elif handler.stream_unary is not None:
            answer = await handler.stream_unary(exchange.requests(), context)
            exchange.answer(context.serializer(answer) if context.serializer else answer)
        else:
            await handler.stream_stream(exchange.requests(), context)
    except grpc.aio.AbortError:
        status = context.status
    except asyncio.CancelledError:
        status = _unavailable("the connection was closed")
        raise
    finally:
        exchange.end(status)


def _parsed(handler: Any, raw: bytes) -> Any:
    return handler.request_deserializer(raw) if handler.request_deserializer else raw


class _Pipe:
    """One direction: what is put into it comes out in its order, each message a little later."""

    def __init__(self, net: Net) -> None:
        self._net = net
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._last_s = 0.0

    def put(self, message: Any) -> None:
        loop = asyncio.get_running_loop()
        self._last_s = max(self._last_s + 1e-6, loop.time() + self._net.quick())
        loop.call_at(self._last_s, self._queue.put_nowait, message, context=contextvars.Context())

    async def get(self) -> Any:
        return await self._queue.get()


class _Exchange:
    """A call between two machines: the requests on their way, and the answers."""

    def __init__(self, net: Net, client: "SimChannel", server: Process) -> None:
        self._net = net
        self._client, self._server = client, server
        self._pair = client.here, client.there
        self._out, self._back = _Pipe(net), _Pipe(net)
        self._handling: asyncio.Task[Any] | None = None
        self._is_broken = self._has_ended = False

    def serve(self, server: SimServer, method: str, metadata: Any) -> None:
        self._handling = server.run(_served(server, method, metadata, self))

    # of the client

    def ask(self, raw: Any) -> None:
        if not self._client.is_dead and self._passes():
            self._out.put(raw)

    async def heard(self) -> Any:
        """The next answer: bytes, None at the end, or an error."""
        return await self._back.get()

    def cancel(self) -> None:
        """The client wants no more; the server hears of it a moment later."""
        if self._handling is not None and not self._handling.done():
            asyncio.get_running_loop().call_later(
                self._net.quick(), self._handling.cancel, context=contextvars.Context()
            )

    # of the server

    async def only(self) -> bytes:
        raw = await self._out.get()
        assert isinstance(raw, bytes)
        return raw

    async def requests(self) -> AsyncIterator[bytes]:
        while (raw := await self._out.get()) is not None:
            yield raw

    def answer(self, raw: bytes) -> None:
        if not self._server.is_dead and self._passes():
            self._back.put(raw)

    def end(self, status: grpc.aio.AioRpcError | None) -> None:
        if self._server.is_dead:  # its machine closes the connection
            status = _unavailable("Socket closed")
        if not self._has_ended and self._passes():
            self._has_ended = True
            self._back.put(status)

    def _passes(self) -> bool:
        """Whether a message passes now; if it does not, both sides notice later."""
        if self._is_broken:
            return False
        loss = self._net.loss(*self._pair) / 10
        if self._net.reaches(*self._pair) and not (loss and self._net.chance.random() < loss):
            return True
        self._is_broken = self._has_ended = True
        loop, nowhere = asyncio.get_running_loop(), contextvars.Context()
        loop.call_later(self._net.breaks(), self._back.put, _unavailable("broken"), context=nowhere)
        if self._handling is not None:
            loop.call_later(self._net.breaks(), self._handling.cancel, context=nowhere)
        return False


class SimChannel:
    """Implements `grpc.aio.Channel`, from the process in which it is made."""

    def __init__(self, net: Net, address: str) -> None:
        self._net = net
        self._address = address.rpartition("//")[2]
        self._process = current_process()
        self.here = self._process.name if self._process is not None else ""
        self._streams: dict[_StreamCall, None] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """End what is under way."""
        del grace
        for stream in list(self._streams):
            stream.cancel()

    async def channel_ready(self) -> None:
        """Wait until messages pass; whether a server is there, a call finds out."""
        while not self.is_dead and not self.reaches():  # noqa: ASYNC110 - it is asked again, later
            await asyncio.sleep(0.1)

    def unary_unary(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        **_: Any,
    ) -> Callable[..., Any]:
        """See `grpc.aio.Channel`."""

        def call(request: Any, timeout: float | None = None, metadata: Any = None) -> Any:
            raw = request_serializer(request) if request_serializer else request
            return self._called(method, raw, timeout, metadata, response_deserializer)

        return call

    def unary_stream(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        **_: Any,
    ) -> Callable[..., Any]:
        """See `grpc.aio.Channel`."""

        def call(request: Any, timeout: float | None = None, metadata: Any = None, **_: Any) -> Any:
            del timeout
            codecs = request_serializer, response_deserializer
            return _StreamCall(self, method, [request], metadata, codecs)

        return call

    def stream_stream(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        **_: Any,
    ) -> Callable[..., Any]:
        """See `grpc.aio.Channel`."""

        def call(requests: Any = None, timeout: float | None = None, metadata: Any = None) -> Any:
            del timeout
            codecs = request_serializer, response_deserializer
            return _StreamCall(self, method, requests, metadata, codecs)

        return call

    async def _called(
        self, method: str, raw: bytes, timeout_s: float | None, metadata: Any, parse: Any
    ) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._asked(method, raw, metadata)
        except TimeoutError:
            raise error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None
        if isinstance(answer, grpc.aio.AioRpcError):
            raise answer
        if answer is None:
            raise error(grpc.StatusCode.INTERNAL, "no answer")
        return parse(answer) if parse else answer

    async def _asked(self, method: str, raw: bytes, metadata: Any) -> Any:
        """One unary call, with whatever happens to it on its way."""
        net, chance = self._net, self._net.chance
        net.calls += 1
        if self.is_dead:
            await asyncio.sleep(net.quick())
            raise _unavailable("this process was killed")
        if not self.reaches():
            await asyncio.sleep(net.breaks())
            raise _unavailable("failed to connect to all addresses")
        loss = net.loss(self.here, self.there)
        what = chance.choice(_MISHAPS) if loss and chance.random() < loss else ""
        if what == "lost":
            await asyncio.sleep(net.breaks())
            raise _unavailable("the request was lost")
        if what == "late":
            net.own(self._arrive(method, raw, metadata, chance.uniform(*_LATE_S)))
            await asyncio.sleep(net.breaks())
            raise _unavailable("the request is late")
        if what == "doubled":
            net.own(self._arrive(method, raw, metadata, chance.uniform(*_LATE_S)))
        exchange = self.exchange(method, metadata)
        exchange.ask(raw)
        try:
            answer = await exchange.heard()
        except asyncio.CancelledError:
            exchange.cancel()
            raise
        if what == "unanswered":
            await asyncio.sleep(net.breaks())
            raise _unavailable("the answer was lost")
        return answer

    async def _arrive(self, method: str, raw: bytes, metadata: Any, delay_s: float) -> None:
        """A request arrives late; nobody waits for its answer."""
        await asyncio.sleep(delay_s)
        with contextlib.suppress(grpc.aio.AioRpcError):
            exchange = self.exchange(method, metadata)
            exchange.ask(raw)
            await exchange.heard()

    @property
    def there(self) -> str:
        return self._address.partition(":")[0]

    def reaches(self) -> bool:
        return self._net.reaches(self.here, self.there)

    @property
    def is_dead(self) -> bool:
        return self._process is not None and self._process.is_dead

    def exchange(self, method: str, metadata: Any) -> _Exchange:
        """Begin a call.

        Raises:
            grpc.aio.AioRpcError: nobody listens.
        """
        server = self._net.listeners.get(self._address)
        if server is None or server.process.is_dead or self.is_dead:
            raise _unavailable("Connection refused")
        exchange = _Exchange(self._net, self, server.process)
        exchange.serve(server, method, metadata)
        return exchange


_MISHAPS = ("lost", "late", "doubled", "unanswered")


class _StreamCall:
    """Implements `grpc.aio.StreamStreamCall` and `UnaryStreamCall`."""

    def __init__(
        self, channel: SimChannel, method: str, requests: Any, metadata: Any, codecs: Any
    ) -> None:
        self._channel = channel
        self._serializer, self._parse = codecs
        self._status: grpc.aio.AioRpcError | None = None
        self._has_ended = False
        self._exchange: _Exchange | None = None
        self._sending: asyncio.Task[Any] | None = None
        channel._streams[self] = None
        if not channel.reaches():
            self._status = _unavailable("failed to connect to all addresses")
        else:
            try:
                self._exchange = channel.exchange(method, metadata)
            except grpc.aio.AioRpcError as err:
                self._status = err
        if requests is not None and self._exchange is not None:
            self._sending = asyncio.get_running_loop().create_task(self._send_all(requests))

    async def write(self, request: Any) -> None:
        """See `StreamStreamCall.write`."""
        if self._has_ended or self._exchange is None:
            raise asyncio.InvalidStateError("the call has ended")
        self._exchange.ask(self._serializer(request) if self._serializer else request)

    async def done_writing(self) -> None:
        """See `StreamStreamCall.done_writing`."""
        if self._exchange is not None:
            self._exchange.ask(None)

    async def read(self) -> Any:
        """See `StreamStreamCall.read`."""
        if self._exchange is None and self._status is not None:
            # as long as it takes to notice
            await asyncio.sleep(self._channel._net.quick())
            self._has_ended = True
        if self._has_ended:
            if self._status is not None:
                raise self._status
            return grpc.aio.EOF
        assert self._exchange is not None
        answer = await self._exchange.heard()
        if isinstance(answer, bytes):
            return self._parse(answer) if self._parse else answer
        self._finish(answer)
        if answer is not None:
            raise answer
        return grpc.aio.EOF

    def cancel(self) -> bool:
        """See `Call.cancel`."""
        if self._exchange is not None and not self._has_ended:
            self._exchange.cancel()
        self._finish(error(grpc.StatusCode.CANCELLED, "Locally cancelled by application!"))
        return True

    def _finish(self, status: grpc.aio.AioRpcError | None) -> None:
        if not self._has_ended:
            self._has_ended, self._status = True, status
        if self._sending is not None:
            self._sending.cancel()
        self._channel._streams.pop(self, None)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._answers()

    async def _answers(self) -> AsyncIterator[Any]:
        while (answer := await self.read()) is not grpc.aio.EOF:
            yield answer

    async def _send_all(self, requests: Any) -> None:
        with contextlib.suppress(asyncio.InvalidStateError):
            if hasattr(requests, "__aiter__"):
                async for request in requests:
                    await self.write(request)
            else:
                for request in requests:
                    await self.write(request)
            await self.done_writing()
