"""Settings of the pump daemon."""

from dataclasses import dataclass

from server.config import setting
from storage.value_log import SEGMENT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class PumpConfig:
    """`[pump]`."""

    addr: str = setting("127.0.0.1:8250", "address for binlog.Pump, host:port")
    advertise_addr: str = setting("", "address that TiDB is told to write to; empty: --addr")
    http_addr: str = setting(
        "127.0.0.1:8251", "address for /metrics, /healthz, /readyz, /status, /state and /debug"
    )
    coordinator: str = setting("127.0.0.1:2379", "coordinators (or PDs), host:port[,host:port…]")
    cluster_id: int = setting(
        0, "refuse to start in another cluster than this; 0: take the coordinator's"
    )
    data_dir: str = setting("data/pump", "directory of the value log (value/) and its index (kv/)")
    node_id: str = setting(
        "", "name in the registry, kept in the data directory; empty: hostname:port"
    )
    segment_bytes: int = setting(SEGMENT_BYTES, "size at which a value log segment is finalised")
    segment_seconds: float = setting(
        3600.0,
        "age at which a segment is finalised, so that GC can give its space back",
        least=0.001,
    )
    sync_log: bool = setting(True, "fdatasync each group before it is acknowledged")  # noqa: FBT003 - a default
    stop_write_at_available_bytes: int = setting(
        1 << 30, "refuse binlogs while the disk has less space than this"
    )
    fake_binlog_seconds: float = setting(
        3.0, "write a heartbeat binlog after this long without a binlog", least=0.001
    )
    waiting_prewrites_bytes: int = setting(
        256 << 20, "refuse prewrites while those without an outcome take more memory than this"
    )
    lonely_seconds: float = setting(
        1.0, "ask the store for the outcome of a prewrite that waits longer than this", least=0.001
    )
    txn_timeout_seconds: float = setting(
        600.0,
        "a prewrite of which the store knows nothing after this long is rolled back in the store, "
        "too",
    )
    heartbeat_seconds: float = setting(2.0, "how often the registry entry is renewed", least=0.001)
    close_seconds: float = setting(
        3600.0, "a pump that is closed waits this long until all readers have everything"
    )
    gc_retention_seconds: int = setting(
        7 * 24 * 3600, "binlogs older than this are removed once all readers have them"
    )
    gc_force_seconds: int = setting(
        10 * 24 * 3600, "binlogs older than this are removed even from connected readers"
    )
    gc_interval_seconds: float = setting(3600.0, "how often GC runs", least=0.001)
