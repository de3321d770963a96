"""The sorted block, the unit that the sorter writes and reads: bytes from and to Arrow.

Pure; docs/format/sorter.md.

A block is a header of 64 bytes, which carries a crc32c of everything, and one Arrow IPC message.
What comes before the message fills multiples of 64 bytes, so that a block can be used in the buffer
it was read into.

Many small tables share a block (`encode_shared`): a table of twenty rows would otherwise pay for a
header, a message and a write of its own. Between header and message lies a directory that says
which rows are whose.

Rows are packed before they are serialised (`pack`), cheaply and without loss: an `old_value` column
without values and an `op` that is the same in all rows are left out, and a start_ts is stored as
its distance to the commit_ts where four bytes hold it.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sorter import order
from sorter.errors import BlockCorruptError
from storage.model.event import RAW_SCHEMA

MAGIC: Final = b"TMSB"
VERSION: Final = 3
ALIGNMENT: Final = 64

# Bits of the header's flags.
NEAR_START: Final = 1
ONE_OP: Final = 2
NO_OLD_VALUE: Final = 4
SHARED: Final = 8

# magic, version, flags, op, rows, crc32c, payload length, unique id, table id, min and max
# commit_ts, block number
_HEADER = struct.Struct("<4sBBBxIIQQqQQQ")
_CRC = struct.Struct("<I")
_CRC_OFFSET = 12
_CRC_END = _CRC_OFFSET + _CRC.size

_DIRECTORY_ENTRY = np.dtype(
    [("unique_id", "<u8"), ("table_id", "<i8"), ("first", "<u4"), ("rows", "<u4")]
)
_FAR: Final = 1 << 32


@dataclass(frozen=True, slots=True)
class BlockMeta:
    """The header of a block; `unique_id` is the incarnation of the table.

    The index has one for each table of a shared block, about that table's rows.
    """

    unique_id: int
    table_id: int
    number: int
    rows: int
    min_commit_ts: int
    max_commit_ts: int


@dataclass(frozen=True, slots=True)
class Share:
    """The unsorted rows of one table that go into a shared block, in the order of their arrival."""

    unique_id: int
    table_id: int
    batches: Sequence[pa.RecordBatch]


@dataclass(frozen=True, slots=True)
class SharedBlock:
    """A shared block that was read and verified."""

    number: int
    directory: Any
    batch: pa.RecordBatch

    def rows_of(self, meta: BlockMeta) -> pa.RecordBatch:
        """The sorted rows of the index entry with `meta`.

        Raises:
            BlockCorruptError: they are not there.
        """
        place = int(np.searchsorted(self.directory["unique_id"], np.uint64(meta.unique_id)))
        if place < len(self.directory) and meta.number == self.number:
            entry = self.directory[place]
            rows = self.batch.slice(int(entry["first"]), int(entry["rows"]))
            low, high = (int(order.commit_ts(rows)[row]) for row in (0, -1))
            # The search gives the nearest table, which may be another one; and an index that
            # points to the wrong block of the right table must be noticed, too.
            stored = BlockMeta(
                int(entry["unique_id"]),
                int(entry["table_id"]),
                self.number,
                rows.num_rows,
                low,
                high,
            )
            if stored == meta:
                return rows
        raise corrupt(
            meta, f"the index points to block {self.number}, which has no such rows of this table"
        )


def encode(meta: BlockMeta, batch: pa.RecordBatch) -> tuple[bytes, pa.Buffer]:
    """Header and payload of a block with the rows of one table."""
    return _encode(meta, batch, b"", 0)


def decode(meta: BlockMeta, data: pa.Buffer) -> pa.RecordBatch:
    """The rows of the one table of a block, once it is verified to be whole and the one that `meta`
    describes.

    Raises:
        BlockCorruptError: it is not.
    """
    verified = _verify(meta, data)
    if verified.meta != meta or verified.flags & SHARED:
        raise corrupt(
            meta,
            f"the index points to block {verified.meta.number} of table {verified.meta.table_id}",
        )
    return verified.rows(meta)


def is_shared(data: pa.Buffer) -> bool:
    """Whether a block's header says that several tables share it; verifies nothing."""
    return bool(data.size >= _HEADER.size and data[5] & SHARED)


def encode_shared(number: int, shares: Sequence[Share]) -> tuple[list[BlockMeta], bytes, pa.Buffer]:
    """The parts of a shared block: what the index stores of each table, header with directory, and
    payload; the unique ids must ascend.
    """
    counts = [sum(batch.num_rows for batch in share.batches) for share in shares]
    rows = _sort_each_table(
        pa.concat_batches([batch for share in shares for batch in share.batches]),
        np.asarray(counts),
    )
    timestamps = order.commit_ts(rows)
    entries, metas, first = np.zeros(len(shares), _DIRECTORY_ENTRY), [], 0
    for place, (share, count) in enumerate(zip(shares, counts, strict=True)):
        entries[place] = share.unique_id, share.table_id, first, count
        low, high = int(timestamps[first]), int(timestamps[first + count - 1])
        metas.append(BlockMeta(share.unique_id, share.table_id, number, count, low, high))
        first += count

    # In the header of a shared block the table id is the number of tables (docs/format/sorter.md).
    whole = BlockMeta(0, len(shares), number, first, int(timestamps.min()), int(timestamps.max()))
    directory = entries.tobytes()
    # The message must begin at a multiple of 64 bytes: Arrow reads its columns where they lie.
    padding = bytes(-len(directory) % ALIGNMENT)
    header, payload = _encode(whole, rows, directory + padding, SHARED)
    return metas, header, payload


def decode_shared(meta: BlockMeta, data: pa.Buffer) -> SharedBlock:
    """The shared block that an index entry with `meta` points to.

    Raises:
        BlockCorruptError: it is damaged, or not shared.
    """
    verified = _verify(meta, data)
    tables, room = verified.meta.table_id, verified.rest.size - verified.payload_bytes
    # `frombuffer` would read beyond the directory into the message, and take it for entries.
    if not verified.flags & SHARED or not 0 < tables * _DIRECTORY_ENTRY.itemsize <= room:
        raise corrupt(meta, "it has no directory of tables")
    directory = np.frombuffer(verified.rest, _DIRECTORY_ENTRY, tables)
    return SharedBlock(verified.meta.number, directory, verified.rows(meta))


def corrupt(meta: BlockMeta, reason: str) -> BlockCorruptError:
    """The error that names the block."""
    return BlockCorruptError(
        f"sorter block {meta.number} of table {meta.table_id}, commit_ts {meta.min_commit_ts} to "
        f"{meta.max_commit_ts}, is damaged: {reason}; check the disk, and let the table be pulled "
        "again from its checkpoint",
        meta.table_id,
        meta.min_commit_ts,
        meta.max_commit_ts,
    )


def pack(batch: pa.RecordBatch) -> tuple[int, int, pa.RecordBatch]:
    """(flags, the op of all rows or 0, the columns that remain to be stored) of one row or more."""
    columns, flags, op = list(batch.columns), 0, 0
    if columns[5].null_count == batch.num_rows:
        flags |= NO_OLD_VALUE
        del columns[5]

    ops = columns[2].to_numpy(zero_copy_only=True)
    if (ops == ops[0]).all():
        flags, op = flags | ONE_OP, int(ops[0])
        del columns[2]

    # In uint64, a start_ts above its commit_ts is far away: it wraps around, and the column stays.
    distance = order.commit_ts(batch) - order.start_ts(batch)
    if int(distance.max()) < _FAR:
        flags |= NEAR_START
        columns[1] = pa.array(distance.astype(np.uint32))
    return flags, op, pa.RecordBatch.from_arrays(columns, schema=stored_schema(flags))


def unpack(flags: int, op: int, stored: pa.RecordBatch) -> pa.RecordBatch:
    """The rows of RAW_SCHEMA that `pack` was given."""
    # In the reverse order of `pack`: each step finds the columns at the places it left them.
    columns, count = list(stored.columns), stored.num_rows
    if flags & NEAR_START:
        commit_ts, distance = (column.to_numpy(zero_copy_only=True) for column in columns[:2])
        columns[1] = pa.array(commit_ts - distance)
    if flags & ONE_OP:
        columns.insert(2, pa.array(np.full(count, op, np.uint8)))
    if flags & NO_OLD_VALUE:
        columns.append(pa.nulls(count, pa.binary()))
    return pa.RecordBatch.from_arrays(columns, schema=RAW_SCHEMA)


@cache
def stored_schema(flags: int) -> pa.Schema:
    """The columns that a block with these flags stores."""
    fields = list(RAW_SCHEMA)
    if flags & NO_OLD_VALUE:
        del fields[5]
    if flags & ONE_OP:
        del fields[2]
    if flags & NEAR_START:
        fields[1] = pa.field("start_ts", pa.uint32(), nullable=False)
    return pa.schema(fields)


@dataclass(frozen=True, slots=True)
class _Verified:
    """A block whose bytes are those that were written; `meta` is its header's."""

    meta: BlockMeta
    flags: int
    op: int
    # all that follows the header: the directory, if any, and the message
    rest: pa.Buffer
    payload_bytes: int

    def rows(self, meta: BlockMeta) -> pa.RecordBatch:
        """Its rows; errors name the block as `meta`, which the caller looked for."""
        stored, flags = self.rest.slice(self.rest.size - self.payload_bytes), self.flags & ~SHARED
        batch = unpack(flags, self.op, pa.ipc.read_record_batch(stored, stored_schema(flags)))
        # The crc32c holds for what was written, not for what it means: this finds a defect of ours.
        if batch.num_rows != self.meta.rows:
            raise corrupt(meta, f"it has {batch.num_rows} rows, the header says {self.meta.rows}")
        return batch


def _encode(
    meta: BlockMeta, batch: pa.RecordBatch, directory: bytes, more_flags: int
) -> tuple[bytes, pa.Buffer]:
    """Header with directory, and payload; the header's crc32c covers all of them."""
    flags, op, stored = pack(batch)
    payload = stored.serialize()
    header = bytearray(
        _HEADER.pack(
            MAGIC,
            VERSION,
            flags | more_flags,
            op,
            meta.rows,
            0,
            payload.size,
            meta.unique_id,
            meta.table_id,
            meta.min_commit_ts,
            meta.max_commit_ts,
            meta.number,
        )
    )
    crc = google_crc32c.extend(google_crc32c.value(bytes(header) + directory), payload)
    _CRC.pack_into(header, _CRC_OFFSET, crc)
    return bytes(header) + directory, payload


def _verify(meta: BlockMeta, data: pa.Buffer) -> _Verified:
    """Check length, version and crc32c of the block that the caller looks for as `meta`.

    Raises:
        BlockCorruptError: one of them is wrong.
    """
    if data.size < _HEADER.size:
        raise corrupt(meta, f"it has {data.size} bytes, the header alone needs {_HEADER.size}")
    header = data.slice(0, _HEADER.size).to_pybytes()
    magic, version, flags, op, rows, crc, size, unique_id, table_id, low, high, number = (
        _HEADER.unpack(header)
    )
    # Before the checksum: of another version's header, the fields that follow mean something else.
    if magic != MAGIC or version != VERSION:
        raise corrupt(
            meta, f"it starts with {header[:5]!r}, not with {MAGIC!r} and version {VERSION}"
        )
    if data.size < _HEADER.size + size:
        raise corrupt(meta, f"it ends after {data.size} of {_HEADER.size + size} bytes")

    # The crc32c was computed while its own field was zero.
    blank = header[:_CRC_OFFSET] + bytes(_CRC.size) + header[_CRC_END:]
    rest = data.slice(_HEADER.size)
    if google_crc32c.extend(google_crc32c.value(blank), rest) != crc:
        raise corrupt(meta, "its crc32c does not match")
    return _Verified(BlockMeta(unique_id, table_id, number, rows, low, high), flags, op, rest, size)


def _sort_each_table(rows: pa.RecordBatch, counts: Any) -> pa.RecordBatch:
    """Sort the rows of each table; copies of a row stay, in the order of their arrival."""
    table = np.repeat(np.arange(len(counts), dtype=np.uint32), counts)
    timestamps = order.commit_ts(rows)
    by_ts = np.lexsort((timestamps, table))
    sorted_table, sorted_ts = table[by_ts], timestamps[by_ts]
    same_table = sorted_table[1:] == sorted_table[:-1]
    if (same_table & (sorted_ts[1:] == sorted_ts[:-1])).any():
        # Some commit_ts came twice: sort by the whole key, which costs more.
        keyed = rows.add_column(0, "table", pa.array(table))
        by_ts = pc.sort_indices(
            keyed, sort_keys=[("table", "ascending"), *order.SORT_KEYS]
        ).to_numpy()
    return rows.take(pa.array(by_ts))
