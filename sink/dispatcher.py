"""Dispatcher and workers of the sink manager: threads that keep the slowest tables staged while
there is memory.

One thread takes the slowest table with something new off the heap, acquires the memory a task
begins with, and passes the task through a channel (TiCDC's sinkTaskChan) to an idle worker; the
worker gives the table back to the heap. No task waits for a worker, so only running tasks hold
memory that is not a table's.

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
from collections.abc import Callable
from functools import lru_cache
from typing import Final

import structlog

from sink import metrics
from sink.errors import QuotaClosedError, RangeCleanedError, TableDamagedError, TableNotFoundError
from sink.progress import Progress, ProgressHeap
from sink.quota import MemQuota
from sink.table_sink import TableSink
from sink.worker import REQUEST_BYTES, SinkTask, TaskResult, TaskRun
from sorter import Sorter
from sorter.errors import SorterClosedError
from storage.model.event import Position
from storage.model.span import Span
from storage.model.ts import compose

_STOP: Final = None
_TASKS_IN_QUOTA: Final = 8  # a small quota must do for more than one task, too
# TiCDC's maxTaskTimeRange: a table far behind leaves others their turn
_TASK_RANGE: Final = compose(30 * 60 * 1000)
_log = structlog.get_logger(__name__)

Upper = Callable[[TableSink], int]


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
        self._request_bytes = min(REQUEST_BYTES, max(quota.total_bytes // _TASKS_IN_QUOTA, 1))
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
        """No more tasks for the table; one that runs comes to nothing."""
        with self._wanted:
            self._tables.pop(span, None)
            self._heap.remove(span)
            self._fresh.pop(span, None)
            self._left_out.pop(span, None)
            self._forget_failure(span)

    def wake(self, span: Span) -> None:
        """The table may go further; a table without rows does not need to."""
        # Without the lock: of 100,000 tables most have nothing when they are resolved.
        if not self._has_rows(span):
            return
        with self._wanted:
            if self._stage_after_s:
                self._wait_for_reader(span)
            elif self._heap.wake(span):
                self._wanted.notify()

    def retry(self, table: TableSink) -> None:
        """The table's checkpoint moved: stage it again, if that had failed."""
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
        """Somebody gave memory back."""
        with self._wanted:
            self._short_of_memory = False
            # A task that gave up meanwhile must not set the flag again: see `_work_on`.
            self._times_freed += 1
            self._wanted.notify()

    def _dispatch(self) -> None:
        while (task := self._next_task()) is not None:
            self._channel.put(task)
        # Behind the tasks that were passed on: each of them runs to its end.
        for _ in self._threads[1:]:
            self._channel.put(_STOP)

    def _next_task(self) -> SinkTask | None:
        """Wait for an idle worker, a table with something new and the memory to begin with;
        None when stopping.
        """
        with self._wanted:
            while not self._stopping:
                # Only for an idle worker: a task that waited would hold memory, and the slowest
                # table of then would not be the slowest when it runs.
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
            # Acknowledged meanwhile, from what readers had of the sorter.
            lower = max(progress.next_lower, Position(table.checkpoint_ts + 1, 0))
            upper_ts = min(
                self._upper(table),
                lower.commit_ts + _TASK_RANGE,
                table.next_end(lower.commit_ts - 1),
            )
            upper = Position.fence(upper_ts)
            if lower > upper or not self._has_rows(progress.span):
                self._heap.park(Progress(lower, progress.span, progress.version))
            elif self._quota.try_acquire(self._request_bytes):
                return SinkTask(table, lower, upper)
            else:
                # It keeps its turn: were a faster table taken instead, the slowest could starve.
                self._heap.push(progress)
                self._short_of_memory = True
                return None
        return None

    def _has_rows(self, span: Span) -> bool:
        try:
            return not self._sorter.is_empty(span)
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
        """Run a task; None: the table is staged no more,
        its readers go to the sorter and see what is wrong.
        """
        run = TaskRun(
            task,
            self._quota,
            self._batch_ids,
            split_txn=self._split_txn,
            request_bytes=self._request_bytes,
        )
        table, ended = task.table, "stopped"
        try:
            result = run.run(self._sorter)
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
        """Stage the table no more, until `retry`; returns whether this is the first failure since
        it went well.
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
    """Where tables that were added there begin: one object for all."""
    return Position(start_ts + 1, 0)
