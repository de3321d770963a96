"""The region cache against a plain map of key to region, over random splits,
merges and late news.
"""

from hypothesis import given
from hypothesis import strategies as st
from kvproto import metapb_pb2 as metapb

from server.rpc.region_cache import RegionCache, RegionRoute, covers

KEYS = [bytes([letter]) for letter in b"abcdefgh"]


def route(start: bytes, end: bytes, *, version: int = 1, region_id: int = 1) -> RegionRoute:
    region = metapb.Region(
        id=region_id,
        start_key=start,
        end_key=end,
        region_epoch=metapb.RegionEpoch(conf_ver=1, version=version),
    )
    return RegionRoute(region, metapb.Peer(id=9, store_id=1), "127.0.0.1:1")


def test_an_empty_end_covers_everything_behind_the_start() -> None:
    assert covers(route(b"b", b"").region, b"zzz")
    assert not covers(route(b"b", b"").region, b"a")
    assert not covers(route(b"b", b"c").region, b"c")


def test_a_split_replaces_its_parent_only_where_it_overlaps() -> None:
    cache = RegionCache()
    cache.insert(route(b"", b"", version=1))
    assert cache.insert(route(b"m", b"", version=2, region_id=2))
    assert cache.find(b"a") is None
    found = cache.find(b"z")
    assert found is not None
    assert found.region.id == 2


def test_late_news_of_an_older_epoch_is_refused() -> None:
    cache = RegionCache()
    cache.insert(route(b"a", b"m", version=5))
    assert not cache.insert(route(b"", b"", version=4))
    found = cache.find(b"b")
    assert found is not None
    assert found.region.region_epoch.version == 5


def test_dropping_an_old_epoch_spares_a_newer_one() -> None:
    cache = RegionCache()
    cache.insert(route(b"a", b"m", version=5))
    cache.drop(route(b"a", b"m", version=4).region)
    assert len(cache) == 1
    cache.drop(route(b"a", b"m", version=5).region)
    assert len(cache) == 0


bounds = st.tuples(st.sampled_from([b"", *KEYS]), st.sampled_from([b"", *KEYS])).filter(
    lambda pair: not pair[1] or pair[0] < pair[1]
)
steps = st.lists(st.tuples(st.booleans(), bounds, st.integers(1, 4)), max_size=30)


@given(steps)
def test_the_cache_answers_as_a_map_of_every_key_would(
    news: list[tuple[bool, tuple[bytes, bytes], int]],
) -> None:
    cache = RegionCache()
    kept: list[RegionRoute] = []
    for number, (inserting, (start, end), version) in enumerate(news):
        new = route(start, end, version=version, region_id=number + 1)
        touched = [old for old in kept if _overlap(old.region, new.region)]
        newer = [old for old in touched if old.region.region_epoch.version > version]
        if inserting:
            assert cache.insert(new) == (not newer)
            if not newer:
                kept = [old for old in kept if old not in touched] + [new]
        else:
            cache.drop(new.region)
            kept = [old for old in kept if old not in touched or old in newer]
        for key in [b"", *KEYS, b"z"]:
            assert cache.find(key) == next((old for old in kept if covers(old.region, key)), None)
        assert len(cache) == len(kept)


def _overlap(left: metapb.Region, right: metapb.Region) -> bool:
    return (not right.end_key or left.start_key < right.end_key) and (
        not left.end_key or right.start_key < left.end_key
    )
