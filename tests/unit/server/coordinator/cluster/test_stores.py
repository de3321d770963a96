"""Registrations of stores, any number in any order: addresses stay unique and removals final."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvproto import metapb_pb2, pdpb_pb2

from server.coordinator.cluster.stores import cluster_version, is_removed, registered, version_of
from server.coordinator.errors import RefusedError

ADDRESSES = st.sampled_from(["h:1", "h:2", "h:3"])
STORES = st.builds(
    metapb_pb2.Store,
    id=st.integers(0, 4),
    address=st.one_of(ADDRESSES, st.just("")),
    peer_address=st.one_of(ADDRESSES, st.just("")),
    state=st.sampled_from([metapb_pb2.Up, metapb_pb2.Up, metapb_pb2.Offline, metapb_pb2.Tombstone]),
    version=st.sampled_from(["8.5.0", "v7.1.2-alpha", "", "8.5"]),
)


@given(st.lists(STORES, max_size=30))
def test_addresses_stay_unique_and_removals_final(wanted: list[metapb_pb2.Store]) -> None:
    stores: dict[int, metapb_pb2.Store] = {}
    for store in wanted:
        before = stores.get(store.id)
        try:
            kept = registered(store, stores)
        except RefusedError:
            continue
        assert store.id
        assert before is None or not is_removed(before)
        assert before is None or kept.state == before.state
        stores[store.id] = kept
        living = [one for one in stores.values() if not is_removed(one)]
        taken = [address for one in living for address in {one.address, one.peer_address} - {""}]
        assert len(taken) == len(set(taken))


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("8.5.0", (8, 5, 0)),
        ("v7.5.0-alpha", (7, 5, 0)),
        ("6.0.0+build", (6, 0, 0)),
        ("", (1, 0, 0)),
    ],
)
def test_versions_are_compared_as_numbers(text: str, version: tuple[int, int, int]) -> None:
    assert version_of(metapb_pb2.Store(version=text)) == version


def test_the_clusters_version_is_that_of_its_oldest_living_store() -> None:
    versions = [
        ("8.10.0", metapb_pb2.Up),
        ("8.9.1", metapb_pb2.Offline),
        ("1.0.0", metapb_pb2.Tombstone),
        ("kept by somebody else", metapb_pb2.Up),
    ]
    stores = [metapb_pb2.Store(version=version, state=state) for version, state in versions]
    assert cluster_version(stores) == "8.9.1"
    assert cluster_version([]) == ""


def test_who_was_removed_is_told_so_before_anything_else() -> None:
    gone = metapb_pb2.Store(id=1, state=metapb_pb2.Tombstone)
    with pytest.raises(RefusedError) as refused:
        registered(metapb_pb2.Store(id=1, version="nonsense"), {1: gone})
    assert refused.value.type == pdpb_pb2.STORE_TOMBSTONE
