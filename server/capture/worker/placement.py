"""Which worker has which table of a changefeed, and which tables should move.

A table goes to the worker with the fewest of the changefeed's tables. It stays there until workers
come or go, one of them has far more to do than the others (`is_uneven`), or somebody moves it.
`next_move` chooses what moves then; a table's weight is its traffic (`server.capture.traffic`).

The parts of a split table (docs/design/0037) are placed one by one: for the workers of a whole
table, look up its `parts` first.
"""

import itertools
import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Generic, NamedTuple, TypeVar

from storage.model.span import Span

W = TypeVar("W")
GROUP_TABLES: Final = 32
"""At most so many tables move at the same time."""
_ROUNDING: Final = 1e-9
"""Sums of the same weights in another order differ by less."""


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
        self._listed: dict[W, tuple[Span, ...]] = {}
        """The cached result of `tables` for workers whose tables have not changed."""
        self._parts: dict[Span, tuple[Span, ...]] = {}
        self._whole: dict[Span, Span] = {}
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
            for worker, spans in self._tables.items():
                if worker not in self._listed:
                    self._listed[worker] = tuple(spans)
            return {worker: self._listed[worker] for worker in self._tables}

    def worker(self, span: Span) -> W:
        """The table's worker; a table that was not known gets one."""
        worker = self._worker_of.get(span)
        return self._place(span) if worker is None else worker

    def find(self, span: Span) -> W | None:
        """The worker of a table or part, if it has one."""
        return self._worker_of.get(span)

    def parts(self, span: Span) -> tuple[Span, ...]:
        """Return the units of placement of a table: its parts in the order of their keys, or the
        table itself.
        """
        return self._parts.get(span, (span,))

    def whole(self, span: Span) -> Span:
        """Return the table that a part belongs to; for any other span the span itself."""
        return self._whole.get(span, span)

    def split(self) -> tuple[Span, ...]:
        """The tables that are split."""
        with self._lock:
            return tuple(self._parts)

    def reshape(self, whole: Span, shape: Mapping[Span, W]) -> None:
        """Divide a table into these parts, in the order of their keys, each with its worker; given
        itself alone, the table is not split any more.
        """
        with self._lock:
            for span in self.parts(whole):
                self._whole.pop(span, None)
                if span in self._worker_of:
                    self._remove(span)
            self._parts.pop(whole, None)
            if {*shape} != {whole}:
                self._parts[whole] = tuple(shape)
                self._whole |= dict.fromkeys(shape, whole)
            for span, worker in shape.items():
                self._add(span, worker)

    def is_only_part(self, worker: W, span: Span) -> bool:
        """Whether the worker has no other part of the table that a part belongs to."""
        others = self.parts(self.whole(span))
        return all(self._worker_of.get(other) != worker for other in others if other != span)

    def has(self, worker: W, span: Span) -> bool:
        """Whether the worker has the table."""
        return self._worker_of.get(span) == worker

    def move(self, spans: Iterable[Span], worker: W) -> None:
        """Give tables to another worker."""
        with self._lock:
            for span in spans:
                self._remove(span)
                self._add(span, worker)

    def keep_only(self, spans: Collection[Span]) -> None:
        """Forget all other tables, and their parts."""
        with self._lock:
            kept = {part for span in spans for part in self.parts(span)}
            for span in self._worker_of.keys() - kept:
                self._remove(span)
                self._parts.pop(self._whole.pop(span, span), None)

    def join(self, worker: W) -> None:
        """Add a worker without tables."""
        with self._lock:
            self._tables[worker] = {}

    def leave(self, worker: W) -> bool:
        """Remove a worker without tables; returns False if it has some, and keeps it."""
        with self._lock:
            if self._tables[worker]:
                return False
            del self._tables[worker]
            self._listed.pop(worker, None)
            return True

    def _place(self, span: Span) -> W:
        with self._lock:
            assert span not in self._parts, "a table that is split has a worker for each part"
            if span not in self._worker_of:
                worker = min(self._tables, key=lambda each: len(self._tables[each]))
                self._add(span, worker)
            return self._worker_of[span]

    def _add(self, span: Span, worker: W) -> None:
        self._tables[worker][span] = None
        self._worker_of[span] = worker
        self._listed.pop(worker, None)

    def _remove(self, span: Span) -> None:
        worker = self._worker_of.pop(span)
        del self._tables[worker][span]
        self._listed.pop(worker, None)


class Move(NamedTuple, Generic[W]):
    """Tables that go from one worker to another."""

    spans: tuple[Span, ...]
    source: W
    target: W


class Balance(NamedTuple):
    """How tables should be divided among workers."""

    weights: Mapping[Span, float] = MappingProxyType({})
    """The weights of tables that weigh more than 1."""
    slack: float = 0.0
    """The allowed deviation of a worker from an equal division, as a fraction."""

    def of(self, spans: Collection[Span]) -> float:
        """Return the total weight of tables."""
        if not self.weights:
            return float(len(spans))
        return sum(self.weights.get(span, 1.0) for span in spans)


NO_WEIGHTS: Final = Balance()


def is_uneven(tables: Mapping[W, Sequence[Span]], balance: Balance) -> bool:
    """Whether the heaviest worker exceeds its fair share by more than the slack."""
    totals = [balance.of(spans) for spans in tables.values()]
    return max(totals) > sum(totals) / len(totals) * (1 + balance.slack)


def next_move(
    tables: Mapping[W, Sequence[Span]],
    staying: Collection[W],
    can_move: Callable[[Span], bool],
    balance: Balance = NO_WEIGHTS,
    may_have: Callable[[W, Span], bool] = lambda _worker, _span: True,
) -> Move[W] | None:
    """The next move of a division; None: it is complete, or no table that should move can move now.

    A division is complete when workers that leave have no tables, and no move of a table of a
    `staying` worker would make that worker and the lightest one more even. With equal weights the
    numbers of tables then differ by at most one. The heaviest worker never becomes heavier, except
    by tables of a worker that leaves. Only such tables may go to a worker that already has another
    part of the same table (`may_have`).
    """
    totals = {worker: balance.of(spans) for worker, spans in tables.items()}
    staying_totals = {worker: totals[worker] for worker in tables if worker in staying}
    if not staying_totals:
        return None
    target = min(staying_totals, key=staying_totals.__getitem__)
    lacks = sum(totals.values()) / len(staying_totals) - totals[target]
    for source, spans in tables.items():
        if source not in staying:
            offered = _Offered(spans, can_move, balance)
            if moving := offered.filling(lacks) or offered.lightest():
                return Move(moving, source, target)
    return _evened(
        tables, staying_totals, lambda span: can_move(span) and may_have(target, span), balance
    )


def _evened(
    tables: Mapping[W, Sequence[Span]],
    totals: Mapping[W, float],
    can_move: Callable[[Span], bool],
    balance: Balance,
) -> Move[W] | None:
    """A step that brings a heavy worker and the lightest one nearer to each other."""
    even = sum(totals.values()) / len(totals)
    target = min(totals, key=totals.__getitem__)
    # The heaviest first; but it may be one table alone, or nothing of it may be able to move now.
    for source in sorted(totals, key=totals.__getitem__, reverse=True):
        gap = totals[source] - totals[target]
        if gap <= balance.slack * even or source == target:
            return None
        offered = _Offered(tables[source], can_move, balance)
        # No step goes beyond what is even: tables that came would have to leave again.
        most = min(totals[source] - even, even - totals[target])
        if moving := offered.filling(most) or offered.halving(gap):
            return Move(moving, source, target)
    return None


class _Offered:
    """The tables of one worker from which some are taken: those that came last first."""

    def __init__(
        self, spans: Sequence[Span], can_move: Callable[[Span], bool], balance: Balance
    ) -> None:
        self._weights = balance.weights
        self._slack = balance.slack
        self._can_move = can_move
        self._spans = spans
        heavy = (span for span in reversed(spans) if span in balance.weights)
        self._heavy = sorted(heavy, key=balance.weights.__getitem__) if balance.weights else []

    def filling(self, most: float) -> tuple[Span, ...]:
        """Tables that weigh `most` together, the heaviest first: so the fewest move."""
        taken: list[Span] = []
        for span in itertools.chain(reversed(self._heavy), self._light()):
            if len(taken) == GROUP_TABLES or most + _ROUNDING < 1:
                break
            weight = self._weights.get(span, 1.0)
            if weight <= most + _ROUNDING and self._can_move(span):
                taken.append(span)
                most -= weight
        return tuple(taken)

    def lightest(self) -> tuple[Span, ...]:
        """One table that can move."""
        offered = itertools.chain(self._light(), self._heavy)
        return tuple(itertools.islice(filter(self._can_move, offered), 1))

    def halving(self, gap: float) -> tuple[Span, ...]:
        """The one table whose move leaves the least of a gap between two workers, if that is worth
        it.
        """
        light = itertools.islice(filter(self._can_move, self._light()), 1)
        offered = (*filter(self._can_move, self._heavy), *light)
        left = {span: abs(gap - 2 * self._weights.get(span, 1.0)) for span in offered}
        best = min(left, key=left.__getitem__, default=None)
        if best is None or left[best] >= gap * (1 - self._slack) - _ROUNDING:
            return ()
        return (best,)

    def _light(self) -> Iterator[Span]:
        return (span for span in reversed(self._spans) if span not in self._weights)
