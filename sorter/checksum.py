"""Order-independent checksums of row changes: rows lost, doubled or changed on the way make two sums differ. Pure.

A row's digest mixes its commit_ts, start_ts and op, the length and the last eight bytes of its key (the handle, in
TiDB's keys), and the lengths of its images; the bytes themselves are guarded by the crc32c of each block. Sums are
modulo 2^64, so rows may be taken in any order and in any batches.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_MASK: Final = (1 << 64) - 1
_TAIL_BYTES: Final = 8
_MULTIPLIERS: Final = tuple(
    np.uint64(number)
    for number in (
        0x9E3779B97F4A7C15,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0xD6E8FEB86659FD93,
        0xBF58476D1CE4E5B9,
        0x94D049BB133111EB,
    )
)
_SHIFT: Final = np.uint64(32)

Digests = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Checksum:
    """How many rows, and the sum of their digests."""

    rows: int = 0
    digest: int = 0

    def __add__(self, other: "Checksum") -> "Checksum":
        return Checksum(self.rows + other.rows, (self.digest + other.digest) & _MASK)

    def __sub__(self, other: "Checksum") -> "Checksum":
        return Checksum(self.rows - other.rows, (self.digest - other.digest) & _MASK)


def by_bucket(batch: pa.RecordBatch, shift: int) -> dict[int, Checksum]:
    """The checksums of a batch's rows by `commit_ts >> shift`."""
    if not batch.num_rows:
        return {}
    buckets = batch.column(0).to_numpy(zero_copy_only=True) >> np.uint64(shift)
    digests = _digests(batch)
    first = buckets[0]
    if (buckets == first).all():
        return {int(first): Checksum(len(digests), int(digests.sum()))}
    order = np.argsort(buckets, kind="stable")
    found, starts, counts = np.unique(buckets[order], return_index=True, return_counts=True)
    sums = np.add.reduceat(digests[order], starts)
    return {
        int(bucket): Checksum(int(count), int(total)) for bucket, count, total in zip(found, counts, sums, strict=True)
    }


def _digests(batch: pa.RecordBatch) -> Digests:
    commit_ts, start_ts, op = (batch.column(column).to_numpy(zero_copy_only=True) for column in range(3))
    key_offsets = _offsets(batch.column(3))
    key_lengths = _lengths(batch.column(3), key_offsets)
    value, old_value = (_lengths(column, _offsets(column)) for column in batch.columns[4:6])
    mixed: Digests = commit_ts * _MULTIPLIERS[0]
    mixed ^= (start_ts + _MULTIPLIERS[1]) * _MULTIPLIERS[2]
    mixed ^= mixed >> _SHIFT
    mixed += _tails(batch.column(3), key_offsets, key_lengths) * _MULTIPLIERS[3]
    mixed ^= mixed >> _SHIFT
    mixed += (key_lengths << np.uint64(2) | op) * _MULTIPLIERS[4]
    mixed += (value << _SHIFT | old_value) * _MULTIPLIERS[5]
    mixed *= _MULTIPLIERS[0]
    mixed ^= mixed >> _SHIFT
    return mixed


def _lengths(column: pa.Array, offsets: Any) -> Digests:
    if offsets is None or column.null_count == len(column):
        return np.zeros(len(column), np.uint64)
    lengths: Digests = (offsets[1:] - offsets[:-1]).astype(np.uint64)
    if column.null_count:  # what lies under a null is nobody's, and need not survive a copy
        lengths *= column.is_valid().to_numpy(zero_copy_only=False)
    return lengths


def _tails(column: pa.Array, offsets: Any, lengths: Digests) -> Digests:
    """The last eight bytes of each value as a number, of shorter ones all there are."""
    data = column.buffers()[2]
    if offsets is None or data is None:
        return np.zeros(len(column), np.uint64)
    octets, ends = np.frombuffer(data, np.uint8), offsets[1:]
    if len(octets) >= _TAIL_BYTES and (lengths >= _TAIL_BYTES).all():
        words = np.ndarray((len(octets) - _TAIL_BYTES + 1,), "<u8", octets, strides=(1,))
        return np.asarray(words[ends - _TAIL_BYTES], np.uint64)
    tails = np.zeros(len(column), np.uint64)
    for back in range(_TAIL_BYTES):
        long_enough = np.flatnonzero(lengths > back)
        octet = octets[ends[long_enough] - 1 - back].astype(np.uint64)
        tails[long_enough] |= octet << np.uint64(8 * (_TAIL_BYTES - 1 - back))
    return tails


def _offsets(column: pa.Array) -> Any:
    buffer = column.buffers()[1]
    if buffer is None:
        return None
    return np.frombuffer(buffer, np.int32)[column.offset : column.offset + len(column) + 1]
