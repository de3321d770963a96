"""How the rows of one span are mounted: each mount is in force above the DDL that gave it. Pure.

A mount makes typed rows of a batch of raw changes. `SequenceMount` mounts the consecutive batches
of one range, `clip` and `coalesce` cut and join what it gives. `Mounts` are all mounts of a span.
Every batch that comes out of a mounter must have the rows that went in: `CheckedMount` counts them.
The sorter compares what comes out of it with what went in (`sorter.checksum_log`); what is staged
is counted by `sink.staging`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sink.errors import RangeCrossesDdlError, SinkRowsLostError
from storage.model.event import UPDATE
from storage.model.ts import MAX_TS

Mount = Callable[[pa.RecordBatch], pa.RecordBatch]
Keep = Callable[[pa.RecordBatch, pa.RecordBatch], pa.RecordBatch]
"""What readers get of mounted rows, given the raw ones, which were split: see `sink.row_filter`."""

_COMMIT_TS: Final = "_commit_ts"
_START_TS: Final = "_start_ts"
_SEQ: Final = "_seq"


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
    keep: Keep | None = None
    """None: readers get all rows."""
    split_all: Mount | None = None
    """With `keep`: `TableMounter.split`, so that raw and mounted rows are one to one."""

    def checked(self, table_id: int) -> "Mounting":
        """The same, with every batch counted."""
        before = None if self.before is None else CheckedMount(table_id, self.before)
        return replace(self, mount=CheckedMount(table_id, self.mount), before=before)

    def with_before(self) -> Mount:
        """The mount that tells what each row was; a table that `SinkManager.follow` added has
        one.
        """
        assert self.before is not None, "the table was added without it"
        return self.before


@dataclass(frozen=True, slots=True)
class _Since:
    """The mounting in force above `ts`, and the one before."""

    ts: int
    mounting: Mounting
    before: "_Since | None" = None


class Mounts:
    """All mounts of one span. One writer at a time; readers in other threads see all of a change or
    nothing of it.
    """

    __slots__ = ("_newest", "_table_id")

    def __init__(self, table_id: int, start_ts: int, mounting: Mounting) -> None:
        self._table_id = table_id
        # there are as many of these as tables, most with one schema
        self._newest = _Since(start_ts, mounting)

    def change(self, ts: int, mounting: Mounting) -> bool:
        """Rows above `ts` are mounted otherwise; False: that is known already."""
        if ts <= self._newest.ts:
            return False
        # One assignment: readers in other threads take no lock.
        self._newest = _Since(ts, mounting, self._newest)
        return True

    def above(self, ts: int) -> Mounting:
        """The mount for the rows right above `ts`; every batch that it makes is counted."""
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

    def drop_below(self, ts: int) -> None:
        """Drop mounts that only ranges below `ts` need; nobody asks for those any more."""
        kept, since = [], self._newest
        while since.before is not None and since.ts > ts:
            kept.append(since)
            since = since.before
        if since.before is not None:
            # The chain is made anew, from its end: a reader may be in the middle of the old one.
            since = _Since(since.ts, since.mounting)
            for later in reversed(kept):
                since = _Since(later.ts, later.mounting, since)
            self._newest = since


def crosses(what: str, start_ts: int, end_ts: int, ddl_ts: int) -> RangeCrossesDdlError:
    """The error for a range that a DDL lies inside of; `what` says of which table."""
    return RangeCrossesDdlError(
        f"the range ({start_ts}, {end_ts}] of {what} crosses the DDL at {ddl_ts}: end it there, "
        f"take the new schema (describe at ts {ddl_ts}), then go on above it"
    )


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
        # The first and the last commit_ts, too: rows that are as many, but others, are noticed.
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
    # An update that did not stay one became two rows.
    kept: int = pc.sum(pc.equal(mounted.column("_op"), "update")).as_py() or 0
    expected = raw.num_rows + updates - kept
    return expected, expected


def _borders(batch: pa.RecordBatch) -> tuple[int, int]:
    """The first and the last commit_ts; raw and mounted batches call it differently."""
    if not batch.num_rows:
        return 0, 0
    column = batch.column("_commit_ts" if "_commit_ts" in batch.schema.names else "commit_ts")
    return column[0].as_py(), column[batch.num_rows - 1].as_py()


class SequenceMount:
    """Mounts the consecutive batches of one range;
    a transaction that crosses batches keeps counting its `_seq`.

    What `mounting` does not keep is left out afterwards: a batch may be empty then.
    """

    def __init__(self, mounting: Mounting, *, before: bool = False) -> None:
        self._mount = mounting.with_before() if before else mounting.mount
        self._keep = mounting.keep
        self._split = mounting.split_all
        self._last = (-1, -1)
        self._next_seq = 0

    def __call__(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        """Mount the next batch of the range; it must not be empty."""
        if self._split is not None:
            raw = self._split(raw)
        mounted = self._numbered(self._mount(raw))
        return mounted if self._keep is None else self._keep(raw, mounted)

    def _numbered(self, mounted: pa.RecordBatch) -> pa.RecordBatch:
        if _SEQ not in mounted.schema.names or not mounted.num_rows:
            return mounted
        # A mounter numbers from 0 within each batch. Where batches end depends on memory and disk,
        # and a range must give the same rows whenever it is read.
        if _transaction(mounted, 0) == self._last:
            mounted = self._continued(mounted)
        self._last = _transaction(mounted, mounted.num_rows - 1)
        self._next_seq = mounted.column(_SEQ)[mounted.num_rows - 1].as_py() + 1
        return mounted

    def _continued(self, mounted: pa.RecordBatch) -> pa.RecordBatch:
        commit, start = (
            mounted.column(name).to_numpy(zero_copy_only=False) for name in (_COMMIT_TS, _START_TS)
        )
        same = (commit == self._last[0]) & (start == self._last[1])
        seq = mounted.column(_SEQ).to_numpy(zero_copy_only=False) + np.where(
            same, self._next_seq, 0
        )
        index = mounted.schema.get_field_index(_SEQ)
        return mounted.set_column(index, mounted.schema.field(index), pa.array(seq, pa.int64()))


def _transaction(mounted: pa.RecordBatch, row: int) -> tuple[int, int]:
    return mounted.column(_COMMIT_TS)[row].as_py(), mounted.column(_START_TS)[row].as_py()


def clip(batch: pa.RecordBatch, start_ts: int, end_ts: int) -> pa.RecordBatch:
    """The rows with `start_ts` < commit_ts <= `end_ts`, without a copy."""
    timestamps = batch.column(_COMMIT_TS).to_numpy(zero_copy_only=False)
    first, end = np.searchsorted(timestamps, [start_ts, end_ts], "right")
    return batch if end - first == batch.num_rows else batch.slice(int(first), int(end - first))


def coalesce(batches: Iterable[pa.RecordBatch], target_bytes: int) -> Iterator[pa.RecordBatch]:
    """The same rows, small batches joined to about `target_bytes`."""
    waiting: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        waiting.append(batch)
        size += batch.nbytes
        if size >= target_bytes:
            yield _join(waiting)
            waiting, size = [], 0
    if waiting:
        yield _join(waiting)


def _join(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)
