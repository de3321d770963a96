"""Which of a table's runs are merged when: so that a table of many small spills is read in few pieces. Pure.

A run that memory pressure wrote is of level 0; a merge of all runs of one level makes one run of the next. So of n runs
some `FAN_IN` a level remain, and a row is written again once a level. Runs of a level arrived after all of the next.
"""

from typing import Final

FAN_IN: Final = 32


class RunLevels:
    """The numbers of one table's runs that may overlap or are small, by level, in the order of arrival."""

    __slots__ = ("_levels",)

    fan_in = FAN_IN

    def __init__(self) -> None:
        self._levels: tuple[tuple[int, ...], ...] = ()  # there are as many of these as tables, most with a run or none

    def __len__(self) -> int:
        return sum(map(len, self._levels))

    def add(self, run: int, level: int = 0) -> None:
        """Note a new run."""
        self._set(level, (*(self._levels[level] if level < len(self._levels) else ()), run))

    def full(self) -> int | None:
        """A level that should be merged, the lowest first."""
        return next((level for level, runs in enumerate(self._levels) if len(runs) >= self.fan_in), None)

    def runs(self, level: int) -> frozenset[int]:
        """The runs of a level."""
        return frozenset(self._levels[level])

    def merged(self, level: int, run: int) -> None:
        """All runs of `level` are now `run`."""
        self._set(level, ())
        self.add(run, level + 1)

    def keep(self, level: int, alive: frozenset[int]) -> None:
        """Forget the runs of a level that were cleaned."""
        self._set(level, tuple(run for run in self._levels[level] if run in alive))

    def _set(self, level: int, runs: tuple[int, ...]) -> None:
        self._levels = (*self._levels[:level], runs, *self._levels[level + 1 :])
