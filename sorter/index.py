"""The index of blocks in LevelDB: which block holds which range of commit_ts. docs/format/sorter.md.

key   = unique id | table id | min_commit_ts | block number, each 8 bytes, ascending
value = version | max_commit_ts | segment | offset | length | rows | run | bytes

LevelDB can seek by min_commit_ts only. A table's widest block so far bounds how far below a wanted range a block may
start that still reaches into it, so a lookup reads the blocks of its range and few others.
"""

import contextlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from sorter.block import BlockMeta
from sorter.database import IndexDatabase
from sorter.errors import BlockCorruptError, SorterDiskError
from sorter.segment import Pointer
from storage.codec import encode_i64, encode_u64
from storage.kv import WriteBatch
from storage.model.errors import CorruptError
from storage.model.ts import MAX_TS

VERSION: Final = 2
_KEY = struct.Struct(">QQQQ")
_VALUE = struct.Struct(">BQQQQIQQ")
_ENTRY_BYTES: Final = _KEY.size + _VALUE.size
_SIGN: Final = 1 << 63
_DELETE_ENTRIES: Final = 4096


@dataclass(frozen=True, slots=True)
class Entry:
    """A table's block, or its share of one, and where the block lies.

    The blocks of one `run` were written together and follow one another in order. `bytes` is the size of
    the table's rows.
    """

    meta: BlockMeta
    pointer: Pointer
    run: int
    bytes: int


def encode_entry(entry: Entry) -> tuple[bytes, bytes]:
    """Key and value of an entry."""
    meta, pointer = entry.meta, entry.pointer
    key = _prefix(meta.unique_id, meta.table_id) + encode_u64(meta.min_commit_ts) + encode_u64(meta.number)
    where = (pointer.segment, pointer.offset, pointer.length)
    return key, _VALUE.pack(VERSION, meta.max_commit_ts, *where, meta.rows, entry.run, entry.bytes)


def decode_entry(key: bytes, value: bytes) -> Entry:
    """Read what `encode_entry` wrote.

    Raises:
        CorruptError: it is something else.
    """
    if len(key) != _KEY.size or len(value) != _VALUE.size or value[0] != VERSION:
        raise CorruptError(f"sorter index entry {key.hex()} is not of version {VERSION}; restart the capture")
    unique_id, table_id, min_commit_ts, number = _KEY.unpack(key)
    _, max_commit_ts, segment, offset, length, rows, run, size = _VALUE.unpack(value)
    meta = BlockMeta(unique_id, table_id - _SIGN, number, rows, min_commit_ts, max_commit_ts)
    return Entry(meta, Pointer(segment, offset, length), run, size)


class RunEntries:
    """The blocks of one run in their order, 85 bytes each: of a huge transaction there are hundreds of thousands."""

    __slots__ = ("_packed", "min_commit_ts", "rows", "segments")

    def __init__(self) -> None:
        self.segments = set[int]()
        self.min_commit_ts = MAX_TS
        self.rows = 0
        self._packed = bytearray()

    def add(self, entry: Entry, packed: bytes) -> None:
        """One more, and its key and value."""
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


class TableIndex:
    """The blocks of one incarnation of a table; the caller serialises the calls."""

    __slots__ = ("_database", "blocks", "dead_ts", "table_id", "unique_id", "widest")

    def __init__(self, database: IndexDatabase, unique_id: int, table_id: int, dead_ts: int) -> None:
        """Entries up to `dead_ts` are dead, whether or not there was room to delete them."""
        self.unique_id = unique_id
        self.table_id = table_id
        self.dead_ts = dead_ts
        self.blocks = 0
        self.widest = 0
        self._database = database

    def replace(self, new: Sequence[Entry], old: Sequence[Entry]) -> None:
        """Remember the blocks `new`, and forget `old`, at once.

        Raises:
            SorterDiskError: there is no room; nothing has changed.
        """
        batch = WriteBatch()
        for entry in old:
            batch.delete(encode_entry(entry)[0])
        for entry in new:
            batch.put(*encode_entry(entry))
        self._database.write(batch, replaced=len(new) + len(old) - len(batch))  # those that only moved
        self.count(new, len(old))

    def count(self, new: Sequence[Entry], gone: int) -> None:
        """Note that the blocks `new` were added, and so many are gone."""
        for entry in new:
            self.widest = max(self.widest, entry.meta.max_commit_ts - entry.meta.min_commit_ts)
        self.blocks += len(new) - gone

    def scan(self, lower_ts: int, upper_ts: int) -> Iterator[Entry]:
        """Blocks that may hold rows with commit_ts in `[lower_ts, upper_ts]`, and few others, by min_commit_ts.

        Raises:
            BlockCorruptError: the index cannot be read.
        """
        if self.blocks:
            found = self._read(max(lower_ts - self.widest, 0), upper_ts)
            yield from (entry for entry, _ in found if entry.meta.max_commit_ts > self.dead_ts)

    def runs(self, lower_ts: int, upper_ts: int) -> dict[int, "RunEntries"]:
        """The blocks with rows that may have a commit_ts in `[lower_ts, upper_ts]`, by the number of their run.

        Raises:
            BlockCorruptError: the index cannot be read.
        """
        found: dict[int, RunEntries] = {}
        if self.blocks:
            least_ts = max(lower_ts, self.dead_ts + 1)
            for entry, packed in self._read(max(lower_ts - self.widest, 0), upper_ts):
                if entry.meta.max_commit_ts >= least_ts:
                    found.setdefault(entry.run, RunEntries()).add(entry, packed)
        return found

    def has(self, entry: Entry) -> bool:
        """Whether a block is still alive, and where it was.

        Raises:
            CorruptError: the index cannot be read.
        """
        key, value = encode_entry(entry)
        return entry.meta.max_commit_ts > self.dead_ts and self._database.scan(key, key + b"\0") == [(key, value)]

    def delete_up_to(self, commit_ts: int) -> Iterator[list[Entry]]:
        """Forget the blocks that have no row above `commit_ts`; gives them, some at a time.

        On a full disk that succeeds too: the space of blocks must come back then more than ever.
        """
        known_ts, self.dead_ts = self.dead_ts, commit_ts
        found = (entry for entry, _ in self._read(0, commit_ts) if entry.meta.max_commit_ts <= commit_ts)
        while some := list(islice(found, _DELETE_ENTRIES)):
            batch = WriteBatch()
            for entry in some:
                batch.delete(encode_entry(entry)[0])
            with contextlib.suppress(SorterDiskError):  # next time
                self._database.write(batch)
            dead = [entry for entry in some if entry.meta.max_commit_ts > known_ts]
            self.blocks -= len(dead)
            yield dead

    def _read(self, lower_ts: int, upper_ts: int) -> Iterator[tuple[Entry, bytes]]:
        try:
            pairs = self._database.walk(self._key(lower_ts), self._key(min(upper_ts, MAX_TS)) + b"\xff" * 9)
            for key, value in pairs:
                yield decode_entry(key, value), key + value
        except CorruptError as err:
            raise BlockCorruptError(
                f"the index of table {self.table_id}, commit_ts {lower_ts} to {upper_ts}, cannot be read: "
                f"{err.message}; check the disk, and let the table be pulled again from its checkpoint",
                self.table_id,
                lower_ts,
                upper_ts,
            ) from err

    def _key(self, commit_ts: int) -> bytes:
        return _prefix(self.unique_id, self.table_id) + encode_u64(commit_ts)


def _prefix(unique_id: int, table_id: int) -> bytes:
    return encode_u64(unique_id) + encode_i64(table_id)
