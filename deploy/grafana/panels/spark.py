"""The dashboard about lake jobs."""

from typing import Final

from deploy.grafana.dashboard import Dashboard, Panel, Row
from deploy.grafana.queries import CHOSEN, mean, quantile, rate

SPARK: Final = Dashboard(
    name="spark",
    title="Tidemark: lake jobs",
    text="How Spark applies cuts to the lakes, and how it keeps them in shape.",
    changefeeds=True,
    rows=(
        Row(
            title="Lag",
            panels=(
                Panel(
                    title="Lag of the lake",
                    unit="s",
                    queries={"{{changefeed}}": f"tidemark_spark_lag_seconds{{{CHOSEN}}}"},
                    text="Wall clock minus the newest cut that readers of the lake see.",
                ),
                Panel(
                    title="Lag by stage",
                    unit="s",
                    queries={
                        "{{changefeed}} {{stage}}": f"tidemark_spark_stage_lag_seconds{{{CHOSEN}}}"
                    },
                    text="captures: from the source to the sink. spark: from the sink to the lake.",
                ),
                Panel(
                    title="Lag as captures see it",
                    unit="s",
                    queries={
                        "{{changefeed}}": f"tidemark_capture_job_lag_seconds{{{CHOSEN}}}",
                    },
                    text="It grows, too, when the job is gone.",
                ),
            ),
        ),
        Row(
            title="Cuts",
            panels=(
                Panel(
                    title="Cuts",
                    unit="cps",
                    queries={
                        "{{changefeed}}": rate(
                            "tidemark_spark_batches_total", "changefeed", CHOSEN
                        ),
                    },
                    text="Each makes the rows of all tables visible at once.",
                ),
                Panel(
                    title="Row changes",
                    unit="cps",
                    queries={
                        "{{changefeed}}": rate("tidemark_spark_rows_total", "changefeed", CHOSEN),
                    },
                    text="Committed to the lake.",
                ),
                Panel(
                    title="Time of a cut",
                    unit="s",
                    queries={
                        "{{changefeed}} median": quantile(
                            0.5, "tidemark_spark_batch_seconds", "changefeed", CHOSEN
                        ),
                        "{{changefeed}} 99 %": quantile(
                            0.99, "tidemark_spark_batch_seconds", "changefeed", CHOSEN
                        ),
                    },
                    text="To apply it to all tables.",
                ),
                Panel(
                    title="Steps of a batch, mean",
                    unit="s",
                    width=12,
                    queries={
                        "{{step}}": mean("tidemark_spark_step_seconds", "step", CHOSEN),
                    },
                    text="latestOffset waits for rows, addBatch is the work, triggerExecution is both.",
                ),
                Panel(
                    title="Inserts that replaced rows",
                    width=12,
                    queries={
                        "{{changefeed}} {{table}}": "increase("
                        f"tidemark_spark_replaced_inserts_total{{{CHOSEN}}}[$__rate_interval])"
                    },
                    text="Keys that the lake had already. No line: there was none.",
                ),
            ),
        ),
        Row(
            title="Jobs",
            panels=(
                Panel(
                    title="Starts",
                    queries={
                        "{{changefeed}}": f"tidemark_spark_job_starts_total{{{CHOSEN}}}",
                    },
                    text="Processes started since `spark keep` started.",
                ),
                Panel(
                    title="Errors",
                    queries={
                        "{{changefeed}} {{code}}": f"tidemark_spark_job_errors_total{{{CHOSEN}}}",
                    },
                    text="By their codes (docs/reference/errors.md). No line: there was none.",
                ),
                Panel(
                    title="Audit is late by",
                    unit="s",
                    queries={
                        "{{changefeed}}": f"tidemark_spark_audit_late_seconds{{{CHOSEN}}}",
                    },
                    text="For changefeeds with --audit; 0: it comes round in its time.",
                ),
                Panel(
                    title="Rows audited",
                    unit="cps",
                    queries={
                        "{{changefeed}}": rate(
                            "tidemark_spark_audit_rows_total", "changefeed", CHOSEN
                        ),
                    },
                    text="Compared with their source. No line: no changefeed has --audit.",
                ),
                Panel(
                    title="Ranges that differed",
                    queries={
                        "{{changefeed}} {{table}}": "tidemark_spark_audit_differences_total"
                        f"{{{CHOSEN}}}",
                    },
                    text="`tidemark cli verify --repair` mends them. No line: there was none.",
                ),
            ),
        ),
        Row(
            title="Maintenance",
            panels=(
                Panel(
                    title="Time for which cuts waited, mean",
                    unit="s",
                    queries={
                        "{{changefeed}}": "sum by (changefeed) "
                        f"(tidemark_spark_maintenance_seconds_sum{{{CHOSEN}}}) / "
                        "sum by (changefeed) "
                        f"(tidemark_spark_maintenance_seconds_count{{{CHOSEN}}})",
                    },
                    text="While files were compacted and old ones removed (--compact-every).",
                ),
                Panel(
                    title="Small files",
                    unit="percentunit",
                    queries={
                        "{{changefeed}}": f"tidemark_spark_small_file_ratio{{{CHOSEN}}}",
                    },
                    text="Files below 16 MiB, of the table maintained last.",
                ),
                Panel(
                    title="Deleted rows in files",
                    unit="percentunit",
                    queries={
                        "{{changefeed}}": f"tidemark_spark_deleted_row_ratio{{{CHOSEN}}}",
                    },
                    text="Rows that readers must leave out, of the table maintained last.",
                ),
            ),
        ),
    ),
)
