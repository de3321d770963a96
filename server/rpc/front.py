"""A service's methods as gRPC handlers: messages parsed, hot calls batched, errors as statuses.

`method_handlers` looks a method up by name: a batch function if one is given, else the servicer's
coroutine of that name. Whatever a client sends, garbage too, ends at most its own call: no error of
parsing reaches a task that others depend on.

A batch function takes the requests' bytes and returns as many answers, bytes or errors as values:
one bad request must not fail its neighbours. What waits on its `Route` is handed to one function
call and answered together; while a batch is being worked on, the next one gathers, and there is no
timer. A service that gathers calls itself is given them as they come (`CallQueue`). Two engines put
calls on routes: grpc.aio, where a task waits for each, and our own (`server.rpc.http2`), where
nothing does.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, Protocol

import grpc
import grpc.aio
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError

from server.rpc.audit_log import audited, is_audited
from server.rpc.errors import StatusError, status_of
from storage.defect import request_error
from storage.model.errors import TidemarkError
from storage.queue import GroupQueue

Answer = bytes | TidemarkError
BatchHandler = Callable[[Sequence[bytes]], Awaitable[Sequence[Answer]]]

MAX_ITEMS = 1024
MAX_BYTES = 1 << 20
MAX_WAITING = 16_384
MAX_WAITING_BYTES = 64 << 20
Context = grpc.aio.ServicerContext[Any, Any]
_ENDED = (grpc.aio.BaseError, grpc.aio.UsageError, grpc.RpcError)
"""The exceptions that gRPC raises in a handler whose call was aborted, or whose client is gone."""


class OverloadedError(StatusError):
    """More calls, or bytes of them, wait on this route than the daemon will hold."""

    def __init__(self, message: str) -> None:
        super().__init__(grpc.StatusCode.RESOURCE_EXHAUSTED, message)


def overload(name: str, waiting: int, waiting_bytes: int, size: int) -> OverloadedError | None:
    """Why one more call of `size` bytes is not taken behind so many; None: it is."""
    # A first request of any size is taken: the bound is for what waits behind others.
    if not waiting or (waiting < MAX_WAITING and waiting_bytes + size <= MAX_WAITING_BYTES):
        return None
    calls = f"{waiting} calls of {name} with {waiting_bytes} bytes"
    return OverloadedError(f"{calls} are waiting; slow down and try again")


class ClosedError(StatusError):
    """The route's loop has ended."""

    def __init__(self) -> None:
        super().__init__(
            grpc.StatusCode.UNAVAILABLE, "the server is stopping; ask another one, or again"
        )


class Waiter(Protocol):
    """Waits for one answer, as an `asyncio.Future` does."""

    def done(self) -> bool:
        """Whether it no longer waits; its request is dropped then."""

    def set_result(self, result: Answer, /) -> None:
        """The answer."""


class Messages(list[bytes]):
    """Answers of a stream, serialized: a handler that has many at a time yields them together, and
    pays for one turn of its generator.
    """


class CallQueue(Protocol):
    """A queue of a method's calls: its `Route`, or a queue that its service has anyway."""

    def put(self, request: bytes, waiter: Waiter, /) -> None:
        """Queue one request, whatever its bytes are; `waiter` is answered later, or at once."""


async def _answer_of(queue: CallQueue, request: bytes) -> Answer:
    """Queue one request and wait for its answer."""
    future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    queue.put(request, future)
    return await future


class Route:
    """One method's queue and the loop that empties it."""

    def __init__(
        self, name: str, handler: BatchHandler, refusal: Callable[[], TidemarkError] = ClosedError
    ) -> None:
        """`refusal` makes the answer for calls that wait, or arrive, when the loop has ended."""
        self.name = name
        self._handler = handler
        self._refusal = refusal
        self._queue: GroupQueue[tuple[bytes, Waiter]] = GroupQueue(MAX_ITEMS, MAX_BYTES)
        self._batch: list[tuple[bytes, Waiter]] = []
        self._attached: dict[Waiter, None] = {}
        self._closed = False

    async def call(self, request: bytes) -> Answer:
        """Queue one request and wait for its answer; a request whose caller stops waiting before
        its batch begins is dropped.
        """
        return await _answer_of(self, request)

    def put(self, request: bytes, waiter: Waiter) -> None:
        """See `CallQueue`."""
        queue, size = self._queue, len(request)
        if refusal := overload(self.name, len(queue), queue.waiting_bytes, size):
            waiter.set_result(refusal)
        elif self._closed:
            waiter.set_result(self._refusal())
        else:
            queue.put((request, waiter), size)

    def attach(self, waiter: Waiter) -> None:
        """Register a caller of several requests to be told of the loop's end, until `detach`."""
        self._attached[waiter] = None

    def detach(self, waiter: Waiter) -> None:
        """The opposite of `attach`."""
        self._attached.pop(waiter, None)

    async def run(self) -> None:
        """Answer batches until cancelled; then all waiting callers get an error."""
        try:
            while True:
                await self._queue.wait()
                while calls := self._queue.take():
                    # Calls whose clients have gone are dropped before the work, not after it.
                    self._batch = [call for call in calls if not call[1].done()]
                    await self._answer(self._batch)
        finally:
            self._close()

    async def _answer(self, batch: list[tuple[bytes, Waiter]]) -> None:
        if not batch:
            return
        try:
            answers = await self._handler([request for request, _ in batch])
            assert len(answers) == len(batch), (
                f"{self.name} answered {len(answers)} of {len(batch)} calls"
            )
        except Exception as err:  # noqa: BLE001 - whatever a batch meets, it ends its calls and not the route
            answers = [request_error(err, self.name)] * len(batch)
        self._batch = []
        for (_, waiter), answer in zip(batch, answers, strict=True):
            if not waiter.done():
                waiter.set_result(answer)

    def _close(self) -> None:
        self._closed = True
        # Those under way, too: a batch that was cancelled has no answers, and its callers would
        # wait for ever.
        for _, waiter in self._batch + self._queue.take_all():
            if not waiter.done():
                waiter.set_result(self._refusal())
        for waiter in list(self._attached):
            waiter.set_result(self._refusal())


class MalformedRequestError(StatusError):
    """Bytes that are no message of their kind."""

    def __init__(self, err: DecodeError) -> None:
        super().__init__(grpc.StatusCode.INTERNAL, f"grpc: error unmarshalling request: {err}")


class BatchedMethod(NamedTuple):
    """A gRPC handler that puts its calls into a queue;
    an engine that knows `route` needs none of its coroutines.

    Of a method that streams both ways every request is answered by one message, in order; an error
    ends the call.
    """

    route: CallQueue
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
    queues: Mapping[str, CallQueue] | None = None,
) -> tuple[dict[str, Any], list[Route]]:
    """Return handlers by method name, and the routes of the batched ones, which the server must
    run.

    Calls of methods in `queues` go there, and on no route. `refusal` makes the answer to calls that
    wait on a route when it is run no more.
    """
    handlers: dict[str, Any] = {}
    routes: list[Route] = []
    for method in service.methods:
        if queues and method.name in queues:
            handlers[method.name] = _batched(method, queues[method.name])
        elif batch and method.name in batch:
            routes.append(Route(f"{service.full_name}/{method.name}", batch[method.name], refusal))
            handlers[method.name] = _batched(method, routes[-1])
        elif hasattr(servicer, method.name):
            handlers[method.name] = _handler(method, getattr(servicer, method.name))
    return handlers, routes


def _batched(method: MethodDescriptor, route: CallQueue) -> BatchedMethod:
    async def call(request: bytes, context: Context) -> bytes:
        answer = await _answer_of(route, request)
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
        assert isinstance(route, Route), "streams learn of the end of their route"
        return BatchedMethod(
            route, request_streaming=True, response_streaming=True, stream_stream=answered
        )
    return BatchedMethod(route, request_streaming=False, response_streaming=False, unary_unary=call)


def _handler(method: MethodDescriptor, function: Callable[..., Any]) -> Any:
    response = message_factory.GetMessageClass(method.output_type)
    # Raw bytes come in (no deserializer): gRPC would parse in a task of its own, where garbage
    # cannot be answered with a status of ours.
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[method.client_streaming, method.server_streaming]
    if is_audited(method.full_name):
        function = audited(function, method.full_name)
    served = _streaming(function) if method.server_streaming else function
    kind = message_factory.GetMessageClass(method.input_type)
    guard = _guarded_stream if method.client_streaming else _guarded
    return make(guard(served, kind, method.full_name), response_serializer=_serializer(response))


def _serializer(kind: type[Any]) -> Callable[[Any], bytes]:
    serialize = kind.SerializeToString
    return lambda message: message if message.__class__ is bytes else serialize(message)


def _streaming(function: Callable[..., Any]) -> Callable[..., Any]:
    """Writes itself instead of yielding: whatever interrupts it, a slow reader too, is seen here.

    Headers go first and alone: gRPC cannot end a call with a status that is interrupted while they
    are on their way.
    """

    async def call(request: Any, context: Context) -> None:
        await context.send_initial_metadata(())
        async for answer in function(request, context):
            if isinstance(answer, Messages):
                await _write_all(context, answer)
            else:
                await context.write(answer)

    return call


async def _write_all(context: Context, messages: Messages) -> None:
    write_all = getattr(context, "write_all", None)
    if write_all is not None:
        await write_all(messages)
        return
    # gRPC's own engine takes them one by one.
    for message in messages:
        await context.write(message)


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
            # The cancellation was ours, from `_Requests`, and has done its work: to interrupt the
            # handler wherever it waits.
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
            # The handler may wait in another place than this read; only a cancellation reaches it
            # there.
            self.call.cancel()
            raise StopAsyncIteration from err


def _parsed(kind: type[Any], raw: bytes) -> Any:
    try:
        return kind.FromString(raw)
    except DecodeError as err:
        raise MalformedRequestError(err) from err
