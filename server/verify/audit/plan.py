"""Which ranges of which tables an audit compares next. Pure: whoever asks says what time it is.

A table has one round after the other, each as long as the audit's period. In a round each of its ranges is compared
once, in random order, evenly over the time; the last ones are due two turns before the end. What a turn has not
compared (it failed, or gave way) is due again. A table that a DDL has altered has a sample due at once.
"""

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from server.verify.spans import SLOT_ROWS, SLOTS_MAX, Extent, KeySpans, Span

_TURNS: Final = 12
_TURN_S_MIN, _TURN_S_MAX = 10.0, 300.0
"""A turn reads one snapshot of the source, which must not become old."""
_SPARE_TURNS: Final = 2
_SLOTS_ALL: Final = 100_000
"""Ranges of all tables together: what is held in memory."""


@dataclass(frozen=True, slots=True)
class Pick:
    """Ranges of one table, by their numbers; `spans` None: all of its keys."""

    numbers: tuple[int, ...]
    spans: KeySpans | None = None


@dataclass(slots=True)
class _Round:
    """Of one table."""

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


class Plan:
    """Of one changefeed; `rows_per_s` is how fast its source may be read."""

    def __init__(self, period_s: float, rows_per_s: float, chance: random.Random) -> None:
        self.period_s = period_s
        self.turn_s = min(max(period_s / _TURNS, _TURN_S_MIN), _TURN_S_MAX)
        self._turn_rows = rows_per_s * self.turn_s
        self._chance = chance
        self._rounds: dict[str, _Round] = {}
        self._altered: set[str] = set()
        self._failing: dict[str, _Failing] = {}

    def altered(self, tables: Collection[str]) -> None:
        """A DDL was brought into the lake, or their rows were read again: a sample of these is due."""
        self._altered |= set(tables)

    def is_due(self, now_s: float) -> bool:
        """Whether there is something to compare; a plan that knows no table wants to know them."""
        if not self._rounds or self.is_urgent(now_s):
            return True
        waiting = [each for name, each in self._rounds.items() if not self._waits(name, now_s)]
        return any(self._is_over(each, now_s) or self._wanted(each, now_s) for each in waiting)

    def is_urgent(self, now_s: float) -> bool:
        """Whether a table was altered that is not left out just now."""
        return any(not self._waits(name, now_s) for name in self._altered)

    @property
    def is_known(self) -> bool:
        """Whether it knows the tables."""
        return bool(self._rounds)

    def keep(self, tables: Collection[str]) -> None:
        """These are the tables now: others are forgotten."""
        self._rounds = {name: each for name, each in self._rounds.items() if name in tables}
        self._failing = {name: each for name, each in self._failing.items() if name in tables}
        self._altered &= set(tables)

    def lacks(self, table: str, column: str | None, now_s: float) -> bool:
        """Whether a round of the table has to begin, with its extent: there is none, it is over, or its key is new."""
        found = self._rounds.get(table)
        if self._waits(table, now_s):
            return False
        return found is None or found.column != column or self._is_over(found, now_s)

    def begin(self, table: str, column: str | None, extent: Extent, tables: int, now_s: float) -> None:
        """A round of the table begins; `column` is the one that its ranges are of, `tables` how many there are."""
        most = max(1, min(-(-extent.rows // SLOT_ROWS), SLOTS_MAX, _SLOTS_ALL // max(tables, 1)))
        slots = [(None, None)] if column is None else extent.slots(most)
        left = list(range(len(slots)))
        self._chance.shuffle(left)
        rows = -(-extent.rows // len(slots))
        self._rounds[table] = _Round(column, slots, rows, now_s, left, self._chance.random())

    def picks(self, now_s: float) -> dict[str, Pick]:
        """What the next turn compares, the tables in random order: as many rows as may be read in it, or one range."""
        picks: dict[str, Pick] = {}
        rows = self._turn_rows
        names = sorted(self._rounds, key=lambda name: (name not in self._altered, self._chance.random()))
        for name in names:
            if self._waits(name, now_s):
                continue
            found = self._rounds[name]
            wanted = self._wanted(found, now_s)
            if name in self._altered:
                wanted = max(wanted, -(-len(found.slots) // _TURNS))
            most = math.floor(rows / found.slot_rows) if found.slot_rows else wanted
            count = min(wanted, max(most, 0 if picks else 1))
            if count > 0:
                picks[name] = self._pick(found, count)
                rows -= count * found.slot_rows
        return picks

    def compared(self, table: str, pick: Pick, *, equal: bool) -> bool:
        """What was picked is compared; returns whether that ends a round in which no range differed."""
        found = self._rounds[table]
        self._altered.discard(table)
        self._failing.pop(table, None)
        found.differs |= not equal
        done, before = set(pick.numbers), len(found.left)
        found.left = [number for number in found.left if number not in done]
        return before > 0 and not found.left and not found.differs

    def failed(self, table: str, now_s: float) -> None:
        """The table could not be compared: it is left out for a turn, and twice as long each time, up to a period."""
        count = self._failing[table].count if table in self._failing else 0
        pause_s = min(self.turn_s * float(1 << min(count, 16)), self.period_s)
        self._failing[table] = _Failing(count + 1, now_s + pause_s)

    def late_s(self, now_s: float) -> float:
        """For how long ranges are left of a round whose time is up, at most; 0: of none."""
        ends = [each.begun_s + self.period_s for each in self._rounds.values() if each.left]
        return max([0.0, *(now_s - end_s for end_s in ends)])

    def _waits(self, table: str, now_s: float) -> bool:
        """Whether it has failed just now."""
        return table in self._failing and now_s < self._failing[table].until_s

    def _is_over(self, found: _Round, now_s: float) -> bool:
        return not found.left and now_s >= found.begun_s + self.period_s

    def _wanted(self, found: _Round, now_s: float) -> int:
        """How many ranges should be compared by the end of this turn, and are not."""
        total = len(found.slots)
        part = min((now_s - found.begun_s + _SPARE_TURNS * self.turn_s) / self.period_s, 1.0)
        return max(0, min(total, math.floor(total * part + found.phase)) - (total - len(found.left)))

    def _pick(self, found: _Round, count: int) -> Pick:
        """Ranges that are left, and others where more are wanted."""
        chosen = found.left[:count]
        if len(chosen) < count:
            others = sorted(set(range(len(found.slots))) - set(chosen))
            chosen = chosen + self._chance.sample(others, count - len(chosen))
        numbers = tuple(sorted(chosen))
        if found.column is None or len(found.slots) == 1:
            return Pick(numbers)
        return Pick(numbers, KeySpans(found.column, tuple(found.slots[number] for number in numbers)))
