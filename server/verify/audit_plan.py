"""Which ranges of which tables an audit compares next. Pure: the caller gives the time.

A table has one round after the other, each as long as the audit's period. In a round each of its
ranges is compared once, in random order and evenly over the period; the last ones are due two turns
before its end. Ranges that a turn did not compare, because it failed or was interrupted, are due
again. After a DDL a sample of the table is due at once.
"""

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from server.verify.spans import SLOT_ROWS, SLOTS_MAX, Extent, KeySpans, Span

_TURNS: Final = 12
_TURN_S_MIN, _TURN_S_MAX = 10.0, 300.0
"""A turn reads one snapshot of the source, which must not become old."""
_SPARE_TURNS: Final = 2
_SLOTS_ALL: Final = 100_000
"""Ranges of all tables together, at most: a plan keeps the numbers of those that are left in
memory.
"""


@dataclass(frozen=True, slots=True)
class Pick:
    """Ranges of one table, by their numbers; `spans` None: all of its keys."""

    numbers: tuple[int, ...]
    spans: KeySpans | None = None


@dataclass(slots=True)
class _Round:
    """One pass over all ranges of one table."""

    column: str | None
    slots: Sequence[Span]
    slot_rows: int
    begun_s: float
    left: list[int]
    """Ranges that are still to be compared, in random order."""
    phase: float
    """Between 0 and 1: so that the only ranges of small tables are not all due at the same time."""
    differs: bool = False


@dataclass(frozen=True, slots=True)
class _Failing:
    """A table that could not be compared: so often in a row, and until when it is left out."""

    count: int
    until_s: float


class AuditPlan:
    """The plan of one changefeed; `rows_per_s` is how fast its source may be read."""

    def __init__(self, period_s: float, rows_per_s: float, chance: random.Random) -> None:
        self.period_s = period_s
        self.turn_s = min(max(period_s / _TURNS, _TURN_S_MIN), _TURN_S_MAX)
        self._turn_rows = rows_per_s * self.turn_s
        self._chance = chance
        self._rounds: dict[str, _Round] = {}
        self._altered: set[str] = set()
        self._failing: dict[str, _Failing] = {}

    def note_altered(self, tables: Collection[str]) -> None:
        """Note tables that a DDL has changed in the lake, or that were read again: a sample of each
        is due.
        """
        self._altered |= set(tables)

    def is_due(self, now_s: float) -> bool:
        """Whether there is something to compare; an empty plan is due, since it needs
        the tables.
        """
        if not self._rounds or self.is_urgent(now_s):
            return True
        ready = [each for name, each in self._rounds.items() if not self._waits(name, now_s)]
        return any(self._is_over(each, now_s) or self._due(each, now_s) for each in ready)

    def is_urgent(self, now_s: float) -> bool:
        """Whether a table was altered that is not excluded at the moment."""
        return any(not self._waits(name, now_s) for name in self._altered)

    @property
    def is_known(self) -> bool:
        """Whether the plan has its tables."""
        return bool(self._rounds)

    def keep(self, tables: Mapping[str, str]) -> None:
        """Keep the plans of these tables and forget all others; they are given with their names in
        the lake, by which its job says which it has altered.
        """
        self._rounds = {name: each for name, each in self._rounds.items() if name in tables}
        self._failing = {name: each for name, each in self._failing.items() if name in tables}
        self._altered = {
            name for name, lake_name in tables.items() if self._altered & {name, lake_name}
        }

    def needs_round(self, table: str, column: str | None, now_s: float) -> bool:
        """Whether a round of the table must begin, and so needs its extent: it has no round, its
        round is over, or its key is new.
        """
        current = self._rounds.get(table)
        if self._waits(table, now_s):
            return False
        return current is None or current.column != column or self._is_over(current, now_s)

    def begin(
        self, table: str, column: str | None, extent: Extent, tables: int, now_s: float
    ) -> None:
        """Begin a round of the table. `column` is the column of its ranges, `tables` the number of
        tables.
        """
        most = max(1, min(-(-extent.rows // SLOT_ROWS), SLOTS_MAX, _SLOTS_ALL // max(tables, 1)))
        slots = [(None, None)] if column is None else extent.slots(most)
        left = list(range(len(slots)))
        self._chance.shuffle(left)
        rows = -(-extent.rows // len(slots))
        self._rounds[table] = _Round(column, slots, rows, now_s, left, self._chance.random())

    def picks(self, now_s: float) -> dict[str, Pick]:
        """Return what the next turn compares, with tables in random order: as many rows as one turn
        may read, or one range.
        """
        picks: dict[str, Pick] = {}
        rows = self._turn_rows
        names = sorted(
            self._rounds, key=lambda name: (name not in self._altered, self._chance.random())
        )
        for name in names:
            if self._waits(name, now_s):
                continue
            current = self._rounds[name]
            due = self._due(current, now_s)
            if name in self._altered:
                due = max(due, -(-len(current.slots) // _TURNS))
            affordable = math.floor(rows / current.slot_rows) if current.slot_rows else due
            # The first table gets a range at any price: else one whose ranges are large would never
            # be compared.
            count = min(due, max(affordable, 0 if picks else 1))
            if count > 0:
                picks[name] = self._pick(current, count)
                rows -= count * current.slot_rows
        return picks

    def compared(self, table: str, pick: Pick, *, equal: bool) -> bool:
        """Note that a pick was compared; returns whether that completes a round without a
        difference.
        """
        current = self._rounds[table]
        self._altered.discard(table)
        self._failing.pop(table, None)
        current.differs |= not equal

        done, left_before = set(pick.numbers), len(current.left)
        current.left = [number for number in current.left if number not in done]
        return left_before > 0 and not current.left and not current.differs

    def failed(self, table: str, now_s: float) -> None:
        """Leave out a table that could not be compared: for a turn, then each time twice as long,
        up to a period.
        """
        count = self._failing[table].count if table in self._failing else 0
        pause_s = min(self.turn_s * float(1 << min(count, 16)), self.period_s)
        self._failing[table] = _Failing(count + 1, now_s + pause_s)

    def late_s(self, now_s: float) -> float:
        """Return the greatest time for which ranges of an expired round have been left; 0: there
        are none.
        """
        ends = [each.begun_s + self.period_s for each in self._rounds.values() if each.left]
        return max([0.0, *(now_s - end_s for end_s in ends)])

    def _waits(self, table: str, now_s: float) -> bool:
        """Whether its comparison has failed a moment ago."""
        return table in self._failing and now_s < self._failing[table].until_s

    def _is_over(self, current: _Round, now_s: float) -> bool:
        return not current.left and now_s >= current.begun_s + self.period_s

    def _due(self, current: _Round, now_s: float) -> int:
        """Return how many more ranges must be compared by the end of this turn."""
        total, done = len(current.slots), len(current.slots) - len(current.left)
        # Ahead of time by some turns, so that a turn that fails does not make the round late.
        part = min((now_s - current.begun_s + _SPARE_TURNS * self.turn_s) / self.period_s, 1.0)
        return max(0, min(total, math.floor(total * part + current.phase)) - done)

    def _pick(self, current: _Round, count: int) -> Pick:
        """Ranges that are left, and others where `count` is more."""
        chosen = current.left[:count]
        if len(chosen) < count:
            others = sorted(set(range(len(current.slots))) - set(chosen))
            chosen = chosen + self._chance.sample(others, count - len(chosen))
        numbers = tuple(sorted(chosen))
        if current.column is None or len(current.slots) == 1:
            return Pick(numbers)
        return Pick(
            numbers, KeySpans(current.column, tuple(current.slots[number] for number in numbers))
        )
