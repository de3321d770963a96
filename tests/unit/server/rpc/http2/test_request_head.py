"""What a call's headers say."""

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.rpc.errors import StatusError
from server.rpc.http2.headers import Field, read_head

CALL: tuple[Field, ...] = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/a.B/C"),
    (b"content-type", b"application/grpc+proto"),
    (b"te", b"trailers"),
    (b"user-agent", b"grpc-go/1.60"),
)


def test_metadata_is_what_is_neither_grpcs_nor_https() -> None:
    head, timeout_s = read_head(
        (*CALL, (b"token", b"t"), (b"grpc-encoding", b"gzip"), (b"id-bin", b"AAE"))
    )
    assert head.method == "/a.B/C"
    assert head.encoding == b"gzip"
    assert head.invocation_metadata == (
        ("user-agent", "grpc-go/1.60"),
        ("token", "t"),
        ("id-bin", b"\0\1"),
    )
    assert timeout_s is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (b"1H", 3600),
        (b"2M", 120),
        (b"3S", 3),
        (b"40m", 0.04),
        (b"50u", 5e-05),
        (b"60n", 6e-08),
        (b"99999999S", 99999999),
    ],
)
def test_timeouts_have_six_units(text: bytes, seconds: float) -> None:
    assert read_head((*CALL, (b"grpc-timeout", text)))[1] == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", [b"", b"S", b"1", b"1s", b"-1S", b"1.5S", b"123456789S", b" 1S", b"1 S"]
)
def test_timeouts_that_are_none_are_refused(text: bytes) -> None:
    with pytest.raises(StatusError) as refused:
        read_head((*CALL, (b"grpc-timeout", text)))
    assert refused.value.status is grpc.StatusCode.INTERNAL


@given(st.integers(0, len(CALL)), st.integers(0, 99999999))
def test_the_timeout_is_found_anywhere_and_the_rest_is_the_same_head(
    place: int, milliseconds: int
) -> None:
    fields = (*CALL[:place], (b"grpc-timeout", b"%dm" % milliseconds), *CALL[place:])
    if (
        place >= 3
    ):  # among the pseudo-headers it is malformed only once it is not taken out: nobody sends that
        head, timeout_s = read_head(fields)
        assert head is read_head(CALL)[0]
        assert timeout_s == pytest.approx(milliseconds / 1000)
