"""Records and keys on disk: round trips, order, golden bytes."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.codec import encode_bytes
from storage.model.errors import CorruptError
from storage.mvcc.record import (
    AFTER_VERSIONS,
    DELETE,
    LOCK,
    PESSIMISTIC,
    PUT,
    ROLLBACK,
    Lock,
    Write,
    column_range,
    decode_lock,
    decode_write,
    lock_key,
    split_version,
    user_key,
    value_key,
    write_key,
)
from storage.mvcc.region import Region, decode_regions, encode_regions

TS = st.integers(0, 2**64 - 1)
VALUES = st.none() | st.binary(max_size=255)
KINDS = st.sampled_from([PUT, DELETE, LOCK, PESSIMISTIC])
LOCK_FIELDS = (KINDS, st.binary(max_size=40), TS, TS, TS, TS, TS, VALUES)
SECONDARIES = st.lists(st.binary(max_size=40), max_size=4).map(tuple)
SOURCES = st.just(0) | TS
LOCKS = st.builds(Lock, *LOCK_FIELDS, st.just(value=False), st.just(()), SOURCES) | st.builds(
    Lock, *LOCK_FIELDS, st.just(value=True), SECONDARIES, SOURCES
)
WRITES = st.builds(
    Write, st.sampled_from([PUT, DELETE, LOCK, ROLLBACK]), TS, VALUES, st.booleans(), SOURCES
)


@given(LOCKS)
def test_a_lock_survives_its_bytes(lock: Lock) -> None:
    assert decode_lock(lock.encode()) == lock


@given(WRITES)
def test_a_write_survives_its_bytes(write: Write) -> None:
    assert decode_write(write.encode()) == write


GOLDEN = json.loads((Path(__file__).parents[3] / "golden" / "mvcc.json").read_text())
RECORDS: dict[str, Lock | Write] = {
    "lock_put_short": Lock(PUT, b"pk", 0x0102, 3000, 7, 8, 9, b"v"),
    "lock_pessimistic": Lock(PESSIMISTIC, b"pk", 0x0102, 20000, 0x0103),
    "lock_async_commit": Lock(PUT, b"pk", 0x0102, 3000, 0, 0x0103, 3, b"v", True, (b"s1", b"")),
    "lock_source": Lock(DELETE, b"pk", 0x0102, 3000, txn_source=5),
    "write_source": Write(PUT, 0x0102, b"v", txn_source=5),
    "write_put_long": Write(PUT, 0x0102),
    "write_delete": Write(DELETE, 0x0102),
    "write_put_empty_over_rollback": Write(PUT, 1, b"", overlapped_rollback=True),
    "write_rollback": Write(ROLLBACK, 5),
}
REGIONS = [
    Region(4, 5, b"", encode_bytes(b"m"), 1, 2),
    Region(2, 3, encode_bytes(b"m"), b"", 1, 2),
]


def test_golden_bytes_are_written_and_read_as_ever() -> None:
    for name, record in RECORDS.items():
        golden = bytes.fromhex(GOLDEN[name])
        assert record.encode() == golden, name
        assert (decode_lock if isinstance(record, Lock) else decode_write)(golden) == record, name
    assert lock_key(encode_bytes(b"k")).hex() == GOLDEN["key_lock"]
    assert write_key(encode_bytes(b"12345678"), 1).hex() == GOLDEN["key_write"]
    assert value_key(encode_bytes(b""), 2).hex() == GOLDEN["key_value"]
    assert encode_regions(REGIONS).hex() == GOLDEN["regions"]
    assert list(decode_regions(bytes.fromhex(GOLDEN["regions"]))) == REGIONS


@pytest.mark.parametrize("data", [b"", b"\x01P", b"\x03" + b"\0" * 60])
def test_unknown_versions_and_short_records_are_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptError):
        decode_lock(data)
    with pytest.raises(CorruptError):
        decode_write(data)


@given(st.integers(0, 60))
def test_a_lock_that_ends_within_its_secondaries_is_corrupt(missing: int) -> None:
    data = Lock(PUT, b"pk", 1, 2, async_commit=True, secondaries=(b"first", b"second")).encode()
    with pytest.raises(CorruptError):
        decode_lock(data[: -1 - missing])


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
