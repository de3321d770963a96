"""The dashboard about changefeeds."""

from typing import Final

from deploy.grafana.dashboard import Dashboard, Panel, Row
from deploy.grafana.queries import CHOSEN, rate

CHANGEFEED: Final = Dashboard(
    name="changefeed",
    title="Tidemark: changefeeds",
    text="The way of the changes of each changefeed, stage by stage, and its first copies.",
    changefeeds=True,
    rows=(
        Row(
            title="State",
            panels=(
                Panel(
                    title="State",
                    kind="state-timeline",
                    width=12,
                    queries={
                        "{{changefeed}} {{state}}": f"tidemark_capture_changefeed_state{{{CHOSEN}}}"
                        " == 1"
                    },
                    text="`tidemark cli changefeed history` has the reasons.",
                ),
                Panel(
                    title="State of the lake job",
                    kind="state-timeline",
                    width=12,
                    queries={
                        "{{changefeed}} {{state}}": f"tidemark_capture_job_state{{{CHOSEN}}} == 1"
                    },
                    text="As the job reports it to the captures; silent: it does not report any more.",
                ),
            ),
        ),
        Row(
            title="Lag",
            panels=(
                Panel(
                    title="Checkpoint and resolved lag",
                    unit="s",
                    queries={
                        "{{changefeed}} checkpoint": "tidemark_capture_checkpoint_lag_seconds"
                        f"{{{CHOSEN}}}",
                        "{{changefeed}} resolved": "tidemark_capture_resolved_lag_seconds"
                        f"{{{CHOSEN}}}",
                    },
                    text="Resolved: all older changes are here. Checkpoint: they are in the lake, too.",
                ),
                Panel(
                    title="Lag by stage",
                    unit="s",
                    queries={
                        "{{changefeed}} {{stage}}": "tidemark_capture_stage_lag_seconds"
                        f"{{{CHOSEN}}}"
                    },
                    text="How far each stage is behind the one before it. The highest line is what to "
                    "look into: puller is the source, sorter the disk, sink a DDL or a dump, reader "
                    "the lake job.",
                ),
                Panel(
                    title="Not read for",
                    unit="s",
                    queries={
                        "{{changefeed}}": f"tidemark_capture_unread_seconds{{{CHOSEN}}}",
                    },
                    text="For how long nobody has asked for the changefeed's rows.",
                ),
            ),
        ),
        Row(
            title="Pulling and sorting",
            panels=(
                Panel(
                    title="Regions",
                    queries={"{{changefeed}}": f"tidemark_capture_regions{{{CHOSEN}}}"},
                    text="Regions of TiKV subscribed to; 0 for MySQL and Pump.",
                ),
                Panel(
                    title="Sorted rows",
                    unit="bytes",
                    queries={
                        "{{changefeed}} disk": f"tidemark_capture_sorter_disk_bytes{{{CHOSEN}}}",
                        "{{changefeed}} memory": "tidemark_capture_sorter_memory_bytes"
                        f"{{{CHOSEN}}}",
                        "{{changefeed}} staged": f"tidemark_capture_staged_bytes{{{CHOSEN}}}",
                    },
                    text="Rows that wait to be acknowledged by the lake. Staged: ready for readers.",
                ),
                Panel(
                    title="The sorter's disk",
                    queries={
                        "{{changefeed}} refuses": "tidemark_capture_sorter_disk_refuses"
                        f"{{{CHOSEN}}}",
                        "{{changefeed}} waiting calls": "tidemark_capture_sorter_waiting_calls"
                        f"{{{CHOSEN}}}",
                    },
                    text="Anything but 0: the disk takes no rows; it is full or broken.",
                ),
                Panel(
                    title="Errors",
                    queries={
                        "{{code}}": "sum by (code) "
                        "(increase(tidemark_capture_changefeed_errors_total[$__rate_interval]))"
                    },
                    text="By their codes (docs/reference/errors.md). No line: there was none.",
                ),
                Panel(
                    title="Region faults and locks in the way",
                    unit="cps",
                    queries={
                        "locks": rate("tidemark_puller_stuck_locks_total"),
                        "{{reason}}": rate("tidemark_puller_region_faults_total", "reason"),
                    },
                    text="Subscriptions that ended, as at a split, and locks of clients that are gone.",
                ),
                Panel(
                    title="Captures that share the tables",
                    queries={
                        "captures": "max(tidemark_capture_sharing_captures)",
                        "owners": "sum(tidemark_capture_is_owner)",
                    },
                    text="There is one owner at any time.",
                ),
            ),
        ),
        Row(
            title="First copies (dumps)",
            panels=(
                Panel(
                    title="Rows read",
                    unit="cps",
                    queries={"rows": rate("tidemark_dump_rows_total")},
                    text="From tables, by the dumps of all changefeeds.",
                ),
                Panel(
                    title="Bytes read",
                    unit="Bps",
                    queries={"bytes": rate("tidemark_dump_bytes_total")},
                    text="From tables, by the dumps of all changefeeds.",
                ),
                Panel(
                    title="Tables whose dump failed",
                    queries={"{{changefeed}}": f"tidemark_dump_tables_failed{{{CHOSEN}}}"},
                    text="`tidemark cli changefeed dumpstatus` says why.",
                ),
            ),
        ),
        Row(
            title="MySQL and MariaDB",
            panels=(
                Panel(
                    title="The server still keeps its log for",
                    unit="s",
                    queries={
                        "{{changefeed}}": f"tidemark_mysql_log_seconds_until_purge{{{CHOSEN}}}"
                    },
                    text="From the checkpoint on, if nothing moves. At 0 the tables must be dumped anew.",
                ),
                Panel(
                    title="Age of what is read",
                    unit="s",
                    queries={
                        "{{changefeed}}": f"tidemark_puller_mysql_resolved_lag_seconds{{{CHOSEN}}}"
                    },
                    text="Of the newest transaction of the log, by the second that the log has.",
                ),
                Panel(
                    title="Connections lost",
                    queries={
                        "{{daemon}}": "sum by (daemon) "
                        "(increase(tidemark_puller_mysql_reconnects_total[$__rate_interval]))"
                    },
                    text="Log connections that were lost or could not be opened.",
                ),
            ),
        ),
    ),
)
