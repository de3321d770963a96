"""Routes of a daemon's HTTP port beside metrics and health: handlers by method and path, called in
threads.

A handler brings its own timeout; errors of `storage.model.errors` that it raises become statuses
here, in the form of TiCDC's API: `{"error_msg": …, "error_code": "TM:Err…"}`.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, TypeAlias, TypeVar
from urllib.parse import unquote, unquote_to_bytes

from storage.defect import request_error
from storage.model.errors import InvalidError, Kind, NotFoundError, TidemarkError

T = TypeVar("T")
_CALL_SECONDS = 15.0
_STATUS = {
    Kind.INVALID: 400,
    Kind.NOT_FOUND: 404,
    Kind.CONFLICT: 409,
    Kind.UNAVAILABLE: 503,
    Kind.CLOSED: 503,
}
_OWN_STATUS = {"ErrMethodNotAllowed": 405, "ErrUnauthenticated": 401, "ErrUnauthorized": 403}
_LOGIN = ("WWW-Authenticate", 'Basic realm="Tidemark: any user, a token as password"')
"""Lets a browser ask for a token."""


class PathUnknownError(NotFoundError):
    """The path is not served."""

    code = "ErrPathUnknown"


class MethodRefusedError(InvalidError):
    """The path is served, but not by this method."""

    code = "ErrMethodNotAllowed"

    def __init__(self, path: str, method: str, allowed: Iterable[str]) -> None:
        self.allowed = ", ".join(sorted(allowed))
        super().__init__(f"{path[:256]} takes {self.allowed}, not {method}")


class UnauthorizedError(InvalidError):
    """The path is served to clients with a certificate only."""

    code = "ErrUnauthorized"


@dataclass(frozen=True, slots=True)
class Request:
    """One request; `tail` is what follows a route's prefix, percent-decoded,
    bytes that are no UTF-8 as surrogates.
    """

    method: str
    path: str
    query: Mapping[str, Sequence[str]] = field(default_factory=dict)
    body: bytes = b""
    tail: str = ""
    raw_query: str = ""
    """The query as it came."""
    authorization: str = ""
    """The header of that name."""
    common_names: Sequence[bytes] = ()
    """The names in the client's certificate."""
    peer: str = ""
    """The peer's address as gRPC writes it; empty where it is unknown."""

    def query_bytes(self, name: str) -> bytes:
        """The bytes that a parameter of the query stands for, percent-decoded;
        empty without one.
        """
        for part in self.raw_query.split("&"):
            key, _, value = part.partition("=")
            if key == name:
                return unquote_to_bytes(value.replace("+", " "))
        return b""


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, body and its type."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: Sequence[tuple[str, str]] = ()
    """Others than those that describe the body."""
    error_code: str = ""
    """The code of the error that it tells of, without `TM:`; empty: of none that has one."""


Handler: TypeAlias = Callable[[Request], Answer]
Route: TypeAlias = tuple[str, str]
"""Method and path; a path that ends in `/` stands for all below it."""


class Routes:
    """The routes of a daemon; they come and go with `serving`."""

    def __init__(self) -> None:
        self._handlers: dict[Route, Handler] = {}
        self.not_ready: Callable[[], str] = lambda: ""
        """Why a daemon that has started cannot serve now, for `/readyz`; empty when it can."""

    @contextmanager
    def serving(self, handlers: Mapping[Route, Handler]) -> Iterator[None]:
        """Answer these routes for the block."""
        self._handlers |= handlers
        try:
            yield
        finally:
            self._handlers = {
                route: kept for route, kept in self._handlers.items() if route not in handlers
            }

    def find(self, method: str, path: str) -> tuple[Handler, str]:
        """The handler of the longest fitting path, and the tail below it.

        Raises:
            PathUnknownError, MethodRefusedError: there is none.
        """
        handlers = self._handlers
        fitting = [(verb, prefix) for verb, prefix in handlers if _fits(prefix, path)]
        if not fitting:
            shown = sorted({prefix for _, prefix in handlers} | {"/metrics", "/healthz", "/readyz"})
            raise PathUnknownError(f"nothing is served at {path}; try {', '.join(shown)}")
        longest = max(len(prefix) for _, prefix in fitting)
        methods = {verb: prefix for verb, prefix in fitting if len(prefix) == longest}
        if method not in methods:
            raise MethodRefusedError(path, method, methods)
        return handlers[method, methods[method]], unquote(path[longest:], errors="surrogateescape")


def template_arguments(names: Sequence[str], parts: Sequence[str]) -> list[str] | None:
    """The parts of a path where a template has `{…}`, still percent-encoded; None if they do not
    fit.
    """
    if len(names) != len(parts):
        return None
    pairs = list(zip(names, parts, strict=True))
    if any(not name.startswith("{") and name != part for name, part in pairs):
        return None
    return [part for name, part in pairs if name.startswith("{")]


def answered(call: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> T:
    """The result of `call` on a daemon's event loop, for a handler's thread.

    Raises:
        TimeoutError: it took more than 15 seconds, and was cancelled.
    """
    future = asyncio.run_coroutine_threadsafe(call, loop)
    try:
        return future.result(_CALL_SECONDS)
    except TimeoutError:
        future.cancel()
        raise


def json_answer(document: Any, status: int = 200) -> Answer:
    """A JSON document."""
    return Answer(status, json.dumps(document).encode() + b"\n", "application/json")


def error_answer(err: TidemarkError) -> Answer:
    """The answer that a client gets for `err`."""
    status = _OWN_STATUS.get(err.code) or _STATUS.get(err.kind, 500)
    answer = fault(status, err.code, err.message)
    if isinstance(err, MethodRefusedError):
        return replace(answer, headers=[("Allow", err.allowed)])
    return answer


def fault(status: int, code: str, message: str, prefix: str = "TM") -> Answer:
    """An error in the form of TiCDC's API."""
    answer = json_answer({"error_msg": message, "error_code": f"{prefix}:{code}"}, status)
    headers = [_LOGIN] if status == HTTPStatus.UNAUTHORIZED else []
    return replace(answer, headers=headers, error_code=code)


def answer_of(handler: Handler, request: Request) -> Answer:
    """Call `handler`; whatever it raises becomes an answer."""
    try:
        return handler(request)
    except TidemarkError as err:
        return error_answer(err)
    except TimeoutError:
        return fault(504, "ErrTimeout", f"{request.path} took too long; try again")
    except Exception as err:  # noqa: BLE001 - the client gets an answer, the log the trace; the port lives on
        return error_answer(request_error(err, f"{request.method} {request.path}"))


def _fits(prefix: str, path: str) -> bool:
    return path.startswith(prefix) if prefix.endswith("/") else path == prefix
