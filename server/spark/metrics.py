"""Metrics of the lake jobs, from the line that a job prints for each cut."""

import time
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from storage.model.ts import physical_s

BATCHES = Counter("tidemark_spark_batches_total", "Cuts applied to the lake", ["changefeed"])
ROWS = Counter("tidemark_spark_rows_total", "Row changes applied to the lake", ["changefeed"])
BATCH_SECONDS = Histogram(
    "tidemark_spark_batch_seconds", "Time to apply one cut to all tables", ["changefeed"]
)
CUT_TS = Gauge(
    "tidemark_spark_cut_ts",
    "The newest cut that is visible in the lake, a TSO timestamp",
    ["changefeed"],
)
CUT_SECONDS = Gauge(
    "tidemark_spark_cut_timestamp_seconds", "Unix time of tidemark_spark_cut_ts", ["changefeed"]
)
CHECKPOINT_TS = Gauge(
    "tidemark_spark_checkpoint_ts", "What the changefeed answered to the last ack", ["changefeed"]
)
LAG_SECONDS = Gauge(
    "tidemark_spark_lag_seconds", "Now minus the physical time of the newest cut", ["changefeed"]
)
REPLACED = Counter(
    "tidemark_spark_replaced_inserts_total",
    "Keys that cuts inserted and that the table had already: their rows were replaced",
    ["changefeed", "table"],
)
AUDIT_ROWS = Counter(
    "tidemark_spark_audit_rows_total",
    "Rows of the source that the audit compared with the lake",
    ["changefeed", "table"],
)
AUDIT_DIFFERENCES = Counter(
    "tidemark_spark_audit_differences_total",
    "Key ranges in which the audit found other rows",
    ["changefeed", "table"],
)
AUDIT_ERRORS = Counter(
    "tidemark_spark_audit_errors_total",
    "Turns of the audit that ended by an error, by its code",
    ["changefeed", "code"],
)
AUDIT_LATE = Gauge(
    "tidemark_spark_audit_late_seconds",
    "For how long ranges wait beyond the audit's time; 0: none",
    ["changefeed"],
)
STARTS = Counter("tidemark_spark_job_starts_total", "Processes started for the job", ["changefeed"])
ERRORS = Counter(
    "tidemark_spark_job_errors_total",
    "Ends of the job by an error, by its code",
    ["changefeed", "code"],
)

STAGE_LAG_SECONDS = Gauge(
    "tidemark_spark_stage_lag_seconds",
    "How far a stage is behind the one before it: captures (upstream to sink), spark (sink to "
    "lake)",
    ["changefeed", "stage"],
)
STEP_SECONDS = Histogram(
    "tidemark_spark_step_seconds",
    "Time of the steps of a cut: waiting for it, applying it, both",
    ["changefeed", "step"],
)
SMALL_FILE_RATIO = Gauge(
    "tidemark_spark_small_file_ratio",
    "Files below 16 MiB, of the table maintained last",
    ["changefeed"],
)
DELETED_ROW_RATIO = Gauge(
    "tidemark_spark_deleted_row_ratio",
    "Rows that readers must leave out, of the table maintained last",
    ["changefeed"],
)
MAINTENANCE_SECONDS = Histogram(
    "tidemark_spark_maintenance_seconds",
    "Time for which maintenance held up the cuts",
    ["changefeed"],
)
_STAGES = ("captures", "spark")
_STEPS = ("latestOffset", "addBatch", "triggerExecution")


def observe(changefeed: str, line: dict[str, Any]) -> None:
    """Count a line of the job."""
    if "end_ts" in line:
        observe_cut(changefeed, line)
    elif "replaced" in line:
        for table, rows in line["replaced"].items():
            REPLACED.labels(changefeed, table).inc(rows)
    elif "progress" in line:
        observe_progress(changefeed, line["progress"])
    elif "maintenance" in line:
        observe_maintenance(changefeed, line["maintenance"])


def forget(changefeed: str) -> None:
    """Remove the gauges of this changefeed's lake; counters stay."""
    for gauge in (
        CUT_TS,
        CUT_SECONDS,
        CHECKPOINT_TS,
        LAG_SECONDS,
        AUDIT_LATE,
        SMALL_FILE_RATIO,
        DELETED_ROW_RATIO,
    ):
        gauge.remove(changefeed)
    for stage in _STAGES:
        STAGE_LAG_SECONDS.remove(changefeed, stage)


def observe_progress(changefeed: str, progress: dict[str, Any]) -> None:
    """Note the lags and steps of a batch."""
    for stage in _STAGES:
        STAGE_LAG_SECONDS.labels(changefeed, stage).set(progress[f"{stage}_lag_s"])
    for step in _STEPS:
        if step in progress["ms"]:
            STEP_SECONDS.labels(changefeed, step).observe(progress["ms"][step] / 1000)


def observe_maintenance(changefeed: str, figures: dict[str, Any]) -> None:
    """Note the results of maintenance."""
    SMALL_FILE_RATIO.labels(changefeed).set(figures["small_file_ratio"])
    DELETED_ROW_RATIO.labels(changefeed).set(figures["deleted_row_ratio"])
    MAINTENANCE_SECONDS.labels(changefeed).observe(figures["seconds"])


def observe_cut(changefeed: str, line: dict[str, Any]) -> None:
    """Count one cut."""
    end_ts = int(line["end_ts"])
    BATCHES.labels(changefeed).inc()
    ROWS.labels(changefeed).inc(sum(line["rows"].values()))
    BATCH_SECONDS.labels(changefeed).observe(line["seconds"])
    CUT_TS.labels(changefeed).set(end_ts)
    CUT_SECONDS.labels(changefeed).set(physical_s(end_ts))
    CHECKPOINT_TS.labels(changefeed).set(line["checkpoint"])
    LAG_SECONDS.labels(changefeed).set_function(lambda: time.time() - physical_s(end_ts))
