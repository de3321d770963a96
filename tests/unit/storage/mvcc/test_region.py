"""Regions always cover the key space without gaps, whatever is split; their bytes survive."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.model.errors import CorruptError
from storage.mvcc.region import (
    Region,
    RegionMap,
    RegionMissingError,
    decode_regions,
    encode_regions,
)

KEYS = st.binary(min_size=1, max_size=3)


@given(st.lists(st.sets(KEYS, min_size=1, max_size=3), max_size=5), KEYS)
def test_splits_keep_the_key_space_whole_and_raise_versions(
    splits: list[set[bytes]], probe: bytes
) -> None:
    regions, next_id = RegionMap([Region(1, 2)]), 3
    for asked in splits:
        old = regions.at(min(asked))
        keys = sorted(key for key in asked if old.contains(key) and key != old.start_key)
        if not keys:
            continue
        parts = old.split(
            keys, [(next_id + 2 * at, next_id + 2 * at + 1) for at in range(len(keys))]
        )
        next_id += 2 * len(keys)
        assert parts[-1].region_id == old.region_id
        assert all(part.version == old.version + len(keys) for part in parts)
        regions = regions.replaced([old], parts)
    listed = list(regions)
    assert listed[0].start_key == b""
    assert listed[-1].end_key == b""
    assert all(a.end_key == b.start_key for a, b in itertools.pairwise(listed))
    assert regions.at(probe).contains(probe)
    assert list(decode_regions(encode_regions(regions))) == listed


@given(st.sets(KEYS, min_size=1, max_size=6), st.randoms(use_true_random=False), KEYS)
def test_merges_keep_the_key_space_whole_and_the_newer_region_has_the_greater_version(
    keys: set[bytes], rng: random.Random, probe: bytes
) -> None:
    ids = iter(range(3, 100))
    regions = RegionMap(Region(1, 2).split(sorted(keys), [(next(ids), next(ids)) for _ in keys]))
    while len(regions) > 1:
        listed = list(regions)
        at = rng.randrange(1, len(listed))
        source, target = rng.sample(listed[at - 1 : at + 1], 2)
        merged = target.merged(source)
        assert (merged.region_id, merged.peer_id, merged.conf_ver) == (
            target.region_id,
            target.peer_id,
            target.conf_ver,
        )
        assert merged.version > max(source.version, target.version)
        regions = regions.replaced([source, target], [merged])
        assert regions.at(probe).contains(probe)
        assert regions.after(probe) == regions.at(probe)
    assert [(region.start_key, region.end_key) for region in regions] == [(b"", b"")]


def test_after_a_hole_comes_the_next_region_and_after_the_last_none() -> None:
    first, second = Region(1, 2, b"b", b"c"), Region(3, 4, b"d", b"e")
    regions = RegionMap([first, second])
    assert [regions.after(key) for key in (b"", b"b", b"c", b"d", b"e")] == [
        first,
        first,
        second,
        second,
        None,
    ]
    assert not first.touches(second)
    assert first.overlaps(b"", b"bb")
    assert not first.overlaps(b"c", b"")


@given(
    st.binary(max_size=2), st.binary(max_size=2), st.binary(max_size=2), st.binary(max_size=2), KEYS
)
def test_clamp_is_the_intersection(
    start: bytes, end: bytes, lower: bytes, upper: bytes, probe: bytes
) -> None:
    region = Region(1, 2, start, end)
    low, high = region.clamp(lower, upper)
    inside = region.contains(probe) and lower <= probe and (not upper or probe < upper)
    assert (low <= probe and (not high or probe < high)) == inside


def test_a_key_outside_all_regions_is_missing() -> None:
    with pytest.raises(RegionMissingError):
        RegionMap([Region(1, 2, b"b", b"c")]).at(b"a")
    with pytest.raises(RegionMissingError):
        RegionMap([]).at(b"a")


@pytest.mark.parametrize(
    "data", [b"", b"{}", b'{"format": 2, "regions": []}', b'{"format": 1, "regions": [[1]]}']
)
def test_a_damaged_region_table_is_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptError):
        decode_regions(data)
