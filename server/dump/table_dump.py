"""One table while it is dumped: what is durable of it,
and what is ahead of that in this process only. Pure.

Invariants:
1. What is durable of a cursor is at the target: a chunk counts once the checkpoint has reached its
   high watermark, and after all chunks before it in its range. Whatever is lost in a crash is read
   again, never left out.
2. A chunk that must be read again takes those behind it in its range with it: nothing is counted
   over a gap.
"""

from collections import deque
from dataclasses import dataclass, field, replace

from server.dump.progress import Cursor, Range, TableProgress, TableState


@dataclass(frozen=True, slots=True)
class Read:
    """A chunk that was read from a range of a table; `last` None: nothing was there."""

    place: int
    epoch: int
    last: Cursor | None
    ends: bool
    """Whether nothing of the range is behind it."""
    rows: int
    bytes: int
    checked: bool = False
    """It counts only if its sum is that of the server."""


@dataclass(slots=True)
class _Reading:
    """One range while it is read: `epoch` grows when it is set back,
    `unsettled` are the chunks not yet durable.
    """

    at: Range
    epoch: int = 0
    unsettled: deque[tuple[int, Read]] = field(default_factory=deque)
    """With the commit_ts of their high watermarks."""
    rows_ahead: int = 0
    """Rows of chunks that were read and are not yet durable, in windows still open, too."""

    @property
    def closed(self) -> Range | None:
        """As far as windows have closed."""
        return _moved(self.at, self.unsettled[-1][1]) if self.unsettled else None


class TableDump:
    """One table while it is dumped: `durable`, and what is ahead of it in this process only."""

    def __init__(self, durable: TableProgress) -> None:
        self.durable = durable
        self._ranges = [_Reading(each) for each in durable.ranges]
        self._ahead = list(durable.ranges)
        self._expected = 0

    def next_range(self, taken: frozenset[int] = frozenset()) -> int | None:
        """A range that has more to read and is not `taken`; None: there is none."""
        open_ranges = (
            place for place, each in enumerate(self._ahead) if not each.done and place not in taken
        )
        return next(open_ranges, None)

    def ahead(self, place: int) -> tuple[Range, int]:
        """What is still to be read of a range, and its epoch."""
        return self._ahead[place], self._ranges[place].epoch

    def read(self, chunk: Read) -> None:
        """A chunk was read; the next one begins behind it. One of an older epoch is forgotten."""
        reading = self._reading(chunk)
        if reading is not None:
            self._ahead[chunk.place] = _moved(self._ahead[chunk.place], chunk)
            reading.rows_ahead += chunk.rows

    def closed(self, chunk: Read, commit_ts: int) -> bool:
        """Its window has closed; returns whether its rows count:
        not if it was set back meanwhile.
        """
        reading = self._reading(chunk)
        if reading is None:
            return False
        reading.unsettled.append((commit_ts, chunk))
        return True

    def again(self, chunk: Read) -> bool:
        """It must be read again, and what was read behind it;
        returns whether it was not set back before.
        """
        reading = self._reading(chunk)
        if reading is None:
            return False
        reading.epoch += 1
        reading.rows_ahead = sum(each.rows for _, each in reading.unsettled)
        self._ahead[chunk.place] = reading.closed or reading.at
        return True

    def _reading(self, chunk: Read) -> _Reading | None:
        """The range of a chunk, as it was when that was read; None: it was set back,
        or planned anew.
        """
        return self._ranges[chunk.place] if self.is_now(chunk.place, chunk.epoch) else None

    def is_now(self, place: int, epoch: int) -> bool:
        """Whether what `ahead` told at that epoch of a range still is so."""
        return place < len(self._ranges) and self._ranges[place].epoch == epoch

    def settle(self, checkpoint_ts: int) -> bool:
        """Everything up to `checkpoint_ts` is at the target for good;
        returns whether `durable` has moved.
        """
        before = self.durable
        for place, reading in enumerate(self._ranges):
            while reading.unsettled and reading.unsettled[0][0] <= checkpoint_ts:
                commit_ts, chunk = reading.unsettled.popleft()
                reading.at = _moved(reading.at, chunk)
                reading.rows_ahead -= chunk.rows
                self.durable = replace(
                    self.durable,
                    rows=self.durable.rows + chunk.rows,
                    bytes=self.durable.bytes + chunk.bytes,
                    chunks=self.durable.chunks + 1,
                    chunks_verified=self.durable.chunks_verified + chunk.checked,
                    high_ts=max(self.durable.high_ts, commit_ts),
                    ranges=(
                        *self.durable.ranges[:place],
                        reading.at,
                        *self.durable.ranges[place + 1 :],
                    ),
                )
        rows_read = self.durable.rows + sum(each.rows_ahead for each in self._ranges)
        estimated = self._estimated(before)
        if (rows_read, estimated) != (self.durable.rows_read, self.durable.rows_estimated):
            self.durable = replace(self.durable, rows_read=rows_read, rows_estimated=estimated)
        if self.durable.state is TableState.DUMPING and all(
            each.done for each in self.durable.ranges
        ):
            self.durable = replace(self.durable, state=TableState.DONE)
        return self.durable != before

    def expected(self, rows: int) -> None:
        """There are about so many rows in all, as is seen by now."""
        self._expected = rows

    def _estimated(self, before: TableProgress) -> int:
        """As many as are expected, but for now no more than leave the share of those at the target
        where it was.
        """
        if not self._expected:
            return self.durable.rows_estimated
        shown = before.rows and before.rows_estimated
        most = self.durable.rows * before.rows_estimated // before.rows if shown else self._expected
        return max(min(self._expected, most), self.durable.rows)

    def repaired(self) -> None:
        """A chunk is read again as its sum was not that of the server."""
        self.durable = replace(self.durable, chunks_repaired=self.durable.chunks_repaired + 1)

    def moved_to(self, state: TableState, error: str = "") -> None:
        """The table is in another state."""
        self.durable = replace(self.durable, state=state, error=error)

    def goes_at(self, rows_per_s: int) -> None:
        """How fast it went lately."""
        self.durable = replace(self.durable, rows_per_s=rows_per_s)

    def planned(self, ranges: tuple[Range, ...], rows_estimated: int) -> None:
        """Reading begins, in these ranges."""
        self._restarted(replace(self.durable, ranges=ranges, rows_estimated=rows_estimated))
        self.moved_to(TableState.DUMPING)

    def restart(self, table_id: int) -> None:
        """Begin anew: nothing that was read counts."""
        fresh = TableProgress(self.durable.name, table_id, self.durable.job)
        self._restarted(fresh)

    def _restarted(self, durable: TableProgress) -> None:
        newest = max((each.epoch for each in self._ranges), default=0) + 1
        self.durable = durable
        self._ranges = [_Reading(each, newest) for each in durable.ranges]
        self._ahead = list(durable.ranges)

    @property
    def closed_ts(self) -> int | None:
        """The last high watermark of a table whose windows have all closed; None:
        there is something to read.
        """
        if self.durable.state.is_over and self.durable.state is not TableState.DONE:
            return None
        if self.durable.state is TableState.WAITING or not all(
            (each.closed or each.at).done for each in self._ranges
        ):
            return None
        return max(
            [self.durable.high_ts, *(ts for each in self._ranges for ts, _ in each.unsettled)]
        )

    @property
    def rows_ahead(self) -> int:
        """Rows whose windows have closed, durable or not."""
        return self.durable.rows + sum(
            chunk.rows for each in self._ranges for _, chunk in each.unsettled
        )


def _moved(at: Range, chunk: Read) -> Range:
    return replace(at, after=chunk.last if chunk.last is not None else at.after, done=chunk.ends)
