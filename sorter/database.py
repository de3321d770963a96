"""The LevelDB of one shard, where its index is. It is made anew when a full disk has put an end to it.

LevelDB refuses all further writes once it could not write its own files, and what it wrote last may be torn. Its reads
go on, so its few entries are copied to a new directory as soon as there is room. Nothing is synced: it is a cache.
"""

import contextlib
import itertools
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from sorter.errors import SorterDiskError
from storage.kv import WriteBatch
from storage.leveldb import DirectoryUnusableError, LevelDB

_WRITE_BUFFER_BYTES: Final = 2 << 20
_COPY_ENTRIES: Final = 4096
_COMPACT_ENTRIES: Final = 4096


class IndexDatabase:
    """Entries of all tables of a shard; safe to call from several threads."""

    def __init__(self, directory: Path) -> None:
        """Begin with an empty database in `directory`, which does not exist yet.

        Raises:
            DirectoryUnusableError: it cannot be created or written.
        """
        self._directory = self._path = directory
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._sick = False
        self._live = self._dead = 0
        self._kv = LevelDB(directory, write_buffer_bytes=_WRITE_BUFFER_BYTES)

    def write(self, batch: WriteBatch) -> None:
        """Apply puts and deletes together.

        Raises:
            SorterDiskError: there is no room; nothing has changed.
        """
        with self._lock:
            if self._sick:
                self._renew()
            try:
                self._kv.write(batch, sync=False)
            except DirectoryUnusableError as err:
                self._sick = True
                raise SorterDiskError(
                    f"cannot write the sorter's index in {self._path}: {err.message}; free some space, "
                    "the rows wait in memory"
                ) from err
            dead = sum(value is None for value in batch.ops.values())
            self._dead, self._live = self._dead + dead, self._live + len(batch) - 2 * dead
            if self._dead >= max(_COMPACT_ENTRIES, self._live):
                self._kv.compact(b"", b"")
                self._dead = 0

    def scan(self, lower: bytes, upper: bytes) -> list[tuple[bytes, bytes]]:
        """Pairs with `lower <= key < upper`.

        Raises:
            CorruptDatabaseError: LevelDB found a damaged file.
        """
        with self._lock:
            return list(self._kv.scan(lower, upper))

    def walk(self) -> Iterator[tuple[bytes, bytes]]:
        """All pairs, some at a time; who writes meanwhile does not wait, and may or may not be seen.

        Raises:
            CorruptDatabaseError: LevelDB found a damaged file.
        """
        some, lower = [(b"", b"")], b""
        while some:
            with self._lock:
                some = list(itertools.islice(self._kv.scan(lower), _COPY_ENTRIES))
            yield from some
            lower = some[-1][0] + b"\0" if some else b""

    def close(self) -> None:
        """Let go of the directory."""
        with self._lock:
            self._kv.close()

    def _renew(self) -> None:
        path = self._directory.with_name(f"{self._directory.name}-{next(self._numbers)}")
        with contextlib.ExitStack() as undo:
            undo.callback(shutil.rmtree, path, ignore_errors=True)
            try:
                kv = LevelDB(path, write_buffer_bytes=_WRITE_BUFFER_BYTES)
                undo.callback(kv.close)
                pairs = self._kv.scan(b"")
                while some := dict(itertools.islice(pairs, _COPY_ENTRIES)):
                    batch = WriteBatch()
                    batch.ops.update(some)
                    kv.write(batch, sync=False)
            except (DirectoryUnusableError, OSError) as err:
                raise SorterDiskError(f"cannot renew the sorter's index in {path}: {err}; free some space") from err
            undo.pop_all()
        self._kv.close()
        shutil.rmtree(self._path, ignore_errors=True)
        self._kv, self._path, self._sick = kv, path, False
