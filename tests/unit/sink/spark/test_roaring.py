"""Deletion vectors: what goes in comes out, and Delta's own bytes are read."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark_tidemark.lake import roaring

# dense and sparse parts, so that containers of both kinds come; up to five containers
SPANS = st.lists(
    st.tuples(st.integers(0, 300_000), st.integers(1, 9_000), st.integers(1, 70)), max_size=5
)


@given(SPANS)
def test_positions_survive_a_vector_and_its_frame(spans):
    rows = {row for start, count, step in spans for row in range(start, start + count * step, step)}
    positions = np.array(sorted(rows), np.int64)
    framed = roaring.framed(roaring.encoded(positions))
    assert (roaring.decoded(roaring.unframed(framed)) == positions).all()


@given(st.binary(max_size=40).filter(lambda data: len(data) % 4 == 0))
def test_bytes_survive_their_text(data):
    assert roaring.unz85(roaring.z85(data)) == data


def test_the_text_is_that_of_the_specification():
    assert roaring.z85(bytes.fromhex("864FD26FB559F75B")) == "HelloWorld"


def test_runs_are_read_though_not_written():
    runs = struct.pack("<HHHHH", 2, 3, 4, 100, 0)  # 3 to 7, and 100
    bitmap = struct.pack("<I", 12347) + b"\x01" + struct.pack("<HH", 1, 5) + runs
    assert roaring.decoded(struct.pack("<iqI", 1681511377, 1, 0) + bitmap).tolist() == [
        65539,
        *range(65540, 65544),
        65636,
    ]


def test_the_bytes_of_one_position_do_not_change():
    assert roaring.encoded(np.array([65543])).hex() == (
        "d1d33964" "0100000000000000" "00000000" "3a300000" "01000000" "01000000" "10000000" "0700"
    )  # fmt: skip


def test_a_damaged_vector_is_refused():
    framed = bytearray(roaring.framed(roaring.encoded(np.array([1, 2]))))
    framed[8] ^= 1
    with pytest.raises(ValueError, match="checksum"):
        roaring.unframed(bytes(framed))
    with pytest.raises(ValueError, match="unknown kind"):
        roaring.decoded(b"\0" * 12)
