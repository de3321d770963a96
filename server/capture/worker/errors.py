"""Errors of workers, as they arrive at the owner."""

import re
from typing import Any

import grpc

from storage.model.errors import (
    ConflictError,
    CorruptError,
    InvalidError,
    NotFoundError,
    TidemarkError,
    UnavailableError,
)

_TEXT = re.compile(r"\[TM:(\w+)\] (.*)", re.DOTALL)
_CLASSES: dict[grpc.StatusCode, type[TidemarkError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ABORTED: ConflictError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DATA_LOSS: CorruptError,
}
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class WorkerLostError(UnavailableError):
    """A worker process, or another capture, has died or does not answer;
    its tables are pulled again.
    """

    code = "ErrWorkerLost"


class WorkerRowsOnlyError(InvalidError):
    """A worker's Flight port hands out rows; everything else is asked of the capture."""

    code = "ErrWorkerRowsOnly"


def lost(worker: str) -> WorkerLostError:
    """What to say of a worker that is gone."""
    return WorkerLostError(
        f"{worker} has died or does not answer; its tables are pulled again, here or elsewhere"
    )


def error_of(worker: str, err: grpc.RpcError | Any) -> TidemarkError:
    """The worker's own error, code and kind as it raised it; WorkerLostError if it said nothing."""
    match = _TEXT.fullmatch(err.details() or "")
    if match is None:
        return lost(worker) if err.code() in _LOST else TidemarkError(f"{worker}: {err.details()}")
    return coded(_CLASSES.get(err.code(), TidemarkError), *match.groups())


def error_of_text(worker: str, text: str, *, retryable: bool) -> TidemarkError:
    """The worker's own error in the text of a Flight error; WorkerLostError if there is none."""
    match = re.search(r"\[TM:(\w+)\] (.*?)(?:\. Detail: |$)", text, re.DOTALL)
    if match is None:
        return lost(worker)
    return coded(UnavailableError if retryable else InvalidError, *match.groups())


def coded(kind: type[TidemarkError], code: str, message: str) -> TidemarkError:
    """An error of that kind that keeps its name across processes."""
    error = kind(message)
    error.code = code
    return error
