"""The right to write a lake on a disk of this machine, or a mounted one:
a lock of its manifest's directory.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake import claims
from pyspark_tidemark.lake.files import LocalFiles


class Lock:
    """The lock, held; see `lake.manifest.Right`."""

    def __init__(self, files: LocalFiles) -> None:
        self._files = files

    @classmethod
    @contextmanager
    def held(cls, directory: Path) -> Iterator["Lock"]:
        """The lock for the block; the directory is made if there is none.

        Raises:
            SourceError: ErrTargetUnusable, ErrTargetBusy.
        """
        try:
            directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as err:
            raise SourceError(
                "ErrTargetUnusable", f"cannot write to {directory}: {err.strerror}"
            ) from None
        try:
            _lock(descriptor, directory)
            if (directory / claims.DIRECTORY).exists():
                raise SourceError(
                    "ErrTargetUnusable",
                    f"{directory.parent} is written through Hadoop, as FORMAT+SCHEME://…; go on "
                    "like that",
                )
            yield cls(LocalFiles(directory))
        finally:
            os.close(descriptor)

    def announce(self, start_ts: int, end_ts: int, *, moved: bool = False) -> int:  # noqa: ARG002 - nobody else begins
        """See `Right`."""
        return end_ts

    def publish(self, end_ts: int, text: str) -> None:
        """See `Right`."""
        self._files.replace(f"{end_ts:020d}.json", text)

    def republish(self, start_ts: int, end_ts: int, text: str) -> None:  # noqa: ARG002 - see `announce`
        """See `Right`."""
        self.publish(end_ts, text)

    def tidy(self) -> None:
        """Nothing is left behind."""


def _lock(descriptor: int, directory: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SourceError(
            "ErrTargetBusy", f"another job writes to {directory.parent}; stop it first"
        ) from None
