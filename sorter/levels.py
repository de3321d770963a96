"""Which of a table's runs on disk are merged when: so that a table of any spills is read in few pieces. Pure.

A run that memory pressure wrote is of level 0; `fan_in` neighbours of one level are merged into one of the next, so
each row of small runs is written again once a level. A run of `LARGE_BYTES` is left as it is: what it costs a reader is
a small block or two in memory, and rewriting it would cost its size. Only when there are more than `most_runs` in all,
the `fan_in` neighbours with the fewest bytes become one. Neighbours only: so the order in which rows arrived is kept.
"""

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Final, NamedTuple

FAN_IN: Final = 32
MOST_RUNS: Final = 768
LARGE_BYTES: Final = 4 << 20


class Spill(NamedTuple):
    """A run on disk."""

    run: int
    bytes: int
    level: int


class RunLevels:
    """One table's runs that may overlap or are small, in the order of their arrival."""

    __slots__ = ("_spills",)

    fan_in = FAN_IN
    most_runs = MOST_RUNS
    large_bytes = LARGE_BYTES

    def __init__(self) -> None:
        self._spills: tuple[Spill, ...] = ()

    def freeze(self) -> bytes:
        """All it knows, in few bytes."""
        return array("Q", chain.from_iterable(self._spills)).tobytes()

    def thaw(self, frozen: Sequence[int]) -> None:
        """Begin with what `freeze` gave."""
        self._spills = tuple(map(Spill, frozen[::3], frozen[1::3], frozen[2::3]))

    def __len__(self) -> int:
        return len(self._spills)

    def add(self, run: int, size: int) -> None:
        """Note a new run of so many bytes."""
        self._spills = (*self._spills, Spill(run, size, 0))

    def to_merge(self) -> frozenset[int] | None:
        """Runs that should become one."""
        first = self._same_level()
        if first is None and len(self._spills) > self.most_runs:
            first = self._smallest()
        return None if first is None else frozenset(it.run for it in self._spills[first : first + self.fan_in])

    def merged(self, runs: frozenset[int], size: int) -> None:
        """`runs`, which `to_merge` gave, are now one of `size` bytes, with the lowest of their numbers."""
        level = 1 + max(it.level for it in self._spills if it.run in runs)
        one = Spill(min(runs), size, level)
        self._spills = tuple(one if it.run == one.run else it for it in self._spills if it.run not in runs - {one.run})

    def keep(self, runs: frozenset[int], alive: frozenset[int]) -> None:
        """Forget those of `runs` that were cleaned."""
        self._spills = tuple(it for it in self._spills if it.run not in runs or it.run in alive)

    def _same_level(self) -> int | None:
        """Where `fan_in` neighbours of one level begin that are not large."""
        alike, level = 0, -1
        for number, it in enumerate(self._spills):
            small = it.bytes < self.large_bytes
            alike = (alike + 1 if it.level == level else 1) if small else 0
            level = it.level if small else -1
            if alike == self.fan_in:
                return number + 1 - self.fan_in
        return None

    def _smallest(self) -> int:
        sizes = [it.bytes for it in self._spills]
        return min(range(len(sizes) - self.fan_in + 1), key=lambda first: sum(sizes[first : first + self.fan_in]))
