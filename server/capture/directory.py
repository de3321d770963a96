"""A capture's data directory: its identity, and the lock that proves no other process uses it.

LOCK                       locked by flock while the capture lives
capture-id                 the capture's id, kept over restarts
sorter/CHANGEFEED/         sorted rows, a cache
sorter/worker-N/…          the same of worker process N
run/N.control, N.flight    its Unix sockets, for the capture's user only
"""

import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from storage.model.errors import UnavailableError
from storage.whole_file import replace_file

_SOCKET_PATH_BYTES_MAX: Final = 107  # Linux


class DataDirError(UnavailableError):
    """The data directory cannot be used."""

    code = "ErrDataDirUnusable"


@contextmanager
def lock(directory: Path) -> Iterator[str]:
    """Own `directory` for the block; yields the capture id kept in it, a new one the first time.

    Raises:
        DataDirError: it cannot be written, another process owns it, or what is kept in it is no id.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(directory / "LOCK", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as err:
        raise DataDirError(
            f"cannot use {directory}: {err.strerror}; choose another --data-dir"
        ) from err
    try:
        # The kernel drops the lock when the process dies, whatever killed it: no stale lock stays.
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as err:
        os.close(handle)
        raise DataDirError(
            f"another capture runs in {directory}; stop it or choose another --data-dir"
        ) from err
    try:
        yield _identity(directory / "capture-id")
    finally:
        os.close(handle)


def _identity(path: Path) -> str:
    try:
        # Empty: a capture of an earlier version crashed while it wrote its first id.
        if path.exists() and (kept := path.read_bytes()):
            return str(uuid.UUID(kept.decode("ascii").strip()))
        identity = str(uuid.uuid4())
        replace_file(path, f"{identity}\n".encode())
    except ValueError as err:
        raise DataDirError(
            f"{path} holds no capture id: {err}; remove it, and the capture takes a new one"
        ) from err
    except OSError as err:
        raise DataDirError(
            f"cannot keep the capture's id in {path}: {err.strerror}; make it readable and the "
            "directory writable, or choose another --data-dir"
        ) from err
    return identity


def control_socket(directory: Path, number: int) -> str:
    """The socket on which a worker listens for calls of its capture."""
    return f"unix:{directory}/run/{number}.control"


def flight_socket(directory: Path, number: int) -> str:
    """The socket on which a worker serves rows to its capture."""
    return f"unix:{directory}/run/{number}.flight"


def sorter_directory(directory: Path, number: int) -> Path:
    """The directory of a worker's sorted rows, with a subdirectory for each changefeed."""
    return directory / "sorter" / f"worker-{number}"


def make_sockets_directory(directory: Path, workers: int) -> None:
    """Make the place of the sockets, for this user only.

    Raises:
        DataDirError: the path is too long for Unix sockets.
    """
    check_sockets_directory(directory, workers)
    (directory / "run").mkdir(mode=0o700, exist_ok=True)
    (directory / "run").chmod(0o700)


def check_sockets_directory(directory: Path, workers: int) -> None:
    """See that sockets can have names there.

    Raises:
        DataDirError: the path is too long for Unix sockets.
    """
    # A path that is too long fails at bind(), in the child, long after the flag was read: refuse it
    # here with its name.
    longest = control_socket(directory, workers).removeprefix("unix:")
    if len(os.fsencode(longest)) > _SOCKET_PATH_BYTES_MAX:
        raise DataDirError(
            f"the path {directory} is too long for the Unix sockets of workers; choose a shorter "
            "--data-dir"
        )
