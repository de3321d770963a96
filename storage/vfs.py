"""The seam between storage and the disk: a few calls with exact durability, a real file system, and one that crashes.

Durability, the same for both: what `append` wrote is there after a crash once `sync` returned; a created or removed
name is so only once `sync_directory` returned; `make_directories` is durable when it returns. `MemFS.crash_clone` keeps
exactly that and forgets the rest, `HookedFS` makes chosen calls fail: together they test every path that is rare on a
real disk.
"""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol


class File(Protocol):
    """An append-only file, readable anywhere."""

    def append(self, data: bytes | memoryview) -> int:
        """Write at the end; returns how many bytes were taken, which may be fewer, as with write(2)."""
        ...

    def read(self, offset: int, size: int) -> bytes:
        """Up to `size` bytes; fewer only at the end of the file."""
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
        return RealFile(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))

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


class MemFile:
    """A file in memory that remembers which of its bytes were synced; all handles of a name share it."""

    def __init__(self, content: bytes = b"") -> None:
        self.content = bytearray(content)
        self.synced = content

    def append(self, data: bytes | memoryview) -> int:
        """See `File.append`."""
        self.content += data
        return len(data)

    def read(self, offset: int, size: int) -> bytes:
        """See `File.read`."""
        return bytes(self.content[offset : offset + size])

    def size(self) -> int:
        """See `File.size`."""
        return len(self.content)

    def truncate(self, size: int) -> None:
        """See `File.truncate`."""
        del self.content[size:]

    def sync(self) -> None:
        """See `File.sync`."""
        self.synced = bytes(self.content)

    def close(self) -> None:
        """Nothing to release."""

    def after_crash(self, torn_bytes: int) -> "MemFile":
        """What the disk holds after a crash: the synced bytes and, by chance, the next `torn_bytes` after them."""
        kept = self.synced
        if self.content.startswith(kept):
            kept += bytes(self.content[len(kept) : len(kept) + torn_bytes])
        return MemFile(kept)


class MemFS:
    """A file system in memory that can forget what was not synced."""

    def __init__(self, available: int = 1 << 40) -> None:
        self.available = available
        self._names: dict[Path, MemFile] = {}
        self._durable_names: dict[Path, MemFile] = {}
        self._directories: set[Path] = {Path("/")}

    def create(self, path: Path) -> MemFile:
        """See `FS.create`."""
        if path.parent not in self._directories:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        if path in self._names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        return self._names.setdefault(path, MemFile())

    def open(self, path: Path) -> MemFile:
        """See `FS.open`."""
        if path not in self._names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return self._names[path]

    def names(self, directory: Path) -> list[str]:
        """See `FS.names`."""
        return sorted(path.name for path in self._names if path.parent == directory)

    def remove(self, path: Path) -> None:
        """See `FS.remove`."""
        self.open(path)
        del self._names[path]

    def make_directories(self, path: Path) -> None:
        """See `FS.make_directories`."""
        self._directories |= {path, *path.parents}

    def sync_directory(self, path: Path) -> None:
        """See `FS.sync_directory`."""
        kept = {name: file for name, file in self._durable_names.items() if name.parent != path}
        self._durable_names = kept | {name: file for name, file in self._names.items() if name.parent == path}

    def available_bytes(self, path: Path) -> int:
        """See `FS.available_bytes`; whatever the test set, for every directory that exists."""
        assert path in self._directories, path
        return self.available

    def crash_clone(self, torn_bytes: int = 0) -> "MemFS":
        """The disk as a crash at this moment leaves it; `torn_bytes` of each file's unsynced tail happen to survive."""
        clone = MemFS(self.available)
        clone._directories = set(self._directories)
        clone._names = {path: file.after_crash(torn_bytes) for path, file in self._durable_names.items()}
        clone._durable_names = dict(clone._names)
        return clone


Hook = Callable[[str, Path], int | None]
"""Called before each call with its name and path: raise OSError to fail it, return n to let `append` take n bytes."""


class HookedFile:
    """A file whose calls pass a hook first."""

    def __init__(self, inner: File, path: Path, hook: Hook) -> None:
        self._inner, self._path, self._hook = inner, path, hook

    def append(self, data: bytes | memoryview) -> int:
        """See `File.append`; short when the hook says so."""
        taken = self._hook("append", self._path)
        return self._inner.append(data if taken is None else data[:taken])

    def read(self, offset: int, size: int) -> bytes:
        """See `File.read`."""
        self._hook("read", self._path)
        return self._inner.read(offset, size)

    def size(self) -> int:
        """See `File.size`."""
        return self._inner.size()

    def truncate(self, size: int) -> None:
        """See `File.truncate`."""
        self._hook("truncate", self._path)
        self._inner.truncate(size)

    def sync(self) -> None:
        """See `File.sync`."""
        self._hook("sync", self._path)
        self._inner.sync()

    def close(self) -> None:
        """See `File.close`."""
        self._inner.close()


class HookedFS:
    """A file system whose calls pass a hook first: the place to inject ENOSPC, EIO, short writes and crashes."""

    def __init__(self, inner: FS, hook: Hook) -> None:
        self._inner, self._hook = inner, hook

    def create(self, path: Path) -> HookedFile:
        """See `FS.create`."""
        self._hook("create", path)
        return HookedFile(self._inner.create(path), path, self._hook)

    def open(self, path: Path) -> HookedFile:
        """See `FS.open`."""
        self._hook("open", path)
        return HookedFile(self._inner.open(path), path, self._hook)

    def names(self, directory: Path) -> list[str]:
        """See `FS.names`."""
        return self._inner.names(directory)

    def remove(self, path: Path) -> None:
        """See `FS.remove`."""
        self._hook("remove", path)
        self._inner.remove(path)

    def make_directories(self, path: Path) -> None:
        """See `FS.make_directories`."""
        self._inner.make_directories(path)

    def sync_directory(self, path: Path) -> None:
        """See `FS.sync_directory`."""
        self._hook("sync_directory", path)
        self._inner.sync_directory(path)

    def available_bytes(self, path: Path) -> int:
        """See `FS.available_bytes`."""
        return self._inner.available_bytes(path)


def fail_nth(call: str, nth: int, code: int) -> Hook:
    """A hook that fails the `nth` (from 1) call named `call`, once, with errno `code`."""
    seen = 0

    def hook(name: str, path: Path) -> int | None:
        nonlocal seen
        seen += name == call
        if name == call and seen == nth:
            raise OSError(code, os.strerror(code), str(path))
        return None

    return hook
