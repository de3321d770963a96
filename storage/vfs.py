"""The seam between storage and the disk: the few calls that storage needs, and the operating
system's files behind them.

Tests put files in memory in their place, which a crash takes back to what was durable
(`tests/memory_fs.py`), and calls that fail when told to (`tests/hooked_fs.py`).

Durability, of every kind: what `append` wrote is there after a crash once `sync` returned; a
created or removed name is so only once `sync_directory` returned; `make_directories` is durable
when it returns.
"""

import os
from pathlib import Path
from typing import Protocol


class File(Protocol):
    """An append-only file, readable anywhere."""

    def append(self, data: bytes | memoryview) -> int:
        """Write at the end; returns how many bytes were taken, which may be fewer,
        as with write(2).
        """
        ...

    def read(self, offset: int, size: int) -> bytes:
        """Return up to `size` bytes; fewer only at the end of the file."""
        ...

    def size(self) -> int:
        """The length in bytes."""
        ...

    def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes; durable with the next `sync`."""
        ...

    def sync(self) -> None:
        """Make the content and length durable."""
        ...

    def close(self) -> None:
        """Release the handle."""
        ...


class FS(Protocol):
    """Files by path. Every call raises OSError as the operating system does."""

    def create(self, path: Path) -> File:
        """Make a new, empty file; FileExistsError when the name is taken."""
        ...

    def open(self, path: Path) -> File:
        """Open an existing file."""
        ...

    def names(self, directory: Path) -> list[str]:
        """The names in a directory, sorted."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a name."""
        ...

    def make_directories(self, path: Path) -> None:
        """Make a directory and its missing parents, durably; it may exist."""
        ...

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""
        ...

    def available_bytes(self, path: Path) -> int:
        """Space an unprivileged writer still has (statfs: bavail times frsize)."""
        ...


class RealFile:
    """A file descriptor opened for appending."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def append(self, data: bytes | memoryview) -> int:
        """See `File.append`."""
        return os.write(self._descriptor, data)

    def read(self, offset: int, size: int) -> bytes:
        """See `File.read`."""
        data = os.pread(self._descriptor, size, offset)
        while data and len(data) < size:
            more = os.pread(self._descriptor, size - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def size(self) -> int:
        """See `File.size`."""
        return os.fstat(self._descriptor).st_size

    def truncate(self, size: int) -> None:
        """See `File.truncate`."""
        os.ftruncate(self._descriptor, size)

    def sync(self) -> None:
        """See `File.sync`."""
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        """See `File.close`."""
        os.close(self._descriptor)


class RealFS:
    """The operating system's files."""

    def create(self, path: Path) -> RealFile:
        """See `FS.create`."""
        return RealFile(
            os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        )

    def open(self, path: Path) -> RealFile:
        """See `FS.open`."""
        return RealFile(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC))

    def names(self, directory: Path) -> list[str]:
        """See `FS.names`."""
        return sorted(entry.name for entry in directory.iterdir())

    def remove(self, path: Path) -> None:
        """See `FS.remove`."""
        path.unlink()

    def make_directories(self, path: Path) -> None:
        """See `FS.make_directories`."""
        missing = [parent for parent in (path, *path.parents) if not parent.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for made in missing:
            self.sync_directory(made.parent)

    def sync_directory(self, path: Path) -> None:
        """See `FS.sync_directory`."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def available_bytes(self, path: Path) -> int:
        """See `FS.available_bytes`."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize
