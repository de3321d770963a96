"""One run of a changefeed in this process, from its checkpoint to its end: the pullers and the
readable state of its tables.

Invariants:
1. The sorter and the sink have a table from before anything is added to it until its last row is
   acknowledged.
2. A table that ends at a schema change is resolved up to that ts: by `Run` if its source is a log,
   which goes on to other tables; else by its own puller.
3. Readers get no rows above the ts up to which all schema changes are known.
"""

import asyncio
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

import pyarrow as pa
import structlog
from pyspark_tidemark import tracing

from server.capture import long_lived, metrics
from server.capture.cut import CutPart, cut_part
from server.capture.errors import TargetInRereadError
from server.capture.processor import Assignment
from server.capture.pulling import Gate, PullContext, Pulling, SorterRows
from server.capture.traffic import Traffic
from server.changefeed.table import SourceTable
from sink.cut import Bounds
from sink.manager import SinkManager
from sink.versions import Ddl, Version
from sorter.errors import TableDamagedError, TableNotFoundError
from storage.model.errors import ClosedError
from storage.model.span import Span
from storage.model.ts import MAX_TS

_LOOK_EVERY_S = 1.0
_DELIVERED_EVERY_S = 0.1
_SETTLE_S = 60.0
_log = structlog.get_logger(__name__)


class LocalSink(SinkManager):
    """A sink manager that answers for its part of a cut over several processes."""

    def cut_part(self, start_ts: int, upper_ts: int, bounds: Bounds) -> CutPart:
        """See `server.capture.cut`; raises as `cut`."""
        end_ts = min(upper_ts, self.cut(start_ts, bounds.max_rows, bounds.max_bytes))
        if bounds.is_open or end_ts <= start_ts:
            return CutPart(end_ts)
        return cut_part(self.extents(start_ts, end_ts), start_ts, end_ts)

    def read(
        self, span: Span, start_ts: int, end_ts: int, *, before: bool = False
    ) -> Iterator[pa.RecordBatch]:
        """See `SinkManager.read`; shows in the reader's trace what was done for these rows."""
        reader = tracing.current()
        if self.times is not None and reader.is_recording:
            for name, done in self.times.of_range(span, start_ts, end_ts).items():
                reader.child(
                    name, done.start_ns, table_id=span.table_id, rows=done.rows, batches=done.count
                ).end(end_ns=done.end_ns)
        return super().read(span, start_ts, end_ts, before=before)


class Run:
    """Implements `server.capture.catalog.Listener`."""

    def __init__(
        self, assignment: Assignment, start_ts: int, rows: SorterRows, sink: LocalSink
    ) -> None:
        self.sink = sink
        self.rows = rows
        self.pulling: Pulling | None = None
        self.repairs = Repairs()
        self._assignment = assignment
        self._start_ts = start_ts
        self._ending: set[Span] = set()
        """Those of `rows.ended` whose end the log has not reached yet."""
        self._moving = asyncio.Lock()
        """Held while tables come, go, or are pulled again."""

    def open(self) -> None:
        """Open all tables that have rows above the start; blocks."""
        assignment = self._assignment
        assignment.catalog.holds.clear()
        self.sink.withhold(assignment.catalog.holds)
        if assignment.keep_ts:
            self.sink.keep_above(assignment.keep_ts)
        if assignment.stop_ts:
            self.sink.limit_ts(assignment.stop_ts)
        # The owner has not sent a barrier for this share yet. Without one, readers could pass a
        # schema change that has not arrived here.
        if assignment.limited:
            self.sink.update_barrier_ts(self._start_ts)
        # Tables are there before the sink starts and before any puller: see invariant 1.
        for versions in assignment.catalog.versions.spans(self._start_ts):
            self._follow(versions)
        self.sink.start()

    async def pull(self) -> None:
        """Pull until cancelled.

        Raises:
            TidemarkError: in a group; the changefeed cannot go on as it is.
        """
        assignment, catalog = self._assignment, self._assignment.catalog
        intake = PullContext(assignment.changefeed, assignment.source, catalog, self.rows)
        async with asyncio.TaskGroup() as tasks:
            self.pulling = Pulling(intake, tasks)
            catalog.listener = self
            try:
                tasks.create_task(self._settle(self.pulling), name="settle")
                async with self._moving:
                    await self._begin(self.pulling)
                while True:
                    await asyncio.sleep(_LOOK_EVERY_S)
                    await self.pulling.end_passed(self.rows.ended)
                    await self._end_passed_by_log(self.pulling)
                    async with self._moving:
                        await self._repair(self.pulling)
                    self._check_target(self.pulling)
            finally:
                catalog.listener = None
                # Nobody reads any more, so a call that waits for room in the sorter would wait for
                # ever; the puller waits for that call, and the task group for the puller.
                self.rows.sorter.end_waits()

    def _check_target(self, pulling: Pulling) -> None:
        """Check that target_ts can be reached: no cut can end there while a table is read again.

        Raises:
            TargetInRereadError: it cannot.
        """
        target_ts = self._assignment.target_ts
        since_ts = self._assignment.catalog.holds.bound(target_ts)
        if since_ts < target_ts <= pulling.log_ts and self.sink.checkpoint_ts() >= since_ts:
            raise TargetInRereadError(
                f"the target_ts {target_ts} lies where tables are read again since the DDL at "
                f"{since_ts}: they are complete above it only. Everything up to that DDL is "
                "delivered; create another changefeed from there with a later --target-ts"
            )

    def close(self) -> None:
        """Give everything up; blocks."""
        self.sink.stop()
        for versions in self._assignment.catalog.versions.spans(self._start_ts):
            # A plan over all tables that is still under way must not miss those of a removed table.
            self.sink.remove_table(versions[0].span, comes_back=True)
        self.rows.sorter.close()

    async def changed(self, ddl: Ddl) -> None:
        """See `Listener.changed`."""
        assert self.pulling is not None, "changes come from pullers"
        catalog, loop = self._assignment.catalog, asyncio.get_running_loop()
        for versions in catalog.versions.spans_of(ddl):
            # The sorter and the sink know the table before its puller starts.
            await loop.run_in_executor(self.rows.executor, self._change, versions, ddl.ts)
            if versions[0].from_ts == ddl.ts:
                self.pulling.add(catalog.of(versions[0]), ddl.ts)

    def resolved(self, ts: int) -> None:
        """See `Listener.resolved`."""
        self.sink.update_barrier_ts(ts)

    async def wait_delivered(self, ts: int) -> None:
        """See `Listener.wait_delivered`."""
        while self.sink.checkpoint_ts() < ts:  # noqa: ASYNC110 - an acknowledgement comes from a reader's thread
            await asyncio.sleep(_DELIVERED_EVERY_S)

    def traffic(self) -> dict[Span, Traffic]:
        """Return how much each changing table changes."""
        by_span: dict[Span, Traffic] = {}
        for span in self.rows.traffic.spans():
            try:
                by_span[span] = self.rows.traffic.of(span, self.sink.resolved_ts(span))
            except TableNotFoundError:  # it has ended, or has gone
                self.rows.traffic.remove(span)
        return by_span

    async def adopt(self, table: SourceTable, from_ts: int, start_ts: int) -> None:
        """Pull and serve one more table above `start_ts`, which has had one schema since
        `from_ts`. Another capture serves it until it is counted in (`SinkManager.count`).

        Raises:
            ClosedError: the run ends.
            TableExistsError: it is here already.
        """
        if self.pulling is None:
            raise ClosedError("the share does not pull yet, or no more")
        async with self._moving:
            version = self._assignment.catalog.adopt(table, from_ts)
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self.rows.executor, self.sink.stand_by, version, start_ts)
            self.pulling.add(table, start_ts)

    async def release(self, span: Span) -> None:
        """Drop a table, which another capture serves now; it is no error if it is not here."""
        async with self._moving:
            # The sink first: once its puller has ended, the table would hold back all others.
            await asyncio.to_thread(self.sink.remove_table, span)
            gate = await self.pulling.end(span) if self.pulling is not None else None
            await asyncio.to_thread(self._remove, gate, span, comes_back=False)
            self._assignment.catalog.release(span)
            self.rows.ended.pop(span, None)
            self._ending.discard(span)

    async def _end_passed_by_log(self, pulling: Pulling) -> None:
        """Resolve the tables that end at changes known before, as far as the log is there."""
        # A log that is read again brings these changes again, but a known change does not come in
        # force again: no call of `changed` resolves these tables up to their end.
        passed = [
            span
            for span, ts in self.rows.ended.items()
            if span in self._ending and pulling.log_ts >= ts
        ]
        for span in passed:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(
                self.rows.executor, self.rows.resolve, span, self.rows.ended[span]
            )
            self._ending.discard(span)

    async def _begin(self, pulling: Pulling) -> None:
        start_ts, catalog = self._start_ts, self._assignment.catalog
        # Listed before the first await: a change that comes during it adds its tables by itself.
        later = [
            (catalog.of(versions[0]), versions[0].from_ts)
            for versions in catalog.versions.spans(start_ts)
            if versions[0].from_ts > start_ts
        ]
        if await pulling.begin(catalog.at(start_ts), start_ts):
            self.resolved(start_ts)
        for table, from_ts in later:
            pulling.add(table, from_ts)

    async def _settle(self, pulling: Pulling) -> None:
        """Keep the collector off until all tables are being pulled, a minute at most."""
        tables = len(self._assignment.catalog.read())
        if tables < long_lived.TABLES_MIN:
            return
        loop = asyncio.get_running_loop()
        until_s = loop.time() + _SETTLE_S
        with long_lived.building_tables(tables):
            while pulling.resolved_ts <= self._start_ts and loop.time() < until_s:  # noqa: ASYNC110 - pullers tell nobody
                await asyncio.sleep(_LOOK_EVERY_S)

    def _change(self, versions: Sequence[Version], ts: int) -> None:
        """Let a DDL at `ts` come in force for one span."""
        self._follow(versions)
        if versions[-1].to_ts == ts and not self._assignment.source.per_table:
            self.rows.resolve(versions[-1].span, ts)
            self._ending.discard(versions[-1].span)

    def _follow(self, versions: Sequence[Version]) -> None:
        last = versions[-1]
        if last.to_ts != MAX_TS:
            self.rows.ended[last.span] = last.to_ts
            self._ending.add(last.span)
        # If there were no tables before, the checkpoint may have reached the ts at which this one
        # begins, and a reader may still be below it.
        is_new = self._assignment.catalog.versions.is_new(versions[0])
        self.sink.follow(versions, self._start_ts, is_new=is_new)

    async def _repair(self, pulling: Pulling) -> None:
        """Pull damaged tables again from their checkpoint; a log is read again as a whole,
        for which the changefeed starts anew.
        """
        damaged = self.sink.damaged()
        for span, error in damaged.items():
            if not self._assignment.source.per_table:
                raise error
            await self._pull_again(pulling, span, error)
        self.repairs.look(self.sink)

    async def _pull_again(self, pulling: Pulling, span: Span, error: TableDamagedError) -> None:
        resolved_ts, checkpoint_ts = self.sink.resolved_ts(span), self.sink.checkpoint_ts(span)
        self.repairs.begin(span, error, resolved_ts)
        metrics.REPAIRS.inc()
        _log.error(
            "table is pulled again",
            changefeed=self._assignment.changefeed,
            table_id=span.table_id,
            checkpoint_ts=checkpoint_ts,
            code=error.code,
            error=error.message,
        )
        # Order: the puller ends, the damaged rows are removed with the table, then another puller
        # starts at the checkpoint.
        gate = await pulling.end(span)
        versions = next(
            (
                each
                for each in self._assignment.catalog.versions.spans(checkpoint_ts)
                if each[0].span == span
            ),
            None,
        )
        if versions is None:
            # It has ended, and all of it is acknowledged: what is damaged is history.
            await asyncio.to_thread(self._remove, gate, span, comes_back=False)
            return
        await asyncio.to_thread(self._replace, gate, versions, checkpoint_ts)
        pulling.add(
            self._assignment.catalog.of(versions[0]), max(checkpoint_ts, versions[0].from_ts)
        )

    def _replace(self, gate: Gate | None, versions: Sequence[Version], start_ts: int) -> None:
        # Without it, a cut of all tables would have none of its rows.
        self._remove(gate, versions[0].span, comes_back=True)
        self.sink.follow(versions, start_ts)

    def _remove(self, gate: Gate | None, span: Span, *, comes_back: bool) -> None:
        """Take a table out whose puller has ended."""
        self.sink.remove_table(span, comes_back=comes_back)
        self.rows.sorter.remove_table(span)
        self.rows.traffic.remove(span)
        # Only now: a call that waits in the gate for room in the sorter ends when its table is
        # removed.
        if gate is not None:
            gate.drain()


class Resolved(Protocol):
    """Knows up to which ts tables can be read; a sink."""

    def resolved_ts(self, span: Span | None = None) -> int:
        """Return the ts up to which the table can be read; raises TableNotFoundError."""
        ...


class Repairs:
    """Tables whose rows were damaged here and are pulled again: which, why, and until when.

    `spans` are those that have not come back yet to where they were.
    """

    def __init__(self) -> None:
        self.error: TableDamagedError | None = None
        """The last one, until all tables have come back."""
        self._resolved_before: dict[Span, int] = {}

    @property
    def spans(self) -> Collection[Span]:
        """The tables that are being pulled again."""
        return self._resolved_before.keys()

    def begin(self, span: Span, error: TableDamagedError, resolved_ts: int) -> None:
        """A table that was complete up to `resolved_ts` is pulled again.

        Raises:
            TableDamagedError: it was damaged again before it had come back.
        """
        # A disk that damages the same table twice in a row will do it again: pulling it for ever
        # would hide that, and never end.
        if span in self._resolved_before:
            raise error
        self.error = error
        self._resolved_before[span] = resolved_ts

    def look(self, sink: Resolved) -> None:
        """See which tables have come back."""
        self._resolved_before = {
            span: ts for span, ts in self._resolved_before.items() if not _is_back(sink, span, ts)
        }
        if not self._resolved_before:
            self.error = None


def _is_back(sink: Resolved, span: Span, ts: int) -> bool:
    try:
        return sink.resolved_ts(span) >= ts
    except TableNotFoundError:  # it has ended meanwhile
        return True
