"""What a table was given, against which what it hands out is checked: no row is lost in silence. Pure.

The ledger keeps a checksum for each bucket of about a second of commit_ts, wider ones when a backlog grows long. A
range that ends inside of a bucket splits it: the part that was read is booked as read, and what must follow is the
rest. So a row that is missing is noticed at the latest when the end of its bucket is read, whatever the ranges were,
and a range read again must be as before.
"""

import bisect
from collections.abc import Mapping
from typing import Final

import pyarrow as pa

from sorter.checksum import Checksum, by_bucket
from sorter.errors import RowsLostError

BUCKET_SHIFT: Final = 28  # 18 bits count within a millisecond, 10 more make about a second
_MOST_BUCKETS: Final = 64
_MOST_PARTS: Final = 64


class Ledger:
    """The sums of one table; the caller serialises the calls."""

    __slots__ = ("_buckets", "_parts", "_start_ts", "_table_id", "shift")

    def __init__(self, table_id: int, start_ts: int) -> None:
        """Begin a table that has no rows at or below `start_ts`."""
        self.shift = BUCKET_SHIFT
        self._table_id = table_id
        self._start_ts = start_ts
        self._buckets: list[int] = []  # ascending
        self._parts: list[list[tuple[int, Checksum]]] = []  # of each bucket: (last commit_ts, sum), ascending

    def __len__(self) -> int:
        return len(self._buckets)

    def add(self, batch: pa.RecordBatch) -> None:
        """Book rows above everything that was read."""
        for bucket, checksum in by_bucket(batch, self.shift).items():
            parts = self._of(bucket)
            if parts is None:
                at = bisect.bisect_left(self._buckets, bucket)
                self._buckets.insert(at, bucket)
                self._parts.insert(at, [(self._last_ts(bucket), checksum)])
            else:
                last_ts, before = parts[-1]
                parts[-1] = (last_ts, before + checksum)
        while len(self._buckets) > _MOST_BUCKETS:
            self._widen()

    def drop(self, before: pa.RecordBatch, after: pa.RecordBatch) -> None:
        """Book that rows which came twice are kept once; none of them was read yet."""
        kept = by_bucket(after, self.shift)
        for bucket, checksum in by_bucket(before, self.shift).items():
            parts = self._of(bucket)
            assert parts is not None, "rows are booked before they are found to have come twice"
            last_ts, held = parts[-1]
            parts[-1] = (last_ts, held - checksum + kept.get(bucket, Checksum()))

    def check(self, lower_ts: int, upper_ts: int, found: Mapping[int, Checksum], shift: int = BUCKET_SHIFT) -> None:
        """Compare the rows with commit_ts in `[lower_ts, upper_ts]` that were read, as `by_bucket` sums them.

        `shift` is the ledger's of the time when the reading began. A bucket that is entered in the middle, where no
        range has ended before, cannot be checked.

        Raises:
            RowsLostError: rows are missing, or there are too many.
        """
        found = _widened(found, self.shift - shift)
        first, last = lower_ts >> self.shift, upper_ts >> self.shift
        low, high = bisect.bisect_left(self._buckets, first), bisect.bisect_right(self._buckets, last)
        for bucket in sorted({*self._buckets[low:high], *found}):
            self._check_bucket(bucket, lower_ts, upper_ts, found.get(bucket, Checksum()))

    def forget(self, commit_ts: int) -> None:
        """Drop what lies at or below `commit_ts`: nobody reads it any more."""
        count = bisect.bisect_left(self._buckets, (commit_ts + 1) >> self.shift)
        del self._buckets[:count], self._parts[:count]
        if self._buckets:
            parts = self._parts[0]
            while parts[0][0] <= commit_ts:
                self._start_ts = parts.pop(0)[0]

    def _widen(self) -> None:
        """Make one bucket out of two. A range that has ended between them, and nowhere else, is not known any more."""
        self.shift += 1
        joined: dict[int, list[tuple[int, Checksum]]] = {}
        for bucket, parts in zip(self._buckets, self._parts, strict=True):
            wide = joined.setdefault(bucket >> 1, [])
            if wide:
                _, before = wide.pop()
                parts[0] = (parts[0][0], before + parts[0][1])
            wide += parts
            wide[-1] = (self._last_ts(bucket >> 1), wide[-1][1])
        self._buckets, self._parts = list(joined), list(joined.values())

    def _of(self, bucket: int) -> list[tuple[int, Checksum]] | None:
        at = bisect.bisect_left(self._buckets, bucket)
        return self._parts[at] if at < len(self._buckets) and self._buckets[at] == bucket else None

    def _last_ts(self, bucket: int) -> int:
        return ((bucket + 1) << self.shift) - 1

    def _check_bucket(self, bucket: int, lower_ts: int, upper_ts: int, found: Checksum) -> None:
        parts = self._of(bucket) or [(self._last_ts(bucket), Checksum())]
        ends = [(bucket << self.shift) - 1, *(end for end, _ in parts)]
        after = ends[0] if lower_ts - 1 <= self._start_ts else max(lower_ts - 1, ends[0])
        first = bisect.bisect_left(ends, after)
        if ends[first] != after:
            return
        upto = min(upper_ts, ends[-1])
        whole = bisect.bisect_right(ends, upto) - 1
        rest = found
        for _, checksum in parts[first:whole]:
            rest -= checksum
        if ends[whole] == upto:
            if rest != Checksum():
                raise self._lost(after + 1, upto, found - rest, found)
            return
        end, checksum = parts[whole]
        if rest.rows < 0 or rest.rows > checksum.rows:
            raise self._lost(after + 1, end, found - rest + checksum, found)
        parts[whole : whole + 1] = [(upto, rest), (end, checksum - rest)]
        if len(parts) > _MOST_PARTS:
            (_, one), (end, other) = parts[:2]
            parts[:2] = [(end, one + other)]

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
