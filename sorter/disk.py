"""Whether the disk takes rows: who has to write waits here while it does not, and goes on by itself when it does."""

import threading
from collections.abc import Callable

import structlog

from sorter import metrics
from sorter.errors import SorterDiskError

_log = structlog.get_logger(__name__)


class Disk:
    """The state of one sorter's disk; safe to call from several threads."""

    def __init__(self, retry_s: float, clock: Callable[[], float]) -> None:
        """A refused write is tried again after `retry_s`; `clock` gives monotonic seconds."""
        self.error = ""
        self.waiting = 0
        self._retry_s = retry_s
        self._clock = clock
        self._retry_at_s = float("-inf")
        self._changed = threading.Condition()
        self._closed = False

    def may_try(self) -> bool:
        """Whether a write that can wait should be tried."""
        return not self.error or self._clock() >= self._retry_at_s

    def refused(self, err: SorterDiskError) -> None:
        """A write failed."""
        with self._changed:
            if not self.error:
                _log.warning("sorter's disk takes no rows, feeds pause when memory is short", error=err.message)
            self.error = err.message
            self._retry_at_s = self._clock() + self._retry_s

    def took(self) -> None:
        """A write succeeded."""
        if self.error:
            with self._changed:
                self.error = ""
                self._changed.notify_all()
            _log.info("sorter's disk takes rows again")

    def wait(self) -> bool:
        """Wait until a write should be tried again; False: the sorter was closed."""
        with self._changed:
            self.waiting += 1
            metrics.WAITING.inc()
            try:
                if not self._closed:
                    self._changed.wait(self._retry_s)
            finally:
                self.waiting -= 1
                metrics.WAITING.dec()
            return not self._closed

    def close(self) -> None:
        """Nobody waits any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
