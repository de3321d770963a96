"""The sorter as a dict: what every interleaving of calls on `Sorter` must look like."""

from collections.abc import Iterable

from sorter.errors import (
    EventBelowResolvedError,
    NotResolvedError,
    RangeCleanedError,
    ResolvedRegressedError,
)
from storage.model.event import Position
from storage.model.span import Span

Row = tuple[int, int, int, bytes, bytes | None, bytes | None]


class _Table:
    def __init__(self, start_ts: int) -> None:
        self.rows: dict[tuple[int, int, int, bytes], Row] = {}
        self.resolved_ts = start_ts
        self.cleaned = Position.fence(start_ts)


class SorterModel:
    """The methods of `Sorter`, on rows as tuples in the order of RAW_SCHEMA."""

    def __init__(self) -> None:
        self._tables: dict[Span, _Table] = {}

    def add_table(self, span: Span, start_ts: int) -> None:
        """See `Sorter.add_table`."""
        self._tables[span] = _Table(start_ts)

    def remove_table(self, span: Span) -> None:
        """See `Sorter.remove_table`."""
        del self._tables[span]

    def add(self, span: Span, rows: Iterable[Row]) -> None:
        """See `Sorter.add`."""
        table, taken = self._tables[span], list(rows)
        if any(row[0] <= table.resolved_ts for row in taken):
            raise EventBelowResolvedError("below resolved_ts")
        table.rows.update({row[:4]: row for row in taken})

    def resolve(self, span: Span, ts: int) -> None:
        """See `Sorter.resolve`."""
        table = self._tables[span]
        if ts < table.resolved_ts:
            raise ResolvedRegressedError("regressed")
        table.resolved_ts = ts

    def fetch(self, span: Span, lower: Position, upper: Position) -> list[Row]:
        """See `Sorter.fetch`."""
        table = self._tables[span]
        if upper.commit_ts > table.resolved_ts:
            raise NotResolvedError("above resolved_ts")
        if lower <= table.cleaned:
            raise RangeCleanedError("cleaned")
        return [
            table.rows[key]
            for key in sorted(table.rows)
            if lower <= Position(key[0], key[1]) <= upper
        ]

    def clean(self, span: Span, upper: Position) -> None:
        """See `Sorter.clean`."""
        table = self._tables[span]
        if upper.commit_ts > table.resolved_ts:
            raise NotResolvedError("above resolved_ts")
        table.cleaned = max(table.cleaned, upper)

    def cleaned(self, span: Span) -> Position:
        """What `fetch` must start above."""
        return self._tables[span].cleaned

    def unresolved(self, span: Span) -> list[Row]:
        """Rows that `fetch` does not give yet."""
        table = self._tables[span]
        return [row for key, row in sorted(table.rows.items()) if key[0] > table.resolved_ts]
