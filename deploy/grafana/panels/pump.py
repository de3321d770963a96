"""The dashboard about pump."""

from typing import Final

from deploy.grafana.dashboard import Dashboard, Panel, Row
from deploy.grafana.queries import quantile, rate

PUMP: Final = Dashboard(
    name="pump",
    title="Tidemark: pump",
    text="TiDB's binlogs: received, matched, and handed to drainers and changefeeds.",
    rows=(
        Row(
            title="Writing",
            panels=(
                Panel(
                    title="Binlogs",
                    unit="cps",
                    queries={
                        "{{instance}}": rate("tidemark_pump_written_binlogs_total", "instance"),
                        "{{instance}} refused": rate(
                            "tidemark_pump_refused_binlogs_total", "instance"
                        ),
                    },
                    text="Refused: TiDB tries another pump; while all refuse it cannot commit.",
                ),
                Panel(
                    title="Bytes",
                    unit="Bps",
                    queries={
                        "{{instance}}": rate("tidemark_pump_written_bytes_total", "instance"),
                    },
                    text="Payloads acknowledged.",
                ),
                Panel(
                    title="Time of a group",
                    unit="s",
                    queries={
                        "median": quantile(0.5, "tidemark_pump_write_seconds"),
                        "99 %": quantile(0.99, "tidemark_pump_write_seconds"),
                    },
                    text="From parsing until it is durable. TiDB's commits wait for it.",
                ),
            ),
        ),
        Row(
            title="Matching",
            panels=(
                Panel(
                    title="Can be pulled up to (age)",
                    unit="s",
                    queries={"{{instance}}": "time() - tidemark_pump_max_commit_timestamp_seconds"},
                    text="It grows while a prewrite has no outcome.",
                ),
                Panel(
                    title="Prewrites without an outcome",
                    queries={"{{instance}}": "tidemark_pump_waiting_prewrites"},
                    text="Their commits, or their rollbacks, have not come yet.",
                ),
                Panel(
                    title="Oldest prewrite without an outcome",
                    unit="s",
                    queries={"{{instance}}": "tidemark_pump_head_of_line_wait_seconds"},
                    text="Everything committed after it waits for it. The pump asks the store.",
                ),
                Panel(
                    title="Commits that came late or alone",
                    queries={
                        "late": "sum(tidemark_pump_late_commits)",
                        "without a prewrite": "sum(tidemark_pump_orphan_commits_total)",
                        "index failures": "sum(tidemark_pump_index_failures)",
                    },
                    text="Since the pumps started. Anything but 0: look in the pump's log.",
                ),
                Panel(
                    title="Index",
                    queries={
                        "{{instance}} is behind": "tidemark_pump_index_behind",
                    },
                    text="1 while the index is caught up from the log.",
                ),
            ),
        ),
        Row(
            title="Reading and disk",
            panels=(
                Panel(
                    title="Binlogs pulled",
                    unit="cps",
                    queries={
                        "{{instance}}": rate("tidemark_pump_pulled_binlogs_total", "instance"),
                    },
                    text="Counted for each reader.",
                ),
                Panel(
                    title="Readers",
                    queries={"{{instance}}": "tidemark_pump_readers"},
                    text="Open PullBinlogs streams: drainers and changefeeds.",
                ),
                Panel(
                    title="Slowest reader (age)",
                    unit="s",
                    queries={
                        "{{instance}}": "time() - "
                        "(tidemark_pump_slowest_reader_timestamp_seconds > 0)"
                    },
                    text="How old the newest binlog is that every connected reader has. "
                    "No line: nobody reads.",
                ),
                Panel(
                    title="Disk",
                    unit="bytes",
                    queries={
                        "{{instance}} log": "tidemark_pump_value_log_bytes",
                        "{{instance}} free": "tidemark_pump_available_bytes",
                    },
                    text="Below --stop-write-at-available-bytes of free space, binlogs are refused.",
                ),
                Panel(
                    title="GC",
                    unit="cps",
                    queries={"keys": rate("tidemark_pump_gc_keys_total")},
                    text="Index keys removed, of binlogs that all readers have.",
                ),
                Panel(
                    title="Readers overtaken by GC",
                    queries={"readers": "sum(tidemark_pump_gc_overtaken_readers_total)"},
                    text="They lost binlogs (--gc-force-seconds), and must begin anew.",
                ),
            ),
        ),
    ),
)
