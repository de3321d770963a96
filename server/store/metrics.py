"""Prometheus metrics of the store."""

from prometheus_client import Counter, Gauge, Histogram

GROUP_COMMANDS = Histogram(
    "tidemark_store_group_commands",
    "Write commands per synced group.",
    buckets=[1, 2, 4, 8, 16, 32, 64, 128, 256, 1024],
)
GROUP_SECONDS = Histogram(
    "tidemark_store_group_duration_seconds",
    "Time to decide and sync one group.",
    buckets=[0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5],
)
REGIONS = Gauge("tidemark_store_regions", "Regions served by this store.")
OPEN_LOCKS = Gauge("tidemark_store_open_locks", "Put and Delete locks that are neither committed nor rolled back.")
FEED_REGIONS = Gauge("tidemark_store_feed_regions", "Region subscriptions of change feeds.")
FEED_ROWS = Counter("tidemark_store_feed_rows_total", "Rows queued for change feeds.")
FEED_CONGESTED = Counter("tidemark_store_feed_congested_total", "Subscriptions cut because their reader was too slow.")
FEED_QUEUED_BYTES = Gauge("tidemark_store_feed_queued_bytes", "Bytes of changes that wait for their readers.")
RESOLVED_TS = Gauge("tidemark_store_resolved_ts", "Nothing will commit at or before it in any region of this store.")
REGION_SPLITS = Counter("tidemark_store_region_splits_total", "Region splits, by call and by size.")
REGION_HANDOVERS = Counter("tidemark_store_region_handovers_total", "Empty regions given to another store.")
REGION_MERGES = Counter("tidemark_store_region_merges_total", "Region merges, by call and by size.")


def observe_group(commands: int, seconds: float) -> None:
    """One durable group."""
    GROUP_COMMANDS.observe(commands)
    GROUP_SECONDS.observe(seconds)
