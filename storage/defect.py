"""Unexpected exceptions: each is logged once with its traceback, and ends one request, never a
daemon.
"""

import secrets
from typing import Any, Final

import structlog

from storage.model.errors import Kind, TidemarkError, leaves

_ID_BYTES: Final = 4

_log = structlog.get_logger(__name__)


class DefectError(TidemarkError):
    """A request met an unexpected exception: a defect of Tidemark."""

    kind = Kind.INTERNAL
    code = "ErrInternal"


def request_error(err: Exception, where: str, **context: Any) -> TidemarkError:
    """The error that the caller of a request gets for `err`: ours as it is,
    anything else as a DefectError.

    Such an exception is logged here, once, with its traceback and an id; the caller gets the id and
    no details.
    """
    if isinstance(err, TidemarkError):
        return err
    if isinstance(err, ExceptionGroup) and err.split(TidemarkError)[1] is None:
        return leaves(err)[0]
    number = secrets.token_hex(_ID_BYTES)
    _log.error("unexpected exception", id=number, where=where, exc_info=err, **context)
    return DefectError(
        f"an unexpected {type(err).__name__}: a defect; the daemon's log has its traceback, id "
        f"{number}"
    )
