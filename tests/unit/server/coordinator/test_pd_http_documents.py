"""Stores and regions in PD's shapes, whatever is reported of them."""

from kvproto import metapb_pb2

from server.coordinator.cluster.cluster import Cluster
from server.coordinator.cluster.regions import KnownRegion
from server.coordinator.keys import ClusterKeys
from server.coordinator.pd_http import documents


def test_a_state_or_role_of_a_later_version_is_shown_by_its_number():
    peer = metapb_pb2.Peer(id=2, store_id=1, role=98)
    region = metapb_pb2.Region(id=3, peers=[peer])
    shown = documents.region(KnownRegion(region, peer))
    assert shown["leader"]["role_name"] == "98"

    store = metapb_pb2.Store(id=1, address="a:1", state=99, node_state=97)
    cluster = Cluster(None, ClusterKeys(7))
    counts = documents.RegionCounts()
    document = documents.store(cluster, store, counts)["store"]
    assert document["state_name"] == "99"
    assert document["node_state_name"] == "97"


def test_states_and_roles_have_the_names_of_pd():
    assert (
        documents.region(KnownRegion(metapb_pb2.Region(), metapb_pb2.Peer(role=1)))["leader"][
            "role_name"
        ]
        == "Learner"
    )
    store = metapb_pb2.Store(state=metapb_pb2.Tombstone)
    assert documents.state_name(store) == "Tombstone"
