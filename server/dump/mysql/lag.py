"""How hard a dump may read, so that the log lags little more than it would without it. Pure.

Lag is from a watermark's commit to its arrival through the log. It is measured with every round,
and now and then by a watermark of no round while nothing is read, which tells what is usual on this
machine at this time. Rounds that lag more, by the median, as single ones are late for many reasons,
halve the ease; others raise it slowly. With less ease chunks are smaller, fewer are read at a time,
and nothing is read for a while after each round.
"""

from collections import deque
from statistics import median
from typing import Final

LAG_FACTOR: Final = 1.5
"""So much more than what is usual rounds may lag."""
GRACE_S: Final = 0.001
"""And so much on top of it, as less is nobody's trouble."""
FAR_S: Final = 0.25
"""One round that lags so much more is enough."""
EASE_MIN = 1 / 8
EASE_FIRST = 1 / 2
QUIET_FIRST: Final = 5
"""Measured before anything is read."""
QUIET_EVERY_S: Final = 1.0
SHARE_MIN: Final = 1 / 2
"""Of a chunk's rows: each round costs as much again as this half,
so smaller ones would be CPU for nothing.
"""
_QUIET: Final = 32
_BUSY: Final = 6
_RAISE: Final = 1.1
_REST_MAX: Final = 3.0


class LagGuard:
    """Of one dump; times are in seconds, of any one clock."""

    def __init__(self) -> None:
        self.ease = EASE_FIRST
        """From EASE_MIN to 1."""
        self._quiet: deque[float] = deque(maxlen=_QUIET)
        self._busy: deque[float] = deque(maxlen=_BUSY)
        self._quiet_at = 0.0

    @property
    def limit_s(self) -> float:
        """What rounds may lag."""
        return LAG_FACTOR * median(self._quiet or [0.0]) + GRACE_S

    def quiet_wanted(self, now: float) -> bool:
        """Whether the lag is to be measured while nothing is read."""
        return len(self._quiet) < QUIET_FIRST or now - self._quiet_at >= QUIET_EVERY_S

    def quiet(self, lag_s: float, now: float) -> None:
        """The lag while nothing was read."""
        self._quiet.append(lag_s)
        self._quiet_at = now

    def busy(self, lag_s: float) -> None:
        """The lag of a round."""
        self._busy.append(lag_s)
        if (
            median(self._busy) > self.limit_s
            or lag_s > LAG_FACTOR * max(self._quiet, default=0.0) + FAR_S
        ):
            self.ease = max(self.ease / 2, EASE_MIN)
            # what was read at the pace before tells nothing of this one
            self._busy.clear()
        else:
            self.ease = min(self.ease * _RAISE, 1.0)

    def parallel(self, most: int) -> int:
        """How many chunks to read at a time."""
        return max(round(most * self.ease), 1)

    def rows(self, most: int) -> int:
        """How many rows a chunk may have."""
        return max(int(most * max(self.ease, SHARE_MIN)), 1)

    def rest_s(self, read_s: float) -> float:
        """How long to read nothing after a round that took so long."""
        return read_s * min((1 / self.ease - 1) / 2, _REST_MAX)


class Lags:
    """Watermarks on their way through the log, by their identifiers; in no order,
    as an arrival may be seen first.
    """

    def __init__(self) -> None:
        self._written: dict[str, float | None] = {}
        self._arrived: dict[str, float] = {}
        self._found: dict[str, float] = {}

    def expect(self, unique_identifier: str) -> None:
        """It is about to be written."""
        self._written[unique_identifier] = None

    def written(self, unique_identifier: str, at: float) -> None:
        """It was committed."""
        if unique_identifier in self._written:
            self._written[unique_identifier] = at
            self._match(unique_identifier)

    def arrived(self, unique_identifier: str, at: float) -> None:
        """The log has passed it; nothing happens if it is not expected."""
        if unique_identifier in self._written:
            self._arrived[unique_identifier] = at
            self._match(unique_identifier)

    def forget(self, unique_identifier: str) -> None:
        """It may never arrive."""
        self._written.pop(unique_identifier, None)
        self._arrived.pop(unique_identifier, None)

    def taken(self) -> dict[str, float]:
        """The lags known since the last call, each once."""
        lags, self._found = self._found, {}
        return lags

    def _match(self, unique_identifier: str) -> None:
        written, arrived = self._written[unique_identifier], self._arrived.get(unique_identifier)
        if written is not None and arrived is not None:
            self._found[unique_identifier] = max(arrived - written, 0.0)
            self.forget(unique_identifier)
