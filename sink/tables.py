"""The tables of a sink manager (TiCDC's tableSinks) and how far all of them are, without looking at each. Pure.

Invariants: the whole is as far as its slowest table and no further than the barrier (TiCDC's lastBarrierTs), which only
moves forward. Every call but `add`, `all` and the list of a whole costs the same however many tables there are.
"""

from sink.errors import TableExistsError, TableNotFoundError
from sink.slowest import Slowest
from sink.table_sink import TableSink
from storage.model.span import Span


class TableSinks:
    """Table sinks by span; the caller serialises the calls."""

    def __init__(self) -> None:
        self.barrier_ts: int | None = None
        self.most_cleaned_ts = 0
        self._tables: dict[Span, TableSink] = {}
        self._resolved: Slowest[Span] = Slowest()
        self._checkpoints: Slowest[Span] = Slowest()

    def __len__(self) -> int:
        return len(self._tables)

    def add(self, table: TableSink) -> None:
        """Take a table.

        Raises:
            TableExistsError: it is there already.
        """
        if table.span in self._tables:
            raise TableExistsError(f"table {table.span.table_id} is in the sink already; remove it first")
        self._tables[table.span] = table
        self._resolved.add(table.span, table.resolved_ts)
        self._checkpoints.add(table.span, table.checkpoint_ts)
        self.most_cleaned_ts = max(self.most_cleaned_ts, table.cleaned_ts)

    def remove(self, span: Span) -> TableSink | None:
        """Take a table out."""
        self._resolved.remove(span)
        self._checkpoints.remove(span)
        return self._tables.pop(span, None)

    def get(self, span: Span) -> TableSink | None:
        """The table, if it is there."""
        return self._tables.get(span)

    def chosen(self, span: Span | None) -> list[TableSink]:
        """The table, or all of them.

        Raises:
            TableNotFoundError: no such table.
        """
        if span is None:
            return list(self._tables.values())
        return [self._one(span)]

    def resolve(self, table: TableSink, ts: int) -> bool:
        """The table is complete up to `ts`; returns whether the whole is further than before."""
        before = self._least(self._resolved)
        table.resolve(ts)
        self._resolved.move(table.span, ts)
        return self._least(self._resolved) > before

    def acknowledged(self, table: TableSink) -> None:
        """The table's checkpoint moved; a table that has left meanwhile is no error."""
        if self._tables.get(table.span) is table:
            self._checkpoints.move(table.span, table.checkpoint_ts)
            self.most_cleaned_ts = max(self.most_cleaned_ts, table.cleaned_ts)

    def upper_ts(self, table: TableSink) -> int:
        """How far the table may go."""
        return table.resolved_ts if self.barrier_ts is None else min(table.resolved_ts, self.barrier_ts)

    def resolved_ts(self, span: Span | None) -> int:
        """How far the table (None: every table) may go; without tables the barrier, 0 if there is none.

        Raises:
            TableNotFoundError: no such table.
        """
        if span is not None:
            return self.upper_ts(self._one(span))
        least_ts = self._least(self._resolved)
        return least_ts if self.barrier_ts is None else min(least_ts, self.barrier_ts)

    def checkpoint_ts(self, span: Span | None) -> int:
        """Everything of the table (None: every table) up to it is committed; without tables as `resolved_ts`.

        Raises:
            TableNotFoundError: no such table.
        """
        return self._one(span).checkpoint_ts if span is not None else self._least(self._checkpoints)

    def slowest(self) -> tuple[Span | None, Span | None]:
        """The tables with the least resolved_ts and the least checkpoint_ts."""
        resolved, checkpoint = self._resolved.least(), self._checkpoints.least()
        return resolved[1] if resolved else None, checkpoint[1] if checkpoint else None

    def _least(self, timestamps: Slowest[Span]) -> int:
        least = timestamps.least()
        return least[0] if least is not None else self.barrier_ts or 0

    def _one(self, span: Span) -> TableSink:
        table = self._tables.get(span)
        if table is None:
            raise TableNotFoundError(f"table {span.table_id} is not in this sink; look where it is scheduled")
        return table
