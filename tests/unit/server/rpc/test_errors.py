"""Each kind of error has its gRPC status; texts carry our code,
unless a protocol prescribes them.
"""

import grpc
import pytest

from server.rpc.errors import StatusError, status_of
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
