"""The ranges that can be read of a sink's tables: where a cut ends, how much lies in a range,
and its rows.

Rows come from what is staged, else from the sorter; both are counted.
"""

import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa

from sink import metrics
from sink.cut import Bounds, Slice, find_cut, sliced, whole
from sink.errors import NotResolvedError
from sink.mounts import coalesce
from sink.table_sink import READ_BYTES, TableSink
from sink.tables import TableSinks
from sorter import Extent, Sorter
from storage.model.span import Span


class Ranges:
    """Any thread may ask; `changed` is the sink manager's lock over `tables`."""

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
            TableNotFoundError: no such table.
            RangeCleanedError: `start_ts` is below what is kept.
        """
        with self._changed:
            upper_ts = self._tables.resolved_ts(span)
            # Only a reader that is behind has to be checked against each of 100,000 tables.
            may_be_gone = start_ts < self._tables.most_cleaned_ts
            of_all = self._tables.all() if may_be_gone else self._tables.busy()
            tables = of_all if span is None else [self._tables.one(span)]
        if upper_ts <= start_ts:
            return start_ts
        for table in tables if may_be_gone else ():
            table.check_kept(start_ts)
        if bounds.is_open:
            return min(self._tables.holds.cut_end(start_ts, upper_ts), upper_ts)
        extents = (self._extents(table, start_ts, upper_ts) for table in tables)
        end_ts = find_cut(itertools.chain.from_iterable(extents), start_ts, upper_ts, bounds)
        return min(self._tables.holds.cut_end(start_ts, end_ts), upper_ts)

    def extents(self, start_ts: int, end_ts: int) -> Iterator[Extent]:
        """Where the rows of all tables in `(start_ts, end_ts]` lie.

        Raises:
            NotResolvedError, RangeCleanedError: see `Sorter.extents`.
        """
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
            TableNotFoundError, RangeError, NotResolvedError, RangeCleanedError,
                RangeCrossesDdlError: as `read`.
        """
        slices = []
        for span in self._spans(start_ts, end_ts) if spans is None else spans:
            table = self._checked(span, start_ts, end_ts)
            extents = self._extents(table, start_ts, end_ts)
            if slice_bytes is None:
                part = whole(span, extents, start_ts, end_ts)
                slices += [part] if part.rows else []
            else:
                slices += sliced(span, extents, start_ts, end_ts, slice_bytes)
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
        with self._changed:
            resolved_ts, tables = self._tables.resolved_ts(None), self._tables.busy()
        if end_ts > resolved_ts:
            raise NotResolvedError(
                f"rows are complete up to {resolved_ts}, not yet to {end_ts}; wait for resolved_ts"
            )
        return [
            table.span for table in tables if table.start_ts < end_ts and table.end_ts > start_ts
        ]

    def _checked(self, span: Span, start_ts: int, end_ts: int) -> TableSink:
        with self._changed:
            table = self._tables.one(span)
            table.check_range(start_ts, end_ts, self._tables.upper_ts(table))
        return table

    def _extents(self, table: TableSink, start_ts: int, end_ts: int) -> list[Extent]:
        start_ts, end_ts = max(start_ts, table.start_ts), min(end_ts, table.end_ts)
        if end_ts <= start_ts or self._sorter.is_empty(table.span):
            return []
        return self._sorter.extents(table.span, start_ts + 1, end_ts)


def _counted(source: str, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    metrics.READS.labels(source).inc()
    return _count_rows(source, batches)


def _count_rows(source: str, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        metrics.ROWS_READ.labels(source).inc(batch.num_rows)
        yield batch
