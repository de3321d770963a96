"""A table's rows in memory: `pending` batches as they came, and `ready` ones, resolved and sorted.
Pure.

Every row is added to the table's checksum log when it is added here. When sorting finds a duplicate
(the same change, sent twice), it is dropped and removed from the log once.

Invariant: all rows in `ready` are at or below a resolved_ts, so no row that is added later belongs
between them; the batches in `ready` follow one another without overlap. All other rows are in
`pending`, in the order of their arrival.
"""

from dataclasses import dataclass
from itertools import takewhile
from typing import Final

import pyarrow as pa

from sorter import order
from sorter.checksum_log import ChecksumLog
from sorter.order import Sorted

BATCH_BYTES: Final = 6 << 10
"""The memory of a batch besides its rows, as measured: most of what a small batch takes."""
_SMALL_BYTES: Final = 16 << 10
_MANY_SMALL: Final = 64
"""Whenever a list has grown by so many batches, the small ones at its end are joined."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows with the range of their commit_ts."""

    batch: pa.RecordBatch
    min_commit_ts: int
    max_commit_ts: int

    @classmethod
    def of(cls, batch: pa.RecordBatch) -> "Rows":
        """Measure a batch of at least one row."""
        timestamps = order.commit_ts(batch)
        return cls(batch, int(timestamps.min()), int(timestamps.max()))

    @property
    def bytes(self) -> int:
        """The memory that the rows take."""
        size: int = self.batch.nbytes
        return size + BATCH_BYTES


class Buffer:
    """The unwritten rows of one table; the caller serialises the calls."""

    __slots__ = ("_checksums", "pending", "pending_bytes", "ready", "ready_bytes")

    def __init__(self, checksums: ChecksumLog) -> None:
        self._checksums = checksums
        self.pending: list[Rows] = []
        self.ready: list[Rows] = []
        self.pending_bytes = 0
        self.ready_bytes = 0

    @property
    def bytes(self) -> int:
        """The memory that the rows take."""
        return self.pending_bytes + self.ready_bytes

    def add(self, rows: Rows) -> int:
        """Add rows above the resolved_ts; returns by how many bytes the memory grew."""
        # The checksum log first: a row that is lost after this line is missed by `check`.
        self._checksums.add(rows.batch)
        self.pending.append(rows)
        change = rows.bytes - _join_small(self.pending)
        self.pending_bytes += change
        return change

    def batches(self) -> list[pa.RecordBatch]:
        """All rows; duplicates of a row are in the order of their arrival."""
        # They are never in both lists: `ready` ends at a resolved_ts, and `pending` begins above
        # it.
        return [rows.batch for rows in (*self.ready, *self.pending)]

    def clear(self) -> None:
        """Drop all rows."""
        self.ready, self.pending, self.ready_bytes, self.pending_bytes = [], [], 0, 0

    def settle(self, resolved_ts: int) -> None:
        """Sort the rows up to `resolved_ts` into `ready`."""
        complete: list[pa.RecordBatch] = []
        waiting: list[Rows] = []
        for rows in self.pending:
            if rows.max_commit_ts <= resolved_ts:
                complete.append(rows.batch)
            elif rows.min_commit_ts > resolved_ts:
                waiting.append(rows)
            else:
                below, above = order.split(rows.batch, resolved_ts)
                complete.append(below)
                waiting.append(Rows.of(above))
        if complete:
            self.pending = waiting
            self.pending_bytes = _size(waiting)
            # Everything up to the resolved_ts is sorted into one batch, so that the batches of
            # `ready` ascend and do not overlap.
            self._append_ready(self._sorted(complete).batch())

    def take_ready(self) -> pa.RecordBatch | None:
        """Take out the resolved rows, sorted."""
        taken = [rows.batch for rows in self.ready]
        self.ready, self.ready_bytes = [], 0
        return pa.concat_batches(taken) if taken else None

    def take_pending(self, limit_bytes: int) -> Sorted | None:
        """Take out the rows of `pending` that came first, about `limit_bytes` of them, sorted; the
        commit_ts of rows that stay may be between theirs.
        """
        taken: list[pa.RecordBatch] = []
        size = 0
        while len(taken) < len(self.pending) and size < limit_bytes:
            taken.append(self.pending[len(taken)].batch)
            size += self.pending[len(taken) - 1].bytes
        del self.pending[: len(taken)]
        self.pending_bytes -= size
        return self._sorted(taken) if taken else None

    def put_back_ready(self, batch: pa.RecordBatch) -> None:
        """Undo `take_ready`, for the rows that could not be written."""
        self._append_ready(batch)

    def put_back_pending(self, batch: pa.RecordBatch) -> None:
        """Undo `take_pending`, for the rows that could not be written."""
        rows = Rows.of(batch)
        # At the front, where they were: of duplicates, the one that came last is kept.
        self.pending.insert(0, rows)
        self.pending_bytes += rows.bytes

    def drop_up_to(self, commit_ts: int) -> None:
        """Forget ready runs without a row above `commit_ts`."""
        self.ready = [rows for rows in self.ready if rows.max_commit_ts > commit_ts]
        self.ready_bytes = _size(self.ready)

    def _sorted(self, batches: list[pa.RecordBatch]) -> Sorted:
        rows = order.arrange(batches)
        # A duplicate was added to the log twice, and will be read once.
        if rows.dropped is not None:
            self._checksums.remove(rows.rows.take(pa.array(rows.dropped)))
        return rows

    def _append_ready(self, batch: pa.RecordBatch) -> None:
        rows = Rows.of(batch)
        self.ready.append(rows)
        self.ready_bytes += rows.bytes
        self.ready_bytes -= _join_small(self.ready)


def _join_small(parts: list[Rows]) -> int:
    """Join the last parts to one if they are many and small, since each takes `BATCH_BYTES` besides
    its rows; returns the bytes saved.
    """
    if len(parts) % _MANY_SMALL:
        return 0
    # Only neighbours at the end, which keeps the order of arrival.
    small = list(takewhile(lambda rows: rows.bytes < _SMALL_BYTES, reversed(parts)))[::-1]
    if len(small) < _MANY_SMALL // 2:
        return 0
    joined = Rows(
        pa.concat_batches([rows.batch for rows in small]),
        min(rows.min_commit_ts for rows in small),
        max(rows.max_commit_ts for rows in small),
    )
    parts[-len(small) :] = [joined]
    return _size(small) - joined.bytes


def _size(rows: list[Rows]) -> int:
    return sum(part.bytes for part in rows)
