"""The progress heap (TiCDC's sinkProgressHeap): which table is served next. Pure.

Invariants: a table has at most one entry, in the heap, parked, or with a worker; an entry of an
earlier incarnation
(version) is dropped when it comes up. Tables with nothing new are parked until they have, so they
          never keep others
from their turn.
"""

import heapq
from dataclasses import dataclass

from storage.model.event import Position
from storage.model.span import Span


@dataclass(frozen=True, slots=True, order=True)
class Progress:
    """Where the next task of a table begins; the slowest table sorts first."""

    next_lower: Position
    span: Span
    version: int


class ProgressHeap:
    """Tables waiting for a task, slowest first."""

    def __init__(self) -> None:
        self._heap: list[Progress] = []
        self._parked: dict[Span, Progress] = {}
        self._versions: dict[Span, int] = {}

    def admit(self, progress: Progress) -> None:
        """Begin with a new incarnation of the table;
        entries of an earlier one are ignored from now on.
        """
        self.remove(progress.span)
        self._versions[progress.span] = progress.version
        self.push(progress)

    def remove(self, span: Span) -> None:
        """Accept no more entries of the table."""
        self._versions.pop(span, None)
        self._parked.pop(span, None)

    def push(self, progress: Progress) -> None:
        """Let a table wait for its next task; ignored when the table has left meanwhile."""
        if self._is_live(progress):
            heapq.heappush(self._heap, progress)

    def pop(self) -> Progress | None:
        """Take the slowest table."""
        while self._heap:
            progress = heapq.heappop(self._heap)
            if self._is_live(progress):
                return progress
        return None

    def park(self, progress: Progress) -> None:
        """Set a table aside that has nothing new."""
        if self._is_live(progress):
            self._parked[progress.span] = progress

    def wake(self, span: Span) -> bool:
        """The table may have something new; returns whether it was parked."""
        progress = self._parked.pop(span, None)
        if progress is not None:
            heapq.heappush(self._heap, progress)
        return progress is not None

    def _is_live(self, progress: Progress) -> bool:
        return self._versions.get(progress.span) == progress.version
