"""One table of the sink: how far it is resolved, staged and acknowledged, behind one lock.

A table that has lost rows on the way serves no more rows and takes no more acknowledgements: its
checkpoint stays below the loss, and pulling again from there brings the rows.

Lock order: the sink manager's, then a table sink's, then the quota's.
"""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import structlog

from sink import metrics
from sink.errors import RangeError, SinkRowsLostError
from sink.key_change import deletes_first
from sink.mounts import Mounting, Mounts, SequenceMount, coalesce
from sink.progress import Checkpoint, CheckpointPosition, ResolvedTs, SharedCheckpoint
from sink.quota import MemQuota
from sink.staging import Staging
from sorter import Sorter
from sorter.errors import NotResolvedError, RangeCleanedError, TableDamagedError
from storage.model.event import Position
from storage.model.span import Span
from storage.model.ts import MAX_TS

READ_BYTES: Final = 1 << 20
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Incarnation:
    """A table from where it begins to be served; `version` tells apart those of one span."""

    span: Span
    version: int
    start_ts: int
    born: bool
    """Whether the table is new at `start_ts`, so that it has no rows at or below it."""


class TableSink:
    """One incarnation (version) of a table; safe to call from several threads."""

    __slots__ = (
        "_checkpoint",
        "_lock",
        "_quota",
        "_removed",
        "_shared",
        "_staged_from",
        "_staging",
        "_unborn_ts",
        "end_ts",
        "lost",
        "mounts",
        "resolved_ts",
        "span",
        "start_ts",
        "verified_ts",
        "version",
    )

    def __init__(
        self, incarnation: Incarnation, mounts: Mounts, quota: MemQuota, shared: SharedCheckpoint
    ) -> None:
        """`shared` is the checkpoint that acknowledgements of all tables move."""
        start_ts = incarnation.start_ts
        self.span = incarnation.span
        self.version = incarnation.version
        self.start_ts = start_ts
        self.end_ts = MAX_TS
        self.resolved_ts = start_ts
        self.mounts = mounts
        self.verified_ts = start_ts
        self.lost: TableDamagedError | None = None
        self._unborn_ts = start_ts if incarnation.born else 0
        self._quota = quota
        self._shared = shared
        self._lock = threading.Lock()
        self._checkpoint = Checkpoint(start_ts)
        # made when there is something to stage
        self._staging: Staging | None = None
        self._staged_from = start_ts
        self._removed = False

    @property
    def checkpoint_ts(self) -> int:
        """Everything up to it is committed at the target."""
        return max(self._checkpoint.checkpoint_ts, self._shared.position.checkpoint_ts)

    @property
    def cleaned_ts(self) -> int:
        """Everything above it can be read: the checkpoint before its last move, or further back
        where acknowledged history is kept.
        """
        previous_ts = self._checkpoint.with_shared(self._shared.position).previous_ts
        # History may be kept from before this table came here: it has none of that.
        cleaned_ts = max(min(previous_ts, self._shared.keep_ts), self.start_ts)
        return cleaned_ts if cleaned_ts > self._unborn_ts else 0

    @property
    def complete_ts(self) -> int:
        """All its rows up to it are known: MAX_TS when they are known to its end."""
        return self.resolved_ts if self.resolved_ts < self.end_ts else MAX_TS

    def resolve(self, ts: int) -> None:
        """Note that the sorter has all of the table's rows up to `ts`."""
        with self._lock:
            self.resolved_ts = max(ts, self.resolved_ts)

    def next_end(self, ts: int) -> int:
        """Where a range that begins at `ts` must end: at the next DDL,
        or where the table ends; MAX_TS: nowhere.
        """
        return min(self.mounts.next_change(ts), self.end_ts)

    def reopen(self, ts: int) -> None:
        """Let a table that had ended go on above `ts`; it has no rows between its end and `ts`."""
        with self._lock:
            # There is nothing to acknowledge between its end and `ts`; a checkpoint that stayed at
            # its end would hold back all tables.
            if self.checkpoint_ts >= self.end_ts:
                self._checkpoint.raise_to(CheckpointPosition(ts, ts))
            self.end_ts = MAX_TS

    def append(self, batch: pa.RecordBatch, size: int) -> None:
        """See `Staging.append`."""
        with self._lock:
            # A worker may still run a task of a removed table, to which no memory belongs any more.
            if self._removed:
                self._quota.refund(size)
            else:
                self._stage().append(batch, size)

    def advance(self, resolved: ResolvedTs) -> None:
        """See `Staging.advance`; the rows' memory is the table's until they are acknowledged."""
        with self._lock:
            if not self._removed:
                size = self._stage().advance(resolved)
                if size:
                    self._quota.record(self.span, resolved, size)
                # Readers may have had the rows from the sorter, and acknowledged them, while they
                # were staged.
                self._drop_acknowledged()

    def restart(self) -> None:
        """Give up what is staged; reads go to the sorter."""
        with self._lock:
            self._forget_staged()

    def ack(self, start_ts: int | None, end_ts: int) -> bool:
        """`(start_ts, end_ts]` (None: all up to `end_ts`) is committed;
        returns whether the checkpoint moved.

        Raises:
            SinkRowsLostError: rows of this table were lost.
        """
        with self._lock:
            self._check_whole()
            # First take over the acknowledgements of all tables: otherwise there would be a gap
            # below this range, and the checkpoint would wait for it to close.
            self._checkpoint.raise_to(self._shared.position)
            before = self.checkpoint_ts
            moved = self._checkpoint.ack(before if start_ts is None else start_ts, end_ts) > before
            if moved:
                self._drop_acknowledged()
                self.mounts.drop_below(self.cleaned_ts)
            return moved

    def release(self) -> None:
        """Forget how rows are mounted that are not kept any more."""
        with self._lock:
            self.mounts.drop_below(self.cleaned_ts)

    def settle(self) -> None:
        """Note what was acknowledged of all tables as acknowledged of this one."""
        with self._lock:
            self._checkpoint.raise_to(self._shared.position)

    def remove(self) -> None:
        """Give all memory back, now and later."""
        with self._lock:
            self._forget_staged()
            self._removed = True

    def staged_rows(self, start_ts: int, end_ts: int) -> list[pa.RecordBatch] | None:
        """See `Staging.rows`."""
        with self._lock:
            try:
                return self._staging.rows(start_ts, end_ts) if self._staging is not None else None
            except TableDamagedError as err:
                self.lose(err)
                raise

    def lose(self, err: TableDamagedError) -> None:
        """Note that rows were lost: from now on reads and acknowledgements are refused."""
        if self.lost is None:
            self.lost = err
            metrics.ROWS_LOST.inc()
            _log.error(
                "rows were lost on their way to the reader",
                table_id=self.span.table_id,
                error=err.message,
            )

    def check_range(self, start_ts: int, end_ts: int, resolved_ts: int) -> None:
        """Whether `(start_ts, end_ts]` can be read, given how far the table may go.

        Raises:
            RangeError: it ends before it starts.
            NotResolvedError: it ends above `resolved_ts`.
            RangeCleanedError: it starts below what is kept.
            RangeCrossesDdlError: its rows have two schemas.
            SinkRowsLostError: rows of this table were lost.
        """
        self._check_whole()
        if end_ts < start_ts:
            raise RangeError(f"the range ({start_ts}, {end_ts}] ends before it starts")
        if end_ts > resolved_ts:
            raise NotResolvedError(
                f"table {self.span.table_id} is complete up to {resolved_ts}, not yet to "
                f"{end_ts}; wait for resolved_ts"
            )
        self.check_kept(start_ts)
        self.mounts.check_range(start_ts, end_ts)

    def check_kept(self, start_ts: int) -> None:
        """Whether the rows above `start_ts` are still there.

        Raises:
            RangeCleanedError: they are not.
        """
        if start_ts < self.cleaned_ts:
            raise RangeCleanedError(
                f"table {self.span.table_id} keeps the rows above {self.cleaned_ts}, those from "
                f"{start_ts} on are "
                f"acknowledged and gone; read from the checkpoint_ts, {self.checkpoint_ts}"
            )

    def read_sorted(
        self, sorter: Sorter, mounting: Mounting, start_ts: int, end_ts: int, *, before: bool
    ) -> Iterator[pa.RecordBatch]:
        """The rows of `(start_ts, end_ts]`, mounted by `mounting`, straight from the sorter."""
        raw = self.fetch(sorter, Position(start_ts + 1, 0), Position.fence(end_ts))
        mount = SequenceMount(mounting, before=before)
        return self._whole(coalesce(map(mount, raw), READ_BYTES))

    def fetch(self, sorter: Sorter, lower: Position, upper: Position) -> Iterator[pa.RecordBatch]:
        """Fetch from the sorter within one version of the table; each transaction's deletes come
        first.
        """
        raw, split = (
            sorter.fetch(self.span, lower, upper),
            self.mounts.above(lower.commit_ts - 1).split,
        )
        if split is None:
            return raw
        return deletes_first(
            raw, split, lambda transaction: sorter.fetch(self.span, transaction, transaction)
        )

    def verify(self, sorter: Sorter, end_ts: int) -> None:
        """Read the rows up to `end_ts` that no whole fetch has covered yet,
        so that the sorter compares them.

        For tasks that end before their range does; only one task of a table may call it at a time.

        Raises:
            RowsLostError: they are not what the sorter was given.
        """
        if end_ts <= self.verified_ts:
            return
        start_ts = max(self.verified_ts, self.cleaned_ts)
        # acknowledged meanwhile: nobody will read it again
        with contextlib.suppress(RangeCleanedError):
            for _ in sorter.fetch(self.span, Position(start_ts + 1, 0), Position.fence(end_ts)):
                pass
        self.verified_ts = end_ts

    def _whole(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            yield from batches
        except TableDamagedError as err:
            self.lose(err)
            raise

    def _check_whole(self) -> None:
        if self.lost is not None:
            first_ts, last_ts = self.checkpoint_ts + 1, self.resolved_ts
            raise SinkRowsLostError(
                self.lost.message, self.span.table_id, first_ts, last_ts
            ) from self.lost

    def _stage(self) -> Staging:
        if self._staging is None:
            self._staging = Staging(self.span.table_id, self._staged_from)
            self._staging.drop_up_to(self.checkpoint_ts)
        return self._staging

    def _drop_acknowledged(self) -> None:
        if self._staging is not None and self._staging.drop_up_to(self.checkpoint_ts):
            self._quota.release(self.span, ResolvedTs(self.checkpoint_ts))

    def _forget_staged(self) -> None:
        if self._staging is None:
            return
        self._staged_from = self.checkpoint_ts
        self._quota.refund(self._staging.pending_bytes())
        self._staging = None
        self._quota.release(self.span, ResolvedTs((1 << 64) - 1))
