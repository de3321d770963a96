"""A table's part of a cut, whole or in slices of about equal bytes; a commit_ts is never split. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from sink.cut import measure
from sorter import Extent
from sorter.order import Timestamps, clip_ts
from storage.model.span import Span

SLICES_MAX: Final = 1000
"""Of one table: more would cost readers more than they give."""
_EXTENTS_PER_SLICE: Final = 8  # extents smaller than that share of a slice are not looked into


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows of a table in `(start_ts, end_ts]`; rows count duplicates, bytes are raw and estimated at the edges."""

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
        wanted = np.searchsorted(self.bytes, total * np.arange(1, count) / count)
        return sorted({int(ts) for ts in self.ts[wanted] if ts < self.ts[-1]})

    def until(self, end_ts: int) -> tuple[float, float]:
        """Rows and bytes up to `end_ts`."""
        at = int(np.searchsorted(self.ts, np.uint64(end_ts), "right"))
        return (float(self.rows[at - 1]), float(self.bytes[at - 1])) if at else (0.0, 0.0)


def whole(span: Span, extents: Iterable[Extent], start_ts: int, end_ts: int) -> Slice:
    """The range as one slice."""
    return Slice(span, start_ts, end_ts, *measure(extents, start_ts, end_ts))


def sliced(span: Span, extents: Iterable[Extent], start_ts: int, end_ts: int, slice_bytes: int) -> list[Slice]:
    """The range in slices of about `slice_bytes`, that cover it without gaps; none if there are no rows."""
    weighed = _weighed(extents, start_ts, end_ts, max(slice_bytes, 1))
    if weighed is None:
        return []
    found, begin, before = [], start_ts, (0.0, 0.0)
    for end in [*weighed.cuts(max(slice_bytes, 1)), end_ts]:
        upto = weighed.until(end)
        found.append(Slice(span, begin, end, int(upto[0] - before[0]), int(upto[1] - before[1])))
        begin, before = end, upto
    return found


def _weighed(extents: Iterable[Extent], start_ts: int, end_ts: int, slice_bytes: int) -> _Weighed | None:
    timestamps, rows, sizes = [], [], []
    for extent in extents:
        inside = extent.min_commit_ts > start_ts and extent.max_commit_ts <= end_ts
        if inside and extent.bytes * _EXTENTS_PER_SLICE <= slice_bytes:
            at, count = np.array([extent.max_commit_ts], np.uint64), extent.rows
        else:
            at, count = clip_ts(extent.commit_ts(), start_ts + 1, end_ts), 1
        timestamps.append(at)
        rows.append(np.full(len(at), count, np.float64))
        sizes.append(np.full(len(at), count * extent.bytes / extent.rows))
    if not sum(map(len, timestamps)):
        return None
    ts = np.concatenate(timestamps)
    order = np.argsort(ts, kind="stable")
    return _Weighed(ts[order], np.cumsum(np.concatenate(rows)[order]), np.cumsum(np.concatenate(sizes)[order]))
