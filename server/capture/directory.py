"""A capture's data directory: its identity, and the lock that proves no other process lives in
it.
"""

import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from storage.model.errors import UnavailableError


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
    if path.exists():
        try:
            return str(uuid.UUID(path.read_text(encoding="ascii").strip()))
        except ValueError as err:
            raise DataDirError(
                f"{path} holds no capture id: {err}; remove it, and the capture takes a new one"
            ) from err
    identity = str(uuid.uuid4())
    path.write_text(identity + "\n", encoding="ascii")
    return identity
