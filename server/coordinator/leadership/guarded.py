"""Calls that only a leader answers: interrupted when its term ends, so that no client waits for who cannot answer."""

from collections.abc import Callable
from typing import Any

import grpc.aio

from server.coordinator.errors import NotLeaderError
from server.coordinator.leadership.leader import Leadership
from server.rpc.errors import status_of

_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


def while_leading(handler: Any, leadership: Leadership) -> Any:
    """The same gRPC handler; when the leadership ends, its calls and streams end with `not leader`."""
    functions = {kind: getattr(handler, kind) for kind in _KINDS}
    return handler._replace(**{kind: _guarded(call, leadership) for kind, call in functions.items() if call})


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
