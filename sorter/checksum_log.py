"""Checksums of the rows that a table was given, compared with those it hands out:
no row is lost in silence. Pure.

The log keeps one checksum for each bucket of about a second of commit_ts, and wider buckets when a
backlog grows long. A range that ends inside of a bucket splits it: the first part is what was read,
and the rest is what must follow. So a missing row is noticed at the latest when the end of its
bucket is read, whatever the ranges were, and a range that is read again must be as before.

A row's digest mixes its commit_ts, start_ts and op, the length and the last eight bytes of its key
(the handle, in TiDB's keys), and the lengths of its images; the bytes themselves are guarded by the
crc32c of each block. A checksum is the sum of digests modulo 2^64, so rows may come in any order
and in any batches.
"""

import bisect
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sorter.errors import RowsLostError

# 18 bits count within a millisecond, 10 more make about a second
BUCKET_SHIFT: Final = 28
_MOST_BUCKETS: Final = 64
_MOST_PARTS: Final = 64
_WIDTH: Final = 3  # numbers of a part
_FROZEN: Final = struct.Struct("<QQ")  # shift, start_ts

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
_HALF: Final = np.uint64(32)

Digests = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Checksum:
    """The number of rows, and the sum of their digests."""

    rows: int = 0
    digest: int = 0

    def __add__(self, other: "Checksum") -> "Checksum":
        return Checksum(self.rows + other.rows, (self.digest + other.digest) & _MASK)

    def __sub__(self, other: "Checksum") -> "Checksum":
        return Checksum(self.rows - other.rows, (self.digest - other.digest) & _MASK)


class ChecksumLog:
    """The checksums of one table; the caller serialises the calls.

    A bucket has one part, or several once ranges have ended inside of it. A part is three numbers,
    (last commit_ts, rows, digest), in one array: there may be as many logs as tables. `len` is the
    number of parts. Any thread may call it at any time: a log with rows has a part at every step of
    a change.
    """

    __slots__ = ("_parts", "_start_ts", "_table_id", "shift")

    def __init__(self, table_id: int, start_ts: int) -> None:
        """The log of a table that has no rows at or below `start_ts`."""
        self.shift = BUCKET_SHIFT
        self._table_id = table_id
        self._start_ts = start_ts
        self._parts = array("Q")

    def freeze(self) -> bytes:
        """The whole state in few bytes."""
        return _FROZEN.pack(self.shift, self._start_ts) + self._parts.tobytes()

    @classmethod
    def thaw(cls, table_id: int, frozen: bytes) -> "ChecksumLog":
        """The log that `freeze` was called for."""
        shift, start_ts = _FROZEN.unpack_from(frozen)
        log = cls(table_id, start_ts)
        log.shift = shift
        log._parts.frombytes(frozen[_FROZEN.size :])
        return log

    def __len__(self) -> int:
        return len(self._parts) // _WIDTH

    def add(self, batch: pa.RecordBatch) -> None:
        """Add rows; all of them are above everything that was read."""
        for bucket, checksum in by_bucket(batch, self.shift).items():
            self._add(bucket, checksum)
        # Parts within one bucket become no fewer by widening, so buckets are counted. One look at
        # the number of parts, which is never less, spares most calls the count.
        while len(self) > _MOST_BUCKETS and self._buckets() > _MOST_BUCKETS:
            self._widen()

    def remove(self, batch: pa.RecordBatch) -> None:
        """Take out rows that were added twice and are kept once; none of them was read yet."""
        for bucket, checksum in by_bucket(batch, self.shift).items():
            last = self._after(self._last_ts(bucket)) - 1
            assert last >= 0, "rows are added before they are found to have come twice"
            self._put(last, self._end(last), self._sum(last) - checksum)

    def check(
        self, lower_ts: int, upper_ts: int, read: Mapping[int, Checksum], shift: int = BUCKET_SHIFT
    ) -> None:
        """Compare the sums of rows read with commit_ts in `[lower_ts, upper_ts]`, as of
        `by_bucket`, with those of the rows added.

        `shift` is that of the log when the read began. A bucket that the range enters in the
        middle, where no range has ended before, cannot be checked.

        Raises:
            RowsLostError: rows are missing, or there are too many.
        """
        read = _widen(read, self.shift - shift)
        low = self._after(((lower_ts >> self.shift) << self.shift) - 1)
        high = self._after(self._last_ts(upper_ts >> self.shift))
        for bucket in sorted(
            {*(self._end(part) >> self.shift for part in range(low, high)), *read}
        ):
            self._check_bucket(bucket, lower_ts, upper_ts, read.get(bucket, Checksum()))

    def drop_up_to(self, commit_ts: int) -> None:
        """Drop what lies at or below `commit_ts`, which is never read again."""
        count = self._after(commit_ts)
        if count == len(self):
            del self._parts[:]
        elif count:
            cut_ts = self._end(count - 1)
            # Inside of a bucket: of what remains of it, the sum begins above `cut_ts`, and not at
            # the bucket's begin.
            if self._end(count) >> self.shift == cut_ts >> self.shift:
                self._start_ts = cut_ts
            del self._parts[: _WIDTH * count]

    def _buckets(self) -> int:
        return len({self._end(part) >> self.shift for part in range(len(self))})

    def _add(self, bucket: int, checksum: Checksum) -> None:
        # New rows are above everything that was read, so they belong to the bucket's last part.
        last_ts = self._last_ts(bucket)
        after = self._after(last_ts)
        if after and self._end(after - 1) == last_ts:
            self._put(after - 1, last_ts, self._sum(after - 1) + checksum)
        else:
            self._parts[_WIDTH * after : _WIDTH * after] = array(
                "Q", (last_ts, checksum.rows, checksum.digest)
            )

    def _widen(self) -> None:
        """Double the width of all buckets; the end of a range exactly between two of them is
        lost.
        """
        parts = [(self._end(part), self._sum(part)) for part in range(len(self))]
        # Ends of buckets are no ends of ranges: those that are inside of a wider bucket join their
        # neighbour, the ends of ranges stay.
        borders = {end for end, _ in parts if end == self._last_ts(end >> self.shift)}
        self.shift += 1
        wide, carried = array("Q"), Checksum()
        for (end, checksum), (following, _) in zip(parts, [*parts[1:], (-1, None)], strict=True):
            carried += checksum
            bucket = end >> self.shift
            is_last = following >> self.shift != bucket
            if end in borders and not is_last:
                continue
            wide.extend((self._last_ts(bucket) if is_last else end, carried.rows, carried.digest))
            carried = Checksum()
        self._parts = wide

    def _after(self, ts: int) -> int:
        """The number of the first part that ends above `ts`."""
        return bisect.bisect_right(range(len(self)), ts, key=self._end)

    def _end(self, part: int) -> int:
        return self._parts[_WIDTH * part]

    def _sum(self, part: int) -> Checksum:
        return Checksum(*self._parts[_WIDTH * part + 1 : _WIDTH * part + _WIDTH])

    def _put(self, part: int, end: int, checksum: Checksum) -> None:
        self._parts[_WIDTH * part : _WIDTH * (part + 1)] = array(
            "Q", (end, checksum.rows, checksum.digest)
        )

    def _last_ts(self, bucket: int) -> int:
        return ((bucket + 1) << self.shift) - 1

    def _check_bucket(self, bucket: int, lower_ts: int, upper_ts: int, read: Checksum) -> None:
        low, high = self._after((bucket << self.shift) - 1), self._after(self._last_ts(bucket))
        ends = [(bucket << self.shift) - 1, *map(self._end, range(low, high))]
        sums = [*map(self._sum, range(low, high))]
        if low == high:  # nothing was added
            ends.append(self._last_ts(bucket))
            sums.append(Checksum())
        # There are no rows at or below `_start_ts`: a range from there begins with the bucket.
        after = ends[0] if lower_ts - 1 <= self._start_ts else max(lower_ts - 1, ends[0])
        first = bisect.bisect_left(ends, after)
        # The range begins where no sum does: how many rows it should have is not known.
        if ends[first] != after:
            return
        upto = min(upper_ts, ends[-1])
        whole = bisect.bisect_right(ends, upto) - 1
        rest = read  # without the parts that lie wholly inside of the range
        for checksum in sums[first:whole]:
            rest -= checksum
        if ends[whole] == upto:
            if rest != Checksum():
                raise self._lost(after + 1, upto, read - rest, read)
            return
        # The range ends inside of a part: what was read of it is believed, as far as it can be.
        # The rest of the part must then add up when it is read.
        if rest.rows < 0 or rest.rows > sums[whole].rows:
            raise self._lost(after + 1, ends[whole + 1], read - rest + sums[whole], read)
        if low < high:
            self._split(low + whole, upto, rest)
            # A reader that takes tiny ranges would make the log as long as the table: the two
            # oldest parts of the bucket become one.
            if high - low >= _MOST_PARTS:
                one, end = self._sum(low), self._end(low + 1)
                self._put(low + 1, end, one + self._sum(low + 1))
                del self._parts[_WIDTH * low : _WIDTH * (low + 1)]

    def _split(self, part: int, upto: int, read: Checksum) -> None:
        """Make a part of its own of the rows up to `upto`, of which `read` came out."""
        self._put(part, self._end(part), self._sum(part) - read)
        at = _WIDTH * part
        self._parts[at:at] = array("Q", (upto, read.rows, read.digest))

    def _lost(
        self, lower_ts: int, upper_ts: int, expected: Checksum, read: Checksum
    ) -> RowsLostError:
        first_ts = max(lower_ts, self._start_ts + 1)
        return RowsLostError(
            f"table {self._table_id}, commit_ts {first_ts} to {upper_ts}: {expected.rows} rows "
            f"were added (checksum {expected.digest:016x}), {read.rows} came out (checksum "
            f"{read.digest:016x}); this is a defect of the sorter or its disk: let the table be "
            "pulled again from its checkpoint",
            self._table_id,
            first_ts,
            upper_ts,
        )


def by_bucket(batch: pa.RecordBatch, shift: int) -> dict[int, Checksum]:
    """The checksums of a batch's rows by `commit_ts >> shift`."""
    if not batch.num_rows:
        return {}
    buckets = batch.column(0).to_numpy(zero_copy_only=True) >> np.uint64(shift)
    digests = _digests(batch)
    first = buckets[0]
    # Most batches are of one second: then there is nothing to sort.
    if (buckets == first).all():
        return {int(first): Checksum(len(digests), int(digests.sum()))}
    order = np.argsort(buckets, kind="stable")
    numbers, starts, counts = np.unique(buckets[order], return_index=True, return_counts=True)
    sums = np.add.reduceat(digests[order], starts)
    return {
        int(bucket): Checksum(int(count), int(total))
        for bucket, count, total in zip(numbers, counts, sums, strict=True)
    }


def _widen(sums: Mapping[int, Checksum], shift: int) -> Mapping[int, Checksum]:
    """Sums of buckets 2^`shift` times as wide."""
    if not shift:
        return sums
    wide: dict[int, Checksum] = {}
    for bucket, checksum in sums.items():
        wide[bucket >> shift] = wide.get(bucket >> shift, Checksum()) + checksum
    return wide


def _digests(batch: pa.RecordBatch) -> Digests:
    commit_ts, start_ts, op = (
        batch.column(column).to_numpy(zero_copy_only=True) for column in range(3)
    )
    key_offsets = _offsets(batch.column(3))
    key_lengths = _lengths(batch.column(3), key_offsets)
    value, old_value = (_lengths(column, _offsets(column)) for column in batch.columns[4:6])
    # Each column is multiplied and folded before the next one comes in: were they only added, rows
    # that exchange the values of two columns would have the same sum.
    mixed: Digests = commit_ts * _MULTIPLIERS[0]
    mixed ^= (start_ts + _MULTIPLIERS[1]) * _MULTIPLIERS[2]
    mixed ^= mixed >> _HALF
    mixed += _tails(batch.column(3), key_offsets, key_lengths) * _MULTIPLIERS[3]
    mixed ^= mixed >> _HALF
    mixed += (key_lengths << np.uint64(2) | op) * _MULTIPLIERS[4]
    mixed += (value << _HALF | old_value) * _MULTIPLIERS[5]
    mixed *= _MULTIPLIERS[0]
    mixed ^= mixed >> _HALF
    return mixed


def _lengths(column: pa.Array, offsets: Any) -> Digests:
    if offsets is None or column.null_count == len(column):
        return np.zeros(len(column), np.uint64)
    lengths: Digests = (offsets[1:] - offsets[:-1]).astype(np.uint64)
    # a null may have any bytes under it, and others in a copy
    if column.null_count:
        lengths *= column.is_valid().to_numpy(zero_copy_only=False)
    return lengths


def _tails(column: pa.Array, offsets: Any, lengths: Digests) -> Digests:
    """The last eight bytes of each value as a number, of shorter ones all there are."""
    data = column.buffers()[2]
    if offsets is None or data is None:
        return np.zeros(len(column), np.uint64)
    octets, ends = np.frombuffer(data, np.uint8), offsets[1:]
    if len(octets) >= _TAIL_BYTES and (lengths >= _TAIL_BYTES).all():
        # A view of the bytes as overlapping words, one at each byte: one gather reads all tails.
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
    # A slice shares its parent's buffers, and begins at `offset` in them.
    return np.frombuffer(buffer, np.int32)[column.offset : column.offset + len(column) + 1]
