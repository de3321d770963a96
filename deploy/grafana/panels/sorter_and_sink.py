"""The dashboard about sorter and sink."""

from typing import Final

from deploy.grafana.dashboard import Dashboard, Panel, Row
from deploy.grafana.queries import quantile, rate

SORTER_AND_SINK: Final = Dashboard(
    name="sorter-and-sink",
    title="Tidemark: sorter and sink",
    text="How captures sort row changes, mount them, and hand them out by Arrow Flight.",
    rows=(
        Row(
            title="Sorter",
            panels=(
                Panel(
                    title="Rows in and out",
                    unit="cps",
                    queries={
                        "in": rate("tidemark_sorter_rows_in_total"),
                        "out": rate("tidemark_sorter_rows_out_total"),
                        "read from blocks": rate("tidemark_sorter_rows_read_total"),
                    },
                    text="Rows are counted each time they are handed out. Read minus out is what was "
                    "read for nothing.",
                ),
                Panel(
                    title="Written",
                    unit="Bps",
                    queries={
                        "new": rate("tidemark_sorter_written_bytes_total"),
                        "moved": rate("tidemark_sorter_moved_bytes_total"),
                    },
                    text="Moved: written again, so that segments with few living rows could go.",
                ),
                Panel(
                    title="Size",
                    unit="bytes",
                    queries={
                        "disk": "sum(tidemark_sorter_disk_bytes)",
                        "memory": "sum(tidemark_sorter_memory_bytes)",
                    },
                    text="Rows whose cuts are not acknowledged yet.",
                ),
                Panel(
                    title="Blocks",
                    unit="cps",
                    queries={
                        "written": rate("tidemark_sorter_blocks_written_total"),
                        "read": rate("tidemark_sorter_blocks_read_total"),
                        "skipped by {{by}}": rate("tidemark_sorter_blocks_skipped_total", "by"),
                    },
                    text="Skipped: a fetch knew from the index that it need not read them.",
                ),
                Panel(
                    title="Blocks of a fetch",
                    queries={
                        "median": quantile(0.5, "tidemark_sorter_fetch_blocks"),
                        "99 %": quantile(0.99, "tidemark_sorter_fetch_blocks"),
                    },
                    text="How many blocks one fetch has to read.",
                ),
                Panel(
                    title="Tables and waiting batches",
                    queries={
                        "tables": "sum(tidemark_sorter_tables)",
                        "waiting for the disk": "sum(tidemark_sorter_disk_waiting)",
                    },
                    text="Batches wait while the disk takes no rows.",
                ),
            ),
        ),
        Row(
            title="Sink manager",
            panels=(
                Panel(
                    title="Memory",
                    unit="bytes",
                    queries={
                        "in use": "sum(tidemark_sink_memory_bytes)",
                        "quota": "sum(tidemark_sink_quota_bytes)",
                    },
                    text="At the quota, tables wait for readers (--memory-quota-bytes).",
                ),
                Panel(
                    title="Age of the slowest table",
                    unit="s",
                    queries={
                        "{{timestamp}}": "max by (timestamp) "
                        "(tidemark_sink_slowest_table_age_seconds)"
                    },
                    text="A cut goes no further than the slowest table.",
                ),
                Panel(
                    title="Tasks",
                    unit="cps",
                    queries={"{{result}}": rate("tidemark_sink_tasks_total", "result")},
                    text="Each reads a range of one table, mounts its rows and stages them.",
                ),
                Panel(
                    title="Rows read",
                    unit="cps",
                    queries={"{{source}}": rate("tidemark_sink_rows_read_total", "source")},
                    text="Staged: they were mounted before anybody asked. Sorter: they were not.",
                ),
                Panel(
                    title="Rows of a batch",
                    queries={
                        "median": quantile(0.5, "tidemark_sink_batch_rows"),
                        "99 %": quantile(0.99, "tidemark_sink_batch_rows"),
                    },
                    text="Larger batches cost less for each row.",
                ),
                Panel(
                    title="Tables",
                    queries={
                        "all": "sum(tidemark_sink_tables)",
                        "failed": "sum(tidemark_sink_failed_tables)",
                        "stopped, rows were lost": "sum(tidemark_sink_rows_lost_total)",
                    },
                    text="Failed tables are read from the sorter. Lost rows are a defect: report it.",
                ),
            ),
        ),
        Row(
            title="Arrow Flight",
            panels=(
                Panel(
                    title="Calls",
                    unit="cps",
                    queries={
                        "{{call}}": rate("tidemark_flight_call_seconds_count", "call"),
                    },
                    text="By readers: lake jobs, and programs of your own.",
                ),
                Panel(
                    title="Time of a call, 99 %",
                    unit="s",
                    queries={
                        "{{call}}": quantile(0.99, "tidemark_flight_call_seconds", "call"),
                    },
                    text="`latest` waits for new rows, and may take as long as its reader allows.",
                ),
                Panel(
                    title="Sent",
                    unit="Bps",
                    queries={"{{daemon}}": rate("tidemark_flight_sent_bytes_total", "daemon")},
                    text="Arrow buffers handed to readers.",
                ),
                Panel(
                    title="Acknowledgements",
                    unit="cps",
                    queries={"acks": rate("tidemark_sink_acks_total")},
                    text="Those that moved a checkpoint.",
                ),
            ),
        ),
    ),
)
