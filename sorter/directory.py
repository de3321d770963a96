"""The sorter's directory: one process has it, and finds it empty. What is in it is a cache of the upstream."""

import fcntl
import os
import shutil
import weakref
from pathlib import Path
from typing import Final

from storage.leveldb import DirectoryLockedError, DirectoryUnusableError

_LOCK: Final = "LOCK"


class SorterDirectory:
    """A locked directory; the lock ends with the process, however it ends."""

    def __init__(self, path: Path) -> None:
        """Lock `path`, and only then remove everything in it: a full disk has room again after that.

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
            raise DirectoryLockedError(f"{path} is in use by another sorter; stop it or choose another") from err
        except OSError as err:
            raise DirectoryUnusableError(f"cannot use {path}: {err}; check that it exists and is writable") from err

    def close(self) -> None:
        """Let others have it."""
        self._release()
