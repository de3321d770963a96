"""How the rows of one span are mounted: a table's mounts, each in force above the DDL that gave it.

Pure.

Every batch that comes out of a mounter must have the rows that went in: `CheckedMount` counts them.
The sorter compares what comes out of it with what went in (`sorter.checksum_log`); what is staged
is counted by `sink.staging`.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sink.errors import RangeCrossesDdlError, SinkRowsLostError
from sink.mounted import Mount
from storage.model.event import UPDATE
from storage.model.ts import MAX_TS


class CheckedMount:
    """A table's mount, whose every batch must have the rows it was given;
    an update may become delete and insert.
    """

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
                f"table {self._table_id}, commit_ts {first_ts} to {last_ts}: of {raw.num_rows} "
                f"rows that were read, {mounted.num_rows} came out of the mounter; this is a "
                "defect of the mounter, stop the changefeed",
                self._table_id,
                first_ts,
                last_ts,
            )
        return mounted


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


@dataclass(frozen=True, slots=True)
class Mounting:
    """The mounts of one version of a table; `before` adds what each row was before,
    where a source can tell.
    """

    mount: Mount
    before: Mount | None = None
    split: Mount | None = None
    """`TableMounter.split`, where updates may change what identifies a row:
    see `sink.key_change`.
    """

    def checked(self, table_id: int) -> "Mounting":
        """The same, with every batch counted."""
        before = None if self.before is None else CheckedMount(table_id, self.before)
        return Mounting(CheckedMount(table_id, self.mount), before, self.split)

    def with_before(self) -> Mount:
        """The mount that tells what each row was; a table that `SinkManager.follow` added has
        one.
        """
        assert self.before is not None, "the table was added without it"
        return self.before


@dataclass(frozen=True, slots=True)
class _Since:
    """What is in force above `ts`, and what was before."""

    ts: int
    mounting: Mounting
    before: "_Since | None" = None


class Mounts:
    """One writer at a time; readers in other threads see all of a change or nothing of it."""

    __slots__ = ("_newest", "_table_id")

    def __init__(self, table_id: int, start_ts: int, mounting: Mounting) -> None:
        self._table_id = table_id
        # there are as many of these as tables, most with one schema
        self._newest = _Since(start_ts, mounting)

    def change(self, ts: int, mounting: Mounting) -> bool:
        """Rows above `ts` are mounted otherwise; False: that is known already."""
        if ts <= self._newest.ts:
            return False
        self._newest = _Since(ts, mounting, self._newest)
        return True

    def above(self, ts: int) -> Mounting:
        """For the rows right above `ts`; every batch is counted."""
        since = self._newest
        while since.ts > ts and since.before is not None:
            since = since.before
        return since.mounting.checked(self._table_id)

    def next_change(self, ts: int) -> int:
        """The first DDL above `ts`; MAX_TS: none is known."""
        since, next_ts = self._newest, MAX_TS
        while since.before is not None and since.ts > ts:
            since, next_ts = since.before, since.ts
        return next_ts

    def check_range(self, start_ts: int, end_ts: int) -> None:
        """Refuse a range whose rows have two schemas.

        Raises:
            RangeCrossesDdlError: there is a DDL inside of it.
        """
        change_ts = self.next_change(start_ts)
        if change_ts < end_ts:
            raise crosses(f"table {self._table_id}", start_ts, end_ts, change_ts)

    def forget(self, ts: int) -> None:
        """No range below `ts` is asked for any more."""
        kept, since = [], self._newest
        while since.before is not None and since.ts > ts:
            kept.append(since)
            since = since.before
        if since.before is not None:
            since = _Since(since.ts, since.mounting)
            for later in reversed(kept):
                since = _Since(later.ts, later.mounting, since)
            self._newest = since


def crosses(what: str, start_ts: int, end_ts: int, ddl_ts: int) -> RangeCrossesDdlError:
    """Say so."""
    return RangeCrossesDdlError(
        f"the range ({start_ts}, {end_ts}] of {what} crosses the DDL at {ddl_ts}: end it there, "
        f"take the new schema (describe at ts {ddl_ts}), then go on above it"
    )
