"""Tables whose rows were damaged here and are pulled again: which, why, and until when. Pure."""

from collections.abc import Collection
from typing import Protocol

from server.capture import metrics
from sorter.errors import TableDamagedError, TableNotFoundError
from storage.model.span import Span


class Resolved(Protocol):
    """Whoever knows how far tables can be read; a sink."""

    def resolved_ts(self, span: Span | None = None) -> int:
        """How far it can be read; raises TableNotFoundError."""
        ...


class Repairs:
    """`spans` are those that have not come back yet to where they were."""

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
        metrics.REPAIRS.inc()
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
