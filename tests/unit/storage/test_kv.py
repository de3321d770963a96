from hypothesis import given
from hypothesis import strategies as st

from storage.kv import WriteBatch, scan_prefix
from tests.memory_kv import MemoryKV

keys = st.binary(max_size=3)
pairs = st.dictionaries(keys, st.binary(max_size=3), max_size=20)


def test_the_last_write_of_a_key_in_a_batch_wins() -> None:
    batch = WriteBatch()
    batch.put(b"a", b"1")
    batch.delete(b"a")
    batch.put(b"b", b"1")
    batch.put(b"b", b"2")
    assert (len(batch), batch.ops) == (2, {b"a": None, b"b": b"2"})


@given(pairs, keys, keys, st.booleans())
def test_a_scan_is_the_sorted_pairs_between_its_bounds(
    stored: dict[bytes, bytes], lower: bytes, upper: bytes, reverse: bool
) -> None:
    expected = sorted(
        (key, value) for key, value in stored.items() if key >= lower and (not upper or key < upper)
    )
    found = list(MemoryKV(stored).scan(lower, upper, reverse=reverse))
    assert found == (expected[::-1] if reverse else expected)


@given(pairs, keys)
def test_a_prefix_scan_is_the_pairs_with_that_prefix(
    stored: dict[bytes, bytes], prefix: bytes
) -> None:
    assert list(scan_prefix(MemoryKV(stored), prefix)) == sorted(
        (key, value) for key, value in stored.items() if key.startswith(prefix)
    )


def test_a_snapshot_does_not_see_later_writes() -> None:
    kv = MemoryKV({b"a": b"1"})
    snapshot = kv.snapshot()
    kv.delete_range(b"", b"")
    assert (snapshot.get(b"a"), kv.get(b"a")) == (b"1", None)
