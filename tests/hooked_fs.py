"""Files whose calls are looked at first, and can be made to fail."""

import os
from collections.abc import Callable
from pathlib import Path

from storage.vfs import FS, File

Hook = Callable[[str, Path], int | None]
"""Called before each call with its name and path: raise OSError to fail it,
return n to let `append` take n bytes.
"""


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
    """A file system whose calls pass a hook first: the place to inject ENOSPC, EIO,
    short writes and crashes.
    """

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
