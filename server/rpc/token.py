"""A client's token on its calls, read from its file for each: it is kept nowhere."""

from collections.abc import Callable
from typing import Any, Final

import grpc
import grpc.aio

from sink.flight.tokens import read_token

_HEADER: Final = "authorization"


def token_interceptors(path: str) -> list[Any]:
    """For a channel of an event loop: calls bring the token of a file.

    Calls raise TokenFileError if it cannot be read.
    """
    return [_UnaryUnary(path), _UnaryStream(path)]


def with_token(channel: grpc.Channel, path: str) -> grpc.Channel:
    """The same for a channel of threads."""
    return grpc.intercept_channel(channel, _Sync(path)) if path else channel


class _Details(grpc.ClientCallDetails):
    """The details of a call, and the token."""

    def __init__(self, details: Any, path: str) -> None:
        self.method = details.method
        self.timeout = details.timeout
        self.credentials = details.credentials
        self.wait_for_ready = details.wait_for_ready
        self.compression = getattr(details, "compression", None)
        self.metadata = _brought(details.metadata, path)


class _UnaryUnary(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    def __init__(self, path: str) -> None:
        self._path = path

    async def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: Any, request: Any
    ) -> Any:
        return await continuation(_of_loop(client_call_details, self._path), request)


class _UnaryStream(grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    def __init__(self, path: str) -> None:
        self._path = path

    async def intercept_unary_stream(
        self, continuation: Callable[..., Any], client_call_details: Any, request: Any
    ) -> Any:
        return await continuation(_of_loop(client_call_details, self._path), request)


class _Sync(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    def __init__(self, path: str) -> None:
        self._path = path

    def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: Any, request: Any
    ) -> Any:
        return continuation(_Details(client_call_details, self._path), request)

    intercept_unary_stream = intercept_unary_unary


def _of_loop(details: Any, path: str) -> Any:
    return details._replace(metadata=grpc.aio.Metadata(*_brought(details.metadata, path)))


def _brought(metadata: Any, path: str) -> tuple[tuple[str, Any], ...]:
    return (*(metadata or ()), (_HEADER, f"Bearer {read_token(path)}"))
