"""Chooses the end of a cut: the largest ts whose rows fit,
and divides a table's part of it into slices. Pure.

A commit_ts is never split. An extent is a block of one table in the sorter. Only as many commit_ts
are looked at as fit; extents whose first row is beyond what fits are not read. A table's part of a
cut is read whole or in slices of about equal bytes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from sorter import Extent
from sorter.order import Timestamps, clip_ts
from storage.model.span import Span

_COMPACT_ROWS = 1 << 16
SLICES_MAX: Final = 1000
"""The most slices of one table. A reader pays for each slice, and with more of them it would pay
more than it gains.
"""
# an extent smaller than an eighth of a slice is not read to find where the slice ends
_EXTENTS_PER_SLICE: Final = 8


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of a cut; None: no limit.

    Rows are counted exactly, bytes by the average of their block.
    """

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
        """The largest ts up to `upper_ts` whose rows fit; at least the first commit_ts,
        however many rows it has.
        """
        self.compact()
        if self.first_too_many is None or self._smallest is None:
            return upper_ts
        return max(self.first_too_many - 1, self._smallest)

    def _first_over(self, weights: npt.NDArray[np.float64]) -> int:
        over = len(weights)
        if self._bounds.max_rows is not None:
            over = min(over, max(self._bounds.max_rows, 0))
        if self._bounds.max_bytes is not None:
            over = min(
                over, int(np.searchsorted(np.cumsum(weights), self._bounds.max_bytes, "right"))
            )
        return over


def find_cut(extents: Iterable[Extent], start_ts: int, upper_ts: int, bounds: Bounds) -> int:
    """The largest ts up to `upper_ts` such that the rows above `start_ts`, up to it, fit into
    `bounds`.
    """
    if bounds.is_open:
        return upper_ts
    fitting = _Fitting(bounds)
    # By their first row: once that is beyond what fits, no later extent can change the answer, and
    # none is read.
    for extent in sorted(extents, key=lambda extent: extent.min_commit_ts):
        if fitting.first_too_many is not None and extent.min_commit_ts > fitting.first_too_many:
            break
        timestamps = clip_ts(extent.commit_ts(), start_ts + 1, upper_ts)
        fitting.add(timestamps, extent.bytes / extent.rows)
    return fitting.end(upper_ts)


def measure(extents: Iterable[Extent], start_ts: int, end_ts: int) -> tuple[int, int]:
    """(rows, bytes) with commit_ts in `(start_ts, end_ts]`; duplicates count,
    bytes are estimated at the edges.
    """
    rows = size = 0.0
    for extent in extents:
        inside = extent.rows
        if extent.min_commit_ts <= start_ts or extent.max_commit_ts > end_ts:
            inside = len(clip_ts(extent.commit_ts(), start_ts + 1, end_ts))
        rows += inside
        size += extent.bytes * inside / extent.rows
    return int(rows), int(size)


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows of a table in `(start_ts, end_ts]`; rows count duplicates,
    bytes are raw and estimated at the edges.
    """

    span: Span
    start_ts: int
    end_ts: int
    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class _Weighed:
    """Rows and bytes at some commit_ts, ascending, summed up."""

    ts: Timestamps
    rows: npt.NDArray[np.float64]
    bytes: npt.NDArray[np.float64]

    def cuts(self, slice_bytes: int) -> list[int]:
        """Inner borders of slices."""
        total = self.bytes[-1]
        count = int(min(-(-total // slice_bytes), SLICES_MAX))
        places = np.searchsorted(self.bytes, total * np.arange(1, count) / count)
        return sorted({int(ts) for ts in self.ts[places] if ts < self.ts[-1]})

    def until(self, end_ts: int) -> tuple[float, float]:
        """Rows and bytes up to `end_ts`."""
        at = int(np.searchsorted(self.ts, np.uint64(end_ts), "right"))
        return (float(self.rows[at - 1]), float(self.bytes[at - 1])) if at else (0.0, 0.0)


def whole(span: Span, extents: Iterable[Extent], start_ts: int, end_ts: int) -> Slice:
    """The range as one slice."""
    return Slice(span, start_ts, end_ts, *measure(extents, start_ts, end_ts))


def sliced(
    span: Span, extents: Iterable[Extent], start_ts: int, end_ts: int, slice_bytes: int
) -> list[Slice]:
    """The range in slices of about `slice_bytes`, that cover it without gaps;
    none if there are no rows.
    """
    weighed = _weighed(extents, start_ts, end_ts, max(slice_bytes, 1))
    if weighed is None:
        return []
    slices, begin, before = [], start_ts, (0.0, 0.0)
    for end in [*weighed.cuts(max(slice_bytes, 1)), end_ts]:
        upto = weighed.until(end)
        slices.append(Slice(span, begin, end, int(upto[0] - before[0]), int(upto[1] - before[1])))
        begin, before = end, upto
    return slices


def _weighed(
    extents: Iterable[Extent], start_ts: int, end_ts: int, slice_bytes: int
) -> _Weighed | None:
    timestamps, rows, sizes = [], [], []
    for extent in extents:
        inside = extent.min_commit_ts > start_ts and extent.max_commit_ts <= end_ts
        # Small against a slice: taken as if all its rows were at its end, it need not be read.
        if inside and extent.bytes * _EXTENTS_PER_SLICE <= slice_bytes:
            commit_ts, count = np.array([extent.max_commit_ts], np.uint64), extent.rows
        else:
            commit_ts, count = clip_ts(extent.commit_ts(), start_ts + 1, end_ts), 1
        timestamps.append(commit_ts)
        rows.append(np.full(len(commit_ts), count, np.float64))
        sizes.append(np.full(len(commit_ts), count * extent.bytes / extent.rows))
    if not sum(map(len, timestamps)):
        return None
    ts = np.concatenate(timestamps)
    order = np.argsort(ts, kind="stable")
    return _Weighed(
        ts[order], np.cumsum(np.concatenate(rows)[order]), np.cumsum(np.concatenate(sizes)[order])
    )
