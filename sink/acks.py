"""Acknowledgements: what the target has committed moves the checkpoints, frees memory,
and lets the sorter clean.

An acknowledgement of all tables visits those only that have something, or have ended; the others
share one checkpoint.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable

from sink import metrics
from sink.dispatcher import Dispatcher
from sink.errors import AckAboveResolvedError, SinkRowsLostError, TableNotFoundError
from sink.table_sink import TableSink
from sink.tables import TableSinks
from sorter import Sorter
from storage.model.event import Position
from storage.model.span import Span


class Acks:
    """Any thread may acknowledge; `changed` is the sink manager's lock over `tables`."""

    def __init__(
        self,
        sorter: Sorter,
        tables: TableSinks,
        changed: threading.Condition,
        dispatcher: Dispatcher,
        remove: Callable[[Span], None],
    ) -> None:
        """`remove` takes a table out of the sink that ended and is not needed any more."""
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
        # A table's acknowledgement takes its own lock, and frees memory: outside of the manager's.
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
        # A table that lost rows keeps its checkpoint, so the shared one must not move: the quiet
        # tables are acknowledged one by one then.
        with self._changed:
            news = lost is None and self._tables.acknowledge_all(ts)
            quiet = [] if lost is None else list({*self._tables.all()} - {*busy})
        moved += _acknowledged(quiet, None, ts)[0]
        self._moved(moved, news=news)
        if lost is not None:
            raise lost

    def _moved(self, tables: list[TableSink], *, news: bool = False) -> None:
        """The tables' checkpoints moved, or (`news`) those of tables that have nothing."""
        if not tables and not news:
            return
        # The sorter first: whether a table has rows left is asked below, after it was cleaned.
        for table in tables:
            self._clean(table)
            self._dispatcher.retry(table)
        with self._changed:
            for table in tables:
                self._tables.acknowledged(table)
                self._note_empty(table)
            passed = self._tables.passed()
        for table in passed:
            self._remove(table.span)
        metrics.ACKS.inc()
        self._dispatcher.memory_freed()

    def _clean(self, table: TableSink) -> None:
        cleaned_ts = table.cleaned_ts
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
    """The tables whose checkpoint moved, and why some did not."""
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
