"""Blocks of answers: a decoder that remembers nothing reads them."""

import grpc
import pytest
from hpack import Decoder
from hypothesis import given
from hypothesis import strategies as st

from server.rpc.http2 import headers
from server.rpc.http2.frames import MAX_FRAME_BYTES, header_block


def fields(block: bytes) -> list[tuple[bytes, bytes]]:
    decoder = Decoder(1 << 20)
    found = [(bytes(name), bytes(value)) for name, value in decoder.decode(block, raw=True)]
    assert not decoder.header_table.dynamic_entries
    return found


def test_heads_and_trailers_are_grpcs() -> None:
    assert fields(headers.RESPONSE_HEAD) == [
        (b":status", b"200"),
        (b"content-type", b"application/grpc"),
    ]
    assert fields(headers.TRAILERS_OK) == [(b"grpc-status", b"0")]
    assert fields(headers.response_head([("Key", "v"), ("id-bin", b"\0\1")]))[2:] == [
        (b"key", b"v"),
        (b"id-bin", b"AAE"),
    ]


@given(st.text(max_size=200))
def test_texts_are_percent_encoded(text: str) -> None:
    (status, message) = fields(headers.trailers(grpc.StatusCode.ABORTED, text + "!"))
    assert status == (b"grpc-status", b"10")
    assert all(0x20 <= byte < 0x7F for byte in message[1])
    decoded = bytearray()
    parts = message[1].split(b"%")
    decoded += parts[0]
    for part in parts[1:]:
        decoded += bytes.fromhex(part[:2].decode()) + part[2:]
    assert decoded.decode() == text + "!"


def test_a_text_with_a_lone_surrogate_is_sent() -> None:
    block = headers.trailers(grpc.StatusCode.INTERNAL, "cannot open a\udcff")
    assert fields(block)[1] == (b"grpc-message", b"cannot open a?")


def test_a_status_without_text_has_none() -> None:
    assert fields(headers.trailers(grpc.StatusCode.NOT_FOUND, "")) == [(b"grpc-status", b"5")]


def test_clients_whose_encoding_we_do_not_know_learn_which_we_do() -> None:
    assert dict(fields(headers.trailers(grpc.StatusCode.UNIMPLEMENTED, "no")))[
        b"grpc-accept-encoding"
    ]


@pytest.mark.parametrize("size", [0, 10, MAX_FRAME_BYTES, MAX_FRAME_BYTES + 1, 50_000])
def test_large_blocks_are_continued(size: int) -> None:
    frames, block, flags = header_block(1, bytes(size), end_stream=True), b"", []
    while frames:
        length = int.from_bytes(frames[:3])
        flags.append((frames[3], frames[4]))
        block += frames[9 : 9 + length]
        frames = frames[9 + length :]
    assert len(block) == size
    assert flags[0] == (1, 5 if len(flags) == 1 else 1)
    assert [kind for kind, _ in flags[1:]] == [9] * (len(flags) - 1)
    assert [bits for _, bits in flags[1:]] == [0] * (len(flags) - 2) + [4] * (len(flags) > 1)
