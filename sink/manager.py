"""The sink manager: serves any range of a table that is resolved and not yet acknowledged,
and takes acknowledgements.

A range `(start_ts, end_ts]` always gives the same rows in the same order, from memory where the
workers have staged it, else straight from the sorter; correctness never depends on staging. What is
acknowledged stays readable until the next acknowledgement, so that the last range can be replayed.
Tables begin, end and change their schema at DDLs, which no range crosses. Source: TiCDC's sink
manager, which pushes rows; here readers pull them.
"""

import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pyarrow as pa

from sink import metrics
from sink.cut import Bounds, Slice
from sink.dispatcher import Dispatcher
from sink.holds import Holds
from sink.metrics import SinkStats
from sink.mounter import WithBefore, whole_mounter
from sink.mounts import Mount, Mounting, Mounts
from sink.quota import MemQuota
from sink.range_times import RangeTimes
from sink.ranges import Acks, Ranges
from sink.row_filter import FilteredMounter
from sink.table_sink import Incarnation, TableSink
from sink.tables import TableSinks
from sink.versions import Version
from sorter import Extent, Sorter
from sorter.errors import NotResolvedError, TableDamagedError, TableNotFoundError
from storage.model.span import Span
from storage.model.ts import MAX_TS


class SinkManager:
    """The sink of one changefeed on this capture; every method may be called from any thread."""

    def __init__(
        self,
        sorter: Sorter,
        *,
        memory_quota_bytes: int = 256 << 20,
        workers: int = 2,
        split_txn: bool = True,
        stage_after_s: float = 0.0,
        times: RangeTimes | None = None,
    ) -> None:
        """`memory_quota_bytes` bounds what is staged; `split_txn` lets a transaction be staged in
        parts; for `stage_after_s` new rows wait for a reader before they are staged; `times` are
        for traces.
        """
        self.times = times
        self._sorter = sorter
        self._quota = MemQuota(memory_quota_bytes)
        self._changed = threading.Condition()
        self._tables = TableSinks()
        # tables that somebody waits for
        self._awaited: Counter[Span] = Counter()
        self._lives = itertools.count(1)
        self._ranges = Ranges(sorter, self._tables, self._changed)
        upper = self._tables.upper_ts
        self._dispatcher = Dispatcher(
            sorter,
            self._quota,
            workers=workers,
            split_txn=split_txn,
            upper=upper,
            stage_after_s=stage_after_s,
        )
        self._dispatcher.times = times
        self._acks = Acks(sorter, self._tables, self._changed, self._dispatcher, self._retire)
        sorter.on_resolve(self._on_resolve)

    def start(self) -> None:
        """Begin to stage tables in the background; everything else works without."""
        metrics.watch(self)
        metrics.QUOTA_BYTES.inc(self._quota.total_bytes)
        self._dispatcher.start()

    def stop(self) -> None:
        """End the background threads; reads go on from the sorter."""
        self._quota.close()
        if self._dispatcher.stop():
            metrics.unwatch(self)
            metrics.QUOTA_BYTES.dec(self._quota.total_bytes)

    def add_table(
        self,
        span: Span,
        start_ts: int,
        mount: Mount | Mounting,
        *,
        born: bool = False,
        standby: bool = False,
    ) -> None:
        """Serve a table above `start_ts`; `mount` makes typed batches of raw ones,
        row by row in order, in any thread.

        `born`: the table did not exist before `start_ts`; the older rows of any other table are not
        here. `standby`: until `count` it is served by its span only, and is not part of what is
        reported of all tables. The caller adds and removes the sorter's table.

        Raises:
            TableExistsError: it is there already.
        """
        mounts = Mounts(
            span.table_id, start_ts, mount if isinstance(mount, Mounting) else Mounting(mount)
        )
        life = next(self._lives)
        # In one step for other threads, and in the order of the locks: the manager's, then the
        # quota's and the dispatcher's.
        with self._changed:
            table = TableSink(
                Incarnation(span, life, start_ts, born), mounts, self._quota, self._tables.shared
            )
            self._tables.add(table, standby=standby)
            self._quota.add_table(span)
            self._dispatcher.add_table(table)
            self._changed.notify_all()
        metrics.TABLES.inc()
        # The sorter's table may be resolved already, and its hook is not called again until it is
        # resolved further; or it is only added later.
        with contextlib.suppress(TableNotFoundError):
            self._on_resolve(span, self._sorter.resolved_ts(span))

    def follow(self, versions: Sequence[Version], start_ts: int, *, is_new: bool = False) -> None:
        """Serve one span above `start_ts` in its versions, from the first of them on; known
        versions are skipped. `is_new`: the table begins with the first one, which may be at
        `start_ts` itself.

        Adds the sorter's table, too, and removes it when the table has ended, all of it is
        acknowledged, and no reader can read it again. Call it for `Versions.spans(start_ts)`, then
        for `Versions.spans_of` each DDL, while nothing above the DDL can be read yet.
        """
        first, last = versions[0], versions[-1]
        with self._changed:
            is_followed = self._tables.get(first.span) is not None
        if not is_followed:
            begin_ts = max(first.from_ts, start_ts)
            self._sorter.add_table(first.span, begin_ts)
            self.add_table(
                first.span, begin_ts, _mounting(first), born=is_new or first.from_ts > start_ts
            )
        for version in versions:
            self.change_table(version.span, version.from_ts, _mounting(version))
        if last.to_ts < MAX_TS:
            self.end_table(last.span, last.to_ts)

    def stand_by(self, version: Version, start_ts: int) -> None:
        """Prepare to serve a table above `start_ts`, which another sink serves until `count`; adds
        the sorter's table, too. `version` must be the table's only one above `start_ts`.

        Raises:
            TableExistsError: it is there already.
        """
        self._sorter.add_table(version.span, start_ts)
        self.add_table(version.span, start_ts, _mounting(version), standby=True)

    def count(self, span: Span, checkpoint_ts: int, timeout_s: float = 0.0) -> None:
        """Count a table that stands by among all tables; everything of it up to `checkpoint_ts` is
        committed. Repeating it changes nothing.

        The resolved_ts of all tables does not go back: this call waits up to `timeout_s` until the
        table has reached it. Their checkpoint_ts may go back: without tables it was the
        resolved_ts.

        Raises:
            TableNotFoundError: no such table.
            NotResolvedError: it is not as far as the others; nothing was changed.
        """
        with self._changed:
            table = self._tables.one(span)
            self._wait_complete(table, checkpoint_ts, timeout_s)
        # Before it counts, so that the checkpoint_ts of all tables goes back no further than that.
        self._acks.of_table(span, None, checkpoint_ts)
        with self._changed:
            self._tables.counting_ts = upper_ts = self._tables.resolved_ts(None)
            try:
                self._wait_complete(table, upper_ts, timeout_s)
                self._tables.count(span)
            finally:
                self._tables.counting_ts = MAX_TS
                self._changed.notify_all()

    def change_table(self, span: Span, ts: int, mount: Mount | Mounting) -> None:
        """Mount rows above `ts` by `mount`; a table that had ended goes on. A known change is
        ignored.

        Raises:
            TableNotFoundError: no such table.
        """
        mounting = mount if isinstance(mount, Mounting) else Mounting(mount)
        with self._changed:
            table = self._tables.one(span)
            reopened = table.mounts.change(ts, mounting) and self._tables.reopen(table, ts)
        if reopened and self._sorter.resolved_ts(span) < ts:
            self._sorter.resolve(span, ts)

    def end_table(self, span: Span, ts: int) -> None:
        """End a table at `ts`: it is served up to there, and does not hold the changefeed's
        resolved_ts back above it.

        Raises:
            TableNotFoundError: no such table.
        """
        with self._changed:
            self._tables.end(self._tables.one(span), ts)
            self._changed.notify_all()

    def remove_table(self, span: Span, *, comes_back: bool = False) -> None:
        """Remove a table and free its memory; it is no error if it is not there.

        `comes_back`: it is still part of the changefeed, and no other sink has it. Until it is
        added again, the resolved_ts of all tables stays where it is, and they cannot be cut or
        planned.
        """
        with self._changed:
            table = self._tables.remove(span, comes_back=comes_back)
            if table is None:
                return
            self._dispatcher.remove_table(span)
            table.remove()
            self._quota.remove_table(span)
            self._changed.notify_all()
        self._dispatcher.memory_freed()
        metrics.TABLES.dec()

    def update_barrier_ts(self, ts: int) -> None:
        """Let no table go beyond `ts`; barriers only move forward.

        Until the first call there is none.
        """
        with self._changed:
            self._tables.barrier_ts = max(ts, self._tables.barrier_ts or 0)
            self._changed.notify_all()
            with_rows = [table.span for table in self._tables.with_rows()]
        for span in with_rows:
            self._dispatcher.wake(span)

    def limit_ts(self, ts: int) -> None:
        """Let no table ever go beyond `ts`, whatever the barrier says."""
        with self._changed:
            self._tables.limit_ts = min(ts, self._tables.limit_ts)

    def keep_above(self, ts: int) -> None:
        """Keep acknowledged rows above `ts` readable, and drop those below. The first call turns
        keeping on, and must come before any table; later ones only move `ts` forward.

        `ts` must be at or below the checkpoint of all tables.
        """
        with self._changed:
            has_more = self._tables.keep_above(ts)
        if has_more:
            self._acks.release()

    def kept_ts(self) -> int:
        """The timestamp above which all commits, of whatever table, can still be read once
        resolved.
        """
        with self._changed:
            return self._tables.most_cleaned_ts

    def withhold(self, holds: Holds) -> None:
        """Withhold cuts in which a table that is being read again, as `holds` says, would be
        incomplete.
        """
        with self._changed:
            self._tables.holds = holds

    def resolved_ts(self, span: Span | None = None) -> int:
        """How far the table (None: every table) can be read; without tables the barrier,
        0 if there is none.

        Raises:
            TableNotFoundError: no such table.
        """
        with self._changed:
            return self._tables.resolved_ts(span)

    def wait_resolved(self, after_ts: int, timeout_s: float, span: Span | None = None) -> int:
        """Wait until `resolved_ts` is above `after_ts`, at most `timeout_s`; returns it either way.

        Raises:
            TableNotFoundError: no such table, or it was removed meanwhile.
        """
        with self._changed:
            with self._awaiting(span):
                self._changed.wait_for(lambda: self._tables.resolved_ts(span) > after_ts, timeout_s)
            return self._tables.resolved_ts(span)

    def cut(
        self,
        start_ts: int,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        span: Span | None = None,
    ) -> int:
        """See `Ranges.cut`."""
        return self._ranges.cut(start_ts, Bounds(max_rows, max_bytes), span)

    def extents(self, start_ts: int, end_ts: int) -> Iterator[Extent]:
        """See `Ranges.extents`."""
        return self._ranges.extents(start_ts, end_ts)

    def plan_tables(
        self,
        spans: Sequence[Span] | None,
        start_ts: int,
        end_ts: int,
        slice_bytes: int | None = None,
    ) -> list[Slice]:
        """See `Ranges.plan`."""
        return self._ranges.plan(spans, start_ts, end_ts, slice_bytes)

    def read(
        self, span: Span, start_ts: int, end_ts: int, *, before: bool = False
    ) -> Iterator[pa.RecordBatch]:
        """See `Ranges.read`."""
        return self._ranges.read(span, start_ts, end_ts, before=before)

    def ack(self, ts: int, span: Span | None = None, *, start_ts: int | None = None) -> int:
        """The target has committed everything up to `ts`, of the table or of all;
        returns the checkpoint_ts.

        With `start_ts` only the rows above it; the checkpoint then waits for what is missing.
        Acknowledging twice, or less than before, changes nothing. The sorter is cleaned up to the
        checkpoint before this one.

        Raises:
            TableNotFoundError: no such table.
            AckAboveResolvedError: `ts` is above the resolved_ts of a table; nothing was
                acknowledged.
            SinkRowsLostError: rows of a table were lost; the others are acknowledged.
        """
        if span is not None:
            self._acks.of_table(span, start_ts, ts)
        elif start_ts is None:
            self._acks.of_all(ts)
        else:
            with self._changed:
                spans = [table.span for table in self._tables.all()]
            for each in spans:
                self._acks.of_table(each, start_ts, ts)
        return self.checkpoint_ts(span)

    def checkpoint_ts(self, span: Span | None = None) -> int:
        """Everything of the table (None: every table) up to it is committed;
        without tables as `resolved_ts`.

        Raises:
            TableNotFoundError: no such table.
        """
        with self._changed:
            return self._tables.checkpoint_ts(span)

    def counted_checkpoint(self) -> tuple[int, int]:
        """How often a table was counted in, and the checkpoint_ts of all tables, which never goes
        back within one count.
        """
        with self._changed:
            return self._tables.counts, self._tables.checkpoint_ts(None)

    def damaged(self) -> dict[Span, TableDamagedError]:
        """Tables that have lost rows and serve none any more: remove them, and add them again from
        their checkpoint_ts.
        """
        with self._changed:
            return {
                table.span: table.lost
                for table in self._tables.with_rows()
                if table.lost is not None
            }

    def slowest(self) -> tuple[int, int]:
        """The least resolved_ts and checkpoint_ts of the tables; 0 without tables."""
        with self._changed:
            return (
                (self._tables.resolved_ts(None), self._tables.checkpoint_ts(None))
                if len(self._tables)
                else (0, 0)
            )

    def stats(self) -> SinkStats:
        """State and totals of this moment."""
        with self._changed:
            _, slowest = self._tables.slowest()
            tables, barrier_ts, sorted_ts = (
                len(self._tables),
                self._tables.barrier_ts,
                self._tables.sorted_ts(),
            )
        return SinkStats(
            tables=tables,
            resolved_ts=self.resolved_ts(),
            checkpoint_ts=self.checkpoint_ts(),
            barrier_ts=barrier_ts,
            quota_bytes=self._quota.total_bytes,
            used_bytes=self._quota.used_bytes,
            reads_staged=self._ranges.reads_staged,
            reads_sorter=self._ranges.reads_sorter,
            sorted_ts=sorted_ts,
            slowest=slowest,
            failures=self._dispatcher.failures(),
        )

    def _on_resolve(self, span: Span, ts: int) -> None:
        with self._changed:
            table = self._tables.get(span)
            if table is None or ts <= table.resolved_ts:
                return
            # Not for each of many tables: all who wait would wake up and look.
            if self._tables.resolve(table, ts) or span in self._awaited:
                self._changed.notify_all()
            has_rows = not self._sorter.is_empty(span)
            if has_rows:
                self._tables.note_rows(table)
        if has_rows:
            self._dispatcher.wake(span)

    def _wait_complete(self, table: TableSink, ts: int, timeout_s: float) -> None:
        """Wait, under the lock, until a table is complete up to `ts`."""
        with self._awaiting(table.span):
            self._changed.wait_for(lambda: table.complete_ts >= ts, timeout_s)
        if table.complete_ts < ts:
            raise NotResolvedError(
                f"table {table.span.table_id} is complete up to {table.complete_ts}, not yet to "
                f"{ts}; try again"
            )

    @contextlib.contextmanager
    def _awaiting(self, span: Span | None) -> Iterator[None]:
        if span is None:
            yield
            return
        self._awaited[span] += 1
        try:
            yield
        finally:
            self._awaited[span] -= 1
            # Adding nothing removes what stands at zero.
            self._awaited += Counter()

    def _retire(self, span: Span) -> None:
        """Remove a table that has ended, and that no reader can read again."""
        self.remove_table(span)
        self._sorter.remove_table(span)


def _mounting(version: Version) -> Mounting:
    mounter = version.mounter
    split = whole_mounter(mounter).split if mounter.moves_keys else None
    mounting = Mounting(mounter.mount, WithBefore(mounter).mount, split)
    if not isinstance(mounter, FilteredMounter):
        return mounting
    return replace(mounting, keep=mounter.kept, split_all=mounter.split)
