"""The index of blocks: which block of a table holds which range of commit_ts.
docs/format/sorter.md.

key   = unique id | table id | min_commit_ts | block number, each 8 bytes, ascending
value = version | max_commit_ts | segment | offset | length | rows | run | bytes

`TableIndex` is what one table has in the `IndexDatabase` (LevelDB) that it shares with others.
LevelDB can seek by min_commit_ts only. The widest range of commit_ts that a block of the table has
bounds how far below a range a block may start that still reaches into it, so a lookup reads the
entries of its range and few others.
"""

import contextlib
import itertools
import shutil
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sorter.block import BlockMeta
from sorter.errors import BlockCorruptError, IndexLostError, SorterDiskError
from sorter.segment import Pointer
from storage.codec import encode_i64, encode_u64
from storage.kv import WriteBatch
from storage.leveldb import DirectoryUnusableError, LevelDB
from storage.model.errors import CorruptError
from storage.model.ts import MAX_TS

VERSION: Final = 2
_KEY = struct.Struct(">QQQQ")
_VALUE = struct.Struct(">BQQQQIQQ")
_ENTRY_BYTES: Final = _KEY.size + _VALUE.size
_SIGN: Final = 1 << 63
_DELETE_ENTRIES: Final = 4096
_COPY_ENTRIES: Final = 4096
_COMPACT_ENTRIES: Final = 4096
_WRITE_BUFFER_BYTES: Final = 2 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """A table's block, or its share of one, and where the block lies.

    The blocks of one `run` were written together and follow one another in order. `bytes` is the
    size of the table's rows.
    """

    meta: BlockMeta
    pointer: Pointer
    run: int
    bytes: int


def encode_entry(entry: Entry) -> tuple[bytes, bytes]:
    """Key and value of an entry."""
    meta, pointer = entry.meta, entry.pointer
    key = (
        _prefix(meta.unique_id, meta.table_id)
        + encode_u64(meta.min_commit_ts)
        + encode_u64(meta.number)
    )
    where = (pointer.segment, pointer.offset, pointer.length)
    return key, _VALUE.pack(VERSION, meta.max_commit_ts, *where, meta.rows, entry.run, entry.bytes)


def decode_entry(key: bytes, value: bytes) -> Entry:
    """Read what `encode_entry` wrote.

    Raises:
        CorruptError: it is something else.
    """
    if len(key) != _KEY.size or len(value) != _VALUE.size or value[0] != VERSION:
        raise CorruptError(
            f"sorter index entry {key.hex()} is not of version {VERSION}; restart the capture"
        )
    unique_id, table_id, min_commit_ts, number = _KEY.unpack(key)
    _, max_commit_ts, segment, offset, length, rows, run, size = _VALUE.unpack(value)
    meta = BlockMeta(unique_id, table_id - _SIGN, number, rows, min_commit_ts, max_commit_ts)
    return Entry(meta, Pointer(segment, offset, length), run, size)


class RunEntries:
    """The blocks of one run in their order, 85 bytes each:
    of a huge transaction there are hundreds of thousands.
    """

    __slots__ = ("_packed", "min_commit_ts", "rows", "segments")

    def __init__(self) -> None:
        self.segments = set[int]()
        self.min_commit_ts = MAX_TS
        self.rows = 0
        self._packed = bytearray()

    def add(self, entry: Entry, packed: bytes) -> None:
        """Append an entry; `packed` is its key and value."""
        self.segments.add(entry.pointer.segment)
        self.min_commit_ts = min(self.min_commit_ts, entry.meta.min_commit_ts)
        self.rows += entry.meta.rows
        self._packed += packed

    def __len__(self) -> int:
        return len(self._packed) // _ENTRY_BYTES

    def __iter__(self) -> Iterator[Entry]:
        for first in range(0, len(self._packed), _ENTRY_BYTES):
            border, end = first + _KEY.size, first + _ENTRY_BYTES
            yield decode_entry(bytes(self._packed[first:border]), bytes(self._packed[border:end]))


class IndexDatabase:
    """The entries of all tables of a shard, in LevelDB; safe to call from several threads.

    LevelDB refuses all further writes once it could not write its own files, and what it wrote last
    may be torn. Its reads still work, so the entries are copied to a new directory as soon as there
    is room. Nothing is synced: they are a cache.
    """

    def __init__(self, directory: Path) -> None:
        """Begin with an empty database in `directory`, which does not exist yet.

        Raises:
            DirectoryUnusableError: it cannot be created or written.
        """
        self._directory = self._path = directory
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._write_failed = False
        self._live = self._dead = 0
        self._kv = LevelDB(directory, write_buffer_bytes=_WRITE_BUFFER_BYTES)

    @property
    def live(self) -> int:
        """The number of entries."""
        return self._live

    def write(self, batch: WriteBatch, *, replaced: int = 0) -> None:
        """Apply puts and deletes together; `replaced` of the puts overwrite entries,
        deletes are of entries that exist.

        Raises:
            SorterDiskError: there is no room; nothing has changed.
            IndexLostError: LevelDB found a damaged file.
        """
        with self._lock:
            try:
                # LevelDB would refuse this write, too, however much room there is by now.
                if self._write_failed:
                    self._renew()
                self._kv.write(batch, sync=False)
            except CorruptError as err:
                raise IndexLostError(
                    f"the sorter's index in {self._path} is damaged: {err.message}; check the "
                    "disk; the changefeed starts again at its checkpoint, with a new index"
                ) from err
            except DirectoryUnusableError as err:
                self._write_failed = True
                raise SorterDiskError(
                    f"cannot write the sorter's index in {self._path}: {err.message}; free some "
                    "space, the rows wait in memory"
                ) from err
            deleted = sum(value is None for value in batch.ops.values())
            self._dead += deleted + replaced
            # Of the batch's operations, deletes take one away, and replacing puts add none.
            self._live += len(batch) - 2 * deleted - replaced
            # LevelDB keeps what was deleted until a compaction meets it by chance: a scan would
            # step over a whole backlog of entries that were cleaned.
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
        """Pairs with `lower <= key < upper` (empty: all), some at a time,
        so that any number takes little memory.

        Writers do not wait meanwhile, and what they write may or may not be seen.

        Raises:
            CorruptDatabaseError: LevelDB found a damaged file.
        """
        more = True
        while more:
            # A new iterator each time: `_renew` may have put another database in the place of this
            # one since.
            with self._lock:
                some = list(itertools.islice(self._kv.scan(lower, upper), _COPY_ENTRIES))
            yield from some
            more = len(some) == _COPY_ENTRIES
            lower = some[-1][0] + b"\0" if some else lower

    def close(self) -> None:
        """Close LevelDB."""
        with self._lock:
            self._kv.close()

    def _renew(self) -> None:
        """Copy all entries to a new database in a new directory."""
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
                raise SorterDiskError(
                    f"cannot renew the sorter's index in {path}: {err}; free some space"
                ) from err
            undo.pop_all()
        # Only now, when every entry is in the new one: a copy that failed has lost nothing.
        self._kv.close()
        shutil.rmtree(self._path, ignore_errors=True)
        self._kv, self._path, self._write_failed, self._dead = kv, path, False, 0


class TableIndex:
    """The blocks of one incarnation of a table; the caller serialises the calls."""

    __slots__ = ("_database", "blocks", "dead_ts", "table_id", "unique_id", "widest_range")

    def __init__(
        self, database: IndexDatabase, unique_id: int, table_id: int, dead_ts: int
    ) -> None:
        """Entries up to `dead_ts` are dead, whether or not there was room to delete them."""
        self.unique_id = unique_id
        self.table_id = table_id
        self.dead_ts = dead_ts
        self.blocks = 0
        self.widest_range = 0
        self._database = database

    def replace(self, new: Sequence[Entry], old: Sequence[Entry]) -> None:
        """Add the blocks `new` and delete `old`, at once.

        Raises:
            SorterDiskError: there is no room; nothing has changed.
        """
        batch = WriteBatch()
        for entry in old:
            batch.delete(encode_entry(entry)[0])
        for entry in new:
            batch.put(*encode_entry(entry))
        # An entry in both was moved: the batch has one operation for it.
        self._database.write(batch, replaced=len(new) + len(old) - len(batch))
        self.count(new, len(old))

    def count(self, new: Sequence[Entry], deleted: int) -> None:
        """Count the blocks `new`, and how many were deleted."""
        # The width never shrinks: which block was the widest is not known once it is deleted.
        for entry in new:
            self.widest_range = max(
                self.widest_range, entry.meta.max_commit_ts - entry.meta.min_commit_ts
            )
        self.blocks += len(new) - deleted

    def scan(self, lower_ts: int, upper_ts: int) -> Iterator[Entry]:
        """Blocks that may hold rows with commit_ts in `[lower_ts, upper_ts]`, and few others,
        by min_commit_ts.

        Raises:
            BlockCorruptError: the index cannot be read.
        """
        if self.blocks:
            entries = self._read(max(lower_ts - self.widest_range, 0), upper_ts)
            yield from (entry for entry, _ in entries if entry.meta.max_commit_ts > self.dead_ts)

    def runs(self, lower_ts: int, upper_ts: int) -> dict[int, "RunEntries"]:
        """The blocks with rows that may have a commit_ts in `[lower_ts, upper_ts]`,
        by the number of their run.

        Raises:
            BlockCorruptError: the index cannot be read.
        """
        runs: dict[int, RunEntries] = {}
        if self.blocks:
            least_ts = max(lower_ts, self.dead_ts + 1)
            for entry, packed in self._read(max(lower_ts - self.widest_range, 0), upper_ts):
                if entry.meta.max_commit_ts >= least_ts:
                    runs.setdefault(entry.run, RunEntries()).add(entry, packed)
        return runs

    def has(self, entry: Entry) -> bool:
        """Whether a block is alive and at the same place.

        Raises:
            CorruptError: the index cannot be read.
        """
        if entry.meta.max_commit_ts <= self.dead_ts:
            return False
        # The value holds the place: a block that was moved meanwhile has the same key.
        key, value = encode_entry(entry)
        return self._database.scan(key, key + b"\0") == [(key, value)]

    def delete_up_to(self, commit_ts: int) -> Iterator[list[Entry]]:
        """Delete the blocks that have no row above `commit_ts`, and yield them, some at a time.

        This succeeds on a full disk, too: entries that cannot be deleted there stay, and `dead_ts`
        hides them.
        """
        # First: whatever happens to the deletes, `scan` and `runs` leave these blocks out.
        last_dead_ts, self.dead_ts = self.dead_ts, commit_ts
        entries = (
            entry for entry, _ in self._read(0, commit_ts) if entry.meta.max_commit_ts <= commit_ts
        )
        while some := list(itertools.islice(entries, _DELETE_ENTRIES)):
            batch = WriteBatch()
            for entry in some:
                batch.delete(encode_entry(entry)[0])
            # A full disk refuses deletes, too; the next call meets these entries again.
            with contextlib.suppress(SorterDiskError):
                self._database.write(batch)
            # Those of an earlier call that could not be deleted were counted and released then.
            dead = [entry for entry in some if entry.meta.max_commit_ts > last_dead_ts]
            self.blocks -= len(dead)
            yield dead

    def _read(self, lower_ts: int, upper_ts: int) -> Iterator[tuple[Entry, bytes]]:
        try:
            pairs = self._database.walk(
                self._key(lower_ts), self._key(min(upper_ts, MAX_TS)) + b"\xff" * 9
            )
            for key, value in pairs:
                yield decode_entry(key, value), key + value
        except CorruptError as err:
            raise BlockCorruptError(
                f"the index of table {self.table_id}, commit_ts {lower_ts} to {upper_ts}, cannot "
                f"be read: {err.message}; check the disk, and let the table be pulled again from "
                "its checkpoint",
                self.table_id,
                lower_ts,
                upper_ts,
            ) from err

    def _key(self, commit_ts: int) -> bytes:
        return _prefix(self.unique_id, self.table_id) + encode_u64(commit_ts)


def _prefix(unique_id: int, table_id: int) -> bytes:
    return encode_u64(unique_id) + encode_i64(table_id)
