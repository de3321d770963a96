"""Checksums of ranges: the published check value, and the same however a range is cut."""

from hypothesis import given
from hypothesis import strategies as st

from storage.mvcc.raw import range_sum


def test_the_check_value_is_that_of_crc_64_xz() -> None:
    assert range_sum([(b"1234", b"56789")]) == (0x995DC9BBDF1939FA, 1, 9)
    assert range_sum([(b"", b"")]) == (0, 1, 0)


@given(st.lists(st.tuples(st.binary(max_size=9), st.binary(max_size=9))), st.integers(0, 9))
def test_sums_of_parts_make_the_sum_of_the_whole(
    pairs: list[tuple[bytes, bytes]], cut: int
) -> None:
    left, right, whole = range_sum(pairs[:cut]), range_sum(pairs[cut:]), range_sum(pairs)
    assert (left.xor ^ right.xor, left.pairs + right.pairs, left.size + right.size) == whole
