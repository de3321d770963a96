"""A line in the log for every call that changes something: its client, method, object and outcome.
Calls that only read, and those of other daemons, have none.
"""

import asyncio
import re
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any, Final

import structlog

from server.log import AUDIT
from server.routes import Answer
from storage.model.errors import TidemarkError

_CHANGES: Final = re.compile(
    r"tidemarkpb\.v1\.(Capture|Changefeed|Dump|GC|Pump|Store)Service\.(?!Get|List|Query|Check|Write)\w+"
)
_OBJECTS: Final = ("id", "changefeed_id", "node_id")
"""The members of a request that name its object."""
_SHOWN_MAX: Final = 256
OK: Final = "ok"
BEGUN: Final = "begun"
"""The outcome in the log of a call whose end is not waited for."""

CANCELLED: Final = "cancelled"
"""The outcome of a call whose client is gone, or whose time was over: what it has begun may have
been carried out.
"""
_SAID: Final = {
    OK: "call changed something",
    BEGUN: "call changes something",
    CANCELLED: "call was cancelled, and may have changed something",
}

_client_name: ContextVar[str] = ContextVar("client", default="")
"""The client of the call that this task answers, by its name in the file of clients."""

_log = structlog.get_logger(__name__)


def set_client(name: str) -> None:
    """Note the client of the call that this task answers."""
    _client_name.set(name)


def is_audited(method: str) -> bool:
    """Whether the audit log records calls of the method, `package.Service.Method`."""
    return _CHANGES.fullmatch(method) is not None


def audited(function: Callable[..., Any], method: str) -> Callable[..., Any]:
    """The handler `function` of a unary method, with a line in the log for each of its calls."""

    async def call(request: Any, context: Any) -> Any:
        outcome = "ErrInternal"
        try:
            answer = await function(request, context)
            outcome = OK
        except TidemarkError as err:
            outcome = err.code
            raise
        except asyncio.CancelledError:
            outcome = CANCELLED
            raise
        finally:
            log_change(
                method.rpartition(".")[2], request, outcome, context.peer(), _client(context)
            )
        return answer

    return call


def log_change(method: str, request: Any, outcome: str, peer: str, client: str = "") -> None:
    """Write the line; `client` is its name in the file of clients, or in its certificate."""
    of = next((text for name in _OBJECTS if (text := str(getattr(request, name, "")))), "")
    _log.info(
        _SAID.get(outcome, "call was refused"),
        logger=AUDIT,
        method=method,
        of=of[:_SHOWN_MAX],
        peer=peer,
        client=client,
        outcome=outcome,
    )


def _client(context: Any) -> str:
    if name := _client_name.get():
        return name
    return shown_names(context.auth_context().get("x509_common_name", ()))


def shown_names(names: Iterable[bytes]) -> str:
    """The common names of a client's certificate, as the log has them."""
    return ", ".join(name.decode(errors="backslashreplace") for name in names)[:_SHOWN_MAX]


def outcome_of(answer: Answer) -> str:
    """Return the result of an HTTP request: `ok`, or the error code of its answer."""
    if answer.status < HTTPStatus.BAD_REQUEST:
        return OK
    return answer.error_code or f"HTTP {answer.status}"
