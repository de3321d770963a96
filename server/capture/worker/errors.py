"""Errors of workers, as they arrive at the owner."""

import re
from typing import Any

import grpc

from server.rpc.errors import coded, error_of_peer
from storage.model.errors import InvalidError, TidemarkError, UnavailableError

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
    if error := error_of_peer(err):
        return error
    return lost(worker) if err.code() in _LOST else TidemarkError(f"{worker}: {err.details()}")


def error_of_text(worker: str, text: str, *, retryable: bool) -> TidemarkError:
    """The worker's own error in the text of a Flight error; WorkerLostError if there is none."""
    match = re.search(r"\[TM:(\w+)\] (.*?)(?:\. Detail: |$)", text, re.DOTALL)
    if match is None:
        return lost(worker)
    return coded(UnavailableError if retryable else InvalidError, *match.groups())
