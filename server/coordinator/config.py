"""The coordinator's settings."""

from dataclasses import dataclass

from server.config import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """Where the coordinator listens, and where its state lives."""

    addr: str = setting("127.0.0.1:2379", "host:port for PD's and etcd's gRPC services")
    http_addr: str = setting("127.0.0.1:0", "host:port for /metrics, /healthz and /readyz")
    advertise_addr: str = setting("", "host:port that clients are told to use; empty: the listening address")
    metadata: str = setting("leveldb:data/coordinator", "etcd://host:port[,host:port…] or leveldb:DIRECTORY")
    metadata_keep_revisions: int = setting(10_000, "embedded metadata: revisions of history kept; 0: any number")
    metadata_keep_s: int = setting(3600, "embedded metadata: seconds that history is kept at most; 0: any time")
    metadata_quota_bytes: int = setting(
        256 << 20, "embedded metadata: bytes of keys and values; puts beyond are refused"
    )
    gc_compat: str = setting("classic", "answers to old GC calls: classic (the true minimum) or pd-9 (PD since 2025)")
    leader_lease: int = setting(
        3, "seconds after which others may lead when this leader is gone (PD: leader-lease)", least=1
    )
    cluster_id: int = setting(0, "the cluster id; 0: the stored one, or a new one at first start")
