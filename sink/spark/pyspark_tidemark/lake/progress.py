"""What Spark tells after each batch, as a line of the job: where time goes,
and how far each stage is behind.
"""

import time
from collections.abc import Callable
from typing import Any

from pyspark.sql.streaming.listener import StreamingQueryListener

from pyspark_tidemark.progress import lags


class BatchListener(StreamingQueryListener):
    """Calls `say` with `{"progress": …}` after each batch; called by Spark's own thread."""

    def __init__(self, say: Callable[[dict[str, Any]], None]) -> None:
        self._say = say

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """Nothing: the job says itself that it is ready."""

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """One batch was committed to Spark's log."""
        progress = document(event.progress, time.time())
        if progress is not None:
            self._say({"progress": progress})

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """Nothing has changed."""

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """Nothing: the job ends with its query."""


def document(progress: Any, now_s: float) -> dict[str, Any] | None:
    """The line of a batch; None before the first."""
    lag = next(lags(progress, now_s), None)
    if lag is None:
        return None
    return {
        "batch": lag.batch,
        "end_ts": lag.end_ts,
        "resolved_ts": lag.resolved_ts,
        "spark_lag_s": round(lag.query_s, 3),
        "captures_lag_s": round(max(0.0, lag.total_s - lag.query_s), 3),
        "ms": {name: int(ms) for name, ms in progress.durationMs.items()},
    }
