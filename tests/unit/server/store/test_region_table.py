"""The gate lets a request in exactly when the caller's map is right."""

from hypothesis import given
from hypothesis import strategies as st
from kvproto import errorpb_pb2 as errorpb
from kvproto import kvrpcpb_pb2 as kvrpcpb
from kvproto import metapb_pb2 as metapb

from server.store.region_table import RegionGate
from storage.codec import encode_bytes
from storage.mvcc.region import Region, RegionMap

LEFT = Region(1, 11, b"", encode_bytes(b"m"), version=2)
RIGHT = Region(2, 12, encode_bytes(b"m"), b"", version=2)
GATE = RegionGate(9, RegionMap([LEFT, RIGHT]))


def context(region: Region, version: int = 2, store_id: int = 9) -> kvrpcpb.Context:
    epoch = metapb.RegionEpoch(conf_ver=1, version=version)
    peer = metapb.Peer(id=region.peer_id, store_id=store_id)
    return kvrpcpb.Context(region_id=region.region_id, region_epoch=epoch, peer=peer)


@given(st.lists(st.binary(max_size=3), min_size=1), st.sampled_from([LEFT, RIGHT]))
def test_all_keys_must_lie_in_the_region(keys: list[bytes], region: Region) -> None:
    found = GATE.admit(context(region), keys)
    inside = all(region.contains(encode_bytes(key)) for key in keys)
    assert (found == region) == inside
    assert inside or (
        isinstance(found, errorpb.Error) and found.key_not_in_region.region_id == region.region_id
    )


def test_raw_keys_lie_in_regions_as_they_are() -> None:
    raw = RegionGate(9, RegionMap([Region(1, 11, b"", b"m"), Region(2, 12, b"m", b"")]))
    epoch = metapb.RegionEpoch(conf_ver=1, version=1)
    asked = kvrpcpb.Context(region_id=1, region_epoch=epoch)
    assert raw.admit(asked, [b"lzzzzzzzzzzz"], raw=True) == Region(1, 11, b"", b"m")
    assert isinstance(raw.admit(asked, [b"m"], raw=True), errorpb.Error)


def test_an_old_epoch_learns_the_region_and_its_neighbours() -> None:
    found = GATE.admit(context(LEFT, version=1), [])
    assert isinstance(found, errorpb.Error)
    assert [region.id for region in found.epoch_not_match.current_regions] == [1, 2]


def test_another_stores_peer_is_refused_before_anything_else() -> None:
    found = GATE.admit(context(LEFT, version=1, store_id=8), [])
    assert isinstance(found, errorpb.Error)
    assert (found.store_not_match.request_store_id, found.store_not_match.actual_store_id) == (8, 9)
