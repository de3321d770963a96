"""What the pullers of MySQL logs count, beside the rows and bytes of all pullers."""

from prometheus_client import Counter, Gauge

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
)
CATALOGUE_DIFFERENCES = Gauge(
    "tidemark_mysql_catalogue_differences",
    "tables that are not at the server what its log made of them, by the last look",
    ["changefeed"],
)
