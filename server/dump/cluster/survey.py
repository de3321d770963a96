"""A table of the cluster before it is read: its ranges, and how many rows they seem to have.

Each part's first and last key and a few keys of each range are read at one timestamp. What is
concerned is progress and balance only, so these reads need no hold; a range that was planned before
stays, wherever the table's keys are now.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from server.changefeed.table import SourceTable
from server.dump.cluster.chunks import Page, PageRead, Pulled
from server.dump.cluster.plan import (
    ChunkPace,
    Extent,
    KeyScale,
    RowEstimate,
    key_ranges,
    planned_ranges,
)
from server.dump.progress import Range, TableDump, TableState
from storage.model.span import KeyRange, Span
from storage.tasks import gather

SMALL_ROWS: Final = 4096
"""A part with fewer is not split."""
_SAMPLE_ROWS: Final = 64
_AT_A_TIME: Final = 8


class Store(Protocol):
    """Reads the key distribution; implemented by `server.dump.cluster.chunks`. Every read raises
    TidemarkError.
    """

    async def now(self) -> int:
        """A new timestamp."""
        ...

    async def keys(self, begin: bytes, end: bytes, ts: int, limit: int) -> list[bytes]:
        """The first keys of a range."""
        ...

    async def last(self, begin: bytes, end: bytes, ts: int) -> bytes | None:
        """The last one."""
        ...

    async def region_bounds(self, begin: bytes, end: bytes) -> list[bytes]:
        """Return the region bounds."""
        ...

    def parts(self, table: SourceTable) -> Sequence[Span]:
        """Return the spans of a table's rows, in key order."""
        ...


@dataclass(slots=True, eq=False)
class Surveyed:
    """A surveyed table; valid while the table is pulled as it is now."""

    generation: Hashable
    ranges: Sequence[KeyRange]
    estimate: RowEstimate
    pace: ChunkPace = field(default_factory=ChunkPace)

    def begin(self, place: int, at: Range) -> bytes:
        """The key at which a range is to be read further."""
        return at.after[0].data + b"\0" if at.after else self.ranges[place].start_key

    def note_rows(self, place: int, page: Page, read: PageRead) -> None:
        """A page was read."""
        self.estimate.note_rows(place, page.begin, read.last, read.rows)
        self.pace.took(read.rows, read.size_bytes, read.seconds)

    def left(self, dump: TableDump) -> int:
        """Estimate how many rows are left."""
        ahead = ((place, dump.unread(place)[0]) for place in range(len(self.ranges)))
        return self.estimate.left(
            [(place, self.begin(place, at)) for place, at in ahead if not at.done]
        )


class Surveyor:
    """Surveys tables through a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def survey(self, pulled: Pulled, dump: TableDump) -> Surveyed:
        """Plan the dump of a table, if it is not planned for the parts it has now.

        Raises:
            TidemarkError: the store does not answer.
        """
        parts, ts = self._store.parts(pulled.table), await self._store.now()
        # Some at a time, as a table may have thousands of partitions.
        extents: list[Extent] = []
        for first in range(0, len(parts), _AT_A_TIME):
            extents += await gather(
                self._extent(part, ts) for part in parts[first : first + _AT_A_TIME]
            )
        # Ranges that were planned before stay, with what was read of them, unless the table has
        # other partitions now.
        ranges = key_ranges(dump.durable.ranges, parts)
        if dump.durable.state is TableState.WAITING or ranges is None:
            planned = planned_ranges(extents)
            ranges = key_ranges(planned, parts)
            assert ranges is not None, "ranges of these parts"
            dump.begin(planned, 0)
        surveyed = Surveyed(pulled.generation, ranges, RowEstimate(ranges, extents))
        await self._sample(surveyed, dump, ts)
        dump.set_expected(dump.rows_counted + surveyed.left(dump))
        return surveyed

    async def _extent(self, part: Span, ts: int) -> Extent:
        keys = await self._store.keys(part.start_key, part.end_key, ts, SMALL_ROWS)
        if len(keys) < SMALL_ROWS:
            return Extent(part, KeyScale(keys), rows=len(keys))
        last = await self._store.last(keys[-1], part.end_key, ts) or keys[-1]
        bounds = await self._store.region_bounds(keys[0], last)
        return Extent(part, KeyScale([*keys, last]), tuple(bounds))

    async def _sample(self, surveyed: Surveyed, dump: TableDump, ts: int) -> None:
        unknown = (
            place for place in range(len(surveyed.ranges)) if place not in surveyed.estimate.counted
        )
        left = [place for place in unknown if not dump.unread(place)[0].done]
        for first in range(0, len(left), _AT_A_TIME):
            await gather(
                self._sample_one(surveyed, dump, place, ts)
                for place in left[first : first + _AT_A_TIME]
            )

    async def _sample_one(self, surveyed: Surveyed, dump: TableDump, place: int, ts: int) -> None:
        begin = surveyed.begin(place, dump.unread(place)[0])
        keys = await self._store.keys(begin, surveyed.ranges[place].end_key, ts, _SAMPLE_ROWS)
        if len(keys) == _SAMPLE_ROWS:
            surveyed.estimate.note_rows(place, keys[0], keys[-1], len(keys))
        elif keys:
            surveyed.estimate.note_rows(place, begin, surveyed.ranges[place].end_key, len(keys))
