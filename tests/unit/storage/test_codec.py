import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.codec import (
    decode_bytes,
    decode_i64,
    decode_u64,
    decode_u64_desc,
    encode_bytes,
    encode_i64,
    encode_u64,
    encode_u64_desc,
    prefix_end,
)
from storage.model.errors import CorruptError

u64 = st.integers(0, (1 << 64) - 1)
i64 = st.integers(-(1 << 63), (1 << 63) - 1)


@given(st.binary(max_size=40), st.binary(max_size=10), st.binary(max_size=10))
def test_bytes_round_trip_wherever_they_stand(data: bytes, before: bytes, after: bytes) -> None:
    encoded = encode_bytes(data)
    assert decode_bytes(before + encoded + after, len(before)) == (data, len(before) + len(encoded))


@given(st.binary(max_size=20), st.binary(max_size=20), st.binary(max_size=3), st.binary(max_size=3))
def test_encoded_bytes_keep_their_order_whatever_follows(
    one: bytes, two: bytes, tail: bytes, other: bytes
) -> None:
    if one != two:
        assert (encode_bytes(one) + tail < encode_bytes(two) + other) == (one < two)


def test_encoded_bytes_are_the_ones_of_tidb() -> None:
    assert encode_bytes(b"").hex() == "0000000000000000f7"
    assert encode_bytes(b"abc").hex() == "6162630000000000fa"
    assert encode_bytes(b"12345678").hex() == "3132333435363738ff0000000000000000f7"


@pytest.mark.parametrize(
    "damaged", ["", "61", "616263000000000000", "6162630000000001fa", "616263000000000010"]
)
def test_damaged_bytes_are_refused(damaged: str) -> None:
    with pytest.raises(CorruptError, match="memcomparable"):
        decode_bytes(bytes.fromhex(damaged))


@given(u64, u64)
def test_unsigned_numbers_round_trip_in_both_orders(one: int, two: int) -> None:
    assert decode_u64(encode_u64(one)) == decode_u64_desc(encode_u64_desc(one)) == one
    assert (encode_u64(one) < encode_u64(two)) == (one < two)
    assert (encode_u64_desc(one) < encode_u64_desc(two)) == (one > two)


@given(i64, i64)
def test_signed_numbers_round_trip_in_order(one: int, two: int) -> None:
    assert decode_i64(encode_i64(one)) == one
    assert (encode_i64(one) < encode_i64(two)) == (one < two)


@given(st.binary(max_size=6), st.binary(max_size=8))
def test_a_prefix_ends_just_after_all_keys_with_it(prefix: bytes, key: bytes) -> None:
    end = prefix_end(prefix)
    inside = prefix <= key and (not end or key < end)
    assert inside == key.startswith(prefix)
