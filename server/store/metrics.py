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
GC_KEYS = Counter("tidemark_store_gc_keys_total", "Stored keys deleted by GC.")
GC_SAFE_POINT = Gauge("tidemark_store_gc_safe_point", "Safepoint up to which all regions are collected.")


def observe_group(commands: int, seconds: float) -> None:
    """One durable group."""
    GROUP_COMMANDS.observe(commands)
    GROUP_SECONDS.observe(seconds)
