"""Which worker has which table of a changefeed, and which tables should move.

A table goes to the worker with the fewest of the changefeed's tables. It stays there until workers
come or go (`next_move`), or somebody moves it.
"""

import itertools
import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

from storage.model.span import Span

W = TypeVar("W")
GROUP_TABLES: Final = 32
"""So many tables move at once at most."""


class TablePlacement(Generic[W]):
    """The tables of one run of a changefeed; any thread may ask."""

    def __init__(self, workers: Sequence[W], changefeed: str, spans: Iterable[Span] = ()) -> None:
        """`spans` are placed at once, in their order."""
        # Among equals the first worker is another one for each changefeed: many changefeeds of one
        # table each are spread, too.
        first = zlib.crc32(changefeed.encode()) % len(workers)
        self._tables: dict[W, dict[Span, None]] = {
            worker: {} for worker in (*workers[first:], *workers[:first])
        }
        self._worker_of: dict[Span, W] = {}
        self._lock = threading.Lock()
        for span in spans:
            self.worker(span)

    @property
    def workers(self) -> tuple[W, ...]:
        """All of them, those without tables, too."""
        return tuple(self._tables)

    def tables(self) -> dict[W, tuple[Span, ...]]:
        """The tables of each worker."""
        with self._lock:
            return {worker: tuple(spans) for worker, spans in self._tables.items()}

    def worker(self, span: Span) -> W:
        """The table's worker; a table that was not known gets one."""
        worker = self._worker_of.get(span)
        return self._place(span) if worker is None else worker

    def move(self, spans: Iterable[Span], worker: W) -> None:
        """Tables have another worker from now on."""
        with self._lock:
            for span in spans:
                self._tables[self._worker_of[span]].pop(span)
                self._tables[worker][span] = None
                self._worker_of[span] = worker

    def keep_only(self, spans: Collection[Span]) -> None:
        """Forget all other tables: they are gone."""
        with self._lock:
            for span in self._worker_of.keys() - {*spans}:
                del self._tables[self._worker_of.pop(span)][span]

    def join(self, worker: W) -> None:
        """One more worker, without tables."""
        with self._lock:
            self._tables[worker] = {}

    def leave(self, worker: W) -> bool:
        """Give a worker no more tables; False: it has some, and stays."""
        with self._lock:
            if self._tables[worker]:
                return False
            del self._tables[worker]
            return True

    def _place(self, span: Span) -> W:
        with self._lock:
            if span not in self._worker_of:
                worker = min(self._tables, key=lambda each: len(self._tables[each]))
                self._tables[worker][span] = None
                self._worker_of[span] = worker
            return self._worker_of[span]


class Move(NamedTuple, Generic[W]):
    """Tables that go from one worker to another."""

    spans: tuple[Span, ...]
    source: W
    target: W


def next_move(
    tables: Mapping[W, Sequence[Span]], staying: Collection[W], can_move: Callable[[Span], bool]
) -> Move[W] | None:
    """The next step to where workers that leave have no tables, and the numbers of the `staying`
    differ by one at most; None: it is reached, or no table that should move can now.
    """
    counts = {worker: len(spans) for worker, spans in tables.items() if worker in staying}
    if not counts:
        return None
    target = min(counts, key=counts.__getitem__)
    even = sum(map(len, tables.values())) // len(counts)
    for source, spans in tables.items():
        if source not in staying and (
            moving := _taken(spans, max(even - counts[target], 1), can_move)
        ):
            return Move(moving, source, target)
    source = max(counts, key=counts.__getitem__)
    if counts[source] - counts[target] < 2:
        return None
    # No step goes beyond what is even: tables that came would have to leave again.
    even = sum(counts.values()) // len(counts)
    most = max(min(counts[source] - even, even - counts[target]), 1)
    moving = _taken(tables[source], most, can_move)
    return Move(moving, source, target) if moving else None


def _taken(spans: Sequence[Span], most: int, can_move: Callable[[Span], bool]) -> tuple[Span, ...]:
    """The tables that go: those that came last."""
    return tuple(itertools.islice(filter(can_move, reversed(spans)), min(most, GROUP_TABLES)))
