"""What GC knows of a region's versions: never fewer than there are, and right after a crash."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.kv import WriteBatch
from storage.model.errors import CorruptError
from storage.mvcc.gc import VersionCounts, counts_key, stored_versions
from storage.mvcc.record import DELETE, PUT, Write, write_key
from storage.mvcc.region import Region, RegionMap
from tests.memory_kv import MemoryKV

LEFT, RIGHT = Region(1, 11, b"", b"m"), Region(2, 12, b"m", b"")
WRITES = st.lists(
    st.tuples(st.sampled_from([b"a", b"z"]), st.integers(1, 99), st.sampled_from([PUT, DELETE]))
)


def written(kv: MemoryKV, ops: dict[bytes, bytes]) -> None:
    batch = WriteBatch()
    batch.ops.update(ops)
    kv.write(batch, sync=True)


@given(WRITES, WRITES)
def test_counts_are_those_of_the_walk_and_all_that_came_since_also_after_a_crash(
    during: list[tuple[bytes, int, int]], after: list[tuple[bytes, int, int]]
) -> None:
    kv = MemoryKV()
    versions = stored_versions(kv, RegionMap([LEFT, RIGHT]))
    versions.begin_walk(LEFT)
    left = VersionCounts(5, 5, 7, 50)
    for number, (key, ts, kind) in enumerate((*during, *after)):
        if number == len(during):
            written(kv, versions.end_walk(LEFT, left))
        ops = {write_key(key, ts): Write(kind, 1).encode()}
        written(kv, {**ops, **versions.count(ops)})
    if not after:
        written(kv, versions.end_walk(LEFT, left))
    ours = [(ts, kind) for key, ts, kind in (*during, *after) if key == b"a"]
    expected = VersionCounts(
        5,
        5 + sum(kind == PUT for _, kind in ours),
        7 + len(ours),
        min([50, *(ts for ts, _ in ours)]),
    )
    assert versions.get(1) == expected
    assert versions.get(2) is None
    assert stored_versions(kv, RegionMap([LEFT, RIGHT])).get(1) == expected


def test_a_region_that_changed_is_unknown_and_old_records_of_it_are_not_believed() -> None:
    kv = MemoryKV()
    versions = stored_versions(kv, RegionMap([LEFT, RIGHT]))
    versions.begin_walk(LEFT)
    written(kv, versions.end_walk(LEFT, VersionCounts(1, 1, 1, 1)))
    versions.begin_walk(LEFT)
    merged = RIGHT.merged(LEFT)
    versions.replace_map(RegionMap([merged]), [1, 2])
    assert versions.get(1) is None
    assert versions.end_walk(LEFT, VersionCounts(9, 9, 9, 9)) == {}
    grown = LEFT.merged(RIGHT)
    assert stored_versions(kv, RegionMap([grown])).get(1) is None


def test_tikvs_rule_decides_whether_a_walk_is_worth_it() -> None:
    assert not VersionCounts(100, 100, 110, 5).needs_gc(10, 1.1)
    assert VersionCounts(100, 100, 111, 5).needs_gc(10, 1.1)
    assert not VersionCounts(100, 100, 500, 11).needs_gc(10, 1.1)
    assert VersionCounts(100, 50, 100, 5).needs_gc(10, 1.1)
    assert VersionCounts(100, 100, 100, 11).needs_gc(10, 0.5)
    assert not VersionCounts().needs_gc(10, 1.1)


def test_a_record_of_another_length_is_corrupt() -> None:
    kv = MemoryKV({counts_key(1): b"short"})
    with pytest.raises(CorruptError):
        stored_versions(kv, RegionMap([LEFT]))


def test_a_record_has_the_documented_bytes() -> None:
    versions = stored_versions(MemoryKV(), RegionMap([LEFT, RIGHT]))
    versions.begin_walk(LEFT)
    assert versions.end_walk(LEFT, VersionCounts(1, 2, 3, 4)) == {
        b"mversions/" + bytes(7) + b"\x01": b"".join(
            number.to_bytes(8) for number in (1, 1, 2, 3, 4)
        )
    }
