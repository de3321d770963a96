"""When the rows of a table's ranges were pulled, sorted and staged: what traces of cuts show of the
time before a reader asked. No clock is read here: times are given, in nanoseconds since 1970.

Kept only while traces are sent. A table's oldest notes are joined when there are many, so that a
cut sees them less finely, but whole; of many tables those that were noted last are kept.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Final

from storage.model.span import Span

_NOTES_MAX: Final = 64
"""Of one table; more are joined."""
_TABLES_MAX: Final = 1_000


@dataclass(frozen=True, slots=True)
class RangeTime:
    """One thing that was done, or several as one, for rows with
    `first_ts <= commit_ts <= last_ts`.
    """

    first_ts: int
    last_ts: int
    start_ns: int
    end_ns: int
    rows: int = 0
    count: int = 1
    """How many batches, or tasks."""

    def with_other(self, other: "RangeTime") -> "RangeTime":
        """One note for the ranges of both."""
        return RangeTime(
            min(self.first_ts, other.first_ts),
            max(self.last_ts, other.last_ts),
            min(self.start_ns, other.start_ns),
            max(self.end_ns, other.end_ns),
            self.rows + other.rows,
            self.count + other.count,
        )


class _TableTimes:
    """The notes of one table."""

    __slots__ = ("pulled", "sorted", "staged", "unsorted")

    def __init__(self) -> None:
        self.pulled: list[RangeTime] = []
        self.unsorted: list[RangeTime] = []
        """Waits for a resolved_ts; its `end_ns` is when it was given to the sorter."""
        self.sorted: list[RangeTime] = []
        self.staged: list[RangeTime] = []


class RangeTimes:
    """The notes of a changefeed; any thread may call."""

    def __init__(self) -> None:
        self._tables: OrderedDict[Span, _TableTimes] = OrderedDict()
        self._lock = threading.Lock()

    def note_pulled(self, span: Span, pulled: RangeTime, sorting_ns: int) -> None:
        """Note that a batch was pulled, and that the sorter had it at `sorting_ns`."""
        unsorted = replace(pulled, start_ns=pulled.end_ns, end_ns=sorting_ns)
        with self._lock:
            table = self._table(span)
            _add(table.pulled, pulled)
            _add(table.unsorted, unsorted)

    def note_resolved(self, span: Span, ts: int, now_ns: int) -> None:
        """Note that the table is resolved up to `ts`, and its rows up to there are sorted."""
        # Without the lock: most tables of most calls have nothing that waits.
        table = self._tables.get(span)
        if table is None or not table.unsorted:
            return
        with self._lock:
            for each in table.unsorted:
                if each.last_ts <= ts:
                    _add(table.sorted, replace(each, end_ns=now_ns))
            table.unsorted = [each for each in table.unsorted if each.last_ts > ts]

    def note_staged(self, span: Span, staged: RangeTime) -> None:
        """Note that a task has staged a range."""
        with self._lock:
            _add(self._table(span).staged, staged)

    def of_range(self, span: Span, start_ts: int, end_ts: int) -> dict[str, RangeTime]:
        """The times that rows with `start_ts < commit_ts <= end_ts` took, by stage."""
        with self._lock:
            table = self._tables.get(span)
            if table is None:
                return {}
            done = {
                "pull": _met(table.pulled, start_ts, end_ts),
                "sort": _met(table.sorted, start_ts, end_ts),
                "stage": _met(table.staged, start_ts, end_ts),
            }
        return {name: reduce(RangeTime.with_other, times) for name, times in done.items() if times}

    def _table(self, span: Span) -> _TableTimes:
        table = self._tables.get(span)
        if table is None:
            table = self._tables[span] = _TableTimes()
            if len(self._tables) > _TABLES_MAX:
                self._tables.popitem(last=False)
        self._tables.move_to_end(span)
        return table


def _add(times: list[RangeTime], one: RangeTime) -> None:
    times.append(one)
    if len(times) > _NOTES_MAX:
        times[:2] = [times[0].with_other(times[1])]


def _met(times: Sequence[RangeTime], start_ts: int, end_ts: int) -> list[RangeTime]:
    return [each for each in times if each.first_ts <= end_ts and each.last_ts > start_ts]
