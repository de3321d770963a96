"""The open transactions of one changefeed's regions: in memory up to a limit, else on disk.

Each matcher has maps from (start_ts, key); all maps of a changefeed share one limit and one
LevelDB, which exists only while something is spilled. A map beyond the limit writes all it has to
disk, and loads an entry back before it looks at it. Nothing is synced: it is a cache of the
upstream, in a directory that is removed at start. A `SpillCodec` may compress and encrypt entries.

A full disk pauses the feed that has to spill, as the sorter's does: the entries stay in memory, and
the write is tried again until it succeeds or the map is closed. LevelDB takes no write after one
that failed, so a new database is begun then; the ones before it are read until nothing is spilled
any more.
"""

import itertools
import shutil
import struct
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar

import structlog

from server.puller import metrics
from storage.codec import prefix_end
from storage.kv import WriteBatch
from storage.leveldb import CorruptDatabaseError, DirectoryUnusableError, LevelDB, Limits
from storage.model.errors import ClosedError
from storage.queue import ByteBudget
from storage.spill_codec import PLAIN, SpillCodec, SpillDamagedError

ENTRY_BYTES: Final = 400
"""The memory overhead of an entry beside its bytes."""
_WRITE_BUFFER_BYTES: Final = 2 << 20
_CACHE_BYTES: Final = 1 << 20
_TABLE_BYTES: Final = 1 << 20
# the least that LevelDB allows: what it has open is mapped
_OPEN_FILES: Final = 74
_BATCH_BYTES: Final = 1 << 20
_BATCH_ENTRIES: Final = 4096
_GONE: Final = b""  # hides an entry of an older database; no value is empty

_MAP = struct.Struct(">QQ")  # the number of the map, start_ts
_NUMBER = struct.Struct(">Q")
_KEY = struct.Struct(">I")  # the length of a key that an entry begins with

V = TypeVar("V")
SPILL_DAMAGE: Final = (CorruptDatabaseError, SpillDamagedError)
"""The errors of reading spilled entries that the disk has damaged."""
TxnKey = tuple[int, bytes]
"""(start_ts, key)."""

_log = structlog.get_logger(__name__)


class OpenTransactionsClosedError(ClosedError):
    """The puller has ended."""

    code = "ErrPullerClosed"


class Format(NamedTuple, Generic[V]):
    """The encoding of a map's values, and their size in memory."""

    encode: Callable[[V], bytes]
    decode: Callable[[bytes], V]
    size: Callable[[V], int]


class OpenTransactions:
    """The limit and the disk that the maps of a changefeed share;
    every method may be called from any thread.
    """

    def __init__(
        self,
        directory: Path | None = None,
        memory_bytes: int = 1 << 62,
        *,
        retry_s: float = 1.0,
        codec: SpillCodec = PLAIN,
    ) -> None:
        """Spill into `directory`, which is made when it is needed, beyond `memory_bytes`;
        None: never spill.

        A write that the disk refused is tried again every `retry_s`; `codec` says how entries lie
        there.
        """
        self.codec = codec
        self.memory_bytes = memory_bytes
        """The limit."""
        self.arrived = ByteBudget(memory_bytes)
        """Bytes that the pullers of all tables have yet to process, in memory beside these; the
        same limit again.
        """
        self.used_bytes = 0
        self.spilled = 0
        """Entries on disk."""
        self.disk_error = ""
        self.waiting = 0
        """Threads that wait for the disk."""
        self._directory = directory
        self._retry_s = retry_s
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()
        self._databases: list[LevelDB] = []
        self._begin_new = True
        self._stopping = threading.Event()
        self._closed = False

    @property
    def is_short(self) -> bool:
        """Whether memory use is above its limit."""
        return self.used_bytes > self.memory_bytes and self._directory is not None

    def new_number(self) -> int:
        """The number of a new map."""
        return next(self._numbers)

    def grew(self, size: int) -> None:
        """A map holds `size` bytes more in memory, or less."""
        with self._lock:
            if not self._closed:
                self.used_bytes += size
                metrics.OPEN_BYTES.inc(size)

    def write(self, batch: WriteBatch, added: int, ended: threading.Event) -> None:
        """Write puts and deletes, `added` entries more than before (or less);
        waits while the disk refuses.

        Raises:
            OpenTransactionsClosedError: `ended` was set, or `stop` called, while it waited.
        """
        while not self._try_write(batch, added):
            with self._lock:
                self.waiting += 1
            # On the map's own event, outside of the lock: a puller that ends is not kept waiting by
            # a disk that is full, and other maps go on reading.
            try:
                ended.wait(self._retry_s)
            finally:
                with self._lock:
                    self.waiting -= 1
            if ended.is_set() or self._stopping.is_set():
                raise OpenTransactionsClosedError("the puller has ended; nothing more is written")

    def delete(self, keys: list[bytes]) -> None:
        """Remove entries; those that a full disk does not let go stay until nothing is spilled."""
        batch = WriteBatch()
        for key in keys:
            batch.delete(key)
        if not self._stopping.is_set() and not self._try_write(batch, -len(keys)):
            self._count(-len(keys))

    def get(self, key: bytes) -> bytes | None:
        """The value of an entry.

        Raises:
            CorruptDatabaseError: a file is damaged.
        """
        with self._lock:
            # The newest first: it hides what older ones, which take no more writes, still have.
            for database in reversed(self._databases):
                value = database.get(key)
                if value is not None:
                    return value if value != _GONE else None
            return None

    def scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The entries whose key starts with `prefix`, in order; may change while it runs.

        Raises as `get`.
        """
        lower, upper = prefix, prefix_end(prefix)
        while True:
            with self._lock:
                some: dict[bytes, bytes] = {}
                ends = []
                for database in self._databases:
                    part = list(islice(database.scan(lower, upper), _BATCH_ENTRIES))
                    some.update(part)
                    if len(part) == _BATCH_ENTRIES:
                        ends.append(part[-1][0])
            # Beyond the shortest of these parts, a database may have entries that were not read,
            # and that hide those of another.
            last = min(ends, default=upper)
            yield from (
                (key, some[key]) for key in sorted(some) if some[key] != _GONE and key <= last
            )
            if not ends:
                return
            lower = last + b"\0"

    def stop(self) -> None:
        """Let no thread wait for the disk any more."""
        self._stopping.set()

    def close(self) -> None:
        """Remove the files."""
        self.stop()
        with self._lock:
            self._closed = True
            self._drop()
            metrics.OPEN_BYTES.dec(self.used_bytes)
            self.used_bytes = 0

    def _try_write(self, batch: WriteBatch, added: int) -> bool:
        with self._lock:
            if self._stopping.is_set():
                raise OpenTransactionsClosedError("the puller has ended; nothing more is written")
            try:
                if self._begin_new:
                    self._begin()
                # Older databases take no deletes: an entry of theirs is hidden by one in the last.
                if len(self._databases) > 1:
                    batch.ops = {
                        key: _GONE if value is None else value for key, value in batch.ops.items()
                    }
                self._databases[-1].write(batch, sync=False)
            except DirectoryUnusableError as err:
                self._begin_new = True
                if not self.disk_error:
                    _log.warning(
                        "disk takes no rows of open transactions, feeds pause", error=err.message
                    )
                self.disk_error = err.message
                return False
            if self.disk_error:
                _log.info("disk takes rows of open transactions again")
            self.disk_error = ""
            self._count(added)
            return True

    def _begin(self) -> None:
        assert self._directory is not None, "there is a directory where entries are spilled"
        path = self._directory / f"{len(self._databases):06d}"
        shutil.rmtree(path, ignore_errors=True)  # where one could not be begun
        self._databases.append(
            LevelDB(
                path,
                write_buffer_bytes=_WRITE_BUFFER_BYTES,
                limits=Limits(_CACHE_BYTES, _TABLE_BYTES, _OPEN_FILES),
            )
        )
        self._begin_new = False

    def _count(self, added: int) -> None:
        with self._lock:
            self.spilled += added
            metrics.OPEN_SPILLED_ROWS.inc(added)
            # The usual end of it: the space of what a full disk would not let go comes back, too.
            if not self.spilled:
                self._drop()

    def _drop(self) -> None:
        """Remove all databases: nothing in them is needed."""
        metrics.OPEN_SPILLED_ROWS.dec(self.spilled)
        self.spilled, self.disk_error = 0, ""
        for database in self._databases:
            database.close()
        self._databases.clear()
        self._begin_new = True
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


class OpenRows(Generic[V]):
    """One map of one matcher, used by one thread at a time; `memory` is what is not on disk.

    Callers that use `memory` directly, as the matcher's hot loops do, call `load` before they look
    at an entry while there is something on disk (`spilled`), and `grew` with the bytes that they
    added or took.
    """

    def __init__(self, shared: OpenTransactions, form: Format[V]) -> None:
        self.memory: dict[TxnKey, V] = {}
        self.spilled = 0
        self._shared = shared
        self._form = form
        self._number = shared.new_number()
        self._bytes = 0
        self._deleted: dict[bytes, None] = {}
        self._ended = threading.Event()

    def __len__(self) -> int:
        return len(self.memory) + self.spilled

    def __contains__(self, at: object) -> bool:
        assert isinstance(at, tuple), "entries are known by (start_ts, key)"
        self.load(at)
        return at in self.memory

    def grew(self, size: int) -> None:
        """`memory` holds `size` bytes more, or less."""
        self._bytes += size
        self._shared.grew(size)

    def put(self, at: TxnKey, value: V) -> None:
        """Set an entry."""
        self.load(at)
        old = self.memory.get(at)
        self.memory[at] = value
        self.grew(self._size(at, value) - (self._size(at, old) if old is not None else 0))

    def pop(self, at: TxnKey) -> V | None:
        """Remove an entry."""
        self.load(at)
        value = self.memory.pop(at, None)
        if value is not None:
            self.grew(-self._size(at, value))
        return value

    def get(self, at: TxnKey) -> V | None:
        """An entry, which stays where it is; raises as `load`."""
        value = self.memory.get(at)
        if value is not None or not self.spilled:
            return value
        key = self._key(at)
        stored = self._shared.get(key) if key not in self._deleted else None
        return self._decoded(key, stored)[1] if stored is not None else None

    def load(self, at: TxnKey) -> None:
        """Bring an entry back to memory if it is on disk.

        Raises:
            CorruptDatabaseError, SpillDamagedError: its file is damaged.
        """
        if not self.spilled or at in self.memory:
            return
        value = self.get(at)
        if value is None:
            return
        self.memory[at] = value
        self.grew(self._size(at, value))
        # In memory only from here on: two values of one entry could tell different things.
        self._delete(at)

    def discard(self, at: TxnKey) -> None:
        """Remove an entry that is there, unread."""
        value = self.memory.pop(at, None)
        if value is not None:
            self.grew(-self._size(at, value))
        else:
            self._delete(at)

    def spill(self) -> None:
        """Write all of `memory` to disk.

        Raises:
            OpenTransactionsClosedError: the map was ended while the disk took nothing.
        """
        # Before the writes: a delete that came after them would remove what was just written.
        self.settle()
        entries = iter(self.memory.items())
        batch, size = WriteBatch(), 0
        for at, value in entries:
            key, stored = self._key(at), self._encoded(at, value)
            batch.put(key, stored)
            size += len(key) + len(stored)
            if size >= _BATCH_BYTES:
                self._write(batch)
                batch, size = WriteBatch(), 0
        self._write(batch)
        # Only when everything is on disk: until then, a write that is given up loses nothing.
        self.memory.clear()
        self.grew(-self._bytes)

    def settle(self) -> None:
        """Remove from disk what was loaded back."""
        if self._deleted:
            self._shared.delete(list(self._deleted))
            self._deleted = {}

    def drain(self) -> Iterator[tuple[TxnKey, V]]:
        """All entries, which are gone afterwards."""
        self.settle()
        if self.spilled:
            for key, stored in self._shared.scan(_NUMBER.pack(self._number)):
                at, value = self._decoded(key, stored)
                if at not in self.memory:
                    yield at, value
        yield from self.memory.items()
        self.clear()

    def clear(self) -> None:
        """Drop all entries, in memory and on disk."""
        self.settle()
        self.memory.clear()
        self.grew(-self._bytes)
        pairs = self._shared.scan(_NUMBER.pack(self._number)) if self.spilled else iter(())
        while keys := [key for key, _ in islice(pairs, min(self.spilled, _BATCH_ENTRIES))]:
            self._shared.delete(keys)
            self.spilled -= len(keys)
        self.spilled = 0

    def end(self) -> None:
        """Let no thread wait for the disk with this map; may be called from any thread."""
        self._ended.set()

    def _delete(self, at: TxnKey) -> None:
        """Drop an entry that is on disk."""
        # Gathered: one write for each commit would cost more than all else that is done with it.
        self._deleted[self._key(at)] = None
        self.spilled -= 1
        if len(self._deleted) >= _BATCH_ENTRIES:
            self.settle()

    def _write(self, batch: WriteBatch) -> None:
        if batch:
            self._shared.write(batch, len(batch), self._ended)
            self.spilled += len(batch)

    def _key(self, at: TxnKey) -> bytes:
        return _MAP.pack(self._number, at[0]) + self._shared.codec.name_of(at[1])

    def _encoded(self, at: TxnKey, value: V) -> bytes:
        codec, data = self._shared.codec, self._form.encode(value)
        # The name of a hidden key does not lead back to it, so the entry has it, too.
        return codec.encode(_KEY.pack(len(at[1])) + at[1] + data if codec.hides else data)

    def _decoded(self, key: bytes, stored: bytes) -> tuple[TxnKey, V]:
        """Raises SpillDamagedError."""
        codec = self._shared.codec
        start_ts = _MAP.unpack_from(key)[1]
        data = codec.decode(stored).to_pybytes() if not codec.is_plain else stored
        if not codec.hides:
            return (start_ts, key[_MAP.size :]), self._form.decode(data)
        end = _KEY.size + _KEY.unpack_from(data)[0]
        return (start_ts, data[_KEY.size : end]), self._form.decode(data[end:])

    def _size(self, at: TxnKey, value: V) -> int:
        return ENTRY_BYTES + len(at[1]) + self._form.size(value)
