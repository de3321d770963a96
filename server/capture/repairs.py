"""Tables whose rows were damaged here and are pulled again: which, why, and until when. Pure."""

from collections.abc import Collection
from typing import Protocol

from server.capture import metrics
from sorter.errors import TableDamagedError, TableNotFoundError
from storage.model.span import Span


class Resolved(Protocol):
    """How far tables are."""

    def resolved_ts(self, span: Span | None = None) -> int:
        """How far it can be read; raises TableNotFoundError."""
        ...


class Repairs:
    """`spans` are those that have not come back yet to where they were."""

    def __init__(self) -> None:
        self.error: TableDamagedError | None = None
        """The last one, until all tables have come back."""
        self._wanted: dict[Span, int] = {}

    @property
    def spans(self) -> Collection[Span]:
        """The tables that are being pulled again."""
        return self._wanted.keys()

    def begin(self, span: Span, error: TableDamagedError, resolved_ts: int) -> None:
        """A table that was complete up to `resolved_ts` is pulled again.

        Raises:
            TableDamagedError: it was damaged again before it had come back, so that repeating it is
                no way.
        """
        if span in self._wanted:
            raise error
        metrics.REPAIRS.inc()
        self.error = error
        self._wanted[span] = resolved_ts

    def look(self, sink: Resolved) -> None:
        """See which tables have come back."""
        self._wanted = {
            span: ts for span, ts in self._wanted.items() if not _is_back(sink, span, ts)
        }
        if not self._wanted:
            self.error = None


def _is_back(sink: Resolved, span: Span, ts: int) -> bool:
    try:
        return sink.resolved_ts(span) >= ts
    except TableNotFoundError:  # it has ended meanwhile
        return True
