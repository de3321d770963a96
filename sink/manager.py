"""The sink manager: serves any range of a table that is resolved and not yet acknowledged, and takes acknowledgements.

A range `(start_ts, end_ts]` always gives the same rows in the same order, from memory where the workers have staged
it, else straight from the sorter; correctness never depends on staging. What is acknowledged stays readable until the
next acknowledgement, so that the last range can be replayed. Source: TiCDC (seed 002), there pushed, here pulled.
"""

import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from sink import metrics
from sink.cut import Bounds, find_cut, measure
from sink.dispatcher import Dispatcher
from sink.errors import AckAboveResolvedError, SinkRowsLostError, TableNotFoundError
from sink.mounted import Mount, coalesce
from sink.quota import MemQuota
from sink.table_sink import READ_BYTES, TableSink
from sink.tables import TableSinks
from sorter import Sorter
from storage.model.event import Position
from storage.model.span import Span


@dataclass(frozen=True, slots=True)
class Slice:
    """A table's part of a cut `(start_ts, end_ts]`; rows count duplicates, bytes are raw and estimated at the edges."""

    span: Span
    start_ts: int
    end_ts: int
    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class SinkStats:
    """State of the moment, and totals since the start."""

    tables: int
    resolved_ts: int
    checkpoint_ts: int
    barrier_ts: int | None
    quota_bytes: int
    used_bytes: int
    reads_staged: int
    reads_sorter: int
    slowest: Span | None = None  # the table with the least checkpoint_ts
    failures: Mapping[Span, str] = field(default_factory=dict)  # why tables are not staged, but read from the sorter


class SinkManager:
    """The sink of one changefeed on this capture; every method may be called from any thread."""

    def __init__(
        self, sorter: Sorter, *, memory_quota_bytes: int = 256 << 20, workers: int = 2, split_txn: bool = True
    ) -> None:
        """`memory_quota_bytes` bounds what is staged; `split_txn` lets a transaction be staged in parts."""
        self._sorter = sorter
        self._quota = MemQuota(memory_quota_bytes)
        self._changed = threading.Condition()
        self._tables = TableSinks()
        self._awaited: Counter[Span] = Counter()  # tables that somebody waits for
        self._versions = itertools.count(1)
        self._reads = {"staged": 0, "sorter": 0}
        upper = self._tables.upper_ts
        self._dispatcher = Dispatcher(sorter, self._quota, workers=workers, split_txn=split_txn, upper=upper)
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
            metrics.forget(self)
            metrics.QUOTA_BYTES.dec(self._quota.total_bytes)

    def add_table(self, span: Span, start_ts: int, mount: Mount) -> None:
        """Serve a table above `start_ts`; `mount` makes typed batches of raw ones, row by row in order, in any thread.

        The sorter's table is added, and removed, by the caller.

        Raises:
            TableExistsError: it is there already.
        """
        table = TableSink(span, next(self._versions), start_ts, mount, self._quota)
        with self._changed:
            self._tables.add(table)
            self._quota.add_table(span)
            self._dispatcher.add_table(table)
            self._changed.notify_all()
        metrics.TABLES.inc()
        with contextlib.suppress(TableNotFoundError):  # the sorter's table is to come
            self._on_resolve(span, self._sorter.resolved_ts(span))

    def remove_table(self, span: Span) -> None:
        """Serve the table no more and free its memory; a table that is not there is no error."""
        with self._changed:
            table = self._tables.remove(span)
            if table is None:
                return
            self._dispatcher.remove_table(span)
            table.remove()
            self._quota.remove_table(span)
            self._changed.notify_all()
        self._dispatcher.memory_freed()
        metrics.TABLES.dec()

    def update_barrier_ts(self, ts: int) -> None:
        """Let no table go beyond `ts`; barriers only move forward. Until the first call there is none."""
        with self._changed:
            self._tables.barrier_ts = max(ts, self._tables.barrier_ts or 0)
            self._changed.notify_all()
        self._dispatcher.wake()

    def resolved_ts(self, span: Span | None = None) -> int:
        """How far the table (None: every table) can be read; without tables the barrier, 0 if there is none.

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
        self, start_ts: int, max_rows: int | None = None, max_bytes: int | None = None, span: Span | None = None
    ) -> int:
        """The largest ts in `(start_ts, resolved_ts]` whose rows fit, over the table or all of them.

        Never splits a commit_ts, and holds at least one, however large; `start_ts` itself when nothing is new.

        Raises:
            TableNotFoundError: no such table.
            RangeCleanedError: `start_ts` is below what is kept.
        """
        bounds = Bounds(max_rows, max_bytes)
        with self._changed:
            upper_ts = self._tables.resolved_ts(span)
            below = start_ts < self._tables.most_cleaned_ts
            tables = [] if bounds.is_open and not below else self._tables.chosen(span)
        if upper_ts <= start_ts:
            return start_ts
        for table in tables if below else ():
            table.check_range(start_ts, upper_ts, upper_ts)
        spans = [table.span for table in tables if not self._sorter.is_empty(table.span)]
        extents = (self._sorter.extents(span, start_ts + 1, upper_ts) for span in spans)
        return find_cut(itertools.chain.from_iterable(extents), start_ts, upper_ts, bounds)

    def plan(self, span: Span, start_ts: int, end_ts: int) -> Slice:
        """How much `read` of the same range will give, about.

        Raises:
            TableNotFoundError, RangeError, NotResolvedError, RangeCleanedError: as `read`.
        """
        self._checked(span, start_ts, end_ts)
        extents = self._sorter.extents(span, start_ts + 1, end_ts) if end_ts > start_ts else []
        return Slice(span, start_ts, end_ts, *measure(extents, start_ts, end_ts))

    def read(self, span: Span, start_ts: int, end_ts: int) -> Iterator[pa.RecordBatch]:
        """The table's mounted rows with `start_ts` < commit_ts <= `end_ts`, in order; the range is fixed on return.

        Raises:
            TableNotFoundError: no such table.
            RangeError: the range ends before it starts.
            NotResolvedError: it ends above resolved_ts.
            RangeCleanedError: it starts below what is kept.
            SinkRowsLostError: on return or while iterating; rows of this table were lost, it must be pulled again.
        """
        table = self._checked(span, start_ts, end_ts)
        if end_ts == start_ts:
            return iter(())
        staged = table.staged_rows(start_ts, end_ts)
        if staged is not None:
            return self._counted("staged", coalesce(staged, READ_BYTES))
        return self._counted("sorter", table.read_sorted(self._sorter, start_ts, end_ts))

    def ack(self, ts: int, span: Span | None = None, *, start_ts: int | None = None) -> int:
        """The target has committed everything up to `ts`, of the table or of all; returns the checkpoint_ts.

        With `start_ts` only the rows above it; the checkpoint then waits for what is missing. Acknowledging twice, or
        less than before, changes nothing. The sorter is cleaned up to the checkpoint before this one.

        Raises:
            TableNotFoundError: no such table.
            AckAboveResolvedError: `ts` is above the resolved_ts of a table; nothing was acknowledged.
            SinkRowsLostError: rows of a table were lost; the others are acknowledged.
        """
        with self._changed:
            tables = self._tables.chosen(span)
        for table in tables:
            if ts > table.resolved_ts:
                raise AckAboveResolvedError(
                    f"cannot acknowledge {ts}: table {table.span.table_id} is complete up to {table.resolved_ts} here; "
                    "after a restart, try again when it has been pulled again"
                )
        lost: SinkRowsLostError | None = None
        moved = []
        for table in tables:
            try:
                if table.ack(start_ts, ts):
                    moved.append(table)
            except SinkRowsLostError as err:
                lost = err
        self._moved(moved)
        if lost is not None:
            raise lost
        return self.checkpoint_ts(span)

    def checkpoint_ts(self, span: Span | None = None) -> int:
        """Everything of the table (None: every table) up to it is committed; without tables as `resolved_ts`.

        Raises:
            TableNotFoundError: no such table.
        """
        with self._changed:
            return self._tables.checkpoint_ts(span)

    def slowest(self) -> tuple[int, int]:
        """The least resolved_ts and checkpoint_ts of the tables; 0 without tables."""
        with self._changed:
            return (self._tables.resolved_ts(None), self._tables.checkpoint_ts(None)) if len(self._tables) else (0, 0)

    def stats(self) -> SinkStats:
        """State and totals of this moment."""
        with self._changed:
            _, slowest = self._tables.slowest()
            tables, barrier_ts = len(self._tables), self._tables.barrier_ts
        return SinkStats(
            tables=tables,
            resolved_ts=self.resolved_ts(),
            checkpoint_ts=self.checkpoint_ts(),
            barrier_ts=barrier_ts,
            quota_bytes=self._quota.total_bytes,
            used_bytes=self._quota.used_bytes,
            reads_staged=self._reads["staged"],
            reads_sorter=self._reads["sorter"],
            slowest=slowest,
            failures=self._dispatcher.failures(),
        )

    def _on_resolve(self, span: Span, ts: int) -> None:
        with self._changed:
            table = self._tables.get(span)
            if table is None or ts <= table.resolved_ts:
                return
            if self._tables.resolve(table, ts) or span in self._awaited:
                self._changed.notify_all()
        self._dispatcher.wake(span)

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
            self._awaited += Counter()  # forgets who is awaited no more

    def _moved(self, tables: list[TableSink]) -> None:
        """The tables' checkpoints moved."""
        if not tables:
            return
        for table in tables:
            self._clean(table)
            self._dispatcher.retry(table)
        with self._changed:
            for table in tables:
                self._tables.acknowledged(table)
        metrics.ACKS.inc()
        self._dispatcher.memory_freed()

    def _checked(self, span: Span, start_ts: int, end_ts: int) -> TableSink:
        with self._changed:
            table = self._tables.chosen(span)[0]
            table.check_range(start_ts, end_ts, self._tables.upper_ts(table))
        return table

    def _clean(self, table: TableSink) -> None:
        if table.cleaned_ts > table.start_ts:
            with contextlib.suppress(TableNotFoundError):  # it is being removed
                if not self._sorter.is_empty(table.span):
                    self._sorter.clean(table.span, Position.fence(table.cleaned_ts))

    def _counted(self, source: str, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        self._reads[source] += 1
        metrics.READS.labels(source).inc()
        return _count_rows(source, batches)


def _count_rows(source: str, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        metrics.ROWS_READ.labels(source).inc(batch.num_rows)
        yield batch
