"""The sorted block: a checked header of 64 bytes and one Arrow IPC message. Pure; docs/format/sorter.md.

Everything before the message fills multiples of 64 bytes, so that a block is used where it was read to. Rows of many
small tables share a block, which has a directory of them between header and message: `sorter/shared_block.py`.
"""

import struct
from dataclasses import dataclass
from typing import Final

import google_crc32c
import pyarrow as pa

from sorter import packing
from sorter.errors import BlockCorruptError

MAGIC: Final = b"TMSB"
VERSION: Final = 3
ALIGNMENT: Final = 64
SHARED: Final = 8  # a flag beside those of packing

# magic, version, flags, op, rows, crc32c, payload length, unique id, table id, min and max commit_ts, block number
_HEADER = struct.Struct("<4sBBBxIIQQqQQQ")
_CRC = struct.Struct("<I")
_CRC_OFFSET = 12
_CRC_END = _CRC_OFFSET + _CRC.size


@dataclass(frozen=True, slots=True)
class BlockMeta:
    """What the header of a block says; the unique id is the incarnation of the table.

    Of a shared block the index has one for each table, about that table's rows.
    """

    unique_id: int
    table_id: int
    number: int
    rows: int
    min_commit_ts: int
    max_commit_ts: int


@dataclass(frozen=True, slots=True)
class Opened:
    """A block whose bytes are those that were written; `meta` is its header's."""

    meta: BlockMeta
    flags: int
    op: int
    rest: pa.Buffer  # what lies between header and message, and the message
    payload_bytes: int

    def rows(self, meta: BlockMeta) -> pa.RecordBatch:
        """Its rows; `meta` is what the caller asked for."""
        stored, flags = self.rest.slice(self.rest.size - self.payload_bytes), self.flags & ~SHARED
        batch = packing.unpack(flags, self.op, pa.ipc.read_record_batch(stored, packing.schema(flags)))
        if batch.num_rows != self.meta.rows:
            raise corrupt(meta, f"it has {batch.num_rows} rows, the header says {self.meta.rows}")
        return batch


def encode(
    meta: BlockMeta, batch: pa.RecordBatch, directory: bytes = b"", more_flags: int = 0
) -> tuple[bytes, pa.Buffer]:
    """Header (with `directory` behind it) and payload of a block; the header's crc32c covers all of them."""
    flags, op, stored = packing.pack(batch)
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
    _CRC.pack_into(header, _CRC_OFFSET, google_crc32c.extend(google_crc32c.value(bytes(header) + directory), payload))
    return bytes(header) + directory, payload


def decode(meta: BlockMeta, block: pa.Buffer) -> pa.RecordBatch:
    """The rows of a block, after checking that it is whole and the one that was asked for.

    Raises:
        BlockCorruptError: it is not.
    """
    opened = open_block(meta, block)
    if opened.meta != meta or opened.flags & SHARED:
        raise corrupt(meta, f"the index points to block {opened.meta.number} of table {opened.meta.table_id}")
    return opened.rows(meta)


def is_shared(block: pa.Buffer) -> bool:
    """Whether it says that it has a directory; nothing is checked."""
    return bool(block.size >= _HEADER.size and block[5] & SHARED)


def open_block(meta: BlockMeta, block: pa.Buffer) -> Opened:
    """Check that a block is whole; `meta` is what the caller asks for.

    Raises:
        BlockCorruptError: it is not.
    """
    if block.size < _HEADER.size:
        raise corrupt(meta, f"it has {block.size} bytes, the header alone needs {_HEADER.size}")
    header = block.slice(0, _HEADER.size).to_pybytes()
    magic, version, flags, op, rows, crc, size, unique_id, table_id, low, high, number = _HEADER.unpack(header)
    if magic != MAGIC or version != VERSION:
        raise corrupt(meta, f"it starts with {header[:5]!r}, not with {MAGIC!r} and version {VERSION}")
    if block.size < _HEADER.size + size:
        raise corrupt(meta, f"it ends after {block.size} of {_HEADER.size + size} bytes")
    blank = header[:_CRC_OFFSET] + bytes(_CRC.size) + header[_CRC_END:]
    rest = block.slice(_HEADER.size)
    if google_crc32c.extend(google_crc32c.value(blank), rest) != crc:
        raise corrupt(meta, "its crc32c does not match")
    return Opened(BlockMeta(unique_id, table_id, number, rows, low, high), flags, op, rest, size)


def corrupt(meta: BlockMeta, reason: str) -> BlockCorruptError:
    """The error that names the block."""
    return BlockCorruptError(
        f"sorter block {meta.number} of table {meta.table_id}, commit_ts {meta.min_commit_ts} to {meta.max_commit_ts}, "
        f"is damaged: {reason}; check the disk, and let the table be pulled again from its checkpoint",
        meta.table_id,
        meta.min_commit_ts,
        meta.max_commit_ts,
    )
