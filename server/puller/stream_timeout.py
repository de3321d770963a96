"""Timeouts of streams: a stream that does not begin or falls silent is opened again.

A stream can be lost without an error: gRPC forgets now and then to wake whoever began one just as
its server said GOAWAY, and a server can hang. Calls have deadlines, streams without end have none.
Stores and pumps have something to say every few seconds. But a server may as well be busy, as a
store is that reads many regions first, so each wait in vain lets the next one be twice as long.
"""

import asyncio
import time
from typing import Any, Final, TypeVar

import grpc.aio

from storage.model.errors import UnavailableError

BEGIN_S: Final = 30.0
SILENT_S: Final = 60.0
LONGEST_S: Final = 600.0

M = TypeVar("M")
Call = grpc.aio.UnaryStreamCall[Any, M] | grpc.aio.StreamStreamCall[Any, M]


class StreamSilentError(UnavailableError):
    """A stream has delivered nothing within its timeout."""

    code = "ErrStreamSilent"


class StreamTimeout:
    """The timeouts of the streams to one server, one stream after the other."""

    def __init__(self, silent_s: float = SILENT_S) -> None:
        """`silent_s`: how long a stream that has begun may be silent at first."""
        self._least_silent_s = silent_s
        self._begun_at_s = 0.0
        self.begin_s = BEGIN_S
        """The time allowed for the next stream to begin, in seconds."""
        self.silent_s = silent_s
        """The allowed silence after that, in seconds."""

    async def first(self, call: "Call[M]") -> Any:
        """The first message of a stream, or `grpc.aio.EOF`.

        Raises:
            StreamSilentError: none came in time; the stream is cancelled.
            grpc.aio.AioRpcError: the stream broke.
        """
        message = await _read(call, self.begin_s)
        if message is None:
            waited_s, self.begin_s = self.begin_s, min(2 * self.begin_s, LONGEST_S)
            raise StreamSilentError(
                f"nothing came for {waited_s:.0f} s; the stream is opened again"
            )
        self.begin_s = BEGIN_S
        self._begun_at_s = time.monotonic()
        return message

    async def next(self, call: "Call[M]") -> Any:
        """The next message; raises as `first`."""
        message = await _read(call, self.silent_s)
        if message is None:
            waited_s, self.silent_s = self.silent_s, min(2 * self.silent_s, LONGEST_S)
            raise StreamSilentError(
                f"it was silent for {waited_s:.0f} s; the stream is opened again"
            )
        # One message does not show that the server is well: it may send one, then be busy again.
        # A stream that has lived longer than the timeout does.
        lived_s = time.monotonic() - self._begun_at_s
        if self.silent_s > self._least_silent_s and lived_s > self.silent_s:
            self.silent_s = self._least_silent_s
        return message


async def _read(call: "Call[M]", within_s: float) -> Any:
    """The next message, or `grpc.aio.EOF`; None: nothing came in time,
    and the stream is cancelled.
    """
    try:
        async with asyncio.timeout(within_s):
            return await call.read()
    except TimeoutError:
        call.cancel()
        return None
