"""The coordinator's own keys, in PD's layout of etcd, so that an operator finds them by etcdctl as
before. Clients may read them through the coordinator's port, and not write them.

Whoever deletes or overwrites PD's records under the leader stops the timestamps, or makes numbers
come twice. Those who have a reason, an operator with a snapshot or pd-recover, go to the etcd
itself. What clients of PD do write lies elsewhere: TiDB, TiCDC, BR and TiProxy below `/tidb`,
`/topology`, `/keyspaces/tidb` and `/tiproxy`, pumps below `/tidb-binlog`, our own daemons below
`/tidemark/default`, shared settings below `/global/config`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from etcdpb import election_pb2, lock_pb2, rpc_pb2
from google.protobuf.message import DecodeError

from gcsafepoint.state.records import GcKeys
from storage.codec import prefix_end
from storage.meta.errors import PermissionDeniedError

CLUSTER_ID = b"/pd/cluster_id"
COPY_PREFIX = b"/tidemark"
"""The prefix of a copy's key of ours, before the key of PD's layout."""
OWN_PREFIXES = (b"/pd/", COPY_PREFIX + b"/pd/")
"""The prefixes of PD's keys, and of the records that we keep beside them."""


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


_TO_THE_END = b"\0"
WRITES: dict[str, Any] = {
    "/etcdserverpb.KV/Put": rpc_pb2.PutRequest,
    "/etcdserverpb.KV/DeleteRange": rpc_pb2.DeleteRangeRequest,
    "/etcdserverpb.KV/Txn": rpc_pb2.TxnRequest,
    "/v3electionpb.Election/Campaign": election_pb2.CampaignRequest,
    "/v3electionpb.Election/Proclaim": election_pb2.ProclaimRequest,
    "/v3electionpb.Election/Resign": election_pb2.ResignRequest,
    "/v3lockpb.Lock/Lock": lock_pb2.LockRequest,
    "/v3lockpb.Lock/Unlock": lock_pb2.UnlockRequest,
}
"""The calls that write keys, and the classes of their requests."""


class OwnKeysError(PermissionDeniedError):
    """A client wants to write a key of the coordinator."""

    code = "ErrMetaOwnKeys"
    text = ""
    advice = ""

    def __init__(self, key: bytes) -> None:
        name = key.decode(errors="backslashreplace")
        super().__init__(
            f"{PermissionDeniedError.text}: [TM:ErrMetaOwnKeys] the keys below {name} are the "
            "coordinator's own; change what they say by PD's calls, or, while all coordinators "
            "are stopped, in etcd itself"
        )


def check_request(request: Any) -> None:
    """Refuse a request of etcd that would write one of our keys, in whatever branch.

    Raises:
        OwnKeysError: it would.
    """
    for key, range_end in _written(request):
        # A range, too: deleting everything from b"\0" on would take the leader's key with it.
        for prefix in OWN_PREFIXES:
            if _meets(key, range_end, prefix):
                raise OwnKeysError(prefix)


def check_bytes(method: str, request: bytes) -> None:
    """Check a serialized request as `check_request` does; bytes that are no message are left to
    etcd.

    Raises:
        OwnKeysError: it would write one of our keys.
    """
    if kind := WRITES.get(method):
        try:
            parsed = kind.FromString(request)
        # etcd refuses it in its own words.
        except DecodeError:
            return
        check_request(parsed)


def check_keys(keys: Iterable[bytes]) -> None:
    """Refuse requests for keys that Tidemark keeps for itself. Raises OwnKeysError."""
    for key in keys:
        check_request(rpc_pb2.DeleteRangeRequest(key=key))


def _written(request: Any) -> Sequence[tuple[bytes, bytes]]:
    """Key and range end of everything that a request may write."""
    match request:
        case rpc_pb2.PutRequest():
            return [(request.key, b"")]
        case rpc_pb2.DeleteRangeRequest():
            return [(request.key, request.range_end)]
        case rpc_pb2.TxnRequest():
            return [pair for op in (*request.success, *request.failure) for pair in _written_by(op)]
        case election_pb2.CampaignRequest() | lock_pb2.LockRequest():
            return [(request.name + b"/", b"")]  # and the lease behind it
        case election_pb2.ProclaimRequest() | election_pb2.ResignRequest():
            return [(request.leader.key, b"")]
        case lock_pb2.UnlockRequest():
            return [(request.key, b"")]
    return ()


def _written_by(op: rpc_pb2.RequestOp) -> Sequence[tuple[bytes, bytes]]:
    kind = op.WhichOneof("request")
    return _written(getattr(op, kind)) if kind else ()


def _meets(key: bytes, range_end: bytes, prefix: bytes) -> bool:
    """Whether `key`, or a key of `[key, range_end)`, begins with the prefix."""
    if not range_end:
        return key.startswith(prefix)
    ends_after_start = range_end == _TO_THE_END or range_end > prefix
    return key < prefix_end(prefix) and ends_after_start
