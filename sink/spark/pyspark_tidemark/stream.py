"""The stream readers: offsets are `{"ts": T}`, a micro-batch is the cut `(start, end]`, a commit_ts is never split.

Invariants:
1. The same (start, end) always gives the same rows; Spark replays what its log has and its commits lack.
2. Offsets never go back, and never pass endTs.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from pyspark_tidemark.flight import Changefeed
from pyspark_tidemark.options import Options
from pyspark_tidemark.reader import batches, planned

try:
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
except ImportError:  # before Spark 4.2 there is no admission control: latestOffset is called without arguments

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]
        """Stands in for the mixin that Spark does not have yet."""

    ReadLimit = ReadAllAvailable = ReadMaxRows = None  # type: ignore[assignment,misc]

CUT_SCHEMA = pa.schema([("start_ts", pa.int64()), ("end_ts", pa.int64())])


class TableStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Row changes of one table."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._changefeed = Changefeed(options)
        self._position: int | None = None  # where the last planned batch ended; unknown after a restart
        self._target: int | None = options.end_ts
        self._resolved: int | None = None

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        """`startTs`, or the changefeed's checkpoint_ts."""
        start_ts = self._options.start_ts
        self._position = self._changefeed.describe().checkpoint_ts if start_ts is None else start_ts
        return {"ts": self._position}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """`maxRowsPerTrigger`."""
        rows = self._options.max_rows
        return ReadAllAvailable() if rows is None else ReadMaxRows(rows)

    def latestOffset(  # noqa: N802 - serves both of Spark's signatures
        self, start: dict[str, int] | None = None, limit: ReadLimit | None = None
    ) -> dict[str, int]:
        """The end of the next batch; waits up to `waitMs` at the server when nothing is new."""
        position = self._position if start is None else int(start["ts"])
        if position is None:  # before 4.2 after a restart: a limit counted from the checkpoint could fall behind Spark
            return {"ts": self._capped(self._changefeed.latest(self._changefeed.describe().checkpoint_ts))}
        max_rows = self._options.max_rows if limit is None else getattr(limit, "max_rows", None)
        end_ts = self._changefeed.latest(position, max_rows=max_rows, wait_ms=self._options.wait_ms)
        return {"ts": max(position, self._capped(end_ts))}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Fix the end of the query at what is resolved now."""
        start_ts = self._changefeed.describe().checkpoint_ts
        self._target = self._capped(self._changefeed.latest(start_ts))

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        """One per slice of the captures' plan."""
        self._position = int(end["ts"])
        return planned(self._options, int(start["ts"]), int(end["ts"]))

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Runs on executors."""
        return batches(self._options, partition)

    def commit(self, end: dict[str, int]) -> None:
        """Acknowledge; Spark calls this one batch late, and never for the last one before an idle time."""
        if self._options.ack:
            self._changefeed.ack(int(end["ts"]))

    def _capped(self, ts: int) -> int:
        return ts if self._target is None else min(ts, self._target)


class CutPartition(InputPartition):
    """The cut itself: the one row of its micro-batch."""

    def __init__(self, start_ts: int, end_ts: int) -> None:
        super().__init__((start_ts, end_ts))
        self.start_ts = start_ts
        self.end_ts = end_ts


class CutStreamReader(TableStreamReader):
    """Cuts over all tables of a changefeed: a query over them decides itself what to read of each cut."""

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        """The one row `(start_ts, end_ts)`."""
        self._position = int(end["ts"])
        return [CutPartition(int(start["ts"]), int(end["ts"]))]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Runs on executors; asks nobody."""
        if isinstance(partition, CutPartition):
            yield pa.RecordBatch.from_arrays([[partition.start_ts], [partition.end_ts]], schema=CUT_SCHEMA)
