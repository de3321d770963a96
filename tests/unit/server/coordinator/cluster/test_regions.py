"""The region map against a list that is searched from end to end."""

from hypothesis import given
from hypothesis import strategies as st
from kvproto import metapb_pb2

from server.coordinator.cluster.regions import Regions

NOBODY = metapb_pb2.Peer()
KEYS = st.sampled_from([b"", b"a", b"b", b"c", b"d", b"e"])


def region(
    region_id: int, start: bytes = b"", end: bytes = b"", version: int = 1, conf_ver: int = 1
) -> metapb_pb2.Region:
    return metapb_pb2.Region(
        id=region_id,
        start_key=start,
        end_key=end,
        region_epoch=metapb_pb2.RegionEpoch(version=version, conf_ver=conf_ver),
        peers=[metapb_pb2.Peer(id=region_id * 10, store_id=1)],
    )


def holds(known: metapb_pb2.Region, key: bytes) -> bool:
    return known.start_key <= key and (not known.end_key or key < known.end_key)


def overlap(one: metapb_pb2.Region, two: metapb_pb2.Region) -> bool:
    return (not two.end_key or one.start_key < two.end_key) and (
        not one.end_key or two.start_key < one.end_key
    )


REPORTS = st.lists(
    st.tuples(st.integers(1, 5), KEYS, KEYS, st.integers(1, 4), st.integers(1, 2)).filter(
        lambda report: not report[2] or report[1] < report[2]
    ),
    max_size=40,
)


@given(REPORTS)
def test_reports_leave_what_the_naive_map_leaves(
    reports: list[tuple[int, bytes, bytes, int, int]],
) -> None:
    regions, naive = Regions(), dict[int, metapb_pb2.Region]()
    for report in reports:
        new = region(*report)
        others = [other for other in naive.values() if other.id != new.id and overlap(new, other)]
        old = naive.get(new.id)
        epochs = (old.region_epoch.version, old.region_epoch.conf_ver) if old else (0, 0)
        stale = new.region_epoch.version < epochs[0] or new.region_epoch.conf_ver < epochs[1]
        stale = stale or any(
            new.region_epoch.version < other.region_epoch.version for other in others
        )
        reported = regions.report(new, NOBODY)
        assert reported.stale == stale
        if not stale:
            assert sorted(reported.removed) == sorted(other.id for other in others)
            naive = {known: kept for known, kept in naive.items() if kept not in others} | {
                new.id: new
            }
        for key in (b"", b"a", b"aa", b"b", b"cc", b"e", b"z"):
            found = regions.find(key)
            wanted = [known for known in naive.values() if holds(known, key)]
            assert ([found.region] if found else []) == wanted
        assert [known.region for known in regions.scan(b"b", b"d")] == sorted(
            (known for known in naive.values() if overlap(known, region(99, b"b", b"d"))),
            key=lambda known: known.start_key,
        )


def test_a_split_replaces_the_parent_and_an_old_report_of_it_is_stale() -> None:
    regions = Regions()
    regions.report(region(1), NOBODY)
    regions.report(region(2, b"", b"m", version=2), NOBODY)
    regions.report(region(1, b"m", b"", version=2), NOBODY)
    assert regions.report(region(1), NOBODY).stale
    before = regions.before(b"x")
    assert before is not None
    assert before.region.id == 2
    assert regions.before(b"a") is None
    assert len(regions) == 2


def test_a_report_that_says_nothing_new_need_not_be_saved() -> None:
    regions = Regions()
    assert regions.report(region(1), NOBODY).saved is not None
    assert regions.report(region(1), metapb_pb2.Peer(id=10, store_id=1)).saved is None


def test_the_leader_is_the_reported_else_the_known_else_the_first_peer() -> None:
    regions = Regions()
    grown = region(1, conf_ver=2)
    grown.peers.add(id=77, store_id=2)
    regions.report(region(1), NOBODY)
    assert regions.by_id(1).leader.id == 10  # type: ignore[union-attr]  # None fails, too
    regions.report(grown, metapb_pb2.Peer(id=77, store_id=2))
    regions.report(grown, NOBODY)
    assert regions.by_id(1).leader.id == 77  # type: ignore[union-attr]  # None fails, too
