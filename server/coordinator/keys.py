"""Where PD keeps what in etcd; an operator's etcdctl habits hold."""

from dataclasses import dataclass

from gcsafepoint.state.records import GcKeys

CLUSTER_ID = b"/pd/cluster_id"
COPY_PREFIX = b"/tidemark"
"""What the key of a copy of ours begins with, before the key of PD's layout."""


@dataclass(frozen=True, slots=True)
class ClusterKeys:
    """The paths of one cluster."""

    cluster_id: int

    def path(self, tail: str) -> bytes:
        """`/pd/<cluster id>/<tail>`."""
        return f"/pd/{self.cluster_id}/{tail}".encode()

    def store(self, store_id: int) -> bytes:
        """A `metapb.Store`."""
        return self.path(f"raft/s/{store_id:020d}")

    def region(self, region_id: int) -> bytes:
        """A `metapb.Region`."""
        return self.path(f"raft/r/{region_id:020d}")

    def member(self, member_id: int) -> bytes:
        """A `pdpb.Member`; PD keeps other facts of a member beside it."""
        return self.path(f"member/{member_id}/tidemark")

    @property
    def external_ts(self) -> bytes:
        """The external timestamp, in hex."""
        return self.path("raft/external_timestamp")

    @property
    def gc(self) -> GcKeys:
        """The safepoints' paths."""
        return GcKeys(self.path("gc/"))
