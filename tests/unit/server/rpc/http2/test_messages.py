"""Messages in DATA: any cut gives the same ones, and none is larger than allowed,
compressed or not.
"""

import gzip
import zlib

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.rpc.http2.messages import MessageError, MessageReader
from tests.unit.server.rpc.http2.wire import message


@given(st.lists(st.binary(max_size=100), max_size=6), st.data())
def test_any_cut_gives_the_same_messages(bodies: list[bytes], draw: st.DataObject) -> None:
    reader, found = MessageReader(100, b"gzip"), []
    stream = b"".join(
        message(gzip.compress(body), flag=1) if draw.draw(st.booleans()) and len(gzip.compress(body)) <= 100
        else message(body)
        for body in bodies
    )  # fmt: skip
    while stream:
        size = draw.draw(st.integers(1, len(stream)))
        found += reader.feed(stream[:size])
        stream = stream[size:]
    assert found == bodies
    assert reader.buffered_bytes == 0


def fed(reader: MessageReader, data: bytes) -> list[bytes]:
    """All messages, in as many turns as they need."""
    messages = reader.feed(data)
    while reader.pending:
        messages += reader.feed(b"")
    return messages


def test_one_turn_decompresses_a_slice_only_and_counts_it() -> None:
    reader = MessageReader(64 << 20, b"gzip")
    packed = message(gzip.compress(bytes(10 << 20)), flag=1)
    assert reader.feed(packed + message(b"next")) == []
    assert reader.pending
    assert reader.buffered_bytes <= len(packed) + (1 << 20)
    turns = 1
    messages: list[bytes] = []
    while not messages:
        messages = reader.feed(b"")
        turns += 1
    assert messages == [bytes(10 << 20), b"next"]
    assert turns >= 10
    assert reader.buffered_bytes == 0


def test_a_length_beyond_the_bound_is_refused_before_its_bytes() -> None:
    with pytest.raises(MessageError) as refused:
        MessageReader(100, b"").feed(b"\0" + (101).to_bytes(4))
    assert refused.value.status is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refused.value.message == "grpc: received message larger than max (101 vs. 100)"


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate"])
def test_a_bomb_is_refused_before_it_is_large(encoding: bytes) -> None:
    pack = gzip.compress if encoding == b"gzip" else zlib.compress
    reader = MessageReader(1 << 20, encoding)
    assert fed(reader, message(pack(bytes(1 << 20)), flag=1)) == [bytes(1 << 20)]
    with pytest.raises(MessageError) as refused:
        fed(reader, message(pack(bytes(50 << 20)), flag=1))
    assert reader.buffered_bytes < 2 << 20
    assert refused.value.status is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("encoding", "sent", "status"),
    [
        (b"", message(b"x", flag=1), grpc.StatusCode.UNIMPLEMENTED),
        (b"snappy", message(b"x", flag=1), grpc.StatusCode.UNIMPLEMENTED),
        (b"gzip", message(b"x", flag=1), grpc.StatusCode.INTERNAL),
        (b"gzip", message(gzip.compress(b"hello", mtime=0)[:-3], flag=1), grpc.StatusCode.INTERNAL),
        (b"gzip", message(b"x", flag=2), grpc.StatusCode.INTERNAL),
    ],
)
def test_what_cannot_be_read_has_a_status(
    encoding: bytes, sent: bytes, status: grpc.StatusCode
) -> None:
    with pytest.raises(MessageError) as refused:
        MessageReader(100, encoding).feed(sent)
    assert refused.value.status is status
