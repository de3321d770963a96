"""LevelDB behind the `storage.kv.KV` Protocol. A directory is opened by one process only; LevelDB's lock sees to it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import plyvel

from storage.kv import WriteBatch
from storage.model.errors import CorruptError, UnavailableError

_DELETE_BATCH = 1024
_WRITE_BUFFER_BYTES = 16 << 20
_BLOCK_CACHE_BYTES = 32 << 20
_BLOOM_BITS = 10  # most looked-for keys, locks above all, do not exist


class DirectoryLockedError(UnavailableError):
    """Another process holds the directory."""

    code = "ErrDataDirLocked"


class DirectoryUnusableError(UnavailableError):
    """The directory cannot be created or written."""

    code = "ErrDataDirUnusable"


class CorruptDatabaseError(CorruptError):
    """LevelDB found a damaged file."""

    code = "ErrDatabaseCorrupt"


class _View:
    """Reads of a plyvel DB or snapshot."""

    def __init__(self, source: Any, directory: Path, *, verify: bool) -> None:
        self._source = source
        self._directory = directory
        self._verify = verify

    def get(self, key: bytes) -> bytes | None:
        """See `Reader.get`."""
        try:
            value: bytes | None = self._source.get(key, verify_checksums=self._verify)
        except plyvel.CorruptionError as err:
            raise _corrupt(self._directory, err) from err
        return value

    def scan(self, lower: bytes, upper: bytes = b"", *, reverse: bool = False) -> Iterator[tuple[bytes, bytes]]:
        """See `Reader.scan`; reads the state of the moment of the first step."""
        try:
            with self._source.iterator(
                start=lower, stop=upper or None, reverse=reverse, verify_checksums=self._verify
            ) as pairs:
                yield from pairs
        except plyvel.CorruptionError as err:
            raise _corrupt(self._directory, err) from err


class LevelDBSnapshot(_View):
    """A frozen state of a LevelDB."""

    def close(self) -> None:
        """Release the snapshot."""
        self._source.close()


class LevelDB(_View):
    """One LevelDB directory."""

    def __init__(
        self, directory: Path | str, *, write_buffer_bytes: int = _WRITE_BUFFER_BYTES, verify: bool = False
    ) -> None:
        """Open or create the directory; with `verify` each block that is read from disk is checked.

        Raises:
            DirectoryLockedError: another process has it open.
            DirectoryUnusableError: it cannot be created or written.
            CorruptDatabaseError: LevelDB refuses the files in it.
        """
        path = Path(directory)
        super().__init__(_open(path, write_buffer_bytes), path, verify=verify)

    def snapshot(self) -> LevelDBSnapshot:
        """See `KV.snapshot`."""
        return LevelDBSnapshot(self._source.snapshot(), self._directory, verify=self._verify)

    def write(self, batch: WriteBatch, *, sync: bool) -> None:
        """See `KV.write`."""
        try:
            with self._source.write_batch(transaction=True, sync=sync) as writer:
                for key, value in batch.ops.items():
                    if value is None:
                        writer.delete(key)
                    else:
                        writer.put(key, value)
        except plyvel.CorruptionError as err:
            raise _corrupt(self._directory, err) from err
        except plyvel.IOError as err:
            raise DirectoryUnusableError(
                f"cannot write to {self._directory}: {err}; free some space or check the disk, then restart"
            ) from err

    def delete_range(self, lower: bytes, upper: bytes) -> int:
        """See `KV.delete_range`."""
        deleted = 0
        batch = WriteBatch()
        for key, _ in self.scan(lower, upper):
            batch.delete(key)
            if len(batch) >= _DELETE_BATCH:
                self.write(batch, sync=False)
                deleted += len(batch)
                batch = WriteBatch()
        if batch:
            self.write(batch, sync=False)
            deleted += len(batch)
        if deleted:
            self.compact(lower, upper)
        return deleted

    def approximate_bytes(self, lower: bytes, upper: bytes) -> int:
        """See `KV.approximate_bytes`: tables on disk, to a block; not the last write buffer."""
        size: int = self._source.approximate_size(lower, upper)
        return size

    def compact(self, lower: bytes, upper: bytes) -> None:
        """See `KV.compact`."""
        self._source.compact_range(start=lower, stop=upper or None)

    def level0_files(self) -> int:
        """See `KV.level0_files`."""
        return int(self._source.get_property(b"leveldb.num-files-at-level0"))

    def close(self) -> None:
        """See `KV.close`."""
        self._source.close()


def _open(path: Path, write_buffer_bytes: int) -> Any:
    try:
        path.mkdir(parents=True, exist_ok=True)
        return plyvel.DB(
            str(path),
            create_if_missing=True,
            write_buffer_size=write_buffer_bytes,
            lru_cache_size=_BLOCK_CACHE_BYTES,
            bloom_filter_bits=_BLOOM_BITS,
        )
    except plyvel.CorruptionError as err:
        raise _corrupt(path, err) from err
    except (plyvel.IOError, plyvel.Error, OSError) as err:
        text = str(err)
        if "lock" in text.lower():
            raise DirectoryLockedError(
                f"{path} is in use by another process; stop it or choose another --data-dir ({text})"
            ) from err
        if "corrupt" in text.lower() or "missing" in text.lower():
            raise _corrupt(path, err) from err
        raise DirectoryUnusableError(f"cannot use {path}: {text}; check that it exists and is writable") from err


def _corrupt(path: Path, err: Exception) -> CorruptDatabaseError:
    return CorruptDatabaseError(
        f"the LevelDB in {path} is damaged: {err}; nothing was changed. Restore it from a backup, "
        "or move the directory away to start empty"
    )
