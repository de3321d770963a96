"""A cut over tables in several processes: each sends its commit_ts in a compact form, and one
process chooses. Pure.

Invariants:
1. The chosen end is the one that a single sink manager with all tables chooses, unless a part was
   cut short.
2. A part holds at most `COMMITS_MAX` distinct commit_ts (some 16 MiB), so an answer is bounded
   whatever the backlog.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from sink.cut import Bounds, find_cut
from sorter import Extent
from sorter.order import Timestamps, clip_ts

COMMITS_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class PackedExtent:
    """Rows of one table of `bytes / rows` bytes each: the distinct commit_ts, ascending, and how
    many rows each has.
    """

    rows: int
    bytes: int
    commit_ts: Timestamps
    counts: npt.NDArray[np.int64]

    def unpacked(self) -> Extent:
        """The extent as the sorter gave it, within the range that was packed."""
        first, last = int(self.commit_ts[0]), int(self.commit_ts[-1])
        return Extent(
            first, last, self.rows, self.bytes, partial(np.repeat, self.commit_ts, self.counts)
        )


@dataclass(frozen=True, slots=True)
class CutPart:
    """One process's part: no cut within the bounds ends above `end_ts`,
    and these are its rows up to there.
    """

    end_ts: int
    extents: tuple[PackedExtent, ...] = ()


def cut_part(
    extents: Iterable[Extent], start_ts: int, end_ts: int, commits_max: int = COMMITS_MAX
) -> CutPart:
    """Pack the rows in `(start_ts, end_ts]`; ends earlier where there are more than `commits_max`
    commit_ts.
    """
    packed = [each for extent in extents if (each := _packed(extent, start_ts, end_ts))]
    if sum(len(extent.commit_ts) for extent in packed) > commits_max:
        # Several tables may share commit_ts: only the distinct ones count towards the bound.
        distinct = np.unique(np.concatenate([extent.commit_ts for extent in packed]))
        if len(distinct) > commits_max:
            end_ts = int(distinct[commits_max]) - 1
            packed = [
                each for extent in packed if (each := _packed(extent.unpacked(), start_ts, end_ts))
            ]
    return CutPart(end_ts, tuple(packed))


def combined_cut(parts: Sequence[CutPart], start_ts: int, bounds: Bounds) -> int:
    """The largest ts whose rows fit into `bounds`, at least one commit_ts;
    see `sink.cut.find_cut`.
    """
    upper_ts = min(part.end_ts for part in parts)
    if upper_ts <= start_ts:
        return start_ts
    packed = itertools.chain.from_iterable(part.extents for part in parts)
    # A part that was cut short says nothing about rows above its end, so the whole cut ends there.
    extents = [extent.unpacked() for extent in packed if extent.commit_ts[0] <= upper_ts]
    return find_cut(extents, start_ts, upper_ts, bounds)


def _packed(extent: Extent, start_ts: int, end_ts: int) -> PackedExtent | None:
    if extent.max_commit_ts <= start_ts or extent.min_commit_ts > end_ts:
        return None
    inside = clip_ts(extent.commit_ts(), start_ts + 1, end_ts)
    if not len(inside):
        return None
    distinct, counts = np.unique(inside, return_counts=True)
    return PackedExtent(extent.rows, extent.bytes, distinct, counts.astype(np.int64))
