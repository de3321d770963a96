"""The root of all errors: the code names the fault, the kind the caller's reaction.

Each package has its own subclasses; errors of third parties are wrapped once, where they enter.
Only `server.rpc.errors` knows gRPC's status codes.
"""

import enum
from typing import Any


class Kind(enum.Enum):
    """The reaction that an error asks of its caller."""

    # correct the request; trying again as it is cannot help
    INVALID = "invalid"
    # the named thing does not exist: create it, or correct the name
    NOT_FOUND = "not_found"
    CONFLICT = "conflict"  # somebody else was first: read again, then decide
    UNAVAILABLE = "unavailable"  # try again later, with back-off
    CLOSED = "closed"  # this object is gone: open a new one
    CORRUPT = "corrupt"  # data on disk cannot be trusted: the daemon stops
    INTERNAL = "internal"  # a defect of ours


class TidemarkError(Exception):
    """Base of every error of this project; `str()` gives `[TM:ErrName] message`."""

    kind: Kind = Kind.INTERNAL
    code: str = "ErrInternal"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return f"[TM:{self.code}] {self.message}"


class InvalidError(TidemarkError):
    """The request can never succeed as it is."""

    kind = Kind.INVALID
    code = "ErrInvalidArgument"


class NotFoundError(TidemarkError):
    """The named thing does not exist."""

    kind = Kind.NOT_FOUND
    code = "ErrNotFound"


class ConflictError(TidemarkError):
    """Somebody else changed the same thing first."""

    kind = Kind.CONFLICT
    code = "ErrConflict"


class UnavailableError(TidemarkError):
    """Not now; trying again later can succeed."""

    kind = Kind.UNAVAILABLE
    code = "ErrUnavailable"


class ClosedError(TidemarkError):
    """The object was closed."""

    kind = Kind.CLOSED
    code = "ErrClosed"


class CorruptError(TidemarkError):
    """Data on disk or on the wire is damaged."""

    kind = Kind.CORRUPT
    code = "ErrCorrupt"


class KeyValueError(InvalidError):
    """A row's key has a value that no reader can tell from another one,
    so that two rows would become one.
    """

    code = "ErrKeyValueUnsupported"


def leaves(group: BaseExceptionGroup[Any]) -> list[TidemarkError]:
    """Our errors in a group of groups, in order."""
    nested = [
        leaves(err) if isinstance(err, BaseExceptionGroup) else [err] for err in group.exceptions
    ]
    return [err for errors in nested for err in errors if isinstance(err, TidemarkError)]


def ours_alone(group: BaseExceptionGroup[Any]) -> list[TidemarkError]:
    """The errors of a group that has none but ours, in order.

    Raises:
        BaseExceptionGroup: it has others: the group as it is.
    """
    ours, others = group.split(TidemarkError)
    if ours is None or others is not None:
        raise group
    return leaves(ours)
