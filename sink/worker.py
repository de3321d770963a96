"""A sink task: fetch a table's next rows from the sorter, mount them and stage them,
as far as the memory goes.

As TiCDC's handleTask, but a batch at a time. Memory is acquired before rows are appended, so only
an unfinished transaction that must not be split ever exceeds the quota. When memory is short
between two transactions the task is given up, and the table's next task begins at the next
transaction; what it read by then is still compared with what the sorter had been given.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from sink import metrics
from sink.mounts import SequenceMount
from sink.progress import Acquire, ResolvedTs, acquire_mode, advance_to
from sink.quota import MemQuota
from sink.table_sink import TableSink
from sorter import Sorter
from sorter.order import commit_ts
from storage.model.event import Position

REQUEST_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class SinkTask:
    """Stage the table's rows within `[lower, upper]`; `upper` is a commit fence,
    and no DDL lies between.
    """

    table: TableSink
    lower: Position
    upper: Position


@dataclass(frozen=True, slots=True)
class TaskResult:
    """Where the table's next task begins, and whether this one was given up for want of memory."""

    next_lower: Position
    gave_up: bool


class TaskRun:
    """One run of a task, in the thread of a worker;
    `request_bytes` have been acquired for it and are its own.
    """

    def __init__(
        self,
        task: SinkTask,
        quota: MemQuota,
        batch_ids: Iterator[int],
        *,
        split_txn: bool,
        request_bytes: int = REQUEST_BYTES,
    ) -> None:
        self._task = task
        self._quota = quota
        self._batch_ids = batch_ids
        self._split_txn = split_txn
        self._request_bytes = self._spare_bytes = request_bytes
        self._next_lower = task.lower
        self._last: Position | None = None  # the last row appended
        # the last commit_ts below it: read to its end
        self._previous_commit_ts = 0

    def run(self, sorter: Sorter) -> TaskResult:
        """Stage rows until the end of the range, or of the memory.

        Raises:
            QuotaClosedError: the sink manager is stopping.
            RowsLostError: what was read is not what the sorter was given.
        """
        table, upper = self._task.table, self._task.upper
        try:
            if not self._stage(sorter):
                # The sorter compares sums at the end of a fetch, which this one did not reach.
                table.verify(sorter, self._next_lower.commit_ts - 1)
                return TaskResult(self._next_lower, gave_up=True)
            # Before the rows are announced: readers must not get what does not add up.
            self._verify_read(sorter)
            table.advance(ResolvedTs(upper.commit_ts))
        finally:
            self._quota.refund(self._spare_bytes)
        return TaskResult(upper.next(), gave_up=False)

    def _stage(self, sorter: Sorter) -> bool:
        mount = SequenceMount(self._task.table.mounts.above(self._task.lower.commit_ts - 1))
        for raw in self._task.table.fetch(sorter, self._task.lower, self._task.upper):
            first = _position(raw, 0)
            if self._last is not None:
                self._hand_over(self._last, first)
            if not self._append(mount(raw), first):
                return False
            self._note_last(raw)
        return True

    def _verify_read(self, sorter: Sorter) -> None:
        """See that the sorter compares what it gave: it has, if the task began with a commit_ts;
        else let it do so now.
        """
        table, upper_ts = self._task.table, self._task.upper.commit_ts
        if self._task.lower.start_ts:
            table.verify(sorter, upper_ts)
        table.verified_ts = max(table.verified_ts, upper_ts)

    def _hand_over(self, last: Position, following: Position) -> None:
        """Announce what is known to be complete, now that the row after `last` is known."""
        if following.commit_ts > last.commit_ts:
            finished = Position.fence(last.commit_ts)
        elif following != last:
            finished = last
        else:
            finished = Position(self._previous_commit_ts, 0)
        resolved = advance_to(
            last=finished,
            current_commit_ts=last.commit_ts,
            previous_commit_ts=self._previous_commit_ts,
            batch_id=next(self._batch_ids),
            split_txn=self._split_txn,
        )
        if resolved is not None:
            self._task.table.advance(resolved)
        if following != last:
            self._next_lower = finished.next()

    def _append(self, batch: pa.RecordBatch, first: Position) -> bool:
        """Stage a batch if there is memory for it; False gives the task up."""
        if not batch.num_rows:  # readers get none of these rows
            return True
        size = batch.nbytes
        if size > self._spare_bytes:
            mode = acquire_mode(txn_finished=first != self._last, split_txn=self._split_txn)
            if not self._acquire(mode, max(size, self._request_bytes)):
                return False
        self._spare_bytes -= size
        self._task.table.append(batch, size)
        metrics.BATCH_ROWS.observe(batch.num_rows)
        return True

    def _acquire(self, mode: Acquire, size: int) -> bool:
        """Exchange the memory that is too little for `size`: who waits for memory holds none."""
        # Else all workers could wait for what the others hold (`sink.quota`).
        spare, self._spare_bytes = self._spare_bytes, 0
        self._quota.refund(spare)
        metrics.ACQUIRED.labels(mode.value).inc()
        if mode is Acquire.TRY and not self._quota.try_acquire(size):
            return False
        if mode is Acquire.FORCE:
            self._quota.force_acquire(size)
        elif mode is Acquire.BLOCK:
            self._quota.block_acquire(size)
        self._spare_bytes = size
        return True

    def _note_last(self, raw: pa.RecordBatch) -> None:
        last = _position(raw, raw.num_rows - 1)
        timestamps = commit_ts(raw)
        same = int(np.searchsorted(timestamps, timestamps[-1], "left"))
        if same:
            self._previous_commit_ts = int(timestamps[same - 1])
        elif self._last is not None and self._last.commit_ts < last.commit_ts:
            self._previous_commit_ts = self._last.commit_ts
        self._last = last


def _position(raw: pa.RecordBatch, row: int) -> Position:
    return Position(raw.column(0)[row].as_py(), raw.column(1)[row].as_py())
