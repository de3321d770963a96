"""The dashboard that shows everything at a glance."""

from typing import Final

from deploy.grafana.dashboard import Dashboard, Panel, Row
from deploy.grafana.queries import RUNS, rate

OVERVIEW: Final = Dashboard(
    name="overview",
    title="Tidemark: overview",
    text="Whether everything runs, how far the lakes are behind, and what the processes take.",
    rows=(
        Row(
            title="Now",
            panels=(
                Panel(
                    title="Daemons",
                    kind="stat",
                    width=4,
                    queries={"": f"count(process_start_time_seconds{{{RUNS}}})"},
                    text="Processes that answered the last scrape.",
                ),
                Panel(
                    title="Changefeeds that run",
                    kind="stat",
                    width=4,
                    queries={"": 'sum(tidemark_capture_changefeed_state{state="normal"})'},
                    text="In state normal. `tidemark cli changefeed list` shows all.",
                ),
                Panel(
                    title="Changefeeds in trouble",
                    kind="stat",
                    width=4,
                    red_from=1,
                    queries={"": 'sum(tidemark_capture_changefeed_state{state=~"warning|failed"})'},
                    text="In state warning or failed: `tidemark cli changefeed query -c ID` says why.",
                ),
                Panel(
                    title="Largest checkpoint lag",
                    kind="stat",
                    width=4,
                    unit="s",
                    red_from=600,
                    queries={"": "max(tidemark_capture_checkpoint_lag_seconds)"},
                    text="Of all changefeeds: how old the newest change is that is surely in its lake.",
                ),
                Panel(
                    title="Lake jobs in trouble",
                    kind="stat",
                    width=4,
                    red_from=1,
                    queries={
                        "": 'sum(tidemark_capture_job_state{state=~"retrying|failed|silent"})'
                    },
                    text="Jobs that are started again and again, gave up, or do not report any more.",
                ),
                Panel(
                    title="Alerts that fire",
                    kind="stat",
                    width=4,
                    red_from=1,
                    queries={
                        "": 'count(ALERTS{alertstate="firing",alertname=~"Tidemark.+"})'
                        " or vector(0)"
                    },
                    text="docs/runbooks.md says what to do about each.",
                ),
            ),
        ),
        Row(
            title="Lag",
            panels=(
                Panel(
                    title="Checkpoint lag",
                    unit="s",
                    queries={"{{changefeed}}": "tidemark_capture_checkpoint_lag_seconds"},
                    text="Wall clock minus checkpoint_ts: everything older is in the lake.",
                ),
                Panel(
                    title="Lag of the lake",
                    unit="s",
                    queries={"{{changefeed}}": "tidemark_spark_lag_seconds"},
                    text="Wall clock minus the newest cut that readers of the lake see.",
                ),
                Panel(
                    title="Safepoints",
                    unit="s",
                    queries={
                        "{{type}}": "time() - tidemark_gcsafepoint_timestamp_seconds > 0",
                    },
                    text="How old the history is that the database still keeps.",
                ),
            ),
        ),
        Row(
            title="Rows",
            panels=(
                Panel(
                    title="Row changes from the sources",
                    unit="cps",
                    queries={"{{daemon}}": rate("tidemark_puller_rows_total", "daemon", RUNS)},
                    text="What captures receive, before repeated rows are dropped.",
                ),
                Panel(
                    title="Row changes to readers",
                    unit="cps",
                    queries={"{{daemon}}": rate("tidemark_flight_rows_total", "daemon", RUNS)},
                    text="What captures hand out by Arrow Flight.",
                ),
                Panel(
                    title="Row changes into the lakes",
                    unit="cps",
                    queries={"{{changefeed}}": rate("tidemark_spark_rows_total", "changefeed")},
                    text="What the lake jobs have committed.",
                ),
            ),
        ),
        Row(
            title="Processes",
            panels=(
                Panel(
                    title="CPU",
                    queries={
                        "{{daemon}} {{instance}}": "rate(process_cpu_seconds_total"
                        f"{{{RUNS}}}[$__rate_interval])"
                    },
                    text="Cores in use. Spark's JVMs are processes of their own, and not in it.",
                ),
                Panel(
                    title="Memory",
                    unit="bytes",
                    queries={"{{daemon}} {{instance}}": f"process_resident_memory_bytes{{{RUNS}}}"},
                    text="Resident memory. Spark's JVMs are processes of their own, and not in it.",
                ),
                Panel(
                    title="Uptime",
                    unit="s",
                    queries={
                        "{{daemon}} {{instance}}": f"time() - process_start_time_seconds{{{RUNS}}}"
                    },
                    text="A line that falls to zero is a restart.",
                ),
                Panel(
                    title="Open files",
                    queries={"{{daemon}} {{instance}}": f"process_open_fds{{{RUNS}}}"},
                    text="Files and connections of the process.",
                ),
                Panel(
                    title="gRPC connections",
                    queries={"{{daemon}} {{instance}}": "tidemark_rpc_connections"},
                    text="Connections to the daemons that have the native gRPC engine.",
                ),
                Panel(
                    title="Connections refused and broken",
                    unit="cps",
                    queries={
                        "refused": rate("tidemark_rpc_connections_refused_total"),
                        "server errors": rate("tidemark_rpc_connection_errors_total"),
                    },
                    text="Refused: all that an address may have are in use. Server errors are logged.",
                ),
                Panel(
                    title="Clients refused",
                    unit="cps",
                    queries={
                        "TLS: {{reason}}": rate(
                            "tidemark_rpc_tls_handshakes_refused_total", "reason"
                        ),
                        "name of the certificate": rate("tidemark_rpc_names_refused_total"),
                        "token or role": rate("tidemark_rpc_access_refused_total"),
                    },
                    text="At their TLS handshake, by reason, or at a call. The log names each once.",
                ),
                Panel(
                    title="Changes of certificates",
                    unit="cps",
                    queries={
                        "{{outcome}}": rate("tidemark_rpc_certificate_reloads_total", "outcome")
                    },
                    text="Failed: files that cannot be used, and the old certificate stays.",
                ),
            ),
        ),
    ),
)
