"""Metrics of dumps."""

from prometheus_client import Counter, Gauge, Histogram

ROWS = Counter("tidemark_dump_rows_total", "Rows read from tables by dumps")
BYTES = Counter("tidemark_dump_bytes_total", "Bytes of rows read from tables by dumps")
REPLACED = Counter(
    "tidemark_dump_replaced_rows_total",
    "Rows of chunks left out, as the log changed them meanwhile",
)
CHUNKS_AGAIN = Counter(
    "tidemark_dump_chunks_again_total",
    "Chunks that must be read again: schema changes, faults, full windows",
)
READ_AGAIN = Counter(
    "tidemark_dump_tables_read_again_total",
    "Tables read again by themselves, as a DDL changed their rows beside the log",
)
READING_AGAIN = Gauge(
    "tidemark_dump_tables_reading_again",
    "Tables being read again by themselves, for which cuts wait",
    ["changefeed"],
)
TABLES_FAILED = Gauge(
    "tidemark_dump_tables_failed",
    "Tables whose dump has failed, until it is resumed or begun anew",
    ["changefeed"],
)
VERIFIED = Counter(
    "tidemark_dump_verified_chunks_total", "Chunks whose sums were those of the server"
)
DIFFERING = Counter(
    "tidemark_dump_differing_chunks_total", "Chunks that were not as the server has them"
)
ROUND_SECONDS = Histogram(
    "tidemark_dump_round_seconds", "From a low watermark written to its high watermark written"
)
LAG_SECONDS = Histogram(
    "tidemark_dump_lag_seconds", "From a round's watermark committed until the log has passed it"
)
EASE = Gauge(
    "tidemark_dump_ease_ratio",
    "How hard the dump reads; less than 1 as it gives way to the log's lag",
    ["changefeed"],
)
