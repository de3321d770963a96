"""Files in memory, which a crash takes back to what was durable."""

import errno
import os
from pathlib import Path


class MemFile:
    """A file in memory that remembers which of its bytes were synced;
    all handles of a name share it.
    """

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
        """What the disk holds after a crash: the synced bytes and, by chance,
        the next `torn_bytes` after them.
        """
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
        self._durable_names = kept | {
            name: file for name, file in self._names.items() if name.parent == path
        }

    def available_bytes(self, path: Path) -> int:
        """See `FS.available_bytes`; whatever the test set, for every directory that exists."""
        assert path in self._directories, path
        return self.available

    def crash_clone(self, torn_bytes: int = 0) -> "MemFS":
        """The disk as a crash at this moment leaves it;
        `torn_bytes` of each file's unsynced tail happen to survive.
        """
        clone = MemFS(self.available)
        clone._directories = set(self._directories)
        clone._names = {
            path: file.after_crash(torn_bytes) for path, file in self._durable_names.items()
        }
        clone._durable_names = dict(clone._names)
        return clone
