"""Dispatcher and workers of the sink manager: threads that keep the slowest tables staged while there is memory.

One thread takes the slowest table with something new off the heap, acquires the memory a task begins with, and passes
the task through a bounded channel (the seed's sinkTaskChan) to a worker; the worker gives the table back to the heap.
"""

import itertools
import queue
import threading
from collections.abc import Callable
from typing import Final

import structlog

from sink.errors import QuotaClosedError, RangeCleanedError, TableNotFoundError
from sink.progress import Progress, ProgressHeap
from sink.quota import MemQuota
from sink.table_sink import TableSink
from sink.worker import REQUEST_BYTES, SinkTask, TaskResult, TaskRun
from sorter import Sorter
from storage.model.event import Position
from storage.model.span import Span

_STOP: Final = None
_log = structlog.get_logger(__name__)

Upper = Callable[[TableSink], int]


class Dispatcher:
    """Stages tables in threads of its own; every method may be called from any thread."""

    def __init__(self, sorter: Sorter, quota: MemQuota, *, workers: int, split_txn: bool, upper: Upper) -> None:
        """`upper` tells how far a table may go now; it must not wait."""
        self._sorter = sorter
        self._quota = quota
        self._split_txn = split_txn
        self._upper = upper
        self._request_bytes = min(REQUEST_BYTES, quota.total_bytes)
        self._wanted = threading.Condition()
        self._heap = ProgressHeap()
        self._tables: dict[Span, TableSink] = {}
        self._channel: queue.Queue[SinkTask | None] = queue.Queue(maxsize=workers)
        self._batch_ids = itertools.count(1)
        self._threads = [threading.Thread(target=self._dispatch, name="sink-dispatcher", daemon=True)]
        self._threads += [
            threading.Thread(target=self._work, name=f"sink-worker-{number}", daemon=True) for number in range(workers)
        ]
        self._started = False
        self._stopping = False
        self._short_of_memory = False

    def start(self) -> None:
        """Start the threads."""
        self._started = True
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let running tasks end, then end the threads; close the quota first, so that none waits for memory."""
        with self._wanted:
            self._stopping = True
            self._wanted.notify_all()
        if self._started:
            for thread in self._threads:
                thread.join()

    def add_table(self, table: TableSink) -> None:
        """Begin to stage a table."""
        with self._wanted:
            self._tables[table.span] = table
            self._heap.admit(Progress(Position(table.start_ts + 1, 0), table.span, table.version))
            self._wanted.notify()

    def remove_table(self, span: Span) -> None:
        """No more tasks for the table; one that runs comes to nothing."""
        with self._wanted:
            self._tables.pop(span, None)
            self._heap.remove(span)

    def wake(self, span: Span | None = None) -> None:
        """The table (None: all) may go further."""
        with self._wanted:
            if span is None:
                self._heap.wake_all()
                self._wanted.notify()
            elif self._heap.wake(span):
                self._wanted.notify()

    def memory_freed(self) -> None:
        """Somebody gave memory back."""
        with self._wanted:
            self._short_of_memory = False
            self._wanted.notify()

    def _dispatch(self) -> None:
        while (task := self._next_task()) is not None:
            self._channel.put(task)
        for _ in self._threads[1:]:
            self._channel.put(_STOP)

    def _next_task(self) -> SinkTask | None:
        """Wait for a table with something new and the memory to begin with; None when stopping."""
        with self._wanted:
            while not self._stopping:
                task = None if self._short_of_memory else self._take_slowest()
                if task is not None:
                    return task
                self._wanted.wait()
            return None

    def _take_slowest(self) -> SinkTask | None:
        while (progress := self._heap.pop()) is not None:
            table = self._tables[progress.span]
            lower = max(progress.next_lower, Position(table.checkpoint_ts + 1, 0))
            upper = Position.fence(self._upper(table))
            if lower > upper:
                self._heap.park(Progress(lower, progress.span, progress.version))
            elif self._quota.try_acquire(self._request_bytes):
                return SinkTask(table, lower, upper)
            else:
                self._heap.push(progress)
                self._short_of_memory = True
                return None
        return None

    def _work(self) -> None:
        while (task := self._channel.get()) is not None:
            result = self._run(task)
            with self._wanted:
                # A task that ended for any other reason has given memory back.
                self._short_of_memory = result is not None and result.gave_up
                if result is not None:
                    self._heap.push(Progress(result.next_lower, task.table.span, task.table.version))
                self._wanted.notify()

    def _run(self, task: SinkTask) -> TaskResult | None:
        """Run a task; None: the table is staged no more, its readers go to the sorter and see what is wrong."""
        run = TaskRun(task, self._quota, self._batch_ids, split_txn=self._split_txn, request_bytes=self._request_bytes)
        table = task.table
        try:
            return run.run(self._sorter)
        except RangeCleanedError:  # acknowledged while it waited: begin again at the checkpoint
            table.restart()
            return TaskResult(Position(table.checkpoint_ts + 1, 0), gave_up=False)
        except (QuotaClosedError, TableNotFoundError):
            table.restart()
        except Exception as err:  # noqa: BLE001 - whatever it is, the table's reader meets it and reports it
            _log.error("staging a table failed, reads go to the sorter", table_id=table.span.table_id, error=repr(err))
            table.restart()
        return None
