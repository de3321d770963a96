"""Split keys are keys that exist, inside, and cut a region into parts of about the asked size."""

import itertools
import random
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from storage.codec import encode_bytes
from storage.kv import WriteBatch
from storage.leveldb import LevelDB
from storage.mvcc.record import lock_key, value_key, write_key
from storage.mvcc.region import Region, is_empty, range_bytes, region_bytes, split_keys
from tests.memory_kv import MemoryKV

KEYS = st.sets(st.binary(min_size=1, max_size=12), min_size=1, max_size=40)


@given(KEYS, st.integers(50, 2000), st.data())
def test_split_keys_are_existing_keys_inside_in_order(
    keys: set[bytes], part: int, data: st.DataObject
) -> None:
    encoded = sorted(encode_bytes(key) for key in keys)
    kv = MemoryKV({write_key(key, ts): bytes(50) for key in encoded for ts in (3, 9)})
    start = data.draw(st.sampled_from([b"", encoded[0]]))
    region = Region(
        1, 2, start, data.draw(st.sampled_from([b"", encoded[-1]])) if encoded[-1] > start else b""
    )
    chosen = split_keys(kv, region, part)
    assert chosen == sorted(set(chosen))
    assert all(key in encoded and region.contains(key) and key > region.start_key for key in chosen)
    bounds = [region.start_key, *chosen, region.end_key]
    biggest = max(range_bytes(kv, low, high) for low, high in itertools.pairwise(bounds))
    assert biggest <= 2 * part + 2 * (50 + 30)


def test_parts_of_a_real_database_are_of_about_the_same_size(tmp_path: Path) -> None:
    kv = LevelDB(tmp_path, write_buffer_bytes=64 << 10)
    rng = random.Random(3)
    batch = WriteBatch()
    for number in range(4000):
        encoded = encode_bytes(b"t%08d" % number)
        batch.put(write_key(encoded, 5), rng.randbytes(20))
        batch.put(value_key(encoded, 4), rng.randbytes(500))
    kv.write(batch, sync=True)
    kv.compact(b"", b"\xff")
    region = Region(1, 2)
    whole = region_bytes(kv, region)
    bounds = [b"", *split_keys(kv, region, whole // 5), b""]
    sizes = [range_bytes(kv, low, high) for low, high in itertools.pairwise(bounds)]
    kv.close()
    assert len(sizes) == 5
    assert all(0.7 < 5 * size / whole < 1.4 for size in sizes), sizes


def test_only_a_region_without_any_record_is_empty() -> None:
    region = Region(1, 2, b"b", b"c")
    assert is_empty(MemoryKV({write_key(b"a", 1): b"", b"ra": b"", lock_key(b"c"): b""}), region)
    for key in (write_key(b"bx", 1), value_key(b"bx", 1), lock_key(b"bx"), b"rbx"):
        assert not is_empty(MemoryKV({key: b""}), region)
