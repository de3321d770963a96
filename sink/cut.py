"""Chooses the end of a cut: the largest ts whose rows fit, never splitting a commit_ts. Pure.

Only as many commit_ts are looked at as fit; extents whose first row is beyond what fits are not read.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sorter import Extent
from sorter.order import Timestamps, clip_ts

_COMPACT_ROWS = 1 << 16


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a cut may hold; None: no bound. Rows are counted exactly, bytes by the average of their block."""

    max_rows: int | None = None
    max_bytes: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether everything fits."""
        return self.max_rows is None and self.max_bytes is None


class _Fitting:
    """The smallest commit_ts seen so far, as many as fit and one more."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._parts: list[Timestamps] = []
        self._weights: list[npt.NDArray[np.float64]] = []
        self._fresh = 0
        self.first_too_many: int | None = None
        self._smallest: int | None = None

    def add(self, timestamps: Timestamps, row_bytes: float) -> None:
        self._parts.append(timestamps)
        self._weights.append(np.full(len(timestamps), row_bytes))
        self._fresh += len(timestamps)
        if self._fresh >= _COMPACT_ROWS:
            self.compact()

    def compact(self) -> None:
        """Sort what was added, and forget what does not fit."""
        if not self._parts:
            return
        timestamps, weights = np.concatenate(self._parts), np.concatenate(self._weights)
        order = np.argsort(timestamps)
        timestamps, weights = timestamps[order], weights[order]
        over = self._first_over(weights)
        if over < len(timestamps):
            self.first_too_many, self._smallest = int(timestamps[over]), int(timestamps[0])
        self._parts, self._weights = [timestamps[: over + 1]], [weights[: over + 1]]
        self._fresh = 0

    def end(self, upper_ts: int) -> int:
        """The largest ts up to `upper_ts` whose rows fit; at least the first commit_ts, however many rows it has."""
        self.compact()
        if self.first_too_many is None or self._smallest is None:
            return upper_ts
        return max(self.first_too_many - 1, self._smallest)

    def _first_over(self, weights: npt.NDArray[np.float64]) -> int:
        over = len(weights)
        if self._bounds.max_rows is not None:
            over = min(over, max(self._bounds.max_rows, 0))
        if self._bounds.max_bytes is not None:
            over = min(over, int(np.searchsorted(np.cumsum(weights), self._bounds.max_bytes, "right")))
        return over


def find_cut(extents: Iterable[Extent], start_ts: int, upper_ts: int, bounds: Bounds) -> int:
    """The largest ts in `(start_ts, upper_ts]` such that the rows in `(start_ts, ts]` fit into `bounds`."""
    if bounds.is_open:
        return upper_ts
    fitting = _Fitting(bounds)
    for extent in sorted(extents, key=lambda extent: extent.min_commit_ts):
        if fitting.first_too_many is not None and extent.min_commit_ts > fitting.first_too_many:
            break
        wanted = clip_ts(extent.commit_ts(), start_ts + 1, upper_ts)
        fitting.add(wanted, extent.bytes / extent.rows)
    return fitting.end(upper_ts)


def measure(extents: Iterable[Extent], start_ts: int, end_ts: int) -> tuple[int, int]:
    """(rows, bytes) with commit_ts in `(start_ts, end_ts]`; duplicates count, bytes are estimated at the edges."""
    rows = size = 0.0
    for extent in extents:
        inside = extent.rows
        if extent.min_commit_ts <= start_ts or extent.max_commit_ts > end_ts:
            inside = len(clip_ts(extent.commit_ts(), start_ts + 1, end_ts))
        rows += inside
        size += extent.bytes * inside / extent.rows
    return int(rows), int(size)
