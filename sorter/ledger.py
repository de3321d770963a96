"""What a table was given, against which what it hands out is checked: no row is lost in silence. Pure.

The ledger keeps a checksum for each bucket of about a second of commit_ts, wider ones when a backlog grows long. A
range that ends inside of a bucket splits it: the part that was read is booked as read, and what must follow is the
rest. So a row that is missing is noticed at the latest when the end of its bucket is read, whatever the ranges were,
and a range read again must be as before.
"""

import bisect
import struct
from array import array
from collections.abc import Mapping
from typing import Final

import pyarrow as pa

from sorter.checksum import Checksum, by_bucket
from sorter.errors import RowsLostError

BUCKET_SHIFT: Final = 28  # 18 bits count within a millisecond, 10 more make about a second
_MOST_BUCKETS: Final = 64
_MOST_PARTS: Final = 64
_WIDTH: Final = 3
_FROZEN: Final = struct.Struct("<QQ")


class Ledger:
    """The sums of one table; the caller serialises the calls.

    Each part of a bucket is three numbers, (last commit_ts, rows, digest), ascending: there may be as many ledgers as
    tables. Whether there is any, `len`, may be asked at any time: it is never 0 in between.
    """

    __slots__ = ("_parts", "_start_ts", "_table_id", "shift")

    def __init__(self, table_id: int, start_ts: int) -> None:
        """Begin a table that has no rows at or below `start_ts`."""
        self.shift = BUCKET_SHIFT
        self._table_id = table_id
        self._start_ts = start_ts
        self._parts = array("Q")

    def freeze(self) -> bytes:
        """All it knows, in few bytes."""
        return _FROZEN.pack(self.shift, self._start_ts) + self._parts.tobytes()

    @classmethod
    def thaw(cls, table_id: int, frozen: bytes) -> "Ledger":
        """The ledger that `freeze` was called for."""
        shift, start_ts = _FROZEN.unpack_from(frozen)
        ledger = cls(table_id, start_ts)
        ledger.shift = shift
        ledger._parts.frombytes(frozen[_FROZEN.size :])
        return ledger

    def __len__(self) -> int:
        return len(self._parts) // _WIDTH

    def add(self, batch: pa.RecordBatch) -> None:
        """Book rows above everything that was read."""
        for bucket, checksum in by_bucket(batch, self.shift).items():
            self._add(bucket, checksum)
        while len(self) > _MOST_BUCKETS and len({self._end(part) >> self.shift for part in range(len(self))}) > (
            _MOST_BUCKETS
        ):
            self._widen()

    def drop(self, batch: pa.RecordBatch) -> None:
        """Book that these rows came twice and are kept once; none of them was read yet."""
        for bucket, checksum in by_bucket(batch, self.shift).items():
            last = self._after(self._last_ts(bucket)) - 1
            assert last >= 0, "rows are booked before they are found to have come twice"
            self._put(last, self._end(last), self._sum(last) - checksum)

    def check(self, lower_ts: int, upper_ts: int, found: Mapping[int, Checksum], shift: int = BUCKET_SHIFT) -> None:
        """Compare the rows with commit_ts in `[lower_ts, upper_ts]` that were read, as `by_bucket` sums them.

        `shift` is the ledger's of the time when the reading began. A bucket that is entered in the middle, where no
        range has ended before, cannot be checked.

        Raises:
            RowsLostError: rows are missing, or there are too many.
        """
        found = _widened(found, self.shift - shift)
        low = self._after(((lower_ts >> self.shift) << self.shift) - 1)
        high = self._after(self._last_ts(upper_ts >> self.shift))
        for bucket in sorted({*(self._end(part) >> self.shift for part in range(low, high)), *found}):
            self._check_bucket(bucket, lower_ts, upper_ts, found.get(bucket, Checksum()))

    def forget(self, commit_ts: int) -> None:
        """Drop what lies at or below `commit_ts`: nobody reads it any more."""
        count = self._after(commit_ts)
        if count == len(self):
            del self._parts[:]
        elif count:
            cut_ts = self._end(count - 1)
            if self._end(count) >> self.shift == cut_ts >> self.shift:  # inside of a bucket
                self._start_ts = cut_ts
            del self._parts[: _WIDTH * count]

    def _add(self, bucket: int, checksum: Checksum) -> None:
        last_ts = self._last_ts(bucket)
        after = self._after(last_ts)
        if after and self._end(after - 1) == last_ts:
            self._put(after - 1, last_ts, self._sum(after - 1) + checksum)
        else:
            self._parts[_WIDTH * after : _WIDTH * after] = array("Q", (last_ts, checksum.rows, checksum.digest))

    def _widen(self) -> None:
        """Make one bucket out of two. A range that has ended between them, and nowhere else, is not known any more."""
        parts = [(self._end(part), self._sum(part)) for part in range(len(self))]
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
        self._parts[_WIDTH * part : _WIDTH * (part + 1)] = array("Q", (end, checksum.rows, checksum.digest))

    def _last_ts(self, bucket: int) -> int:
        return ((bucket + 1) << self.shift) - 1

    def _check_bucket(self, bucket: int, lower_ts: int, upper_ts: int, found: Checksum) -> None:
        low, high = self._after((bucket << self.shift) - 1), self._after(self._last_ts(bucket))
        ends = [(bucket << self.shift) - 1, *map(self._end, range(low, high))]
        sums = [*map(self._sum, range(low, high))]
        if low == high:  # nothing was added
            ends.append(self._last_ts(bucket))
            sums.append(Checksum())
        after = ends[0] if lower_ts - 1 <= self._start_ts else max(lower_ts - 1, ends[0])
        first = bisect.bisect_left(ends, after)
        if ends[first] != after:
            return
        upto = min(upper_ts, ends[-1])
        whole = bisect.bisect_right(ends, upto) - 1
        rest = found
        for checksum in sums[first:whole]:
            rest -= checksum
        if ends[whole] == upto:
            if rest != Checksum():
                raise self._lost(after + 1, upto, found - rest, found)
            return
        if rest.rows < 0 or rest.rows > sums[whole].rows:
            raise self._lost(after + 1, ends[whole + 1], found - rest + sums[whole], found)
        if low < high:
            self._split(low + whole, upto, rest)
            if high - low >= _MOST_PARTS:
                one, end = self._sum(low), self._end(low + 1)
                self._put(low + 1, end, one + self._sum(low + 1))
                del self._parts[_WIDTH * low : _WIDTH * (low + 1)]

    def _split(self, part: int, upto: int, read: Checksum) -> None:
        """The rows of a part up to `upto` are `read`, and one of their own."""
        self._put(part, self._end(part), self._sum(part) - read)
        at = _WIDTH * part
        self._parts[at:at] = array("Q", (upto, read.rows, read.digest))

    def _lost(self, lower_ts: int, upper_ts: int, expected: Checksum, found: Checksum) -> RowsLostError:
        first_ts = max(lower_ts, self._start_ts + 1)
        return RowsLostError(
            f"table {self._table_id}, commit_ts {first_ts} to {upper_ts}: {expected.rows} rows were added "
            f"(checksum {expected.digest:016x}), {found.rows} came out (checksum {found.digest:016x}); this is a "
            "defect of the sorter or its disk: let the table be pulled again from its checkpoint",
            self._table_id,
            first_ts,
            upper_ts,
        )


def _widened(sums: Mapping[int, Checksum], shift: int) -> Mapping[int, Checksum]:
    if not shift:
        return sums
    wide: dict[int, Checksum] = {}
    for bucket, checksum in sums.items():
        wide[bucket >> shift] = wide.get(bucket >> shift, Checksum()) + checksum
    return wide
