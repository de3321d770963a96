"""Mounted rows of one table, kept in memory for Flight (TiCDC's appendRowChangedEvents and advanceTableSink). Pure.

Invariant: of the rows with `covered_from` < commit_ts <= `covered_to` every one is staged, so a range within is served
from here, and its rows are counted; any other range is read from the sorter. What is appended is not served before
`advance` says it is complete.
"""

import bisect
from dataclasses import dataclass

import pyarrow as pa

from sink import mounted
from sink.ledger import RowLedger
from sink.resolved import ResolvedTs


@dataclass(frozen=True, slots=True)
class _Staged:
    resolved: ResolvedTs
    batch: pa.RecordBatch


class Staging:
    """Contiguous rows above the checkpoint; the caller serialises the calls."""

    __slots__ = ("_appended", "_ledger", "_staged", "covered_from", "covered_to")

    def __init__(self, table_id: int, start_ts: int) -> None:
        self._ledger = RowLedger(table_id, start_ts)
        self.covered_from = start_ts
        self.covered_to = start_ts
        self._appended: list[tuple[pa.RecordBatch, int]] = []
        self._staged: list[_Staged] = []

    def append(self, batch: pa.RecordBatch, size: int) -> None:
        """Take the next rows, at least one; their memory (`size` bytes) has been acquired."""
        self._ledger.read(batch.num_rows)
        self._appended.append((batch, size))

    def advance(self, resolved: ResolvedTs) -> int:
        """The appended rows with commit_ts <= `resolved.ts` are handed over; returns their bytes."""
        moved = 0
        for number, (batch, size) in enumerate(self._appended):
            below = mounted.clip(batch, -1, resolved.ts)
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
        if not self._appended and not resolved.is_batch:
            self._ledger.complete(resolved.ts)
        return moved

    def drop_up_to(self, checkpoint_ts: int) -> bool:
        """Forget what is acknowledged; returns whether there was something."""
        gone = bisect.bisect_right(self._staged, ResolvedTs(checkpoint_ts), key=lambda staged: staged.resolved)
        del self._staged[:gone]
        self._ledger.drop_up_to(checkpoint_ts)
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
            mounted.clip(staged.batch, start_ts, end_ts) for staged in self._staged if staged.resolved.ts > start_ts
        ]
        self._ledger.hand_out(start_ts, end_ts, sum(part.num_rows for part in parts))
        return [part for part in parts if part.num_rows]
