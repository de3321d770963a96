import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.model.errors import CorruptError
from storage.tidb.record import (
    RecordKey,
    decode_int_handles,
    decode_record_key,
    record_key,
    table_span,
)
from tests.tidb_encoding import common_record_key

IDS = st.integers(1, (1 << 62) - 1)
HANDLES = st.integers(-(1 << 63), (1 << 63) - 1)


def test_a_record_key_is_what_tidb_writes() -> None:
    assert record_key(86, -5).hex() == "7480000000000000565f727ffffffffffffffb"


@given(IDS, HANDLES)
def test_a_record_key_gives_back_its_table_and_handle(table_id: int, handle: int) -> None:
    assert decode_record_key(record_key(table_id, handle)) == RecordKey(table_id, handle)


@given(IDS, st.binary(min_size=9))
def test_a_common_record_key_gives_back_its_handle(table_id: int, handle: bytes) -> None:
    assert decode_record_key(common_record_key(table_id, handle)) == RecordKey(table_id, handle)


@given(HANDLES, HANDLES)
def test_keys_sort_as_their_handles(one: int, other: int) -> None:
    assert (record_key(1, one) < record_key(1, other)) == (one < other)


@given(IDS, HANDLES, IDS)
def test_a_span_holds_the_records_of_its_table_only(table_id: int, handle: int, other: int) -> None:
    span = table_span(table_id)
    assert span.contains(record_key(other, handle)) == (other == table_id)
    assert not span.contains(record_key(table_id, handle)[:9] + b"_i" + bytes(8))


@given(st.lists(HANDLES), st.integers(0, 3))
def test_many_handles_decode_like_one_by_one(handles: list[int], skipped: int) -> None:
    keys = pa.array([record_key(3, handle) for handle in handles], pa.binary()).slice(skipped)
    assert decode_int_handles(keys).tolist() == handles[skipped:]


@pytest.mark.parametrize("key", [b"", b"t", b"m" + bytes(18), b"t" + bytes(8) + b"_i" + bytes(8)])
def test_other_keys_are_refused(key: bytes) -> None:
    with pytest.raises(CorruptError):
        decode_record_key(key)
    with pytest.raises(CorruptError):
        decode_int_handles(pa.array([key], pa.binary()))


def test_a_common_handle_is_no_integer() -> None:
    with pytest.raises(CorruptError):
        decode_int_handles(pa.array([common_record_key(1, bytes(9))], pa.binary()))
