"""LevelDB behind the `storage.kv.KV` Protocol.

A directory is opened by one process only; LevelDB's lock sees to it.

Every read verifies the checksums of what comes from disk: of blocks, of tables' indexes and
filters, of the logs at start, and of what a compaction reads, which would give a damaged value a
new, good checksum. Damage is a CorruptDatabaseError that names the file; it is logged once.

After a write that failed, as on a full disk, no further one is taken until `renew`: LevelDB would
append it to its log behind a torn record, and drop both at the next start, without an error.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import plyvel
import structlog

from storage.kv import Deleted, WriteBatch
from storage.leveldb_files import Damage, find_log_damage, find_table_damage
from storage.model.errors import CorruptError, UnavailableError

_DELETE_BATCH = 1024
_WRITE_BUFFER_BYTES = 16 << 20
_BLOCK_CACHE_BYTES = 32 << 20
_BLOOM_BITS = 10  # most looked-for keys, locks above all, do not exist
_REMEDY = "Restore the directory from a backup, or move it away to start empty"

_log = structlog.get_logger(__name__)


class DirectoryLockedError(UnavailableError):
    """Another process holds the directory."""

    code = "ErrDataDirLocked"


class DirectoryUnusableError(UnavailableError):
    """The directory cannot be created or written."""

    code = "ErrDataDirUnusable"


class CorruptDatabaseError(CorruptError):
    """LevelDB found a damaged file."""

    code = "ErrDatabaseCorrupt"


class Limits(NamedTuple):
    """The files and memory that one database may use beside its write buffer."""

    cache_bytes: int = _BLOCK_CACHE_BYTES
    table_bytes: int = 2 << 20
    open_files: int = 1000


class _Damages:
    """Turns LevelDB's errors into Tidemark's; remembers the damaged places, so that each is
    searched and logged once.
    """

    def __init__(self, directory: Path, remedy: str) -> None:
        self._directory = directory
        self._remedy = remedy
        self._damages: list[Damage] = []

    def corrupt(self, err: Exception, damage: Damage | None) -> CorruptDatabaseError:
        """The error for a damaged file, which is logged when it is new."""
        if damage is not None and damage not in self._damages:
            self._damages.append(damage)
            _log.error(
                "database file is damaged",
                file=str(damage.path),
                offset=damage.offset,
                first_key=damage.first_key.hex(),
                last_key=damage.last_key.hex(),
            )
        return CorruptDatabaseError(
            f"the LevelDB in {self._directory} is damaged: {damage or err}. {self._remedy}; "
            "nothing was changed"
        )

    def read_failed(
        self, err: plyvel.Error, lower: bytes, upper: bytes, *, reverse: bool = False
    ) -> CorruptDatabaseError | DirectoryUnusableError:
        """The error for a read of `[lower, upper)` that failed at its first step."""
        first_key = lower if not reverse else b""
        damage = next(
            (each for each in self._damages if first_key and each.covers(first_key)), None
        )
        damage = damage or find_table_damage(self._directory, lower, upper, reverse=reverse)
        if damage is None and not isinstance(err, plyvel.CorruptionError):
            return DirectoryUnusableError(
                f"cannot read {self._directory}: {err}; check the disk, then restart"
            )
        return self.corrupt(err, damage)


class _View:
    """Reads of a plyvel DB or snapshot."""

    def __init__(self, source: Any, damages: _Damages) -> None:
        self._source = source
        self._damages = damages

    def get(self, key: bytes) -> bytes | None:
        """See `Reader.get`."""
        try:
            value: bytes | None = self._source.get(key, verify_checksums=True)
        except plyvel.Error as err:
            raise self._damages.read_failed(err, key, key + b"\0") from err
        return value

    def scan(
        self, lower: bytes, upper: bytes = b"", *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        """See `Reader.scan`; reads the state of the moment of the first step."""
        last = None
        try:
            # By position: plyvel's own iterators (1.5) take a damaged last block for the end of the
            # data, and cost a short scan, as of one key's versions, twice as much.
            with self._source.raw_iterator(verify_checksums=True) as position:
                _seek(position, lower, upper, reverse=reverse)
                step = position.prev if reverse else position.next
                while position.valid():
                    pair = position.item()
                    if pair[0] < lower or (upper and pair[0] >= upper):
                        break
                    last = pair
                    yield pair
                    step()
        except plyvel.Error as err:
            # What was given so far is whole: the damage lies behind it.
            if last and reverse:
                upper = last[0]
            elif last:
                lower = last[0] + b"\0"
            raise self._damages.read_failed(err, lower, upper, reverse=reverse) from err


class LevelDBSnapshot(_View):
    """A frozen state of a LevelDB."""

    def close(self) -> None:
        """Release the snapshot."""
        self._source.close()


class LevelDB(_View):
    """One LevelDB directory."""

    def __init__(
        self,
        directory: Path | str,
        *,
        write_buffer_bytes: int = _WRITE_BUFFER_BYTES,
        limits: Limits | None = None,
        remedy: str = _REMEDY,
    ) -> None:
        """Open or create the directory; `remedy` is the advice in errors about damage.

        Raises:
            DirectoryLockedError: another process has it open.
            DirectoryUnusableError: it cannot be created or written.
            CorruptDatabaseError: a log is damaged, or LevelDB refuses the files in it; nothing was
                changed.
        """
        self._directory = Path(directory)
        self._write_buffer_bytes = write_buffer_bytes
        self._write_error: DirectoryUnusableError | None = None
        damages = _Damages(self._directory, remedy)
        self._open: Callable[[], Any] = partial(
            _open, self._directory, write_buffer_bytes, limits or Limits(), damages
        )
        super().__init__(self._open(), damages)

    def snapshot(self) -> LevelDBSnapshot:
        """See `KV.snapshot`."""
        return LevelDBSnapshot(self._source.snapshot(), self._damages)

    def write(self, batch: WriteBatch, *, sync: bool) -> None:
        """See `KV.write`."""
        if self._write_error is not None:
            raise DirectoryUnusableError(self._write_error.message)
        try:
            with self._source.write_batch(transaction=True, sync=sync) as writer:
                for key, value in batch.ops.items():
                    if value is None:
                        writer.delete(key)
                    else:
                        writer.put(key, value)
        except (
            plyvel.CorruptionError
        ) as err:  # a compaction met damage: LevelDB takes no more writes
            raise self._damages.corrupt(err, find_table_damage(self._directory, b"", b"")) from err
        except plyvel.IOError as err:
            self._write_error = DirectoryUnusableError(
                f"cannot write to {self._directory}: {_text(err)}; free some space or check the "
                "disk, then restart"
            )
            raise self._write_error from err

    def renew(self) -> None:
        """See `KV.renew`."""
        if self._write_error is None:
            return
        self._check_room()
        self._source.close()
        self._source = self._open()
        self._write_error = None

    def delete_range(self, lower: bytes, upper: bytes) -> int:
        """See `KV.delete_range`."""
        deleted, first = 0, lower
        while (part := self.delete_some(first, upper, _DELETE_BATCH)).keys:
            deleted += part.keys
            first = part.next_key
        if deleted:
            self.compact(lower, upper)
        return deleted

    def delete_some(self, lower: bytes, upper: bytes, most: int) -> Deleted:
        """See `KV.delete_some`; values are not read into Python."""
        batch, key = WriteBatch(), lower
        try:
            with self._source.iterator(
                start=lower, stop=upper or None, include_value=False, verify_checksums=True
            ) as keys:
                for key in islice(keys, most):
                    batch.delete(key)
            if len(batch) < most:
                self._check_end(key + b"\0" if batch else lower)
        except plyvel.Error as err:
            raise self._damages.read_failed(err, key, upper) from err
        if batch:
            self.write(batch, sync=False)
        return Deleted(len(batch), sum(map(len, batch.ops)), key + b"\0")

    def _check_room(self) -> None:
        """Raise if there is no room for what LevelDB writes when it opens the directory: where it
        could not, nothing could be read, either.
        """
        path = self._directory / "room"
        try:
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, 2 * self._write_buffer_bytes)
        except OSError as err:
            raise DirectoryUnusableError(
                f"cannot write to {self._directory}: {err.strerror}; free some space"
            ) from err
        finally:
            path.unlink(missing_ok=True)

    def _check_end(self, key: bytes) -> None:
        """Raise if the keys ended early, at `key`: see `scan`."""
        with self._source.raw_iterator(verify_checksums=True) as position:
            position.seek(key)

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


def _open(path: Path, write_buffer_bytes: int, limits: Limits, damages: _Damages) -> Any:
    try:
        path.mkdir(parents=True, exist_ok=True)
        damage = find_log_damage(path)
        if damage is not None:
            raise damages.corrupt(CorruptError(str(damage)), damage)
        return plyvel.DB(
            str(path),
            create_if_missing=True,
            paranoid_checks=True,
            write_buffer_size=write_buffer_bytes,
            max_file_size=limits.table_bytes,
            max_open_files=limits.open_files,
            lru_cache_size=limits.cache_bytes,
            bloom_filter_bits=_BLOOM_BITS,
        )
    except plyvel.CorruptionError as err:
        raise damages.corrupt(err, find_table_damage(path, b"", b"")) from err
    except (plyvel.IOError, plyvel.Error, OSError) as err:
        text = _text(err)
        # Only of a lock that somebody holds LevelDB says so. The name of the file alone stands in
        # other errors, too: it may not be opened, or the disk is full.
        if text.startswith(f"IO error: lock {path}"):
            raise DirectoryLockedError(
                f"{path} is in use by another process; stop it or choose another --data-dir "
                f"({text})"
            ) from err
        # Without the path, whose words say nothing about the error.
        reason = text.replace(str(path), "").lower()
        if "corrupt" in reason or "missing" in reason:
            raise damages.corrupt(err, None) from err
        raise DirectoryUnusableError(
            f"cannot use {path}: {text}; check that it exists and is writable, and free some "
            "space if its disk is full"
        ) from err


def _seek(position: Any, lower: bytes, upper: bytes, *, reverse: bool) -> None:
    """Move a raw iterator to where a scan begins."""
    if not reverse:
        position.seek(lower)
        return
    if upper:
        position.seek(upper)
        if position.valid():
            position.prev()
            return
    position.seek_to_last()


def _text(err: Exception) -> str:
    """The text of an error; plyvel's have LevelDB's bytes."""
    said = err.args[0] if err.args else ""
    return said.decode(errors="replace") if isinstance(said, bytes) else str(err)
