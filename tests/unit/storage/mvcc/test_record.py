"""Records and keys on disk: round trips, order, golden bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.codec import encode_bytes
from storage.model.errors import CorruptError
from storage.mvcc.layout import AFTER_VERSIONS, column_range, lock_key, split_version, user_key, write_key
from storage.mvcc.record import DELETE, LOCK, PESSIMISTIC, PUT, ROLLBACK, Lock, Write, decode_lock, decode_write

TS = st.integers(0, 2**64 - 1)
VALUES = st.none() | st.binary(max_size=255)
LOCKS = st.builds(
    Lock, st.sampled_from([PUT, DELETE, LOCK, PESSIMISTIC]), st.binary(max_size=40), TS, TS, TS, TS, TS, VALUES
)
WRITES = st.builds(Write, st.sampled_from([PUT, DELETE, LOCK, ROLLBACK]), TS, VALUES, st.booleans())


@given(LOCKS)
def test_a_lock_survives_its_bytes(lock: Lock) -> None:
    assert decode_lock(lock.encode()) == lock


@given(WRITES)
def test_a_write_survives_its_bytes(write: Write) -> None:
    assert decode_write(write.encode()) == write


def test_the_bytes_of_the_format_do_not_change() -> None:
    lock = Lock(PUT, b"pk", 0x0102, 3000, 7, 8, 9, b"v")
    assert lock.encode().hex() == (
        "015001" "0000000000000102" "0000000000000bb8" "0000000000000007" "0000000000000008" "0000000000000009"
        "00000002" "706b" "76"
    )  # fmt: skip
    assert Write(DELETE, 0x0102).encode().hex() == "0144000000000000000102"
    assert Write(PUT, 1, b"", overlapped_rollback=True).encode().hex() == "0150030000000000000001"
    assert lock_key(encode_bytes(b"k")).hex() == "6c6b00000000000000f8"
    assert write_key(encode_bytes(b"k"), 1).hex() == "776b00000000000000f8fffffffffffffffe"


@pytest.mark.parametrize("data", [b"", b"\x01P", b"\x02" + b"\0" * 60])
def test_unknown_versions_and_short_records_are_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptError):
        decode_lock(data)
    with pytest.raises(CorruptError):
        decode_write(data)


@given(st.binary(max_size=40))
def test_user_key_undoes_encode_bytes(key: bytes) -> None:
    assert user_key(encode_bytes(key)) == key


@given(st.binary(max_size=12), st.binary(max_size=12), TS, TS)
def test_versions_sort_by_key_then_newest_first(a: bytes, b: bytes, ts_a: int, ts_b: int) -> None:
    first, second = write_key(encode_bytes(a), ts_a), write_key(encode_bytes(b), ts_b)
    assert (first < second) == ((a, -ts_a) < (b, -ts_b))
    assert split_version(first) == (encode_bytes(a), ts_a)


@given(st.binary(max_size=12), st.binary(max_size=12), TS)
def test_after_versions_separates_keys(a: bytes, b: bytes, ts: int) -> None:
    bound = b"w" + encode_bytes(a) + AFTER_VERSIONS
    assert (write_key(encode_bytes(b), ts) < bound) == (b <= a)


def test_an_open_range_ends_with_its_column() -> None:
    assert column_range(b"w", b"", b"") == (b"w", b"x")
