"""The ranges of a sink's tables, as readers use them: where a cut ends, how much lies in a range,
its rows, and that the target has committed it.

`Ranges` gives rows from what is staged, else from the sorter; both are counted. `Acks` takes
acknowledgements: they move the checkpoints, free memory, and let the sorter clean. An
acknowledgement of all tables visits those only that have something, or have ended; the others share
one checkpoint.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import pyarrow as pa

from sink import metrics
from sink.cut import Bounds, Slice, find_cut, sliced, whole
from sink.dispatcher import Dispatcher
from sink.errors import AckAboveResolvedError, SinkRowsLostError
from sink.mounts import coalesce
from sink.table_sink import READ_BYTES, TableSink
from sink.tables import TableSinks
from sorter import Extent, Sorter
from sorter.errors import NotResolvedError, RangeCleanedError, TableNotFoundError
from storage.model.event import Position
from storage.model.span import Span


class Ranges:
    """Serves ranges to readers, from any thread; `changed` is the sink manager's lock over
    `tables`.
    """

    def __init__(self, sorter: Sorter, tables: TableSinks, changed: threading.Condition) -> None:
        self.reads_staged = 0
        self.reads_sorter = 0
        self._sorter = sorter
        self._tables = tables
        self._changed = changed

    def cut(self, start_ts: int, bounds: Bounds, span: Span | None = None) -> int:
        """The largest ts in `(start_ts, resolved_ts]` whose rows fit,
        over the table or all of them.

        Never splits a commit_ts, and holds at least one, however large; `start_ts` itself when
        nothing is new. Where tables are read again it goes up to where all of them are complete,
        whatever fits.

        Raises:
            TableNotFoundError: no such table; of all, one is missing that is being pulled again.
            RangeCleanedError: `start_ts` is below what is kept.
        """
        with self._changed:
            upper_ts = self._tables.resolved_ts(span)
            tables = self._tables.busy() if span is None else [self._tables.one(span)]
        self._check_kept(span, start_ts)
        if upper_ts <= start_ts:
            return start_ts
        if bounds.is_open:
            return min(self._tables.holds.cut_end(start_ts, upper_ts), upper_ts)
        extents = (self._extents(table, start_ts, upper_ts) for table in tables)
        end_ts = find_cut(itertools.chain.from_iterable(extents), start_ts, upper_ts, bounds)
        return min(self._tables.holds.cut_end(start_ts, end_ts), upper_ts)

    def extents(self, start_ts: int, end_ts: int) -> Iterator[Extent]:
        """Where the rows of all tables in `(start_ts, end_ts]` lie.

        Raises:
            NotResolvedError: see `Sorter.extents`.
            RangeCleanedError: `start_ts` is below what is kept.
        """
        self._check_kept(None, start_ts)
        with self._changed:
            tables = self._tables.busy()
        return itertools.chain.from_iterable(
            self._extents(table, start_ts, end_ts) for table in tables
        )

    def plan(
        self,
        spans: Sequence[Span] | None,
        start_ts: int,
        end_ts: int,
        slice_bytes: int | None = None,
    ) -> list[Slice]:
        """The slices of the tables (None: of all), those without rows left out;
        whole or of about `slice_bytes` each.

        Raises:
            TableNotFoundError: no such table; of all, one is missing that is being pulled again.
            RangeError, NotResolvedError, RangeCleanedError, RangeCrossesDdlError: as `read`.
        """
        if spans is not None:
            return self._planned(spans, start_ts, end_ts, slice_bytes)
        while True:
            removals = self._tables.removals
            try:
                slices = self._planned(self._spans(start_ts, end_ts), start_ts, end_ts, slice_bytes)
                # If rows were dropped meanwhile, the range would look as if it had none.
                self._check_kept(None, start_ts)
            except TableNotFoundError:
                if removals == self._tables.removals:
                    raise
            else:
                # If a table was removed meanwhile, some of its slices may be missing.
                if removals == self._tables.removals:
                    return slices

    def _planned(
        self, spans: Sequence[Span], start_ts: int, end_ts: int, slice_bytes: int | None
    ) -> list[Slice]:
        slices = []
        for span in spans:
            table = self._checked(span, start_ts, end_ts)
            extents = self._extents(table, start_ts, end_ts)
            if slice_bytes is None:
                part = whole(span, extents, start_ts, end_ts)
                slices += [part] if part.rows else []
            else:
                slices += sliced(span, extents, start_ts, end_ts, slice_bytes)
            # Again: if rows were dropped meanwhile, the range would look as if it had none.
            table.check_kept(start_ts)
        return slices

    def read(
        self, span: Span, start_ts: int, end_ts: int, *, before: bool = False
    ) -> Iterator[pa.RecordBatch]:
        """The table's mounted rows with `start_ts` < commit_ts <= `end_ts`, in order;
        the range is fixed on return.

        With `before`, a last column `_before` has what each row was before; such rows are mounted
        when they are asked for.

        Raises:
            TableNotFoundError: no such table.
            RangeError: the range ends before it starts.
            NotResolvedError: it ends above resolved_ts.
            RangeCleanedError: it starts below what is kept.
            RangeCrossesDdlError: its rows have two schemas.
            SinkRowsLostError: on return or while iterating; rows of this table were lost, it must
                be pulled again.
        """
        table = self._checked(span, start_ts, end_ts)
        mounting = table.mounts.above(start_ts)
        start_ts = max(start_ts, table.start_ts)
        if end_ts <= start_ts:
            return iter(())
        # What is staged was mounted without before-images.
        staged = None if before else table.staged_rows(start_ts, end_ts)
        if staged is not None:
            self.reads_staged += 1
            return _counted("staged", coalesce(staged, READ_BYTES))
        self.reads_sorter += 1
        rows = table.read_sorted(self._sorter, mounting, start_ts, end_ts, before=before)
        return _counted("sorter", rows)

    def _spans(self, start_ts: int, end_ts: int) -> list[Span]:
        """The tables that may have rows in a range that all tables have reached."""
        self._check_kept(None, start_ts)
        with self._changed:
            resolved_ts, tables = self._tables.resolved_ts(None), self._tables.busy()
        if end_ts > resolved_ts:
            raise NotResolvedError(
                f"rows are complete up to {resolved_ts}, not yet to {end_ts}; wait for resolved_ts"
            )
        return [
            table.span for table in tables if table.start_ts < end_ts and table.end_ts > start_ts
        ]

    def _check_kept(self, span: Span | None, start_ts: int) -> None:
        """Check that the rows of the table (None: of every table) above `start_ts` are still here.

        A table whose rows were all dropped looks like one that never had any. So does a table that
        was pulled from above `start_ts`, after a move or a restart.
        """
        with self._changed:
            if span is not None:
                self._tables.one(span).check_kept(start_ts)
                return
            self._tables.check_complete()
            # Only a reader that is behind has to be checked against each of 100,000 tables.
            if start_ts >= self._tables.most_cleaned_ts:
                return
            self._check_floor(start_ts)
            tables = self._tables.all()
        for table in tables:
            if table.end_ts > start_ts:
                table.check_kept(start_ts)

    def _check_floor(self, start_ts: int) -> None:
        """Check that a range of all tables contains no rows of a table that was removed."""
        tables = self._tables
        kept_ts = tables.most_cleaned_ts if tables.keeps_history else tables.gone_ts
        if start_ts < kept_ts:
            raise RangeCleanedError(
                f"history is kept above {kept_ts}, that from {start_ts} on is gone; begin there"
            )

    def _checked(self, span: Span, start_ts: int, end_ts: int) -> TableSink:
        with self._changed:
            table = self._tables.one(span)
            table.check_range(start_ts, end_ts, self._tables.upper_ts(table))
        return table

    def _extents(self, table: TableSink, start_ts: int, end_ts: int) -> list[Extent]:
        start_ts, end_ts = max(start_ts, table.start_ts), min(end_ts, table.end_ts)
        if end_ts <= start_ts or not self._sorter.has_rows_above(table.span, start_ts):
            return []
        return self._sorter.extents(table.span, start_ts + 1, end_ts)


def _counted(source: str, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    metrics.READS.labels(source).inc()
    return _count_rows(source, batches)


def _count_rows(source: str, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        metrics.ROWS_READ.labels(source).inc(batch.num_rows)
        yield batch


class Acks:
    """Takes acknowledgements, from any thread; `changed` is the manager's lock over `tables`."""

    def __init__(
        self,
        sorter: Sorter,
        tables: TableSinks,
        changed: threading.Condition,
        dispatcher: Dispatcher,
        remove: Callable[[Span], None],
    ) -> None:
        """`remove` removes a table from the sink that has ended and is not needed any more."""
        self._sorter = sorter
        self._tables = tables
        self._changed = changed
        self._dispatcher = dispatcher
        self._remove = remove

    def of_table(self, span: Span, start_ts: int | None, ts: int) -> None:
        """`(start_ts, ts]` of one table is committed; None: all up to `ts`.

        Raises:
            TableNotFoundError, AckAboveResolvedError, SinkRowsLostError: see `SinkManager.ack`.
        """
        # Outside of the manager's lock: an acknowledgement takes the table's lock, and frees
        # memory.
        with self._changed:
            table = self._tables.one(span)
            complete_ts = table.complete_ts
        _check_complete(ts, complete_ts, f"table {span.table_id}")
        moved, lost = _acknowledged([table], start_ts, ts)
        self._moved(moved)
        if lost is not None:
            raise lost

    def of_all(self, ts: int) -> None:
        """Everything up to `ts` is committed.

        Raises:
            AckAboveResolvedError, SinkRowsLostError: see `SinkManager.ack`.
        """
        with self._changed:
            slowest, _ = self._tables.slowest()
            _check_complete(
                ts,
                self._tables.complete_ts(),
                f"table {slowest.table_id}" if slowest else "the sink",
            )
            busy = self._tables.busy()
        moved, lost = _acknowledged(busy, None, ts)
        # A table that has lost rows keeps its checkpoint, so the shared checkpoint must not move,
        # and the quiet tables are acknowledged one by one.
        with self._changed:
            news = lost is None and self._tables.acknowledge_all(ts)
            quiet = [] if lost is None else list({*self._tables.all()} - {*busy})
        moved += _acknowledged(quiet, None, ts)[0]
        self._moved(moved, news=news)
        if lost is not None:
            raise lost

    def release(self) -> None:
        """Let the sorter clean acknowledged rows that are not kept any more."""
        with self._changed:
            busy = self._tables.busy()
        for table in busy:
            table.release()
        self._give_up(busy)

    def _moved(self, tables: list[TableSink], *, news: bool = False) -> None:
        """Free what these tables, whose checkpoints have moved, do not need any more; `news`: the
        shared checkpoint of tables without rows has moved, too.
        """
        if not tables and not news:
            return
        self._give_up(tables)
        metrics.ACKS.inc()
        self._dispatcher.memory_freed()

    def _give_up(self, tables: list[TableSink]) -> None:
        """Let the sorter clean the tables' rows that are not kept, and remove tables that have
        ended.
        """
        # Noted before it is done: a plan made meanwhile must not take dropped rows for no rows.
        with self._changed:
            cleaned = [self._tables.note_cleaned(table) for table in tables]
        # The sorter is cleaned first: below it is asked whether tables have rows left.
        for table, cleaned_ts in zip(tables, cleaned, strict=True):
            self._clean(table, cleaned_ts)
            self._dispatcher.retry(table)
        with self._changed:
            for table in tables:
                self._tables.acknowledged(table)
                self._note_empty(table)
            passed = self._tables.passed()
        for table in passed:
            self._remove(table.span)

    def _clean(self, table: TableSink, cleaned_ts: int) -> None:
        if cleaned_ts > table.start_ts:
            # The table may be on its way out of the sorter.
            with contextlib.suppress(TableNotFoundError):
                if not self._sorter.is_empty(table.span):
                    # An acknowledgement of all tables may lie above what this one has resolved, if
                    # it has ended.
                    upper = Position.fence(min(cleaned_ts, table.resolved_ts))
                    self._sorter.clean(table.span, upper)

    def _note_empty(self, table: TableSink) -> None:
        with contextlib.suppress(TableNotFoundError):
            if self._sorter.is_empty(table.span):
                self._tables.note_empty(table)


def _acknowledged(
    tables: Iterable[TableSink], start_ts: int | None, ts: int
) -> tuple[list[TableSink], SinkRowsLostError | None]:
    """Acknowledge tables; returns those whose checkpoint has moved, and the error of one that has
    lost rows.
    """
    moved: list[TableSink] = []
    lost: SinkRowsLostError | None = None
    for table in tables:
        try:
            if table.ack(start_ts, ts):
                moved.append(table)
        except SinkRowsLostError as err:
            lost = err
    return moved, lost


def _check_complete(ts: int, complete_ts: int, what: str) -> None:
    if ts > complete_ts:
        raise AckAboveResolvedError(
            f"cannot acknowledge {ts}: {what} is complete up to {complete_ts} here; after a "
            "restart, try again when it has been pulled again"
        )
