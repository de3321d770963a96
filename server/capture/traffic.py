"""The traffic of each table, by the time of its upstream; reads no clock.

A row counts at its commit_ts, not at the time when it is pulled: so a table that is pulled again
from its checkpoint, after a move or a restart, has the same traffic as before. Rows older than a
few minutes hardly count: the weight of a row is divided by `e` every `_MEMORY_S`.
"""

import math
import threading
from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from storage.model.span import Span
from storage.model.ts import LOGICAL_BITS, physical_ms

_MEMORY_S: Final = 60.0
_SEEN_S_MIN: Final = 10.0
"""A table that is known for less is taken to be known for so long: one row makes no rate."""
_EXPONENT_MAX: Final = 600.0
_WHOLE_BYTES_PER_S_MIN: Final = 64 << 10
"""Less is no load for any capture."""


class Traffic(NamedTuple):
    """The rate of a table's recent changes."""

    rows_per_s: float = 0.0
    bytes_per_s: float = 0.0


NO_TRAFFIC: Final = Traffic()


class _Sums(NamedTuple):
    """Decayed sums of rows and bytes, as of `at_s`."""

    since_s: float
    at_s: float
    rows: float
    size_bytes: float


class TableTraffic:
    """The traffic of tables; any thread may call."""

    def __init__(self) -> None:
        self._sums: dict[Span, _Sums] = {}
        self._lock = threading.Lock()

    def add(self, span: Span, commit_ts: npt.NDArray[np.uint64], size_bytes: int) -> None:
        """Count rows of a table, in any order, of `size_bytes` together."""
        if not len(commit_ts):
            return
        times_s = (commit_ts >> np.uint64(LOGICAL_BITS)).astype(np.float64) / 1000
        first_s, last_s = float(times_s.min()), float(times_s.max())
        rows = float(np.exp((times_s - last_s) / _MEMORY_S).sum())
        size = size_bytes * rows / len(commit_ts)

        with self._lock:
            before = self._sums.get(span, _Sums(first_s, last_s, 0.0, 0.0))
            at_s = max(before.at_s, last_s)
            old, new = _fallen(at_s - before.at_s), _fallen(at_s - last_s)
            self._sums[span] = _Sums(
                min(before.since_s, first_s),
                at_s,
                before.rows * old + rows * new,
                before.size_bytes * old + size * new,
            )

    def remove(self, span: Span) -> None:
        """Forget a table; one that is not there is no error."""
        with self._lock:
            self._sums.pop(span, None)

    def of(self, span: Span, resolved_ts: int) -> Traffic:
        """The traffic of a table whose changes are known up to `resolved_ts`."""
        sums = self._sums.get(span)
        if sums is None:
            return NO_TRAFFIC
        now_s = max(physical_ms(resolved_ts) / 1000, sums.at_s)
        seen_s = max(now_s - sums.since_s, _SEEN_S_MIN)
        # Of a table that is known since a short time the earlier rows are missing: what is there is
        # taken for the time in which it came.
        per_s = _fallen(now_s - sums.at_s) / (_MEMORY_S * (1 - _fallen(seen_s)))
        return Traffic(sums.rows * per_s, sums.size_bytes * per_s)

    def spans(self) -> tuple[Span, ...]:
        """The tables that have changed."""
        with self._lock:
            return tuple(self._sums)


def weights(tables: int, traffic: Mapping[Span, Traffic]) -> dict[Span, float]:
    """Return the weights of the tables among `tables` that do not weigh 1.

    Each weighs 1 for being there, and those with traffic together as much again: so tables are
    divided half by their number and half by their bytes. While all together have little traffic,
    only their number counts.
    """
    whole = sum(each.bytes_per_s for each in traffic.values())
    if whole < _WHOLE_BYTES_PER_S_MIN:
        return {}
    return {span: 1 + tables * each.bytes_per_s / whole for span, each in traffic.items()}


def _fallen(seconds: float) -> float:
    return math.exp(-min(max(seconds, 0.0) / _MEMORY_S, _EXPONENT_MAX))
