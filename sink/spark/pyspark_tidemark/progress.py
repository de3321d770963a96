"""How far queries over `format("tidemark")` are behind,
from the progress that Spark reports after each batch.

    spark.streams.addListener(LagListener(print))

Lag has two parts: what the changefeed is behind the clock, and what the query is behind the
changefeed. `document` is the lake job's own, of each cut: it also shows where its time goes.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pyspark.sql.streaming.listener import StreamingQueryListener

_LOGICAL_BITS = 18


@dataclasses.dataclass(frozen=True)
class Lag:
    """One source of one query after a batch; times in seconds, never below 0."""

    query: str
    changefeed: str
    batch: int
    rows: int
    end_ts: int
    """The query holds everything up to this TSO."""
    resolved_ts: int
    """The captures hold everything up to this TSO."""
    query_s: float
    """What the query is behind the changefeed."""
    total_s: float
    """What the query is behind the clock of this machine."""


class LagListener(StreamingQueryListener):
    """Calls `report` with the lag of each tidemark source after each batch."""

    def __init__(self, report: Callable[[Lag], None]) -> None:
        self._report = report

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """Do nothing: there is no progress yet."""

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """Report the lag of each source."""
        for lag in lags(event.progress, time.time()):
            self._report(lag)

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """Do nothing: the query has read nothing."""

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """Do nothing: whoever started the query sees how it ended."""


def document(
    batch: int, end_ts: int, resolved_ts: int, now_s: float, steps_s: Mapping[str, float]
) -> dict[str, Any]:
    """The line of a cut: how far the lake is behind the captures, and they behind the clock; and
    how long the steps took.
    """
    newest_ts = max(resolved_ts, end_ts)
    return {
        "batch": batch,
        "end_ts": end_ts,
        "resolved_ts": newest_ts,
        "spark_lag_s": round(_seconds(newest_ts) - _seconds(end_ts), 3),
        "captures_lag_s": round(max(0.0, now_s - _seconds(newest_ts)), 3),
        "ms": {name: round(seconds * 1000) for name, seconds in steps_s.items()},
    }


def lags(progress: Any, now_s: float) -> Iterator[Lag]:
    """The lag of each of our sources in a `StreamingQueryProgress`;
    sources without a position yet are left out.
    """
    # Spark's own JSON: what PySpark makes of offsets differs from version to version.
    for source in json.loads(progress.json)["sources"]:
        end = _offset(source.get("endOffset"))
        if end is None:
            continue
        end_ts, latest = int(end["ts"]), _offset(source.get("latestOffset"))
        # Before 4.2 Spark does not ask sources for their newest offset.
        resolved_ts = max(int(latest["ts"]) if latest else 0, end_ts)
        yield Lag(
            query=progress.name or str(progress.id),
            changefeed=end["changefeed"],
            batch=progress.batchId,
            rows=source["numInputRows"],
            end_ts=end_ts,
            resolved_ts=resolved_ts,
            query_s=_seconds(resolved_ts) - _seconds(end_ts),
            total_s=max(0.0, now_s - _seconds(end_ts)),
        )


def _offset(offset: Any) -> dict[str, Any] | None:
    """A position, if the source is ours: Spark names the classes of sources, not their formats."""
    # There is none of a newest offset that was not asked for yet, in the batch after a restart.
    return offset if isinstance(offset, dict) and offset.keys() >= {"ts", "changefeed"} else None


def _seconds(ts: int) -> float:
    return (ts >> _LOGICAL_BITS) / 1000
