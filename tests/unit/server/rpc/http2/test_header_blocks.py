"""Header blocks: what the library reads in them we read,
whatever was remembered of those before.
"""

import pytest
from hpack import Decoder, Encoder
from hpack.exceptions import HPACKError
from hypothesis import given
from hypothesis import strategies as st

from server.rpc.http2.frames import ConnectionFault
from server.rpc.http2.headers import Field, HeaderDecoder, OversizedHeadersError

NAMES = st.sampled_from([b":path", b"te", b"user-agent", b"grpc-timeout", b"x", b"y" * 40])
FIELDS = st.lists(st.tuples(NAMES, st.binary(max_size=60)), max_size=8)
MAX_BYTES = 1 << 20


def decoder(max_bytes: int = MAX_BYTES) -> HeaderDecoder[tuple[Field, ...]]:
    return HeaderDecoder(max_bytes, lambda fields: fields)


@given(
    st.lists(
        st.tuples(
            FIELDS, st.booleans(), st.sampled_from([None, 0, 64, 200, 4096]), st.integers(1, 3)
        ),
        max_size=8,
    )
)
def test_a_connections_blocks_mean_what_the_library_says(
    blocks: list[tuple[list[Field], bool, int | None, int]],
) -> None:
    encoder, ours = Encoder(), decoder()
    for fields, huffman, resized, times in blocks:
        if resized is not None:
            encoder.header_table_size = resized
        for _ in range(times):
            block = encoder.encode(fields, huffman=huffman)
            assert ours.request(block) == tuple(fields)


@given(st.lists(st.binary(max_size=30), max_size=5))
def test_any_bytes_are_read_as_the_library_reads_them_or_end_the_connection(
    blocks: list[bytes],
) -> None:
    ours, library = decoder(), Decoder(MAX_BYTES)
    for block in blocks:
        try:
            expected = tuple(tuple(field) for field in library.decode(block, raw=True))
        except (HPACKError, IndexError):
            with pytest.raises(ConnectionFault):
                ours.request(block)
            return
        assert ours.request(block) == expected


def test_a_block_means_another_thing_when_the_table_has_changed() -> None:
    ours = decoder()
    ours.request(b"\x40\x01a\x01b")  # a: b becomes entry 62
    assert ours.request(b"\xbe") == ((b"a", b"b"),)
    assert ours.request(b"\xbe") == ((b"a", b"b"),)
    ours.request(b"\x40\x01c\x01d")
    assert ours.request(b"\xbe") == ((b"c", b"d"),)
    ours.request(b"\x20")  # a table of no bytes
    with pytest.raises(ConnectionFault):
        ours.request(b"\xbe")


def test_a_block_that_changes_the_table_changes_it_every_time() -> None:
    ours = decoder()
    for _ in range(3):
        ours.request(b"\x40\x01a\x01b")
    assert [ours.request(bytes([index])) for index in (0xBE, 0xBF, 0xC0)] == [((b"a", b"b"),)] * 3


def test_what_is_remembered_is_bounded() -> None:
    ours = decoder()
    for number in range(1000):
        ours.request(b"\x00\x01a\x02" + number.to_bytes(2))
    assert len(ours._known) == 256


def test_fields_of_a_few_bytes_each_cannot_grow_beyond_the_bound() -> None:
    ours = decoder(max_bytes=4096)
    ours.request(b"\x40\x01a\x7f\x81\x03" + b"v" * 512)
    with pytest.raises(OversizedHeadersError):
        ours.request(b"\xbe" * 30)
    assert ours.request(b"\xbe") == ((b"a", b"v" * 512),)
