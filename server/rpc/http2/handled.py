"""Calls answered by coroutines: one task each, as gRPC's handlers expect it.

Received requests are queued in the call; the peer's window is renewed as the handler reads them. A
handler that writes waits while too many bytes of its answers are unsent. It gets a `Context`, which
is gRPC's own interface over one of our calls.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from server.rpc.errors import StatusError, status_of
from server.rpc.http2.headers import Metadata, RequestHead
from server.rpc.http2.messages import PREFIX_BYTES, MessageReader
from server.rpc.http2.stream import (
    MAX_UNREAD_BYTES,
    MAX_UNSENT_BYTES,
    STREAM_WINDOW,
    ConnectionState,
    Stream,
)
from storage.defect import request_error

EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in the stubs
_TURN_BYTES = 64 << 10
_MESSAGE_COST_BYTES = 64
"""The overhead of a message in bytes: of an answer, counted towards the limit of what one call may
write in a turn of the loop; of a request, while its handler has not read it. Empty messages take
memory, too.
"""
_LEAST_STARTS, _MOST_STARTS = 4, 16
"""The least and most handlers that start in one turn of the loop: fewer while turns are slower than
`_SLOW_TURN_S`.
"""
_SLOW_TURN_S = 0.02


class IncomingRequest(NamedTuple):
    """A request from its headers: the reader of its messages, and the client's timeout."""

    head: RequestHead
    reader: MessageReader
    timeout_s: float | None
    """None: for ever."""


class HandledCall(Stream):
    """A unary or streaming call with a coroutine for its handler."""

    __slots__ = ("_arrived", "_deadline", "_handler", "_inbox", "_inbox_bytes", "_reader", "_room", "_spawn",
                 "_task", "_timer", "_turn_bytes", "callbacks", "given_up", "head")  # fmt: skip

    def __init__(
        self,
        connection: ConnectionState,
        number: int,
        handler: Any,
        request: IncomingRequest,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        super().__init__(connection, number)
        timeout_s = request.timeout_s
        self.head = request.head
        self.given_up = False
        self.callbacks: list[Callable[[], None]] = []
        self._handler = handler
        self._reader = request.reader
        self._spawn = spawn
        self._inbox: deque[bytes] = deque()
        self._inbox_bytes = self._turn_bytes = 0
        self._arrived: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._timer: asyncio.TimerHandle | None = None
        if timeout_s is not None:
            self._timer = asyncio.get_running_loop().call_later(timeout_s, self._expire)
        # A handler of a stream starts before its first message: it may want to send headers first,
        # and many watch for ever.
        if handler.request_streaming:
            self.start()

    def receive(self, data: bytes, *, ended: bool) -> None:
        """See `Stream`."""
        for message in self._reader.feed(data):
            self._inbox.append(message)
            self._inbox_bytes += len(message) + _MESSAGE_COST_BYTES
        self.set_request_bytes(self._inbox_bytes + self._reader.buffered_bytes)
        if self._reader.pending:
            self.connection.unpacking[self.number] = self
            ended = False
        elif ended and self._reader.buffered_bytes:
            raise StatusError(grpc.StatusCode.INTERNAL, "the call ended in the middle of a message")
        if not self._handler.request_streaming:
            self._receive_one(ended=ended)
        elif self._inbox or ended:
            _wake(self._arrived)
        self._give_credit()

    def aborted(self) -> None:
        """The client cancelled the call, or is gone: cancel the handler."""
        self.given_up = True
        self._interrupt()

    def awaits_rest(self) -> bool:
        """See `Stream`."""
        return self._reader.buffered_bytes > 0 or not (
            self.remote_closed or self._handler.request_streaming
        )

    def writable(self) -> None:
        """See `Stream`."""
        _wake(self._room)

    def time_remaining(self) -> float | None:
        """Seconds until the client gives up; None: never."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def finish(self, status: grpc.StatusCode, text: str = "", metadata: Any = ()) -> None:
        """See `Stream`; a call that ends for other reasons than its handler's interrupts that."""
        super().finish(status, text, metadata)
        # The handler's own `abort` must not cancel the task that is about to end by itself.
        if self._task is not asyncio.current_task():
            self._interrupt()

    async def read(self) -> Any:
        """The next request, or `grpc.aio.EOF`."""
        while not self._inbox:
            if (self.remote_closed and not self._reader.pending) or self.finishing:
                return EOF
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
        message = self._inbox.popleft()
        self._inbox_bytes -= len(message) + _MESSAGE_COST_BYTES
        self.set_request_bytes(self._inbox_bytes + self._reader.buffered_bytes)
        self._give_credit()
        return self._parsed(message)

    async def write(self, message: Any) -> None:
        """Send one answer; waits while too many of them wait for the peer."""
        serializer = self._handler.response_serializer
        raw = message if serializer is None else serializer(message)
        await self._write(len(raw).to_bytes(PREFIX_BYTES) + raw, 1)

    async def write_all(self, messages: Sequence[bytes]) -> None:
        """Send serialized answers, as many in one piece as a turn of the loop may write."""
        parts: list[bytes] = []
        size = count = 0
        for message in messages:
            parts += (len(message).to_bytes(PREFIX_BYTES), message)
            size += len(message)
            count += 1
            if size > _TURN_BYTES:
                await self._write(b"".join(parts), count)
                parts = []
                size = count = 0
        if parts:
            await self._write(b"".join(parts), count)

    async def _write(self, messages: bytes, count: int) -> None:
        self.send_messages(messages, count)
        if self.finishing:
            raise grpc.aio.AbortError("the call is over: its answers are not read")
        self._turn_bytes += len(messages) + _MESSAGE_COST_BYTES * count
        # A handler whose answers always find room would never let go of the loop.
        if self._turn_bytes > _TURN_BYTES:
            self._turn_bytes = 0
            # others have their turn, and what was written goes out
            await asyncio.sleep(0)
        while not self.closed and (
            self.unsent_bytes > MAX_UNSENT_BYTES or self.connection.congested
        ):
            self._room = asyncio.get_running_loop().create_future()
            await self._room

    def _receive_one(self, *, ended: bool) -> None:
        if len(self._inbox) > 1:
            raise StatusError(
                grpc.StatusCode.UNIMPLEMENTED, "more than one message in a call that takes one"
            )
        if ended:
            if not self._inbox:
                raise StatusError(
                    grpc.StatusCode.UNIMPLEMENTED, "no message in a call that takes one"
                )
            self.connection.host.start_handler(self)

    def _give_credit(self) -> None:
        if self._inbox_bytes < STREAM_WINDOW:
            self.give_credit()

    def _parsed(self, message: bytes) -> Any:
        parse = self._handler.request_deserializer
        try:
            return message if parse is None else parse(message)
        except DecodeError as err:
            raise StatusError(
                grpc.StatusCode.INTERNAL, f"grpc: error unmarshalling request: {err}"
            ) from err

    def start(self) -> None:
        """See `Stream`."""
        if self._task is None and not self.finishing:
            self._task = self._spawn(self._run())

    def _expire(self) -> None:
        try:
            self.finish(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
        except Exception as err:  # noqa: BLE001 - a timer of this connection ends this connection only
            self.connection.crash(err)

    def _interrupt(self) -> None:
        """Wake the reader and the writer of this call, in whatever tasks they run: it has ended."""
        _wake(self._arrived)
        _wake(self._room)
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            await self._serve(Context(self))
        except Exception as err:  # noqa: BLE001 - an answer that cannot be sent, a done callback: not the daemon's end
            self.connection.crash(err)

    async def _serve(self, context: "Context") -> None:
        try:
            await self._handle(context)
        except grpc.aio.AbortError:
            self._conclude(context, grpc.StatusCode.UNKNOWN)
        except StatusError as err:
            self.finish(err.status, str(err))
        except Exception as err:  # noqa: BLE001 - a handler's defect ends its call, is logged, and nothing else
            if context.code() is None:
                # What the handler has set itself counts more than what its exception says.
                code, details = status_of(request_error(err, self.head.method))
                context.set_code(code)
                context.set_details(details)
            self._conclude(context, grpc.StatusCode.INTERNAL)
        else:
            self._conclude(context, grpc.StatusCode.OK)
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for callback in self.callbacks:
                callback()

    async def _handle(self, context: "Context") -> None:
        handler = self._handler
        function = (
            handler.stream_stream
            if handler.request_streaming and handler.response_streaming
            else handler.stream_unary if handler.request_streaming
            else handler.unary_stream if handler.response_streaming
            else handler.unary_unary
        )  # fmt: skip
        answer = function(
            _Requests(self) if handler.request_streaming else await self.read(), context
        )
        if hasattr(answer, "__aiter__"):
            async for message in answer:
                await self.write(message)
            return
        if hasattr(answer, "__await__"):
            answer = await answer
        if not handler.response_streaming and not self.finishing:
            serializer = handler.response_serializer
            raw = answer if serializer is None else serializer(answer)
            # Only a plain OK has trailers that are known before the message is written.
            if context.code() in (None, grpc.StatusCode.OK) and not context.trailing_metadata():
                self.answer(raw)
            else:
                self.send_message(raw)

    def _conclude(self, context: "Context", default: grpc.StatusCode) -> None:
        code = context.code()
        self.finish(
            default if code is None else code, context.details(), context.trailing_metadata()
        )


class Context(grpc.aio.ServicerContext[Any, Any]):
    """The context that handlers get, with the methods of `grpc.aio.ServicerContext`; answers are
    never compressed.
    """

    def __init__(self, call: HandledCall) -> None:
        self._call = call
        self._code: Any = None
        self._details = ""
        self._trailing: Metadata = ()

    async def read(self) -> Any:
        """The next request, or `grpc.aio.EOF`."""
        return await self._call.read()

    async def write(self, message: Any) -> None:
        """Send one answer; waits while the peer does not take them."""
        await self._call.write(message)

    async def write_all(self, messages: Sequence[bytes]) -> None:
        """Send serialized answers, many in one piece; waits while the peer does not take them."""
        await self._call.write_all(messages)

    async def send_initial_metadata(
        self, initial_metadata: Iterable[tuple[str, str | bytes]]
    ) -> None:
        """Send the headers now, with these."""
        self._call.send_head(tuple(initial_metadata or ()))

    async def abort(
        self,
        code: grpc.StatusCode,
        details: str = "",
        trailing_metadata: Iterable[tuple[str, str | bytes]] = (),
    ) -> NoReturn:
        """End the call with this status, and the handler with an exception."""
        self._code, self._details = code, details
        if trailing_metadata:
            self._trailing = tuple(trailing_metadata)
        raise grpc.aio.AbortError("Locally aborted.")

    async def abort_with_status(self, status: Any) -> NoReturn:
        """End the call with a status object, as `abort` does with a code."""
        await self.abort(status.code, status.details, status.trailing_metadata or ())

    def invocation_metadata(self) -> Any:
        """The metadata that the client sent with the call."""
        return self._call.head.invocation_metadata

    def set_trailing_metadata(self, trailing_metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Set the metadata that follows the status."""
        self._trailing = tuple(trailing_metadata)

    def trailing_metadata(self) -> Any:
        """The metadata set by `set_trailing_metadata`."""
        return self._trailing

    def set_code(self, code: grpc.StatusCode) -> None:
        """The status of the call when its handler returns or fails."""
        self._code = code

    def set_details(self, details: str) -> None:
        """The text that goes with the status."""
        self._details = details

    def code(self) -> Any:
        """The status code that the handler set; None: none."""
        return self._code

    def details(self) -> str:
        """The status text that the handler set."""
        return self._details

    def peer(self) -> str:
        """The client's address as gRPC writes it: `ipv4:127.0.0.1:1234`."""
        return self._call.connection.peer.address

    def peer_identities(self) -> Iterable[bytes] | None:
        """The names in the client's certificate."""
        return self._call.connection.peer.auth.get("x509_subject_alternative_name") or None

    def peer_identity_key(self) -> str | None:
        """Which kind of names they are."""
        return "x509_subject_alternative_name" if self.peer_identities() else None

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """The properties of the client's TLS certificate."""
        return self._call.connection.peer.auth

    def time_remaining(self) -> Any:
        """Seconds until the client gives up; None: never."""
        return self._call.time_remaining()

    def cancelled(self) -> bool:
        """Whether the client cancelled the call."""
        return self._call.given_up

    def done(self) -> bool:
        """Whether the call has ended."""
        return self._call.closed

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call it with this context when the handler has ended."""
        self._call.callbacks.append(lambda: callback(self))

    def set_compression(self, compression: grpc.Compression) -> None:
        """Does nothing."""

    def disable_next_message_compression(self) -> None:
        """Does nothing."""


class HandlerStarter:
    """Starts the handlers of unary calls: a few in each turn of the loop, the connections in turn.

    One read may bring thousands of calls; without this their handlers would all run before other
    connections' calls. While a peer does not read the answers it has, no more are made for it.
    """

    def __init__(self) -> None:
        self._ready: OrderedDict[ConnectionState, None] = OrderedDict()
        self._most = self._left = _MOST_STARTS
        self._scheduled_s = 0.0

    def start_handler(self, call: Stream) -> None:
        """Start its handler now, if there is a start left in this turn and none of its connection
        waits.
        """
        connection = call.connection
        if (
            self._left > 0
            and not connection.starting
            and connection.unread_bytes <= MAX_UNREAD_BYTES
        ):
            self._start(call)
        else:
            connection.starting[call.number] = call
            self.resume_handlers(connection)

    def resume_handlers(self, connection: ConnectionState) -> None:
        """Its calls may start again: the peer has read."""
        connection.gated = False
        if connection.starting:
            self._ready[connection] = None
            self._schedule()

    def _start(self, call: Stream) -> None:
        self._left -= 1
        call.start()
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled_s:
            self._scheduled_s = time.monotonic()
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        # Halve and double, as TCP's congestion window: the loop finds by itself how many starts it
        # can take.
        slow = time.monotonic() - self._scheduled_s > _SLOW_TURN_S
        self._most = (
            max(_LEAST_STARTS, self._most // 2) if slow else min(_MOST_STARTS, self._most * 2)
        )
        self._left = self._most
        self._scheduled_s = 0.0
        while self._left > 0 and self._ready:
            # One start for a connection, then the next one's turn: a client with thousands of calls
            # gets as many starts as one with two.
            connection, _ = self._ready.popitem(last=False)
            if connection.unread_bytes > MAX_UNREAD_BYTES:
                connection.gated = True
            elif connection.starting:
                self._start(connection.starting.popitem(last=False)[1])
                if connection.starting:
                    self._ready[connection] = None


def _wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)


class _Requests:
    """The requests of a call, for `async for`."""

    __slots__ = ("_call",)

    def __init__(self, call: HandledCall) -> None:
        self._call = call

    def __aiter__(self) -> "_Requests":
        return self

    async def __anext__(self) -> Any:
        message = await self._call.read()
        if message is EOF:
            raise StopAsyncIteration
        return message
