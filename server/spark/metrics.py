"""Metrics of the lake jobs, from the line that a job prints for each cut."""

import time
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from storage.model.ts import physical_ms

BATCHES = Counter("tidemark_spark_batches_total", "Cuts applied to the lake", ["changefeed"])
ROWS = Counter("tidemark_spark_rows_total", "Row changes applied to the lake", ["changefeed"])
BATCH_SECONDS = Histogram("tidemark_spark_batch_seconds", "Time to apply one cut to all tables", ["changefeed"])
CUT_TS = Gauge("tidemark_spark_cut_ts", "The newest cut that is visible in the lake, a TSO timestamp", ["changefeed"])
CHECKPOINT_TS = Gauge("tidemark_spark_checkpoint_ts", "What the changefeed answered to the last ack", ["changefeed"])
LAG_SECONDS = Gauge("tidemark_spark_lag_seconds", "Now minus the physical time of the newest cut", ["changefeed"])
STARTS = Counter("tidemark_spark_job_starts_total", "Processes started for the job", ["changefeed"])


def observe_cut(changefeed: str, line: dict[str, Any]) -> None:
    """Count one cut."""
    end_ts = int(line["end_ts"])
    BATCHES.labels(changefeed).inc()
    ROWS.labels(changefeed).inc(sum(line["rows"].values()))
    BATCH_SECONDS.labels(changefeed).observe(line["seconds"])
    CUT_TS.labels(changefeed).set(end_ts)
    CHECKPOINT_TS.labels(changefeed).set(line["checkpoint"])
    LAG_SECONDS.labels(changefeed).set_function(lambda: time.time() - physical_ms(end_ts) / 1000)
