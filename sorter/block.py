"""The sorted block: a checked header of 64 bytes and one Arrow IPC message. Pure; docs/format/sorter.md.

Blocks are aligned to 64 bytes, so that a mapped block is used where it lies.
"""

import struct
from dataclasses import dataclass
from typing import Final

import google_crc32c
import pyarrow as pa

from sorter import packing
from sorter.errors import BlockCorruptError

MAGIC: Final = b"TMSB"
VERSION: Final = 2
ALIGNMENT: Final = 64

# magic, version, flags, op, rows, crc32c, payload length, unique id, table id, min and max commit_ts, block number
_HEADER = struct.Struct("<4sBBBxIIQQqQQQ")
_CRC = struct.Struct("<I")
_CRC_OFFSET = 12
_CRC_END = _CRC_OFFSET + _CRC.size


@dataclass(frozen=True, slots=True)
class BlockMeta:
    """What the header of a block says; the unique id is the incarnation of the table."""

    unique_id: int
    table_id: int
    number: int
    rows: int
    min_commit_ts: int
    max_commit_ts: int


def encode(meta: BlockMeta, batch: pa.RecordBatch) -> tuple[bytes, pa.Buffer]:
    """Header and payload of a block; the header's crc32c covers both."""
    flags, op, stored = packing.pack(batch)
    payload = stored.serialize()
    header = bytearray(
        _HEADER.pack(
            MAGIC,
            VERSION,
            flags,
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
    _CRC.pack_into(header, _CRC_OFFSET, google_crc32c.extend(google_crc32c.value(bytes(header)), payload))
    return bytes(header), payload


def decode(meta: BlockMeta, block: pa.Buffer) -> pa.RecordBatch:
    """The rows of a block, after checking that it is whole and the one that was asked for.

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
    payload = block.slice(_HEADER.size, size)
    blank = header[:_CRC_OFFSET] + bytes(_CRC.size) + header[_CRC_END:]
    if google_crc32c.extend(google_crc32c.value(blank), payload) != crc:
        raise corrupt(meta, "its crc32c does not match")
    if BlockMeta(unique_id, table_id, number, rows, low, high) != meta:
        raise corrupt(meta, f"the index points to block {number} of table {table_id}")
    batch = packing.unpack(flags, op, pa.ipc.read_record_batch(payload, packing.schema(flags)))
    if batch.num_rows != rows:
        raise corrupt(meta, f"it has {batch.num_rows} rows, the header says {rows}")
    return batch


def corrupt(meta: BlockMeta, reason: str) -> BlockCorruptError:
    """The error that names the block."""
    return BlockCorruptError(
        f"sorter block {meta.number} of table {meta.table_id}, commit_ts {meta.min_commit_ts} to {meta.max_commit_ts}, "
        f"is damaged: {reason}; check the disk, and let the table be pulled again from its checkpoint",
        meta.table_id,
        meta.min_commit_ts,
        meta.max_commit_ts,
    )
