"""Staging in the background: threads that keep the slowest tables mounted in memory while there is
room.

One thread, the dispatcher, takes the slowest table with something new off the heap, acquires the
memory a task begins with, and passes the task through a channel (TiCDC's sinkTaskChan) to an idle
worker; the worker gives the table back to the heap. No task waits for a worker, so only running
tasks hold memory that is not a table's.

A task (`TaskRun`, TiCDC's handleTask, but a batch at a time) fetches a table's next rows from the
sorter, mounts them and stages them, as far as the memory goes. Memory is acquired before rows are
appended, so only an unfinished transaction that must not be split ever exceeds the quota. When
memory is short between two transactions the task is given up, and the table's next task begins at
the next transaction; what it read by then is still compared with what the sorter had been given.

A table whose staging fails leaves the heap, so that it holds nobody back; its readers go to the
sorter and meet what is wrong. When they get past it, which an acknowledgement shows, the table
comes back.

A reader that keeps up is served best from the sorter, all rows since its last cut at once. So a
table with something new is staged only after `stage_after_s` without an acknowledgement; one that
has more to stage than a task takes goes on at once.
"""

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import pyarrow as pa
import structlog

from sink import metrics
from sink.errors import QuotaClosedError
from sink.mounts import SequenceMount
from sink.progress import (
    Acquire,
    Progress,
    ProgressHeap,
    ResolvedTs,
    acquire_mode,
    advance_to,
)
from sink.quota import MemQuota
from sink.range_times import RangeTime, RangeTimes
from sink.table_sink import TableSink
from sorter import Sorter
from sorter.errors import (
    RangeCleanedError,
    SorterClosedError,
    TableDamagedError,
    TableNotFoundError,
)
from sorter.order import commit_ts
from storage.model.event import Position
from storage.model.span import Span
from storage.model.ts import compose

_REQUEST_BYTES: Final = 1 << 20
_STOP: Final = None
_TASKS_IN_QUOTA: Final = 8  # a small quota must do for more than one task, too
# TiCDC's maxTaskTimeRange: a table far behind leaves others their turn
_TASK_RANGE: Final = compose(30 * 60 * 1000)
_log = structlog.get_logger(__name__)

Upper = Callable[[TableSink], int]


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


class Dispatcher:
    """Stages tables in threads of its own; every method may be called from any thread."""

    def __init__(
        self,
        sorter: Sorter,
        quota: MemQuota,
        *,
        workers: int,
        split_txn: bool,
        upper: Upper,
        stage_after_s: float = 0.0,
    ) -> None:
        """`upper` tells how far a table may go now; it must not wait."""
        self._sorter = sorter
        self._quota = quota
        self._split_txn = split_txn
        self._upper = upper
        self._stage_after_s = stage_after_s
        self.times: RangeTimes | None = None
        """For traces."""
        self._request_bytes = min(_REQUEST_BYTES, max(quota.total_bytes // _TASKS_IN_QUOTA, 1))
        self._wanted = threading.Condition()
        self._heap = ProgressHeap()
        self._tables: dict[Span, TableSink] = {}
        self._channel: queue.Queue[SinkTask | None] = queue.Queue(maxsize=workers)
        self._batch_ids = itertools.count(1)
        self._threads = [
            threading.Thread(target=self._dispatch, name="sink-dispatcher", daemon=True)
        ]
        self._threads += [
            threading.Thread(target=self._work, name=f"sink-worker-{number}", daemon=True)
            for number in range(workers)
        ]
        self._failures: dict[Span, str] = {}
        # parked tables with something new: until when, and their checkpoints when it came; the
        # first to come is the first to go, as all wait equally long
        self._fresh: dict[Span, tuple[float, int]] = {}
        # tables without an entry in the heap, after a failure
        self._left_out: dict[Span, TableSink] = {}
        self._idle_workers = workers
        self._started = False
        self._stopping = False
        self._short_of_memory = False
        self._times_freed = 0

    def start(self) -> None:
        """Start the threads."""
        self._started = True
        for thread in self._threads:
            thread.start()

    def stop(self) -> bool:
        """Let running tasks end, then end the threads; returns whether there were any.

        Close the quota first, so that none waits for memory.
        """
        with self._wanted:
            running = self._started and not self._stopping
            self._stopping = True
            self._wanted.notify_all()
        for thread in self._threads if self._started else ():
            thread.join()
        return running

    def add_table(self, table: TableSink) -> None:
        """Begin to stage a table."""
        with self._wanted:
            self._tables[table.span] = table
            self._heap.admit(Progress(_begin(table.start_ts), table.span, table.version))
            self._wanted.notify()

    def remove_table(self, span: Span) -> None:
        """Start no more tasks for the table; what a running one stages is dropped."""
        with self._wanted:
            self._tables.pop(span, None)
            self._heap.remove(span)
            self._fresh.pop(span, None)
            self._left_out.pop(span, None)
            self._forget_failure(span)

    def wake(self, span: Span) -> None:
        """Note that the table may have something new to stage. Nothing is done for a table without
        rows.
        """
        # Without the lock: of 100,000 tables most have nothing when they are resolved.
        table = self._tables.get(span)
        if table is None or not self._has_rows(table):
            return
        with self._wanted:
            if self._stage_after_s:
                self._wait_for_reader(span)
            elif self._heap.wake(span):
                self._wanted.notify()

    def retry(self, table: TableSink) -> None:
        """Stage the table again if that had failed, as its checkpoint has moved."""
        if table.span not in self._left_out:
            return
        with self._wanted:
            if self._left_out.pop(table.span, None) is table:
                self._heap.push(
                    Progress(Position(table.checkpoint_ts + 1, 0), table.span, table.version)
                )
                self._wanted.notify()

    def failures(self) -> dict[Span, str]:
        """The tables whose staging failed last, and why."""
        with self._wanted:
            return dict(self._failures)

    def memory_freed(self) -> None:
        """Note that memory was given back, so that tables which waited for it may be staged."""
        with self._wanted:
            self._short_of_memory = False
            # A task that gave up meanwhile must not set the flag again: see `_work_on`.
            self._times_freed += 1
            self._wanted.notify()

    def _dispatch(self) -> None:
        while (task := self._next_task()) is not None:
            self._channel.put(task)
        # After the tasks in the channel, so that each of them runs to its end.
        for _ in self._threads[1:]:
            self._channel.put(_STOP)

    def _next_task(self) -> SinkTask | None:
        """Wait for an idle worker, a table with something new and the memory to begin with;
        None when stopping.
        """
        with self._wanted:
            while not self._stopping:
                # Only for an idle worker: a task that waited would hold memory, and by the time it
                # runs another table might be the slowest.
                look_again_s, task = self._wake_unread(), None
                if self._idle_workers and not self._short_of_memory:
                    task = self._take_slowest()
                if task is not None:
                    self._idle_workers -= 1
                    return task
                self._wanted.wait(look_again_s)
            return None

    def _wait_for_reader(self, span: Span) -> None:
        if span in self._fresh or not self._heap.is_parked(span):
            return
        until = time.monotonic() + self._stage_after_s
        self._fresh[span] = until, self._tables[span].checkpoint_ts
        if len(self._fresh) == 1:
            self._wanted.notify()

    def _wake_unread(self) -> float | None:
        """Wake the tables that nobody has read meanwhile; returns in how many seconds to look
        again.
        """
        now = time.monotonic()
        while self._fresh:
            span, (until, checkpoint_ts) = next(iter(self._fresh.items()))
            if until > now:
                return until - now
            del self._fresh[span]
            if self._tables[span].checkpoint_ts == checkpoint_ts:
                self._heap.wake(span)
        return None

    def _take_slowest(self) -> SinkTask | None:
        while (progress := self._heap.pop()) is not None:
            table = self._tables[progress.span]
            # Readers may have acknowledged rows that they got from the sorter.
            lower = max(progress.next_lower, Position(table.checkpoint_ts + 1, 0))
            upper_ts = min(
                self._upper(table),
                lower.commit_ts + _TASK_RANGE,
                table.next_end(lower.commit_ts - 1),
            )
            upper = Position.fence(upper_ts)
            if lower > upper or not self._has_rows(table):
                self._heap.park(Progress(lower, progress.span, progress.version))
            elif self._quota.try_acquire(self._request_bytes):
                return SinkTask(table, lower, upper)
            else:
                # It keeps its turn: were a faster table taken instead, the slowest could starve.
                self._heap.push(progress)
                self._short_of_memory = True
                return None
        return None

    def _has_rows(self, table: TableSink) -> bool:
        # What is acknowledged may be kept for long: it is not staged once more.
        try:
            return self._sorter.has_rows_above(table.span, table.checkpoint_ts)
        except (TableNotFoundError, SorterClosedError):  # it is coming or going
            return False

    def _work(self) -> None:
        while (task := self._channel.get()) is not None:
            self._work_on(task)

    def _work_on(self, task: SinkTask) -> None:
        times_freed = self._times_freed
        result = self._run(task)
        with self._wanted:
            self._idle_workers += 1
            # A task that ended for any other reason has given memory back.
            self._short_of_memory = (
                result is not None and result.gave_up and times_freed == self._times_freed
            )
            if result is not None:
                self._heap.push(Progress(result.next_lower, task.table.span, task.table.version))
            self._wanted.notify()

    def _run(self, task: SinkTask) -> TaskResult | None:
        """Run a task. None: the table is not staged any more; its readers go to the sorter, and get
        the error there.
        """
        run = TaskRun(
            task,
            self._quota,
            self._batch_ids,
            split_txn=self._split_txn,
            request_bytes=self._request_bytes,
        )
        table, ended = task.table, "stopped"
        begun_ns = time.time_ns()
        try:
            result = run.run(self._sorter)
            self._note_staged(task, run, result, begun_ns)
            ended = "gave_up" if result.gave_up else "done"
            self._went_well(table)
        except RangeCleanedError:  # acknowledged while it waited: begin again at the checkpoint
            ended = "cleaned"
            table.restart()
            result = TaskResult(Position(table.checkpoint_ts + 1, 0), gave_up=False)
        except (QuotaClosedError, TableNotFoundError, SorterClosedError):
            self._leave_out(table, None)
            return None
        except Exception as err:  # noqa: BLE001 - whatever it is, the table's reader meets it and reports it
            ended = "failed"
            self._failed(table, err)
            return None
        finally:
            metrics.TASKS.labels(ended).inc()
        return result

    def _note_staged(
        self, task: SinkTask, run: "TaskRun", result: TaskResult, begun_ns: int
    ) -> None:
        if self.times is None or not run.staged_rows:
            return
        staged = RangeTime(
            task.lower.commit_ts,
            result.next_lower.commit_ts - 1,
            begun_ns,
            time.time_ns(),
            run.staged_rows,
        )
        self.times.note_staged(task.table.span, staged)

    def _failed(self, table: TableSink, err: Exception) -> None:
        # The rows cannot be trusted: no reader may get past them.
        if isinstance(err, TableDamagedError):
            table.lose(err)
        if self._leave_out(table, repr(err)):
            metrics.FAILED_TABLES.inc()
            _log.error(
                "staging a table failed, reads go to the sorter",
                table_id=table.span.table_id,
                error=repr(err),
            )

    def _leave_out(self, table: TableSink, error: str | None) -> bool:
        """Do not stage the table until `retry`; returns whether this is its first failure since it
        was staged well.
        """
        table.restart()
        with self._wanted:
            # Removed meanwhile, or added anew.
            if self._tables.get(table.span) is not table:
                return False
            self._left_out[table.span] = table
            first = error is not None and table.span not in self._failures
            if error is not None:
                self._failures[table.span] = error
            return first

    def _went_well(self, table: TableSink) -> None:
        if table.span in self._failures:
            with self._wanted:
                self._forget_failure(table.span)
            _log.info("a table is staged again", table_id=table.span.table_id)

    def _forget_failure(self, span: Span) -> None:
        if self._failures.pop(span, None) is not None:
            metrics.FAILED_TABLES.dec()


@lru_cache(maxsize=1)
def _begin(start_ts: int) -> Position:
    """The position from which tables that were added at `start_ts` are staged. Tables that are
    added together share the object, as there may be 100,000 of them.
    """
    return Position(start_ts + 1, 0)


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
        request_bytes: int,
    ) -> None:
        self._task = task
        self._quota = quota
        self._batch_ids = batch_ids
        self._split_txn = split_txn
        self._request_bytes = self._spare_bytes = request_bytes
        self._next_lower = task.lower
        self.staged_rows = 0
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
        """Let the sorter compare the rows that it gave with those it had got. It has done so
        already at the end of the fetch, unless the task began within a commit_ts.
        """
        table, upper_ts = self._task.table, self._task.upper.commit_ts
        if self._task.lower.start_ts:
            table.verify(sorter, upper_ts)
        table.verified_ts = max(table.verified_ts, upper_ts)

    def _hand_over(self, last: Position, following: Position) -> None:
        """Announce the transactions that are complete, now that the row after `last` is known."""
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
        self.staged_rows += batch.num_rows
        metrics.BATCH_ROWS.observe(batch.num_rows)
        return True

    def _acquire(self, mode: Acquire, size: int) -> bool:
        """Take `size` bytes in place of those that are left, which are too few; False: `mode`
        allows no waiting, and there is no room.
        """
        # First give back what is left: otherwise all workers could wait for each other's memory
        # (`sink.quota`).
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
