"""Mounted rows of one table, kept in memory for Flight (TiCDC's appendRowChangedEvents and
advanceTableSink). Pure.

Invariant: of the rows with `covered_from` < commit_ts <= `covered_to` every one is staged, so a
range within is served from here, and its rows are counted; any other range is read from the sorter.
What is appended is not served before `advance` says it is complete.

Rows are counted whole batches at a time (`RowCounts`). A staged range that ends between two counted
places splits the interval, so rows that are missing are noticed at the latest when its end is
handed out, and a range handed out again must have as many rows as before.
"""

import bisect
from dataclasses import dataclass

import pyarrow as pa

from sink.errors import SinkRowsLostError
from sink.mounts import clip
from sink.progress import ResolvedTs


@dataclass(frozen=True, slots=True)
class _Staged:
    resolved: ResolvedTs
    batch: pa.RecordBatch


class Staging:
    """Contiguous rows above the checkpoint; the caller serialises the calls."""

    __slots__ = ("_appended", "_counts", "_staged", "covered_from", "covered_to")

    def __init__(self, table_id: int, start_ts: int) -> None:
        self._counts = RowCounts(table_id, start_ts)
        self.covered_from = start_ts
        self.covered_to = start_ts
        self._appended: list[tuple[pa.RecordBatch, int]] = []
        self._staged: list[_Staged] = []

    def append(self, batch: pa.RecordBatch, size: int) -> None:
        """Take the next rows, at least one; their memory (`size` bytes) has been acquired."""
        self._counts.read(batch.num_rows)
        self._appended.append((batch, size))

    def advance(self, resolved: ResolvedTs) -> int:
        """Serve the appended rows with commit_ts <= `resolved.ts`; returns their bytes."""
        moved = 0
        for number, (batch, size) in enumerate(self._appended):
            # The last batch may end with rows of an incomplete transaction: its memory is divided
            # in proportion to the rows.
            below = clip(batch, -1, resolved.ts)
            share = size * below.num_rows // batch.num_rows
            if below.num_rows:
                self._staged.append(_Staged(resolved, below))
                moved += share
            if below.num_rows < batch.num_rows:
                self._appended[: number + 1] = [(batch.slice(below.num_rows), size - share)]
                break
        else:
            self._appended.clear()
        self.covered_to = max(self.covered_to, resolved.mark)
        # Only then it is known that all rows read so far have a commit_ts up to it.
        if not self._appended and not resolved.is_batch:
            self._counts.complete(resolved.ts)
        return moved

    def drop_up_to(self, checkpoint_ts: int) -> bool:
        """Drop what is acknowledged; returns whether there was something."""
        gone = bisect.bisect_right(
            self._staged, ResolvedTs(checkpoint_ts), key=lambda staged: staged.resolved
        )
        del self._staged[:gone]
        self._counts.drop_up_to(checkpoint_ts)
        self.covered_from = max(self.covered_from, checkpoint_ts)
        self.covered_to = max(self.covered_to, checkpoint_ts)
        return gone > 0

    def pending_bytes(self) -> int:
        """The bytes that were appended but not handed over."""
        return sum(size for _, size in self._appended)

    def rows(self, start_ts: int, end_ts: int) -> list[pa.RecordBatch] | None:
        """The rows with `start_ts` < commit_ts <= `end_ts`, or None if not all of them are here.

        Raises:
            SinkRowsLostError: there are fewer or more than were appended.
        """
        if start_ts < self.covered_from or end_ts > self.covered_to:
            return None
        parts = [
            clip(staged.batch, start_ts, end_ts)
            for staged in self._staged
            if staged.resolved.ts > start_ts
        ]
        self._counts.hand_out(start_ts, end_ts, sum(part.num_rows for part in parts))
        return [part for part in parts if part.num_rows]


class RowCounts:
    """How many rows of a table were staged up to which commit_ts;
    the caller serialises the calls.
    """

    __slots__ = ("_read", "_rows", "_table_id", "_ts")

    def __init__(self, table_id: int, start_ts: int) -> None:
        """Begin a table whose rows are staged above `start_ts`."""
        self._table_id = table_id
        self._ts = [start_ts]  # places where the count is known, ascending
        self._rows = [0]
        self._read = 0

    def read(self, rows: int) -> None:
        """Count rows that were read from the sorter."""
        self._read += rows

    def complete(self, ts: int) -> None:
        """Note that the rows read so far are exactly those with a commit_ts <= `ts`."""
        if ts > self._ts[-1]:
            self._ts.append(ts)
            self._rows.append(self._read)

    def drop_up_to(self, ts: int) -> None:
        """Forget what only ranges below `ts` need: none of them is handed out any more."""
        floor = bisect.bisect_right(self._ts, ts) - 1
        if floor > 0:
            del self._ts[:floor], self._rows[:floor]

    def hand_out(self, start_ts: int, end_ts: int, rows: int) -> None:
        """Check the number of rows before they are handed out for `(start_ts, end_ts]`, which is
        staged.

        Raises:
            SinkRowsLostError: rows are missing, or there are too many.
        """
        (start_least, start_most), (end_least, end_most) = (
            self._between(start_ts),
            self._between(end_ts),
        )
        if not end_least - start_most <= rows <= end_most - start_least:
            raise SinkRowsLostError(
                f"table {self._table_id}, commit_ts {start_ts + 1} to {end_ts}: {rows} rows are "
                f"staged, but {max(end_least - start_most, 0)} to {end_most - start_least} were "
                "read from the sorter; this is a defect of the sink: restart the capture, which "
                "pulls the table again from its checkpoint",
                self._table_id,
                start_ts + 1,
                end_ts,
            )
        # What was handed out is now how many rows there are up to `end_ts`: what follows must add
        # up to the next counted place.
        if start_least == start_most and end_least != end_most:
            place = bisect.bisect_right(self._ts, end_ts)
            self._ts.insert(place, end_ts)
            self._rows.insert(place, start_least + rows)

    def _between(self, ts: int) -> tuple[int, int]:
        """The least and the most rows there may be up to `ts`."""
        floor = bisect.bisect_right(self._ts, ts) - 1
        least = self._rows[max(floor, 0)]
        if floor >= 0 and self._ts[floor] == ts:
            return least, least
        return least, self._rows[floor + 1] if floor + 1 < len(self._rows) else self._read
