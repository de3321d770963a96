"""The sorter's directory: one process uses it, starts with it empty,
and waits while its disk is full.

Everything in it is a cache of the upstream (`SorterDirectory` empties it at start). `DiskStatus`
holds whether the disk takes writes: while it refuses them, those that must write wait, and go on by
themselves when it takes them again.
"""

import fcntl
import os
import shutil
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog
from prometheus_client import Gauge

from sorter.errors import SorterDiskError
from storage.leveldb import DirectoryLockedError, DirectoryUnusableError

_LOCK: Final = "LOCK"
_WAITING: Final = Gauge(
    "tidemark_sorter_disk_waiting", "Batches that wait until the disk takes rows again"
)

_log = structlog.get_logger(__name__)


class SorterDirectory:
    """A locked directory; the lock ends with the process, however it ends."""

    def __init__(self, path: Path) -> None:
        """Lock `path`, and only then remove everything in it:
        a full disk has room again after that.

        Raises:
            DirectoryLockedError: another process uses it; its files are left alone.
            DirectoryUnusableError: it cannot be created, written or emptied.
        """
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._release = weakref.finalize(self, os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for leftover in path.iterdir():
                if leftover.is_dir():
                    shutil.rmtree(leftover)
                elif leftover.name != _LOCK:
                    leftover.unlink()
        except BlockingIOError as err:
            raise DirectoryLockedError(
                f"{path} is in use by another sorter; stop it or choose another"
            ) from err
        except OSError as err:
            raise DirectoryUnusableError(
                f"cannot use {path}: {err}; check that it exists and is writable"
            ) from err

    def close(self) -> None:
        """Release the lock."""
        self._release()


class DiskStatus:
    """Whether one sorter's disk takes rows; safe to call from several threads."""

    def __init__(self, retry_s: float, clock: Callable[[], float]) -> None:
        """A refused write is tried again after `retry_s`; `clock` gives monotonic seconds."""
        self.error = ""
        self.waiting = 0
        self._retry_s = retry_s
        self._clock = clock
        self._retry_at_s = float("-inf")
        self._changed = threading.Condition()
        self._closed = False

    def may_write(self) -> bool:
        """Whether a write that can wait should be tried now."""
        return not self.error or self._clock() >= self._retry_at_s

    def record_failure(self, err: SorterDiskError) -> None:
        """Note that a write failed."""
        with self._changed:
            if not self.error:
                _log.warning(
                    "sorter's disk takes no rows, feeds pause when memory is short",
                    error=err.message,
                )
            self.error = err.message
            self._retry_at_s = self._clock() + self._retry_s

    def record_success(self) -> None:
        """Note that a write succeeded; those that wait try again."""
        if self.error:
            with self._changed:
                self.error = ""
                self._changed.notify_all()
            _log.info("sorter's disk takes rows again")

    def wait_for_retry(self) -> bool:
        """Wait until a write should be tried again, at most the retry interval; False:
        the sorter was closed.
        """
        with self._changed:
            self.waiting += 1
            _WAITING.inc()
            try:
                if not self._closed:
                    self._changed.wait(self._retry_s)
            finally:
                self.waiting -= 1
                _WAITING.dec()
            return not self._closed

    def close(self) -> None:
        """End all waits, and let none begin."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
