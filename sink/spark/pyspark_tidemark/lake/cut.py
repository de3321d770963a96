"""`CutApplier` applies one cut after another to a lake: announce, plan, cross the barrier, write
all tables in parallel, commit to the manifest, acknowledge to the changefeed.

A crash may come between any two steps. The cut is then applied again: a table that has it already
says so by its position, and a cut that is in the manifest is only acknowledged again. `skip` brings
a lake over ranges that an operator let its changefeed skip.
"""

import dataclasses
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import UTC, datetime
from typing import TypeVar

from pyspark.sql import SparkSession

from pyspark_tidemark import tracing
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import (
    Changefeed,
    ChangefeedMeta,
    SliceEndpoint,
    TableMeta,
    slices_within,
)
from pyspark_tidemark.lake.barrier import Barrier, BarrierResult
from pyspark_tidemark.lake.changes import ByTasks, Changes
from pyspark_tidemark.lake.cut_record import (
    CutRecord,
    Shown,
    TableCut,
    after_statements,
    covered,
)
from pyspark_tidemark.lake.cut_tasks import TaskWriter, write_by_tasks
from pyspark_tidemark.lake.failure import in_table, named
from pyspark_tidemark.lake.format import AUTO, SOFT_DELETE, SPARK
from pyspark_tidemark.lake.manifest import Manifest
from pyspark_tidemark.lake.schema import Policy
from pyspark_tidemark.lake.session import SparkThreads
from pyspark_tidemark.lake.shards import merged, owners
from pyspark_tidemark.lake.soft_delete import MarkedTables
from pyspark_tidemark.lake.target import (
    StatementTarget,
    Target,
    TaskTarget,
    VersionedTarget,
    path_part,
    removed,
)
from pyspark_tidemark.options import LOGICAL_BITS

_logger = logging.getLogger(__name__)
_OFFER_WAIT_MS = 10_000
NO_BATCH = -1
"""In the record of a stretch that was skipped: no batch of Spark's delivered it."""
_Argument = TypeVar("_Argument")
_Outcome = TypeVar("_Outcome")
_Planned = tuple[TableMeta, tuple[int, int], Sequence[SliceEndpoint], bool]
"""A table, the range (start_ts, end_ts] of the cut, the table's slices in it, and whether the cut
replaces all of the table's rows.
"""


@dataclasses.dataclass(frozen=True)
class Cut:
    """All changes with `start_ts < commit_ts <= end_ts`, as Spark's batch `batch`."""

    batch: int
    start_ts: int
    end_ts: int


@dataclasses.dataclass(frozen=True)
class TableWriters:
    """How the tables of a cut are written: the options of the `tidemark` data source, the session,
    how many tables at a time, and whether by tasks (`write`, one of `format.WRITES`).
    """

    source_options: dict[str, str]
    spark: SparkSession | None
    """None only for a target that needs no Spark."""
    parallel: int
    write: str = AUTO
    tasks_from_bytes: int = 0
    """With `auto`, tasks write the cuts that have so many bytes or more; 0: none."""


@dataclasses.dataclass(frozen=True)
class _TableWork:
    """What a cut brings to one table that has not got it yet."""

    changes: Changes
    is_new: bool
    """The target does not have the table."""


class CutApplier:
    """Applies cuts to a lake; one call at a time."""

    def __init__(
        self,
        changefeed: Changefeed,
        name: str,
        target: Target,
        manifest: Manifest,
        *,
        policy: Policy,
        writers: TableWriters,
    ) -> None:
        self._changefeed = changefeed
        self._name = name
        self._target = target
        self._manifest = manifest
        self._policy = policy
        self._soft_delete = policy.mode == SOFT_DELETE
        described = MarkedTables(changefeed) if self._soft_delete else changefeed
        self._barrier = Barrier(described, target, manifest, policy)
        self._source_options = writers.source_options
        self._spark = writers.spark
        self._tasks_from_bytes = writers.tasks_from_bytes
        self._configured_write = writers.write
        self._write = writers.write
        """The same, as decided for the cut that is being applied (`_write_of`)."""
        self._pool = (
            ThreadPoolExecutor(writers.parallel, "table")
            if writers.spark is None
            else SparkThreads(writers.spark, writers.parallel, "table")
        )
        self._altered: set[str] = set()
        self._fitted: dict[str, tuple[TableMeta, TableMeta]] = {}
        """Each table as the captures describe it, and with the schema of the target."""
        self._positions: dict[str, int] = {}
        """The end_ts of each table, of those that this job has looked at."""
        self._unchecked: dict[str, Shown] | None = None
        """What the newest cut shows of the tables that this job has not looked at yet; None: not
        read yet.
        """
        self._span: tracing.Span = tracing.NO_SPAN
        """The trace of the cut that is being applied, until it is acknowledged."""

    @property
    def applied_ts(self) -> int:
        """The end of the newest cut in the manifest; -1 for an empty lake."""
        return -1 if self._manifest.last is None else self._manifest.last.end_ts

    @property
    def resolved_ts(self) -> int:
        """The resolved_ts of the captures' last answer, at least `applied_ts`."""
        return max(self._changefeed.resolved_ts, self.applied_ts)

    def next_end(self, max_rows: int, wait_ms: int) -> int:
        """The end_ts of the next cut; `applied_ts` if nothing is new within `wait_ms`."""
        return self._changefeed.latest(self.applied_ts, max_rows=max_rows, wait_ms=wait_ms)

    def apply(self, cut: Cut) -> CutRecord:
        """Apply the cut to every table, then commit it to the manifest; a cut that is committed
        already changes nothing. Durable when it returns the newest record.

        Raises:
            SourceError: ErrCutGap, the lake does not end where the cut starts, or a lake's or a
                capture's error.
        """
        last = self._manifest.last
        if last is not None and cut.end_ts <= last.end_ts:
            return last
        start_ts = self._start_ts(cut, last)
        planning_ns = time.time_ns()
        # Announced before anything is written, also by the barrier: a job that takes over writes a
        # cut with the same end, which the tables' fences recognise (docs/design/0028).
        end_ts, planned = self._planned(start_ts, self._manifest.announce(start_ts, cut.end_ts))
        planned = self._begin_trace(start_ts, end_ts, planned, planning_ns)
        try:
            record = self._applied(Cut(cut.batch, start_ts, end_ts), last, planned)
        except Exception as err:
            self._end_trace(err)
            raise
        # Another job had begun a shorter cut: the rest of Spark's batch is one more.
        return record if end_ts >= cut.end_ts else self.apply(cut)

    def _applied(
        self, cut: Cut, last: CutRecord | None, planned: Sequence[SliceEndpoint]
    ) -> CutRecord:
        start_ts, end_ts = cut.start_ts, cut.end_ts
        barrier_result = self._cross_barrier(start_ts, last)
        self._forget(barrier_result)
        self._follow_names(barrier_result)
        applied = tuple(self._apply_tables(barrier_result, start_ts, end_ts, planned))
        record = CutRecord(
            changefeed=self._name,
            start_ts=start_ts,
            end_ts=end_ts,
            batch=cut.batch,
            applied_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            tables=applied,
            mode=self._policy.mode,
            dropped=barrier_result.dropped,
            renamed=barrier_result.renamed,
            skipped=() if last is None else last.skipped,
        )
        committing = self._span.child("commit")
        self._manifest.commit(record)
        committing.end()
        self._altered |= barrier_result.changed
        return record

    def take_altered(self) -> list[str]:
        """The tables that schema changes made, emptied, altered or renamed since the last call."""
        altered, self._altered = sorted(self._altered), set()
        return altered

    def acknowledge(self) -> int:
        """Acknowledge the newest cut to the changefeed; returns its checkpoint_ts."""
        assert self._manifest.last is not None
        acknowledging = self._span.child("acknowledge")
        try:
            checkpoint_ts = self._changefeed.ack(self._manifest.last.end_ts)
        except Exception as err:
            acknowledging.end(named(err))
            self._end_trace(err)
            raise
        acknowledging.end()
        self._end_trace()
        return checkpoint_ts

    def _begin_trace(
        self, start_ts: int, end_ts: int, planned: Sequence[SliceEndpoint], planning_ns: int
    ) -> Sequence[SliceEndpoint]:
        """Begin the trace of a cut that has rows; returns its slices, which are read within it."""
        self._end_trace()
        if not planned or not tracing.is_on():
            return planned
        # The trace begins at start_ts, when the first of its rows may have been committed: the
        # captures' spans for them are before this moment.
        self._span = tracing.begin(
            "cut",
            (start_ts >> LOGICAL_BITS) * 1_000_000,
            changefeed=self._name,
            start_ts=start_ts,
            commit_ts=end_ts,
            tables=len({part.table for part in planned}),
            rows=sum(part.rows for part in planned),
        )
        self._changefeed.traceparent = self._span.traceparent
        self._span.child("plan", planning_ns).end()
        return slices_within(self._span.traceparent, planned)

    def _end_trace(self, error: Exception | None = None) -> None:
        self._span.end(None if error is None else named(error))
        self._span, self._changefeed.traceparent = tracing.NO_SPAN, ""

    def _start_ts(self, cut: Cut, last: CutRecord | None) -> int:
        if last is None and cut.batch > 0 and isinstance(self._target, StatementTarget):
            raise SourceError(
                "ErrCutGap",
                "the topic is empty, but Spark's checkpoint is that of a job which wrote to it: the "
                "topic's retention (retention.ms, retention.bytes) has removed all messages while the "
                "changefeed stood still, or the topic was made anew. Remove the job's checkpoint "
                "directory (--checkpoint-dir), then start the job again: it goes on at the "
                "changefeed's checkpoint, and no change or statement after that is missing",
            )
        if last is None and cut.batch > 0:
            raise SourceError(
                "ErrCutGap",
                "the lake is gone, but Spark's checkpoint is not. If the lake was lost, bring it back, "
                "or create a new changefeed. If it is to begin here, remove the job's checkpoint "
                "directory (--checkpoint-dir), then start the job again",
            )
        start_ts = cut.start_ts if last is None else last.end_ts
        if cut.start_ts > start_ts:
            raise SourceError(
                "ErrCutGap", f"the lake ends at {start_ts}, Spark's checkpoint at {cut.start_ts}"
            )
        return start_ts

    def _cross_barrier(self, start_ts: int, last: CutRecord | None) -> BarrierResult:
        if last is not None and last.is_skipped:
            return self._barrier.catch_up(start_ts)
        return self._barrier.cross(start_ts, first=last is None)

    def _forget(self, barrier_result: BarrierResult) -> None:
        """Drop what is cached of tables that the barrier changed."""
        # Also where the columns are the same: the key may have changed, and a table that was made
        # again has another position.
        for name in (
            *barrier_result.changed,
            *barrier_result.dropped,
            *barrier_result.recreated,
            *(name for pair in barrier_result.renamed for name in pair),
        ):
            self._positions.pop(name, None)
            self._fitted.pop(name, None)

    def _follow_names(self, barrier_result: BarrierResult) -> None:
        """Rename unchecked tables to the names that they have above a barrier."""
        if self._unchecked is None:
            self._unchecked = {} if self._manifest.last is None else self._manifest.shown()
            _check_merged(barrier_result.tables, self._unchecked)
        self._unchecked = after_statements(
            self._unchecked, barrier_result.dropped, barrier_result.renamed
        )
        # One that a DDL dropped and made again may be missing: a job may have died in between.
        for name in barrier_result.recreated:
            self._unchecked.pop(name, None)

    def _planned(self, start_ts: int, end_ts: int) -> tuple[int, Sequence[SliceEndpoint]]:
        """The end of the cut and its slices; nothing of the target is changed yet.

        While captures read a table again (ErrRangeHeld), they take back the end that they offered
        before. The cut then gets the end that they offer next, where the table is complete.
        """
        try:
            return end_ts, self._changefeed.plan(start_ts, end_ts)
        except SourceError as err:
            if err.code != "ErrRangeHeld":
                raise
            offered_ts = self._changefeed.latest(start_ts, wait_ms=_OFFER_WAIT_MS)
            if offered_ts <= start_ts:
                raise SourceError("ErrRangeHeld", err.message, retryable=True) from None
        end_ts = self._manifest.announce(start_ts, offered_ts, moved=True)
        return end_ts, self._changefeed.plan(start_ts, end_ts)

    def _apply_tables(
        self,
        barrier_result: BarrierResult,
        start_ts: int,
        end_ts: int,
        planned: Sequence[SliceEndpoint],
    ) -> Sequence[TableCut]:
        slices: dict[str, list[SliceEndpoint]] = defaultdict(list)
        tables = barrier_result.tables
        merged_in = owners(tables)
        for part in planned:
            slices[merged_in.get(part.table, part.table)].append(part)
        self._write = self._write_of(planned)
        if unknown := sorted(slices.keys() - tables.keys()):
            # The cut was planned right before the changefeed got another table filter.
            raise SourceError(
                "ErrPlanOutdated",
                f"the changefeed does not take {', '.join(unknown)} any more: the cut is planned "
                "again",
                retryable=True,
            )
        first = self._manifest.last is None
        names = sorted(tables if first else slices.keys() | barrier_result.changed)
        work = [
            (tables[name], (start_ts, end_ts), slices.get(name, []), name in barrier_result.emptied)
            for name in names
        ]
        if self._write == SPARK:
            return self._apply_by_tasks(names, work)
        return self._each(names, lambda one: self._finish(self._begin(one)), work)

    def _write_of(self, planned: Sequence[SliceEndpoint]) -> str:
        """Who writes a cut, one of `format.WRITES`."""
        is_large = sum(part.size_bytes for part in planned) >= self._tasks_from_bytes > 0
        if self._configured_write == AUTO and is_large and isinstance(self._target, TaskTarget):
            return SPARK
        return self._configured_write

    def _apply_by_tasks(self, names: Sequence[str], work: Sequence[_Planned]) -> list[TableCut]:
        """Look at the tables' positions, write the files of all tables in one Spark job, and commit
        them table by table.
        """
        begun = self._each(names, self._begin, work)
        writers = self._each(names, self._task_writer, begun)
        assert self._spark is not None, "a target whose files tasks write has a session"
        files = write_by_tasks(self._spark, filter(None, writers))
        work_and_files = [(one, files.get(name)) for one, name in zip(begun, names, strict=True)]
        return self._each(names, lambda one: self._finish(*one), work_and_files)

    def _task_writer(self, begun: _TableWork | TableCut) -> tuple[Changes, TaskWriter] | None:
        if isinstance(begun, TableCut) or not isinstance(self._target, TaskTarget):
            return None
        # Without slices there is nothing to read: the driver makes or empties the table if needed.
        if not begun.changes.slices:
            return None
        writer = self._target.task_writer(begun.changes, is_new=begun.is_new)
        return None if writer is None else (begun.changes, writer)

    def _each(
        self, names: Sequence[str], call: Callable[[_Argument], _Outcome], of: Iterable[_Argument]
    ) -> list[_Outcome]:
        """The outcomes of a call for each table, made in parallel."""
        running = [self._pool.submit(call, one) for one in of]
        # Also when one has failed: the job ends then, and must not release its right to write while
        # a table is still being written.
        wait(running)
        return [_result(name, one) for name, one in zip(names, running, strict=True)]

    def _begin(self, planned: _Planned) -> _TableWork | TableCut:
        """The changes that a table has not got yet, or its record if it has the whole cut."""
        table, (start_ts, end_ts), slices, emptied = planned
        position = self._positions.get(table.name)
        if position is None:
            position = self._target.position(table)
            self._check_continues(table, position)
        # An earlier try has applied the cut to this table.
        if position is not None and position >= end_ts:
            self._positions[table.name] = position
            changes = self._changes(table, table, start_ts, end_ts, slices)
            return TableCut(table.name, changes.planned_rows, self._target.version(table))
        # The table has a part of the cut, as where another job had announced a shorter one: only
        # the rest is applied, and a truncation at the cut's start is done already.
        if position is not None and position > start_ts:
            names = [shard.name for shard in table.shards] or [table.name]
            slices, emptied = self._changefeed.plan(position, end_ts, names), False
            start_ts = position
        changes = self._changes(self._fitting(table, position), table, start_ts, end_ts, slices)
        return _TableWork(dataclasses.replace(changes, emptied=emptied), position is None)

    def _finish(self, begun: _TableWork | TableCut, by_tasks: ByTasks | None = None) -> TableCut:
        """Commit the cut to a table, with what tasks have written for it or by reading it."""
        if isinstance(begun, TableCut):
            return begun
        changes = dataclasses.replace(begun.changes, by_tasks=by_tasks)
        table, start_ts, end_ts = changes.table, changes.start_ts, changes.end_ts
        is_traced = any(part.is_traced for part in changes.slices)
        writing = self._span.child("table", table=table.name) if is_traced else tracing.NO_SPAN
        try:
            applied = self._target.create(changes) if begun.is_new else self._target.apply(changes)
        except Exception as err:
            writing.end(named(err))
            raise
        writing.set(rows=applied.rows)
        writing.end()
        self._positions[table.name] = end_ts
        if self._soft_delete:
            # A key that is inserted again after its delete is there.
            applied = dataclasses.replace(applied, replaced=0)
        if applied.replaced:
            _logger.warning(
                "%s: %s of the keys that the cut (%s, %s] inserts were in the table already: "
                "their rows were replaced. "
                "Compare the table with its source: tidemark cli verify -c %s --table %s",
                *(table.name, applied.replaced, start_ts, end_ts, self._name, table.name),
            )
        return TableCut(
            table.name, applied.rows, applied.version, applied.checksum, applied.replaced or None
        )

    def _check_continues(self, table: TableMeta, position: int | None) -> None:
        """Check that a table which the newest cut shows still exists with all that the cut shows.

        Raises:
            SourceError: ErrTableRemoved, ErrTableRolledBack; ErrTableMoved, an earlier version
                wrote it under its name without escapes.
        """
        assert self._unchecked is not None
        shown = self._unchecked.pop(table.name, None)
        if shown is None or not isinstance(self._target, VersionedTarget):
            return
        if position is not None or not self._target.names_are_paths:
            self._target.check_continues(table, shown)
            return
        parts = table.name.partition(".")[::2]
        place = tuple(map(path_part, parts))
        if place != parts:
            raise SourceError(
                "ErrTableMoved",
                f"the lake has the table {table.name}, but not at {'/'.join(place)}, where names "
                "like this lie since this version: move its directory there, or start a new "
                "changefeed and target",
            )
        raise removed(table.name)

    def _fitting(self, table: TableMeta, position: int | None) -> TableMeta:
        """The table with the schema to write; `Barrier.fitting`, once for each of its schemas."""
        if position is None:
            return table
        fitted = self._fitted.get(table.name)
        if fitted is None or not fitted[0].schema.equals(table.schema):
            fitted = self._fitted[table.name] = (table, self._barrier.fitting(table))
        return fitted[1]

    def _changes(
        self,
        table: TableMeta,
        read: TableMeta,
        start_ts: int,
        end_ts: int,
        slices: Sequence[SliceEndpoint],
    ) -> Changes:
        # A description may come again as another object: rows are fitted where columns differ.
        schema = None if table.schema.equals(read.schema) else read.schema
        return Changes(
            table,
            start_ts,
            end_ts,
            tuple(slices),
            self._changefeed,
            self._source_options,
            schema,
            soft_delete=self._soft_delete,
            write=self._write,
        )


def skip(manifest: Manifest, described: ChangefeedMeta, mode: str) -> CutRecord | None:
    """Move a lake's end over the ranges that its changefeed was told to skip, up to the checkpoint;
    None: there is nothing to skip.

    The range is committed as a cut without changes that lists it as skipped, as every later cut
    does. No table changes, so after a crash before the commit this is just repeated.

    Raises:
        SourceError: ErrCutGap, changes after the lake's end were neither delivered to it nor given
            up by an operator.
    """
    last, checkpoint_ts = manifest.last, described.checkpoint_ts
    if last is None or checkpoint_ts <= last.end_ts:
        return None
    if not covered(described.skipped, last.end_ts, checkpoint_ts):
        raise SourceError(
            "ErrCutGap",
            f"the lake ends at {last.end_ts}, but the changefeed's checkpoint is already "
            f"{checkpoint_ts}: the changes between were given to somebody else. Pause the "
            f"changefeed, and resume it with --overwrite-checkpoint-ts {last.end_ts} to have them "
            "delivered again; where that is refused, because they are no longer kept, create a "
            "new changefeed with a new target",
        )
    ended = _ended_tables(manifest, described)
    while last.end_ts < checkpoint_ts:
        start_ts, end_ts = last.end_ts, manifest.announce(last.end_ts, checkpoint_ts)
        if end_ts > checkpoint_ts:
            raise SourceError(
                "ErrCutGap",
                f"a job has begun a cut that ends at {end_ts}, above {checkpoint_ts}, where the "
                "changefeed was told to "
                f"go on: pause it, and resume it with --overwrite-checkpoint-ts {end_ts}",
            )
        last = CutRecord(
            changefeed=last.changefeed,
            start_ts=start_ts,
            end_ts=end_ts,
            batch=NO_BATCH,
            applied_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            tables=(),
            mode=mode,
            dropped=ended,
            skipped=(*last.skipped, (start_ts, end_ts)),
        )
        manifest.commit(last)
        ended = ()
    return last


def _check_merged(tables: Mapping[str, TableMeta], shown: Mapping[str, Shown]) -> None:
    """Check that no shard is a table of its own in the lake: its rows would be missing where shards
    are merged.

    Raises:
        SourceError: ErrTargetSchema.
    """
    for shard, table in owners(tables).items():
        if shard in shown and shard not in tables:
            raise SourceError(
                "ErrTargetSchema",
                f"the lake has the table {shard}, as an older lake job writes it, and it is to be "
                f"merged into {table}: start a new changefeed and target",
            )


def _ended_tables(manifest: Manifest, described: ChangefeedMeta) -> tuple[str, ...]:
    """Tables of the lake that the changefeed does not have any more;
    what happened to them was skipped.
    """
    return tuple(sorted(manifest.shown().keys() - merged(described).tables.keys()))


def _result(name: str, writing: "Future[_Outcome]") -> _Outcome:
    """The outcome of one table; its error names the table, since it delays the cuts of all."""
    try:
        return writing.result()
    except Exception as err:
        raise in_table(named(err), name) from err
