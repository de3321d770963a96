"""Checkpoints of Delta tables' logs, written by Delta beside the cuts: readers begin at the newest.

One costs some CPU seconds whatever the table holds, as Delta runs Spark jobs for it. So they are
rationed where many tables are busy: behind one that took t seconds there is none for `REST` times
t. The table with the most commits since its last one comes next; until then its readers read more
commits, of some KB each.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from pyspark_tidemark.lake.session import SparkThreads

CHECKPOINT_EVERY = 50
"""Commits after which a table's log is worth a checkpoint."""
REST = 9.0

_logger = logging.getLogger(__name__)


class Checkpoints:
    """Counts commits, and has `write` make one table's checkpoint at a time, in a thread."""

    def __init__(self, spark: SparkSession, write: Callable[[str], None]) -> None:
        self._write = write
        self._commits: dict[str, int] = {}
        self._due: set[str] = set()
        self._is_busy = False
        self._not_before_s = 0.0
        self._lock = threading.Lock()
        self._beside = SparkThreads(spark, 1, "delta-checkpoint")
        self._newest: Future[None] | None = None

    def committed(self, name: str, version: int) -> None:
        """A version was put into a table's log."""
        with self._lock:
            # When its last checkpoint was is not known at first: the numbers go on as they would.
            before = self._commits.get(name, (version - 1) % CHECKPOINT_EVERY)
            self._count(name, before + 1 if version else 0)
            if not self._due or self._is_busy or time.monotonic() < self._not_before_s:
                return
            self._is_busy = True
            foremost = max(self._due, key=lambda table: self._commits[table])
            self._count(foremost, 0)
            self._newest = self._beside.submit(self._run, foremost)

    def forget(self, name: str) -> None:
        """The table is gone, or another one."""
        with self._lock:
            self._commits.pop(name, None)
            self._due.discard(name)

    def _count(self, name: str, commits: int) -> None:
        self._commits[name] = commits
        if commits >= CHECKPOINT_EVERY:
            self._due.add(name)
        else:
            self._due.discard(name)

    def settle(self) -> None:
        """Wait for the one that is being written."""
        # Nothing is asked of Spark for it: where Spark is gone, that is what the job ended by.
        if self._newest is not None:
            wait([self._newest])

    def _run(self, name: str) -> None:
        began = time.monotonic()
        try:
            self._write(name)
        except (Py4JError, OSError) as err:
            # No error for the cuts: without it readers read more of the log.
            _logger.warning("no checkpoint of %s for now: %s", name, err)
        finally:
            ended = time.monotonic()
            with self._lock:
                self._is_busy = False
                self._not_before_s = ended + REST * (ended - began)
