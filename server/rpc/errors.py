"""Our errors as gRPC statuses, in one place; nothing else in the house knows `grpc.StatusCode`."""

import grpc

from storage.model.errors import Kind, TidemarkError

_STATUS = {
    Kind.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Kind.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Kind.CONFLICT: grpc.StatusCode.ABORTED,
    Kind.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Kind.CLOSED: grpc.StatusCode.UNAVAILABLE,
    Kind.CORRUPT: grpc.StatusCode.DATA_LOSS,
    Kind.INTERNAL: grpc.StatusCode.INTERNAL,
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
    """What gRPC says of a method, `/package.Service/Method`, that nobody serves."""
    service, _, name = method.removeprefix("/").rpartition("/")
    return f"unknown method {name} for service {service}"


def status_of(err: TidemarkError) -> tuple[grpc.StatusCode, str]:
    """The status code and details a client sees for `err`."""
    if isinstance(err, StatusError):
        return err.status, err.message
    return _STATUS[err.kind], str(err)
