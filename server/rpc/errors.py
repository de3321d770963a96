"""Our errors as gRPC statuses and back, in one place."""

import re
from typing import Any

import grpc

from storage.model.errors import (
    ConflictError,
    CorruptError,
    InvalidError,
    Kind,
    NotFoundError,
    TidemarkError,
    UnavailableError,
)

_STATUS = {
    Kind.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Kind.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Kind.CONFLICT: grpc.StatusCode.ABORTED,
    Kind.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Kind.CLOSED: grpc.StatusCode.UNAVAILABLE,
    Kind.CORRUPT: grpc.StatusCode.DATA_LOSS,
    Kind.INTERNAL: grpc.StatusCode.INTERNAL,
}
_OURS = re.compile(r"\[TM:(\w+)\] (.*)", re.DOTALL)
_CLASSES: dict[grpc.StatusCode, type[TidemarkError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ABORTED: ConflictError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DATA_LOSS: CorruptError,
}


class StatusError(TidemarkError):
    """An error whose gRPC status and text a peer's protocol prescribes; sent as it is,
    without our code.
    """

    def __init__(self, status: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.status = status

    def __str__(self) -> str:
        return self.message


def unknown(method: str) -> str:
    """The error that gRPC gives for a method, `/package.Service/Method`, that no service has."""
    service, _, name = method.removeprefix("/").rpartition("/")
    return f"unknown method {name} for service {service}"


def status_of(err: TidemarkError) -> tuple[grpc.StatusCode, str]:
    """The status code and details a client sees for `err`."""
    if isinstance(err, StatusError):
        return err.status, str(err)
    return _STATUS[err.kind], str(err)


def error_of_peer(err: grpc.RpcError | Any) -> TidemarkError | None:
    """Return the error that a Tidemark daemon answered with, with its code and kind; None: it is
    another error, as when the peer does not answer.
    """
    match = _OURS.fullmatch(err.details() or "")
    return coded(_CLASSES.get(err.code(), TidemarkError), *match.groups()) if match else None


def passed_on(err: grpc.RpcError | Any) -> TidemarkError:
    """Return the error for a client whose call was forwarded to a peer that answered `err`: the
    same status and text, and the error's own code if the peer is a Tidemark daemon.
    """
    error = error_of_peer(err)
    if error is not None and status_of(error)[0] is err.code():
        return error
    return StatusError(err.code(), err.details() or "")


def coded(kind: type[TidemarkError], code: str, message: str) -> TidemarkError:
    """An error of that kind that keeps its name across processes."""
    error = kind(message)
    error.code = code
    return error
