"""The settings of `tidemark store`."""

from dataclasses import dataclass

from server.config import HTTP_ADDRS, ConfigError, setting
from server.rpc.call_access import check_provable
from server.rpc.credentials import SecurityConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Configuration of a store: its addresses, its data directory, and the pace of its background
    work.
    """

    addr: str = setting("127.0.0.1:20160", "host:port for gRPC")
    http_addr: str = setting(HTTP_ADDRS["store"], "host:port for metrics and health")
    advertise_addr: str = setting("", "host:port that clients use; empty: --addr")
    coordinator: str = setting("127.0.0.1:2379", "coordinators (or PDs), host:port[,host:port…]")
    access_file: str = setting(
        "",
        "TOML file with the clients that may call, by certificate or token, and their roles; empty: "
        "everybody who reaches a port may do everything (docs/security.md)",
    )
    data_dir: str = setting("data/store", "directory of this store's data")
    split_keys: str = setting(
        "",
        "user keys in hex, comma-separated, where the first regions of a new cluster begin",
    )
    gc_poll_interval: float = setting(
        60.0, "seconds between two looks at the GC safepoint", least=0.001
    )
    gc_max_write_bytes_per_sec: int = setting(
        0,
        "bytes of deletes GC may write per second, 0: no limit; changed online by ModifyTikvConfig",
    )
    gc_ratio_threshold: float = setting(
        1.1, "GC skips a region with fewer versions per row than this; below 1 it skips none"
    )
    destroy_range_share: float = setting(
        0.25,
        "share of the time (to 1) in which ranges of dropped tables are deleted; the rest is left "
        "to others",
        least=0.01,
    )
    region_split_size: int = setting(
        96 << 20, "bytes of a region after a split; 1.5 times as much splits it, 0: never"
    )
    region_merge_size: int = setting(
        20 << 20, "neighbours of this many bytes together become one region, 0: never"
    )
    split_merge_interval: float = setting(
        3600.0, "seconds a region must be unchanged before it may be merged"
    )
    share_regions: bool = setting(
        default=True, help_text="give empty regions to stores that serve fewer"
    )
    region_check_interval: float = setting(
        10.0, "seconds between two looks at the sizes of regions", least=0.001
    )
    heartbeat_interval: float = setting(
        5.0, "seconds between two reports to the coordinator", least=0.001
    )
    wait_for_lock_timeout: float = setting(
        1.0, "seconds a pessimistic lock request waits in the store at most"
    )
    resolved_ts_interval: float = setting(
        0.2, "seconds between two resolved timestamps of the change feed", least=0.001
    )
    feed_buffer_bytes: int = setting(
        64 << 20, "bytes of changes one feed connection may lag before it is cut"
    )
    feed_memory_bytes: int = setting(
        512 << 20, "bytes of changes all feed connections may lag together"
    )
    feed_scan_bytes_per_sec: int = setting(
        128 << 20, "bytes of changes that scans of feeds send per second, 0: no limit"
    )
    read_threads: int = setting(
        2, "threads for reads; scans of change feeds and GC have one of their own each", least=1
    )
    write_buffer_bytes: int = setting(
        16 << 20, "bytes LevelDB keeps in memory before it writes a table"
    )

    def check_with(self, security: SecurityConfig) -> None:
        """Check that the cluster's own processes can identify themselves; raises ConfigError."""
        check_provable(self.access_file, security)

    def __post_init__(self) -> None:
        if self.destroy_range_share > 1:
            raise ConfigError(
                "--destroy-range-share is a share of the time: at most 1, not "
                f"{self.destroy_range_share}"
            )

    def checked(self) -> "StoreConfig":
        """This configuration; raises as `first_split_keys`."""
        self.first_split_keys()
        return self

    def first_split_keys(self) -> list[bytes]:
        """The split keys, sorted, each once.

        Raises:
            ConfigError: one of them is not hex.
        """
        try:
            keys = {bytes.fromhex(text) for text in self.split_keys.split(",") if text.strip()}
        except ValueError as err:
            raise ConfigError(
                f"--split-keys must be hex numbers with commas between: {err}"
            ) from err
        return sorted(keys - {b""})
