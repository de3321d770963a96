"""Members, stores and regions in the shapes that PD's HTTP clients parse (PD
client/http/types.go).
"""

import time
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from kvproto import metapb_pb2, pdpb_pb2

from server.coordinator.cluster.cluster import Cluster
from server.coordinator.cluster.regions import KnownRegion
from server.rpc.enum_name import enum_name

_DISCONNECTED_S, _DOWN_S = 20, 30 * 60
_NS = 1_000_000_000
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
VERSION = "v8.5.0"
"""The version of PD that this API is of, as stores report theirs; clients choose features by it.
"""


def member(one: pdpb_pb2.Member) -> dict[str, Any]:
    """A coordinator."""
    return {
        "name": one.name,
        "member_id": one.member_id,
        "peer_urls": list(one.peer_urls),
        "client_urls": list(one.client_urls),
        "binary_version": VERSION,
    }


def members(
    cluster_id: int, listed: Iterable[pdpb_pb2.Member], leader: pdpb_pb2.Member | None
) -> dict[str, Any]:
    """All coordinators, and which of them leads."""
    led = {"leader": member(leader), "etcd_leader": member(leader)} if leader else {}
    return {"header": {"cluster_id": cluster_id}, "members": [member(one) for one in listed], **led}


class RegionCounts:
    """Counts of regions: of all, and for each store those it has and those it leads; filled by one
    walk over them.
    """

    def __init__(self) -> None:
        self.regions = 0
        self.leaders = Counter[int]()
        self.peers = Counter[int]()

    def add(self, entry: KnownRegion) -> None:
        """Count one."""
        self.regions += 1
        self.leaders[entry.leader.store_id] += 1
        self.peers.update({peer.store_id for peer in entry.region.peers})


def store(cluster: Cluster, one: metapb_pb2.Store, counts: RegionCounts) -> dict[str, Any]:
    """A store and how it is."""
    stats = cluster.stats.get(one.id, pdpb_pb2.StoreStats())
    regions, leaders = counts.peers[one.id], counts.leaders[one.id]
    status: dict[str, Any] = {
        "capacity": size(stats.capacity),
        "available": size(stats.available),
        "used_size": size(stats.used_size),
        "leader_count": leaders,
        "leader_weight": 1,
        "leader_score": leaders,
        "leader_size": 0,
        "region_count": regions,
        "region_weight": 1,
        "region_score": regions,
        "region_size": 0,
    }
    if stats.start_time:
        status["start_ts"] = _time(stats.start_time)
    if one.last_heartbeat:
        status["last_heartbeat_ts"] = _time(one.last_heartbeat / _NS)
        if stats.start_time:
            status["uptime"] = f"{max(0, one.last_heartbeat // _NS - stats.start_time)}s"
    return {"store": _meta(one), "status": status}


def region(entry: KnownRegion) -> dict[str, Any]:
    """A region; keys in hexadecimal, as they lie in regions."""
    one = entry.region
    return {
        "id": one.id,
        "start_key": one.start_key.hex().upper(),
        "end_key": one.end_key.hex().upper(),
        "epoch": {"conf_ver": one.region_epoch.conf_ver, "version": one.region_epoch.version},
        "peers": [_peer(peer) for peer in one.peers],
        "leader": _peer(entry.leader),
        "cpu_usage": 0,
        "written_bytes": 0,
        "read_bytes": 0,
        "written_keys": 0,
        "read_keys": 0,
        "approximate_size": 0,
        "approximate_keys": 0,
    }


def regions(chosen: Iterable[KnownRegion]) -> dict[str, Any]:
    """Regions and how many they are."""
    listed = [region(entry) for entry in chosen]
    return {"count": len(listed), "regions": listed}


def region_stats(counts: RegionCounts) -> dict[str, Any]:
    """The number of regions that each store has, and leads."""
    none: dict[int, int] = {}
    return {
        "count": counts.regions,
        "empty_count": 0,
        "storage_size": 0,
        "storage_keys": 0,
        "store_leader_count": counts.leaders,
        "store_peer_count": counts.peers,
        "store_leader_size": none,
        "store_leader_keys": none,
        "store_peer_size": none,
        "store_peer_keys": none,
    }


def size(count: int) -> str:
    """Bytes as Go's units write them: four digits and a unit."""
    scaled, unit = float(count), 0
    while scaled >= 1024 and unit + 1 < len(_UNITS):
        scaled, unit = scaled / 1024, unit + 1
    return f"{scaled:.4g}{_UNITS[unit]}"


def state_name(one: metapb_pb2.Store) -> str:
    """PD's word for how a store is: by its state and its last heartbeat."""
    if one.state != metapb_pb2.Up:
        return enum_name(metapb_pb2.StoreState, one.state)
    silent_s = time.time() - one.last_heartbeat / _NS
    if silent_s >= _DOWN_S:
        return "Down"
    return "Disconnected" if silent_s >= _DISCONNECTED_S else "Up"


def _meta(one: metapb_pb2.Store) -> dict[str, Any]:
    document: dict[str, Any] = {"id": one.id, "address": one.address}
    if one.state:
        document["state"] = one.state
    if one.labels:
        document["labels"] = [{"key": label.key, "value": label.value} for label in one.labels]
    names = (
        "version",
        "peer_address",
        "status_address",
        "git_hash",
        "start_timestamp",
        "deploy_path",
        "last_heartbeat",
    )
    document |= {name: value for name in names if (value := getattr(one, name))}
    return document | {
        "node_state": one.node_state,
        "state_name": state_name(one),
        "node_state_name": enum_name(metapb_pb2.NodeState, one.node_state),
    }


def _peer(peer: metapb_pb2.Peer) -> dict[str, Any]:
    learner = {"is_learner": True} if peer.role == metapb_pb2.Learner else {}
    return {
        "id": peer.id,
        "store_id": peer.store_id,
        "role": peer.role,
        "role_name": enum_name(metapb_pb2.PeerRole, peer.role),
        **learner,
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
