"""Row counts on the way from the sorter to a reader: what is read, mounted, staged and handed out must agree. Pure.

The sorter compares what comes out of it with what went in (`sorter.checksum_log`); from there on rows are counted,
whole batches at a time. A staged range that ends between two counted places splits the interval, so rows that are
missing are noticed at the latest when its end is handed out, and a range handed out again must have as many rows as
before.
"""

import bisect

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sink.errors import SinkRowsLostError
from sink.mounted import Mount
from storage.model.event import UPDATE


class CheckedMount:
    """A table's mount, whose every batch must have the rows it was given; an update may become delete and insert."""

    __slots__ = ("_mount", "_table_id")

    def __init__(self, table_id: int, mount: Mount) -> None:
        self._table_id = table_id
        self._mount = mount

    def __call__(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        """Mount a batch of at least one row.

        Raises:
            SinkRowsLostError: rows are missing, or there are too many.
        """
        mounted = self._mount(raw)
        least, most = _expected_rows(raw, mounted)
        if not least <= mounted.num_rows <= most or _borders(raw) != _borders(mounted):
            first_ts, last_ts = _borders(raw)
            raise SinkRowsLostError(
                f"table {self._table_id}, commit_ts {first_ts} to {last_ts}: of {raw.num_rows} rows that were read, "
                f"{mounted.num_rows} came out of the mounter; this is a defect of the mounter, stop the changefeed",
                self._table_id,
                first_ts,
                last_ts,
            )
        return mounted


class RowLedger:
    """How many rows of a table were staged up to which commit_ts; the caller serialises the calls."""

    __slots__ = ("_read", "_rows", "_table_id", "_ts")

    def __init__(self, table_id: int, start_ts: int) -> None:
        """Begin a table whose rows are staged above `start_ts`."""
        self._table_id = table_id
        self._ts = [start_ts]  # places where the count is known, ascending
        self._rows = [0]
        self._read = 0

    def read(self, rows: int) -> None:
        """So many more rows were read."""
        self._read += rows

    def complete(self, ts: int) -> None:
        """All rows read so far have a commit_ts <= `ts`, and no others have."""
        if ts > self._ts[-1]:
            self._ts.append(ts)
            self._rows.append(self._read)

    def drop_up_to(self, ts: int) -> None:
        """No range below `ts` is handed out any more."""
        floor = bisect.bisect_right(self._ts, ts) - 1
        if floor > 0:
            del self._ts[:floor], self._rows[:floor]

    def hand_out(self, start_ts: int, end_ts: int, rows: int) -> None:
        """`rows` rows are about to be handed out for `(start_ts, end_ts]`, which is staged.

        Raises:
            SinkRowsLostError: rows are missing, or there are too many.
        """
        (start_least, start_most), (end_least, end_most) = self._between(start_ts), self._between(end_ts)
        if not end_least - start_most <= rows <= end_most - start_least:
            raise SinkRowsLostError(
                f"table {self._table_id}, commit_ts {start_ts + 1} to {end_ts}: {rows} rows are staged, but "
                f"{max(end_least - start_most, 0)} to {end_most - start_least} were read from the sorter; this is a "
                "defect of the sink: restart the capture, which pulls the table again from its checkpoint",
                self._table_id,
                start_ts + 1,
                end_ts,
            )
        if start_least == start_most and end_least != end_most:
            at = bisect.bisect_right(self._ts, end_ts)
            self._ts.insert(at, end_ts)
            self._rows.insert(at, start_least + rows)

    def _between(self, ts: int) -> tuple[int, int]:
        """The least and the most rows there may be up to `ts`."""
        floor = bisect.bisect_right(self._ts, ts) - 1
        least = self._rows[max(floor, 0)]
        if floor >= 0 and self._ts[floor] == ts:
            return least, least
        return least, self._rows[floor + 1] if floor + 1 < len(self._rows) else self._read


def _expected_rows(raw: pa.RecordBatch, mounted: pa.RecordBatch) -> tuple[int, int]:
    updates = int(np.count_nonzero(raw.column("op").to_numpy() == UPDATE))
    if not updates or "_op" not in mounted.schema.names:
        return raw.num_rows, raw.num_rows + updates
    kept: int = pc.sum(pc.equal(mounted.column("_op"), "update")).as_py() or 0
    return raw.num_rows + updates - kept, raw.num_rows + updates - kept


def _borders(batch: pa.RecordBatch) -> tuple[int, int]:
    """The first and the last commit_ts; raw and mounted batches call it differently."""
    if not batch.num_rows:
        return 0, 0
    column = batch.column("_commit_ts" if "_commit_ts" in batch.schema.names else "commit_ts")
    return column[0].as_py(), column[batch.num_rows - 1].as_py()
