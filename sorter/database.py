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

from sorter.errors import IndexLostError, SorterDiskError
from storage.kv import WriteBatch
from storage.leveldb import DirectoryUnusableError, LevelDB
from storage.model.errors import CorruptError

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

    @property
    def live(self) -> int:
        """How many entries there are."""
        return self._live

    def write(self, batch: WriteBatch, *, replaced: int = 0) -> None:
        """Apply puts of so many entries that were there, and of new ones, and deletes of some that were, together.

        Raises:
            SorterDiskError: there is no room; nothing has changed.
            IndexLostError: LevelDB found a damaged file.
        """
        with self._lock:
            try:
                if self._sick:
                    self._renew()
                self._kv.write(batch, sync=False)
            except CorruptError as err:
                raise IndexLostError(
                    f"the sorter's index in {self._path} is damaged: {err.message}; check the disk; the changefeed "
                    "starts again at its checkpoint, with a new index"
                ) from err
            except DirectoryUnusableError as err:
                self._sick = True
                raise SorterDiskError(
                    f"cannot write the sorter's index in {self._path}: {err.message}; free some space, "
                    "the rows wait in memory"
                ) from err
            deleted = sum(value is None for value in batch.ops.values())
            self._dead += deleted + replaced
            self._live += len(batch) - 2 * deleted - replaced
            if self._dead >= max(_COMPACT_ENTRIES, self._live):
                self._kv.compact(b"", b"")
                self._dead = 0

    def scan(self, lower: bytes, upper: bytes) -> list[tuple[bytes, bytes]]:
        """Pairs with `lower <= key < upper`.

        Raises:
            CorruptDatabaseError: LevelDB found a damaged file.
        """
        return list(self.walk(lower, upper))

    def walk(self, lower: bytes = b"", upper: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Pairs with `lower <= key < upper` (empty: all), some at a time, so that any number takes little memory.

        Who writes meanwhile does not wait, and may or may not be seen.

        Raises:
            CorruptDatabaseError: LevelDB found a damaged file.
        """
        more = True
        while more:
            with self._lock:
                some = list(itertools.islice(self._kv.scan(lower, upper), _COPY_ENTRIES))
            yield from some
            more = len(some) == _COPY_ENTRIES
            lower = some[-1][0] + b"\0" if some else lower

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
        self._kv, self._path, self._sick, self._dead = kv, path, False, 0
