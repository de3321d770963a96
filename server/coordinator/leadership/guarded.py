"""Calls that only a leader answers: interrupted when its term ends, so that no client waits for who cannot answer."""

from collections.abc import Callable, Sequence
from typing import Any

import grpc.aio

from server.coordinator.errors import NotLeaderError
from server.coordinator.leadership.leader import Leadership
from server.rpc.errors import status_of
from server.rpc.front import Answer, BatchHandler

_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


def while_leading(handler: Any, leadership: Leadership) -> Any:
    """The same gRPC handler; when the leadership ends, its calls and streams end with `not leader`."""
    functions = {kind: getattr(handler, kind) for kind in _KINDS}
    return handler._replace(**{kind: _guarded(call, leadership) for kind, call in functions.items() if call})


def batch_while_leading(function: BatchHandler, leadership: Leadership) -> BatchHandler:
    """The same batch function; when the leadership ends, all of its batch are answered with `not leader`."""

    async def answers(requests: Sequence[bytes]) -> Sequence[Answer]:
        async with leadership.throughout():
            found = await function(requests)
        leadership.check()
        return found

    return answers


def _guarded(function: Callable[..., Any], leadership: Leadership) -> Callable[..., Any]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            async with leadership.throughout():
                answer = await function(request, context)
            leadership.check()
        except NotLeaderError as err:
            await context.abort(*status_of(err))
        else:
            return answer

    return call
