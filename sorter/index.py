"""The index of blocks in LevelDB: which block holds which range of commit_ts. docs/format/sorter.md.

key   = unique id | table id | min_commit_ts | block number, each 8 bytes, ascending
value = version | max_commit_ts | segment | offset | length | rows | run

LevelDB can seek by min_commit_ts only. A table's widest block so far bounds how far below a wanted range a block may
start that still reaches into it, so a lookup reads the blocks of its range and few others.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from sorter.block import BlockMeta
from sorter.segment import Pointer
from storage.codec import encode_i64, encode_u64
from storage.kv import KV, WriteBatch
from storage.model.errors import CorruptError
from storage.model.ts import MAX_TS

VERSION: Final = 1
_KEY = struct.Struct(">QQQQ")
_VALUE = struct.Struct(">BQQQQIQ")
_SIGN: Final = 1 << 63
_RANGE_DELETE_BLOCKS: Final = 1024  # below it, LevelDB's own compactions see to the few dead entries


@dataclass(frozen=True, slots=True)
class Entry:
    """A block and where it lies; the blocks of one `run` were written together and follow one another in order."""

    meta: BlockMeta
    pointer: Pointer
    run: int


def encode_entry(entry: Entry) -> tuple[bytes, bytes]:
    """Key and value of an entry."""
    meta, pointer = entry.meta, entry.pointer
    key = _prefix(meta.unique_id, meta.table_id) + encode_u64(meta.min_commit_ts) + encode_u64(meta.number)
    where = (pointer.segment, pointer.offset, pointer.length)
    return key, _VALUE.pack(VERSION, meta.max_commit_ts, *where, meta.rows, entry.run)


def decode_entry(key: bytes, value: bytes) -> Entry:
    """Read what `encode_entry` wrote.

    Raises:
        CorruptError: it is something else.
    """
    if len(key) != _KEY.size or len(value) != _VALUE.size or value[0] != VERSION:
        raise CorruptError(f"sorter index entry {key.hex()} is not of version {VERSION}; restart the capture")
    unique_id, table_id, min_commit_ts, number = _KEY.unpack(key)
    _, max_commit_ts, segment, offset, length, rows, run = _VALUE.unpack(value)
    meta = BlockMeta(unique_id, table_id - _SIGN, number, rows, min_commit_ts, max_commit_ts)
    return Entry(meta, Pointer(segment, offset, length), run)


class TableIndex:
    """The blocks of one incarnation of a table; the caller serialises the calls."""

    def __init__(self, kv: KV, unique_id: int, table_id: int) -> None:
        self.unique_id = unique_id
        self.table_id = table_id
        self._kv = kv
        self._prefix = _prefix(unique_id, table_id)
        self._widest = 0
        self.blocks = 0

    def put(self, entry: Entry) -> None:
        """Remember a block."""
        batch = WriteBatch()
        batch.put(*encode_entry(entry))
        self._kv.write(batch, sync=False)
        self._widest = max(self._widest, entry.meta.max_commit_ts - entry.meta.min_commit_ts)
        self.blocks += 1

    def scan(self, lower_ts: int, upper_ts: int) -> Iterator[Entry]:
        """Blocks that may hold rows with commit_ts in `[lower_ts, upper_ts]`, and few others, by min_commit_ts."""
        if not self.blocks:
            return
        lower = self._prefix + encode_u64(max(lower_ts - self._widest, 0))
        for key, value in self._kv.scan(lower, self._end(upper_ts)):
            yield decode_entry(key, value)

    def delete_up_to(self, commit_ts: int) -> list[Entry]:
        """Forget the blocks that have no row above `commit_ts`; returns them."""
        found = [decode_entry(key, value) for key, value in self._kv.scan(self._prefix, self._end(commit_ts))]
        dead = [entry for entry in found if entry.meta.max_commit_ts <= commit_ts]
        if len(dead) == len(found) and len(dead) >= _RANGE_DELETE_BLOCKS:
            self._kv.delete_range(self._prefix, self._end(commit_ts))
        elif dead:
            batch = WriteBatch()
            for entry in dead:
                batch.delete(encode_entry(entry)[0])
            self._kv.write(batch, sync=False)
        self.blocks -= len(dead)
        return dead

    def _end(self, upper_ts: int) -> bytes:
        return self._prefix + encode_u64(min(upper_ts, MAX_TS)) + b"\xff" * 9


def _prefix(unique_id: int, table_id: int) -> bytes:
    return encode_u64(unique_id) + encode_i64(table_id)
