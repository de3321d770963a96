"""Every error of etcd that we name is known again by the status and text it is sent with."""

import pytest

from storage.meta import errors
from storage.meta.errors import EtcdError, MetaRequestError, MetaUnavailableError, error_of
from storage.model.errors import Kind

NAMED = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, EtcdError) and kind.text
]


@pytest.mark.parametrize("kind", NAMED)
def test_an_error_is_known_by_its_text(kind: type[EtcdError]) -> None:
    err = kind()
    assert type(error_of(err.status, err.text)) is kind
    assert err.message.startswith(err.text)


@pytest.mark.parametrize(
    ("status", "details", "wanted"),
    [
        ("UNAVAILABLE", "etcdserver: leader changed", MetaUnavailableError),
        ("INTERNAL", "stream terminated by RST_STREAM", MetaUnavailableError),
        ("INVALID_ARGUMENT", "etcdserver: key is not provided", MetaRequestError),
        (
            "RESOURCE_EXHAUSTED",
            "grpc: received message larger than max (3 vs. 2)",
            errors.RequestTooLargeError,
        ),
        ("UNKNOWN", "raft proposal dropped", MetaUnavailableError),
        ("FAILED_PRECONDITION", "etcdserver: not leader", MetaRequestError),
    ],
)
def test_what_has_no_name_is_sorted_by_its_status(
    status: str, details: str, wanted: type[EtcdError]
) -> None:
    assert type(error_of(status, details)) is wanted


@pytest.mark.parametrize(
    "kind", [errors.NoSpaceError, errors.TooManyRequestsError, errors.InvalidTokenError]
)
def test_what_passes_by_itself_or_by_an_operator_is_unavailable(kind: type[EtcdError]) -> None:
    assert issubclass(kind, MetaUnavailableError)
    assert kind().kind is Kind.UNAVAILABLE
