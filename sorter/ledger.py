"""What a table was given, against which what it hands out is checked: no row is lost in silence. Pure.

The ledger keeps a checksum for each bucket of about a second of commit_ts. A range that ends inside of a bucket splits
it: the part that was read is booked as read, and what must follow is the rest. So a row that is missing is noticed at
the latest when the end of its bucket is read, whatever the ranges were, and a range read again must be as before.
"""

import bisect
from collections.abc import Mapping
from typing import Final

import pyarrow as pa

from sorter.checksum import Checksum, by_bucket
from sorter.errors import RowsLostError

BUCKET_SHIFT: Final = 28  # 18 bits count within a millisecond, 10 more make about a second
_LAST: Final = (1 << BUCKET_SHIFT) - 1


class Ledger:
    """The sums of one table; the caller serialises the calls."""

    def __init__(self, table_id: int, start_ts: int) -> None:
        """Begin a table that has no rows at or below `start_ts`."""
        self._table_id = table_id
        self._start_ts = start_ts
        self._parts: dict[int, list[tuple[int, Checksum]]] = {}  # of a bucket: (last commit_ts, sum), ascending
        self._buckets: list[int] = []

    def __len__(self) -> int:
        return len(self._buckets)

    def add(self, batch: pa.RecordBatch) -> None:
        """Book rows above everything that was read."""
        for bucket, checksum in by_bucket(batch, BUCKET_SHIFT).items():
            if bucket not in self._parts:
                self._parts[bucket] = [(_last_ts(bucket), checksum)]
                bisect.insort(self._buckets, bucket)
            else:
                last_ts, before = self._parts[bucket][-1]
                self._parts[bucket][-1] = (last_ts, before + checksum)

    def drop(self, before: Mapping[int, Checksum], after: Mapping[int, Checksum]) -> None:
        """Book that rows which came twice are kept once; none of them was read yet."""
        for bucket, checksum in before.items():
            last_ts, held = self._parts[bucket][-1]
            self._parts[bucket][-1] = (last_ts, held - checksum + after.get(bucket, Checksum()))

    def check(self, lower_ts: int, upper_ts: int, found: Mapping[int, Checksum]) -> None:
        """Compare the rows with commit_ts in `[lower_ts, upper_ts]` that were read, as `by_bucket` sums them.

        A bucket that is entered in the middle, where no range has ended before, cannot be checked.

        Raises:
            RowsLostError: rows are missing, or there are too many.
        """
        first, last = lower_ts >> BUCKET_SHIFT, upper_ts >> BUCKET_SHIFT
        low, high = bisect.bisect_left(self._buckets, first), bisect.bisect_right(self._buckets, last)
        for bucket in sorted({*self._buckets[low:high], *found}):
            self._check_bucket(bucket, lower_ts, upper_ts, found.get(bucket, Checksum()))

    def forget(self, commit_ts: int) -> None:
        """Drop the buckets that have nothing above `commit_ts`."""
        count = bisect.bisect_left(self._buckets, (commit_ts + 1) >> BUCKET_SHIFT)
        for bucket in self._buckets[:count]:
            del self._parts[bucket]
        del self._buckets[:count]

    def _check_bucket(self, bucket: int, lower_ts: int, upper_ts: int, found: Checksum) -> None:
        parts = self._parts.get(bucket, [(_last_ts(bucket), Checksum())])
        ends = [bucket * (_LAST + 1) - 1, *(end for end, _ in parts)]
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

    def _lost(self, lower_ts: int, upper_ts: int, expected: Checksum, found: Checksum) -> RowsLostError:
        first_ts = max(lower_ts, self._start_ts + 1)
        return RowsLostError(
            f"table {self._table_id}, commit_ts {first_ts} to {upper_ts}: {expected.rows} rows were added "
            f"(checksum {expected.digest:016x}), {found.rows} came out (checksum {found.digest:016x}); this is a "
            "defect of the sorter or its disk: restart the capture, which pulls the table again from its checkpoint"
        )


def _last_ts(bucket: int) -> int:
    return bucket << BUCKET_SHIFT | _LAST
