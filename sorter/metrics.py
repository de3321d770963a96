"""The sorter's metrics, summed over all sorters of the process."""

from prometheus_client import Counter, Gauge, Histogram

ROWS_IN = Counter("tidemark_sorter_rows_in_total", "Row changes taken from pullers")
ROWS_OUT = Counter("tidemark_sorter_rows_out_total", "Row changes handed out, each time they are")
BLOCKS_WRITTEN = Counter("tidemark_sorter_blocks_written_total", "Blocks written to segments")
BYTES_WRITTEN = Counter("tidemark_sorter_written_bytes_total", "Bytes written to segments")
MOVED_BYTES = Counter("tidemark_sorter_moved_bytes_total", "Bytes written again so that mostly dead segments could go")
BLOCKS_READ = Counter("tidemark_sorter_blocks_read_total", "Blocks read back")
ROWS_READ = Counter("tidemark_sorter_rows_read_total", "Rows of the blocks read back: read amplification over rows out")
FETCH_BLOCKS = Histogram(
    "tidemark_sorter_fetch_blocks", "Blocks that a fetch has to read", buckets=(0, 1, 2, 4, 8, 16, 64, 256, 1024, 4096)
)
BLOCKS_SKIPPED = Counter(
    "tidemark_sorter_blocks_skipped_total", "Blocks a fetch did not have to read", ["by"]
)  # by: table, range
MEMORY_BYTES = Gauge("tidemark_sorter_memory_bytes", "Rows held in memory")
DISK_BYTES = Gauge("tidemark_sorter_disk_bytes", "Size of all segments")
TABLES = Gauge("tidemark_sorter_tables", "Tables being sorted")
WAITING = Gauge("tidemark_sorter_disk_waiting", "Batches that wait until the disk takes rows again")
