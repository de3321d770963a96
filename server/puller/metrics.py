"""The pullers' counters; those of MySQL logs beside the rows and bytes of all."""

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
    ["changefeed"],
)
OPEN_BYTES = Gauge(
    "tidemark_puller_open_transaction_bytes", "rows of transactions that have not ended, in memory"
)
OPEN_SPILLED_ROWS = Gauge(
    "tidemark_puller_open_transaction_spilled_rows",
    "rows of transactions that have not ended, on disk",
)

DDLS = Counter(
    "tidemark_puller_mysql_ddls_total", "statements of the log that changed tables of a changefeed"
)
HEARTBEATS = Counter(
    "tidemark_puller_mysql_heartbeat_rows_total", "rows written because the server was idle"
)
RECONNECTS = Counter(
    "tidemark_puller_mysql_reconnects_total",
    "log connections that were lost or could not be opened",
)
ODD_TIMES = Counter(
    "tidemark_puller_mysql_odd_timestamps_total",
    "transactions of the log whose time is later than the present by more than max-clock-skew, "
    "and does not count",
)
UNTIL_PURGE = Gauge(
    "tidemark_mysql_log_seconds_until_purge",
    "how long the server still keeps the log from the checkpoint on, if nothing moves",
    ["changefeed"],
)
RETENTION = Gauge(
    "tidemark_mysql_log_retention_seconds", "how long the server keeps its log", ["changefeed"]
)
RESOLVED_LAG = Gauge(
    "tidemark_puller_mysql_resolved_lag_seconds",
    "age of the newest transaction read, by the second in the log",
    ["changefeed"],
)
CATALOGUE_DIFFERENCES = Gauge(
    "tidemark_mysql_catalogue_differences",
    "tables that are not at the server what its log made of them, by the last look",
    ["changefeed"],
)
