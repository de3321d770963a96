"""The stream readers: a micro-batch is the cut `(start, end]`, a commit_ts is never split,
no cut crosses a DDL.

Offsets are `{"ts": T, "changefeed": ID}`, of rows with `"epoch": N` where the changefeed's
checkpoint was moved back. Invariants:
1. The same (start, end) always gives the same rows; Spark replays what its log has and its commits
   lack.
2. Offsets never go back, and never pass endTs.
3. When Spark asks for the offset after `start`, everything up to `start` is committed, in its sink
   and in its commit log. Its own call of `commit` comes one batch later, and before an idle time
   not at all.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from pyspark_tidemark.errors import MOVED_BACK, SourceError
from pyspark_tidemark.flight import ACK_AGAIN_S, Changefeed, ChangefeedMeta, Known
from pyspark_tidemark.options import Options
from pyspark_tidemark.query_schema import check_schema, check_truncated, without_commit_time
from pyspark_tidemark.reader import plan_partitions, read_batches

# Spark has admission control from 4.2 on. Before that nothing asks for a limit or sets one, and
# `latestOffset` is called without arguments: the stand-ins only let the classes below be defined.
try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxBytes,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
except ImportError:

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]
        """Marks a reader that can end at what is there when its query starts."""

    class ReadLimit:  # type: ignore[no-redef]
        """How much a batch may hold."""

    class ReadAllAvailable(ReadLimit):  # type: ignore[no-redef]
        """Everything."""

    class ReadMaxRows(ReadLimit):  # type: ignore[no-redef]
        """At most this many rows."""

        def __init__(self, max_rows: int) -> None:
            self.max_rows = max_rows

    class ReadMaxBytes(ReadLimit):  # type: ignore[no-redef]
        """At most this many bytes."""

        def __init__(self, max_bytes: int) -> None:
            self.max_bytes = max_bytes


CUT_SCHEMA = pa.schema([("start_ts", pa.int64()), ("end_ts", pa.int64())])
_REPORT_S = 1.0

Offset = dict[str, Any]


class _StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Positions, limits and acknowledgements, whatever a batch is made of."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._changefeed = Changefeed(options)
        # Where the last planned batch ended; unknown after a restart.
        self._position: int | None = None
        self._target: int | None = options.end_ts
        self._acked = -1
        self._ack_again_at = 0.0
        self._reported: Offset | None = None
        self._report_at = 0.0
        self._known: Known | None = None

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        """`startTs`, or the changefeed's checkpoint_ts.

        Raises:
            SourceError: ErrRangeCleaned, `startTs` is below what the changefeed keeps.
        """
        checkpoint_ts, start_ts = self._changefeed.describe().checkpoint_ts, self._options.start_ts
        if start_ts is not None and start_ts < checkpoint_ts:
            self._check_kept(start_ts, checkpoint_ts)
        self._position = checkpoint_ts if start_ts is None else start_ts
        return self._offset(self._position)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """`maxRowsPerTrigger`, else `maxBytesPerTrigger`: Spark has no limit of both,
        so we keep to the other.
        """
        rows, size = self._options.max_rows, self._options.max_bytes
        if rows is not None:
            return ReadMaxRows(rows)
        return ReadAllAvailable() if size is None else ReadMaxBytes(size)

    def latestOffset(  # noqa: N802 - serves both of Spark's signatures
        self, start: Offset | None = None, limit: ReadLimit | None = None
    ) -> Offset:
        """The end of the next batch; waits up to `pollMs` at the server when nothing is new."""
        position = self._position if start is None else self._ts(start)
        # Before 4.2 Spark does not say after a restart where it is. A limit that counts from the
        # checkpoint could end below that, so there is none.
        if position is None:
            return self._offset(
                self._up_to_target(
                    self._changefeed.latest(self._changefeed.describe().checkpoint_ts)
                )
            )
        # Everything up to `start` is committed (invariant 3).
        if start is not None:
            self._acknowledge(position)
        end_ts = max(position, self._up_to_target(self._next_end(position, limit)))
        if end_ts > position:
            self._check_readable(position)
        return self._offset(end_ts)

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802 - Spark's name
        """How far the changefeed is, asked at most once a second:
        a query's progress shows its lag by it.
        """
        if time.monotonic() >= self._report_at:
            described = self._changefeed.describe(known=self._known)
            # Only positions are needed here, so captures leave the tables out.
            self._known = Known(described.checkpoint_ts, {})
            self._reported = self._offset(described.resolved_ts)
            self._report_at = time.monotonic() + _REPORT_S
        return self._reported

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Fix the end of the query at what is resolved now."""
        self._target = self._up_to_target(self._changefeed.describe().resolved_ts)

    def commit(self, end: Offset) -> None:
        """Acknowledge; Spark calls this one batch late."""
        self._acknowledge(self._ts(end))

    def _next_end(self, position: int, limit: ReadLimit | None) -> int:
        """Where a cut ends that begins at `position`."""
        rows, size = self._limits(limit)
        wait_ms = self._options.poll_ms
        return self._changefeed.latest(position, max_rows=rows, max_bytes=size, wait_ms=wait_ms)

    def _check_readable(self, position: int) -> None:
        """Check that rows above `position` may be read by this query."""

    def _acknowledge(self, ts: int) -> None:
        """Acknowledge a new position at once, and the last one again every `ACK_AGAIN_S`: a capture
        may have died before it kept it.
        """
        now_s = time.monotonic()
        if not self._options.ack or ts < self._acked:
            return
        if ts > self._acked:
            for name in self._tables_to_acknowledge():
                self._changefeed.ack(ts, name)
        elif now_s >= self._ack_again_at:
            for name in self._tables_to_acknowledge():
                self._changefeed.ack_again(ts, name)
        else:
            return
        self._acked, self._ack_again_at = ts, now_s + ACK_AGAIN_S

    def _tables_to_acknowledge(self) -> Iterable[str | None]:
        """The tables that are acknowledged; None: what the options choose, at once."""
        return (None,)

    def _limits(self, limit: ReadLimit | None) -> tuple[int | None, int | None]:
        if isinstance(limit, ReadAllAvailable):
            return None, None
        return self._options.max_rows, self._options.max_bytes

    def _check_kept(self, start_ts: int, checkpoint_ts: int) -> None:
        """Check that the captures still keep the changes above `start_ts`."""
        try:
            self._changefeed.plan(
                start_ts, start_ts, None if self._options.table is None else [self._options.table]
            )
        except SourceError as err:
            if err.code != "ErrRangeCleaned":
                raise
            advice = (
                f"leave out startTs to begin at the changefeed's checkpoint, {checkpoint_ts}, or "
                "make another one"
            )
            raise SourceError(
                err.code, f"{err.message}; is the query's own checkpoint gone? Then {advice}"
            ) from None

    def _up_to_target(self, ts: int) -> int:
        return ts if self._target is None else min(ts, self._target)

    def _offset(self, ts: int) -> Offset:
        return {"ts": ts, "changefeed": self._options.changefeed}

    def _ts(self, offset: Offset) -> int:
        """The ts of an offset.

        Raises:
            SourceError: ErrCheckpointForeign, of another changefeed; ErrChangefeedMovedBack.
        """
        changefeed = offset.get("changefeed", self._options.changefeed)
        if changefeed != self._options.changefeed:
            raise SourceError(
                "ErrCheckpointForeign",
                f"the query's checkpoint belongs to changefeed {changefeed!r}, not to "
                f"{self._options.changefeed!r}: give the query another checkpointLocation",
            )
        return int(offset["ts"])

    def _range(self, start: Offset, end: Offset) -> tuple[int, int]:
        start_ts, end_ts = self._ts(start), self._ts(end)
        if end_ts < start_ts:
            raise SourceError(
                "ErrOffsetBehind",
                f"the captures are not at {start_ts} yet, but at {end_ts}: start again",
            )
        self._position = end_ts
        return start_ts, end_ts


class RowStreamReader(_StreamReader):
    """Row changes: of one table in its own columns, or of several in the envelope.

    Only its query's checkpoint knows how far it is, and nothing of what lies below is read again:
    so a checkpoint from before the changefeed was moved back ends the query.
    """

    def __init__(self, options: Options, schema: StructType) -> None:
        super().__init__(options)
        self._schema = without_commit_time(schema)
        self._described: tuple[int, ChangefeedMeta] | None = None
        self._first_position: int | None = None

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """About `sliceBytes` each, as the captures planned."""
        start_ts, end_ts = self._range(start, end)
        if end_ts == start_ts:
            return []
        self._check_readable(start_ts)
        return plan_partitions(self._options, start_ts, end_ts, self._describe_at(start_ts))

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Runs on executors."""
        return read_batches(self._options, partition)

    def _offset(self, ts: int) -> Offset:
        epoch = self._changefeed.epoch
        return super()._offset(ts) | ({"epoch": epoch} if epoch else {})

    def _ts(self, offset: Offset) -> int:
        ts = super()._ts(offset)
        if offset.get("epoch", 0) != self._changefeed.epoch:
            raise SourceError(
                MOVED_BACK,
                f"the checkpoint of changefeed {self._options.changefeed!r} was moved back, and the "
                f"query's checkpoint, at {ts}, is from before: give the query another "
                "checkpointLocation. It then begins at the changefeed's checkpoint_ts, and reads "
                f"again what lies up to {ts}; with startTs={ts} it does not",
            )
        return ts

    def _check_readable(self, position: int) -> None:
        table = self._options.table
        if table is None or self._options.envelope:
            return
        described = self._describe_at(position)
        if self._first_position is None:
            self._first_position = position
        try:
            check_schema(described, table, position, self._schema)
            if position != self._first_position:
                check_truncated(described, table, position)
        except SourceError:
            # A query that is started again gets the columns above the changefeed's checkpoint: it
            # has to be at the barrier by then.
            self._acknowledge(position)
            raise

    def _describe_at(self, ts: int) -> ChangefeedMeta:
        """The changefeed with the tables of rows above `ts`."""
        if self._described is None or self._described[0] != ts:
            self._described = ts, self._changefeed.describe(ts)
        return self._described[1]

    def _tables_to_acknowledge(self) -> Iterable[str | None]:
        """Only what the options choose: somebody else may read the other tables. A reader with a
        name has a position of its own: whatever it leaves out, it does not need.
        """
        if self._options.table is not None or self._options.reader:
            return super()._tables_to_acknowledge()
        return filter(self._options.chooses, self._changefeed.describe().tables)


class CutPartition(InputPartition):
    """The cut itself: the one row of its micro-batch."""

    def __init__(self, start_ts: int, end_ts: int) -> None:
        super().__init__((start_ts, end_ts))
        self.start_ts = start_ts
        self.end_ts = end_ts


class CutStreamReader(_StreamReader):
    """Cuts over all tables of a changefeed: a query over them decides itself what to read of each
    cut. It may have applied further cuts than those that it was given, as the lake job does.
    """

    def _next_end(self, position: int, limit: ReadLimit | None) -> int:
        try:
            return super()._next_end(position, limit)
        except SourceError as err:
            if err.code != "ErrRangeCleaned":
                raise
        # A job that has not applied more cuts on its own gets the error when it plans the cut.
        return super()._next_end(self._changefeed.describe().checkpoint_ts, limit)

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """The one row `(start_ts, end_ts)`."""
        if self._ts(end) < self._ts(start) == self._options.start_ts:
            # Spark replays its first batch to a query whose `startTs` now lies beyond it.
            start = end
        return [CutPartition(*self._range(start, end))]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Runs on executors, without a call to a capture."""
        if isinstance(partition, CutPartition):
            yield pa.RecordBatch.from_arrays(
                [[partition.start_ts], [partition.end_ts]], schema=CUT_SCHEMA
            )
