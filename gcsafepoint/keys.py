"""Where GC states lie in etcd: PD's paths and TiDB's own."""

from dataclasses import dataclass

from gcsafepoint.go_text import key_bytes
from gcsafepoint.states import NULL_KEYSPACE

KEYSPACES_OF_TIDB = b"/keyspaces/tidb/"
TXN_SAFE_POINT_TAIL = b"tidb/store/gcworker/saved_safe_point"


@dataclass(frozen=True, slots=True)
class ScopeKeys:
    """The paths of one keyspace's state."""

    keyspace_id: int
    gc_safe_point: bytes
    """Hexadecimal text; of a real keyspace JSON: keyspace_id, safe_point."""
    services: bytes
    """What all services' keys start with."""
    txn_safe_point: bytes
    """Decimal text; TiDB's own key."""
    min_start_ts: bytes
    """What the keys start with under which TiDB servers write their oldest start_ts, decimal."""

    def service(self, service_id: str) -> bytes:
        """JSON: service_id, expired_at (Unix seconds), safe_point; of a real keyspace also keyspace_id."""
        return self.services + key_bytes(service_id)


@dataclass(frozen=True, slots=True)
class GcKeys:
    """All paths of a cluster; `prefix` is `/pd/<cluster>/gc/`."""

    prefix: bytes

    @property
    def revision(self) -> bytes:
        """Decimal text, raised by every write: the guard between writers."""
        return self.prefix + b"gc_state_revision"

    @property
    def global_barriers(self) -> bytes:
        """What global barriers' keys start with; JSON: barrier_id, barrier_ts, expiration_time (Unix s, 0: never)."""
        return self.prefix + b"global_gc_barriers/"

    @property
    def clock(self) -> bytes:
        """Ours, decimal Unix seconds: the last reading of a leader's clock (`gcsafepoint.clock`)."""
        return b"/tidemark" + self.prefix + b"clock"

    @property
    def keyspaces(self) -> bytes:
        """What keys about keyspaces start with."""
        return self.prefix.removesuffix(b"gc/") + b"keyspaces/"

    @property
    def keyspace_metas(self) -> bytes:
        """What the keys of keyspaces' own records (keyspacepb.KeyspaceMeta) start with."""
        return self.keyspaces + b"meta/"

    @property
    def null(self) -> ScopeKeys:
        """The paths of unified GC."""
        return self.scope(NULL_KEYSPACE)

    def scope(self, keyspace_id: int) -> ScopeKeys:
        """The paths of one keyspace."""
        gc_safe_point, services, tidb = self.prefix + b"safe_point", self.prefix + b"safe_point/service/", b"/"
        if keyspace_id != NULL_KEYSPACE:
            gc_safe_point = self.keyspaces + b"gc_safe_point/%08d" % keyspace_id
            services = self.keyspaces + b"service_safe_point/%08d/" % keyspace_id
            tidb = KEYSPACES_OF_TIDB + b"%d/" % keyspace_id
        txn_safe_point, min_start_ts = tidb + TXN_SAFE_POINT_TAIL, tidb + b"tidb/server/minstartts/"
        return ScopeKeys(keyspace_id, gc_safe_point, services, txn_safe_point, min_start_ts)
