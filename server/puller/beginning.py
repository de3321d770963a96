"""How long a stream may take to begin: one that does not is opened again.

A stream can be lost without an error: gRPC forgets now and then to wake whoever began one just as its server said
GOAWAY. Calls have deadlines, streams without end have none. But a server may as well be busy, as a store is that reads
many regions first, so each wait in vain lets the next one be twice as long.
"""

import asyncio
from typing import Any, Final, TypeVar

import grpc.aio

from storage.model.errors import UnavailableError

LEAST_S: Final = 30.0
MOST_S: Final = 600.0

M = TypeVar("M")


class StreamSilentError(UnavailableError):
    """Nothing came on a new stream."""

    code = "ErrStreamSilent"


class Beginning:
    """Of the streams to one server, one after the other."""

    def __init__(self) -> None:
        self.within_s = LEAST_S
        """How long the next one may take."""

    async def first(self, call: "grpc.aio.UnaryStreamCall[Any, M] | grpc.aio.StreamStreamCall[Any, M]") -> Any:
        """The first message of a stream, or `grpc.aio.EOF`.

        Raises:
            StreamSilentError: none came in time; the stream is cancelled.
            grpc.aio.AioRpcError: the stream broke.
        """
        waited_s = self.within_s
        try:
            async with asyncio.timeout(waited_s):
                message = await call.read()
        except TimeoutError:
            call.cancel()
            self.within_s = min(2 * waited_s, MOST_S)
            raise StreamSilentError(f"nothing came for {waited_s:.0f} s; the stream is opened again") from None
        self.within_s = LEAST_S
        return message
