"""Each kind of error has its gRPC status; texts carry our code,
unless a protocol prescribes them.
"""

import grpc
import pytest
from grpc.aio import AioRpcError

from server.rpc.errors import StatusError, passed_on, status_of
from storage.model import errors
from storage.model.errors import Kind, TidemarkError


@pytest.mark.parametrize(
    ("err", "status"),
    [
        (errors.InvalidError("x"), grpc.StatusCode.INVALID_ARGUMENT),
        (errors.NotFoundError("x"), grpc.StatusCode.NOT_FOUND),
        (errors.ConflictError("x"), grpc.StatusCode.ABORTED),
        (errors.UnavailableError("x"), grpc.StatusCode.UNAVAILABLE),
        (errors.ClosedError("x"), grpc.StatusCode.UNAVAILABLE),
        (errors.CorruptError("x"), grpc.StatusCode.DATA_LOSS),
        (TidemarkError("x"), grpc.StatusCode.INTERNAL),
    ],
)
def test_the_kind_decides_the_status_and_the_text_has_the_code(
    err: TidemarkError, status: grpc.StatusCode
) -> None:
    assert status_of(err) == (status, f"[TM:{err.code}] x")


def test_every_kind_has_a_status() -> None:
    for kind in Kind:
        err = TidemarkError("x")
        err.kind = kind
        assert isinstance(status_of(err)[0], grpc.StatusCode)


def test_a_prescribed_status_goes_out_as_it_is() -> None:
    err = StatusError(grpc.StatusCode.UNKNOWN, "[PD:common:ErrInvalidArgument]no")
    assert status_of(err) == (grpc.StatusCode.UNKNOWN, "[PD:common:ErrInvalidArgument]no")


@pytest.mark.parametrize("status", list(grpc.StatusCode))
@pytest.mark.parametrize("text", ["[TM:ErrX] no", "[TM:ErrX] ", "[PD:ErrX]no", "socket closed", ""])
def test_what_a_peer_answered_is_passed_on_as_it_is(status: grpc.StatusCode, text: str) -> None:
    assert status_of(passed_on(AioRpcError(status, None, None, text))) == (status, text)


def test_an_error_of_ours_that_is_passed_on_keeps_its_code() -> None:
    answer = AioRpcError(grpc.StatusCode.NOT_FOUND, None, None, "[TM:ErrX] no")
    error = passed_on(answer)
    assert (error.code, error.kind, error.message) == ("ErrX", Kind.NOT_FOUND, "no")
