"""Which worker has which table of a changefeed, for one run of it.

A table goes to the worker that has the fewest tables of the changefeed, and stays there for the
run. Among equals the first one is another for each changefeed, so that changefeeds of one table
each are spread, too.
"""

import threading
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from storage.model.span import Span

W = TypeVar("W")


class Dealing(Generic[W]):
    """Any thread may ask."""

    def __init__(self, workers: Sequence[W], changefeed: str, spans: Iterable[Span] = ()) -> None:
        """`spans` are dealt at once, in their order."""
        first = zlib.crc32(changefeed.encode()) % len(workers)
        self.workers = (*workers[first:], *workers[:first])
        self._tables = Counter[int]()
        self._places: dict[Span, int] = {}
        self._lock = threading.Lock()
        for span in spans:
            self.worker(span)

    def worker(self, span: Span) -> W:
        """The table's worker; a table that was not known gets one."""
        place = self._places.get(span)
        return self.workers[self._dealt(span) if place is None else place]

    def _dealt(self, span: Span) -> int:
        with self._lock:
            place = self._places.get(span)
            if place is None:
                place = min(range(len(self.workers)), key=lambda each: (self._tables[each], each))
                self._tables[place] += 1
                self._places[span] = place
            return place
