"""What the Flight server counts."""

from prometheus_client import Counter, Histogram

ROWS = Counter("tidemark_flight_rows_total", "mounted rows handed to readers")
BYTES = Counter("tidemark_flight_sent_bytes_total", "Arrow buffers handed to readers")
SECONDS = Histogram("tidemark_flight_call_seconds", "time of one call, with its waiting", ["call"])
