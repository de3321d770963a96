"""Calls of batch routes (`server.rpc.front`): a received message is queued on its route at once,
and the route calls `set_result` with its answer, which is sent then.

A call needs no task and no future: `done` and `set_result` make it the route's `Waiter`.
"""

import time

import grpc

from server.rpc.errors import StatusError, status_of
from server.rpc.front import Answer, CallQueue, Route
from server.rpc.http2.messages import PREFIX_BYTES, MessageReader
from server.rpc.http2.stream import ConnectionState, Stream
from storage.model.errors import TidemarkError

_MAX_OUTSTANDING = 4096
"""Unanswered requests of one stream, beyond which its window is not renewed."""
_MAX_UNREAD_BYTES = 4 << 20
"""Unsent answers of one stream, beyond which it is ended."""


class BatchedCall(Stream):
    """A unary call: one message, one answer."""

    __slots__ = ("_deadline", "_encoding", "_max_bytes", "_message", "_reader", "_route")

    def __init__(
        self,
        connection: ConnectionState,
        number: int,
        route: CallQueue,
        max_bytes: int,
        encoding: bytes,
        deadline: float | None,
    ) -> None:
        """`deadline` is in seconds of `time.monotonic`."""
        super().__init__(connection, number)
        self._route = route
        self._max_bytes = max_bytes
        self._encoding = encoding
        self._deadline = deadline
        self._reader: MessageReader | None = None
        self._message: bytes | None = None

    def receive(self, data: bytes, *, ended: bool) -> None:
        """See `Stream`; most calls come in one piece."""
        size = len(data) - PREFIX_BYTES
        # Most calls are one DATA frame with one uncompressed message; those need no reader, task or
        # timer.
        whole = (
            ended
            and 0 <= size <= self._max_bytes
            and data[:PREFIX_BYTES] == size.to_bytes(PREFIX_BYTES)
        )
        if whole and self._reader is None:
            self._route.put(data[PREFIX_BYTES:], self)
            return
        if self._reader is None:
            self._reader = MessageReader(self._max_bytes, self._encoding)
        for message in self._reader.feed(data):
            if self._message is not None:
                raise StatusError(
                    grpc.StatusCode.UNIMPLEMENTED, "more than one message in a unary call"
                )
            self._message = message
        self.set_request_bytes(self._reader.buffered_bytes + len(self._message or b""))
        # A compressed message is unpacked a slice a turn; the connection calls again.
        if self._reader.pending:
            self.connection.unpacking[self.number] = self
        elif not ended:
            self.give_credit()
        elif self._message is None or self._reader.buffered_bytes:
            raise StatusError(grpc.StatusCode.UNIMPLEMENTED, "no whole message in a unary call")
        else:
            self._route.put(self._message, self)
            self._message = None

    def awaits_rest(self) -> bool:
        """See `Stream`."""
        return not self.remote_closed

    def done(self) -> bool:
        """Whether the answer is no longer awaited."""
        # The route asks just before it takes the call: a timer for each would cost more than most
        # calls.
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self.finish(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
        return self.closed

    def set_result(self, answer: Answer) -> None:
        """Send it."""
        try:
            if answer.__class__ is bytes:
                if not self.closed:
                    self.answer(answer)
            else:
                assert isinstance(answer, TidemarkError), (
                    f"a batch function answered {type(answer)}"
                )
                self.finish(*status_of(answer))
        except Exception as err:  # noqa: BLE001 - the route serves other connections, too
            self.connection.crash(err)


class BatchedStream(Stream):
    """A stream whose every message is answered by one, in order; an error ends it."""

    __slots__ = ("_begun", "_max_bytes", "_outstanding", "_reader", "_route")

    def __init__(
        self,
        connection: ConnectionState,
        number: int,
        route: Route,
        max_bytes: int,
        encoding: bytes,
    ) -> None:
        super().__init__(connection, number)
        self._route = route
        self._reader = MessageReader(max_bytes, encoding)
        self._max_bytes = max_bytes
        self._begun = False
        self._outstanding = 0
        # The route ends idle streams with the term of leadership, too: nothing would tell their
        # clients otherwise.
        route.attach(self)

    def retire(self) -> None:
        """See `Stream`."""
        # A stream without open requests has nothing to wait for when the server drains.
        if not self._outstanding:
            self.stop()

    def receive(self, data: bytes, *, ended: bool) -> None:
        """See `Stream`."""
        size = len(data) - PREFIX_BYTES
        if (
            not self._begun
            and 0 <= size <= self._max_bytes
            and data[:PREFIX_BYTES] == size.to_bytes(PREFIX_BYTES)
        ):
            self._outstanding += 1
            self._route.put(data[PREFIX_BYTES:], self)
        elif data or self._begun:
            self._read(data)
        if self._begun and self._reader.pending:
            self.connection.unpacking[self.number] = self
        elif not ended:
            # No more credit while that many are unanswered: the peer's own window stops it then,
            # without an error.
            if self._outstanding < _MAX_OUTSTANDING:
                self.give_credit()
        elif not self._outstanding:
            self.finish(grpc.StatusCode.OK)

    def _read(self, data: bytes) -> None:
        """Messages in any cut, or compressed."""
        messages = self._reader.feed(data)
        self.set_request_bytes(self._reader.buffered_bytes)
        self._begun = self._reader.buffered_bytes > 0
        self._outstanding += len(messages)
        for message in messages:
            self._route.put(message, self)

    def awaits_rest(self) -> bool:
        """See `Stream`."""
        return self._begun

    def done(self) -> bool:
        """Whether answers are no longer awaited."""
        return self.finishing

    def set_result(self, answer: Answer) -> None:
        """Send it; the last one, or an error, ends the stream."""
        try:
            self._set_result(answer)
        except Exception as err:  # noqa: BLE001 - the route serves other connections, too
            self.connection.crash(err)

    def _set_result(self, answer: Answer) -> None:
        self._outstanding -= 1
        if not isinstance(answer, bytes):
            assert isinstance(answer, TidemarkError), f"a batch function answered {type(answer)}"
            self.finish(*status_of(answer))
            return
        self.send_message(answer)
        # A client that does not read its answers must not fill our memory with them.
        if self.unsent_bytes > _MAX_UNREAD_BYTES:
            self.finish(
                grpc.StatusCode.RESOURCE_EXHAUSTED, "the answers of this stream are not read"
            )
        elif (
            self.remote_closed
            and not self._outstanding
            and not (self._begun and self._reader.pending)
        ):
            self.finish(grpc.StatusCode.OK)
        elif self.connection.draining and not self._outstanding:
            self.stop()
        elif self._outstanding < _MAX_OUTSTANDING:
            self.give_credit()

    def _release(self) -> None:
        super()._release()
        self._route.detach(self)
