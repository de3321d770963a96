"""What the pullers count."""

from prometheus_client import Counter, Gauge

ROWS = Counter(
    "tidemark_puller_rows_total",
    "committed row changes received, before the sorter drops repeated ones",
)
BYTES = Counter("tidemark_puller_received_bytes_total", "size of the event messages received")
FAULTS = Counter(
    "tidemark_puller_region_faults_total", "region subscriptions that ended", ["reason"]
)
EMPTY_DELETES = Counter(
    "tidemark_puller_empty_deletes_total", "deletes left out because they found no row to delete"
)
UNWRITTEN_ROWS = Counter(
    "tidemark_puller_unwritten_rows_total",
    "rows that a TiDB DDL changed beside all transactions, read from the store",
)
LOCKS_RESOLVED = Counter(
    "tidemark_puller_stuck_locks_total", "locks met in regions whose resolved_ts stood still"
)
SILENT_STREAMS = Counter(
    "tidemark_puller_silent_streams_total",
    "streams that were opened again because nothing came on them",
    ["peer"],
)
REGIONS = Gauge("tidemark_puller_regions", "regions subscribed to")
PUMP_BEHIND = Gauge(
    "tidemark_puller_slowest_pump_behind_seconds",
    "how old the binlogs are that all pumps have sent",
)
OPEN_BYTES = Gauge(
    "tidemark_puller_open_transaction_bytes", "rows of transactions that have not ended, in memory"
)
OPEN_SPILLED_ROWS = Gauge(
    "tidemark_puller_open_transaction_spilled_rows",
    "rows of transactions that have not ended, on disk",
)
