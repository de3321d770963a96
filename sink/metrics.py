"""The sink manager's metrics, summed over all changefeeds of the process."""

from prometheus_client import Counter, Gauge

ROWS_READ = Counter("tidemark_sink_rows_read_total", "Rows handed to readers", ["source"])  # source: staged, sorter
READS = Counter("tidemark_sink_reads_total", "Ranges read", ["source"])
ACKS = Counter("tidemark_sink_acks_total", "Acknowledgements that moved a checkpoint")
MEMORY_BYTES = Gauge("tidemark_sink_memory_bytes", "Memory taken from the quota")
TABLES = Gauge("tidemark_sink_tables", "Tables of the sink managers")
