"""One table of the sink: how far it is resolved, staged and acknowledged, behind one lock.

A table of which rows were lost on the way gives no more rows and takes no more acknowledgements: the checkpoint stays
below the loss, and who pulls again from there has the rows.

Lock order: the sink manager's, then a table sink's, then the quota's.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Final

import pyarrow as pa
import structlog

from sink import metrics, mounted
from sink.checkpoint import Checkpoint
from sink.errors import (
    NotResolvedError,
    RangeCleanedError,
    RangeError,
    RowsLostError,
    SinkRowsLostError,
    TableDamagedError,
)
from sink.ledger import CheckedMount
from sink.mounted import Mount, SequenceMount
from sink.quota import MemQuota
from sink.resolved import ResolvedTs
from sink.staging import Staging
from sorter import Sorter
from storage.model.event import Position
from storage.model.span import Span

READ_BYTES: Final = 1 << 20
ROWS_LOST: Final = (RowsLostError, SinkRowsLostError)
_log = structlog.get_logger(__name__)


class TableSink:
    """One incarnation (version) of a table; safe to call from several threads."""

    def __init__(self, span: Span, version: int, start_ts: int, mount: Mount, quota: MemQuota) -> None:
        self.span = span
        self.version = version
        self.start_ts = start_ts
        self.resolved_ts = start_ts
        self.mount: Mount = CheckedMount(span.table_id, mount)
        self.verified_ts = start_ts
        self.lost: TableDamagedError | None = None
        self._quota = quota
        self._lock = threading.Lock()
        self._checkpoint = Checkpoint(start_ts)
        self._staging = Staging(span.table_id, start_ts)
        self._removed = False

    @property
    def checkpoint_ts(self) -> int:
        """Everything up to it is committed at the target."""
        return self._checkpoint.checkpoint_ts

    @property
    def cleaned_ts(self) -> int:
        """Everything above it can be read: the checkpoint before its last move."""
        return self._checkpoint.previous_ts

    def resolve(self, ts: int) -> None:
        """The sorter has everything up to `ts`."""
        with self._lock:
            self.resolved_ts = max(ts, self.resolved_ts)

    def append(self, batch: pa.RecordBatch, size: int) -> None:
        """See `Staging.append`."""
        with self._lock:
            if self._removed:
                self._quota.refund(size)
            else:
                self._staging.append(batch, size)

    def advance(self, resolved: ResolvedTs) -> None:
        """See `Staging.advance`; the rows' memory is the table's until they are acknowledged."""
        with self._lock:
            if not self._removed:
                size = self._staging.advance(resolved)
                if size:
                    self._quota.record(self.span, resolved, size)
                self._drop_acknowledged()

    def restart(self) -> None:
        """Give up what is staged; reads go to the sorter."""
        with self._lock:
            self._forget_staged()

    def ack(self, start_ts: int | None, end_ts: int) -> bool:
        """`(start_ts, end_ts]` (None: all up to `end_ts`) is committed; returns whether the checkpoint moved.

        Raises:
            SinkRowsLostError: rows of this table were lost.
        """
        with self._lock:
            self._check_whole()
            before = self.checkpoint_ts
            moved = self._checkpoint.ack(before if start_ts is None else start_ts, end_ts) > before
            if moved:
                self._drop_acknowledged()
            return moved

    def remove(self) -> None:
        """Give all memory back, now and later."""
        with self._lock:
            self._forget_staged()
            self._removed = True

    def staged_rows(self, start_ts: int, end_ts: int) -> list[pa.RecordBatch] | None:
        """See `Staging.rows`."""
        with self._lock:
            try:
                return self._staging.rows(start_ts, end_ts)
            except ROWS_LOST as err:
                self.lose(err)
                raise

    def lose(self, err: TableDamagedError) -> None:
        """Rows were lost: refuse whatever is asked from now on."""
        if self.lost is None:
            self.lost = err
            metrics.ROWS_LOST.inc()
            _log.error("rows were lost on their way to the reader", table_id=self.span.table_id, error=err.message)

    def check_range(self, start_ts: int, end_ts: int, resolved_ts: int) -> None:
        """Whether `(start_ts, end_ts]` can be read, given how far the table may go.

        Raises:
            RangeError: it ends before it starts.
            NotResolvedError: it ends above `resolved_ts`.
            RangeCleanedError: it starts below what is kept.
            SinkRowsLostError: rows of this table were lost.
        """
        self._check_whole()
        if end_ts < start_ts:
            raise RangeError(f"the range ({start_ts}, {end_ts}] ends before it starts")
        if end_ts > resolved_ts:
            raise NotResolvedError(
                f"table {self.span.table_id} is complete up to {resolved_ts}, not yet to {end_ts}; wait for resolved_ts"
            )
        if start_ts < self.cleaned_ts:
            raise RangeCleanedError(
                f"table {self.span.table_id} keeps the rows above {self.cleaned_ts}, those from {start_ts} on are "
                f"acknowledged and gone; read from the checkpoint_ts, {self.checkpoint_ts}"
            )

    def read_sorted(self, sorter: Sorter, start_ts: int, end_ts: int) -> Iterator[pa.RecordBatch]:
        """The mounted rows of `(start_ts, end_ts]`, straight from the sorter."""
        raw = sorter.fetch(self.span, Position(start_ts + 1, 0), Position.fence(end_ts))
        return self._whole(mounted.coalesce(map(SequenceMount(self.mount), raw), READ_BYTES))

    def verify(self, sorter: Sorter, end_ts: int) -> None:
        """Read the rows up to `end_ts` that no whole fetch has covered yet, so that the sorter compares them.

        For tasks that end before their range does; only one task of a table may call it at a time.

        Raises:
            RowsLostError: they are not what the sorter was given.
        """
        if end_ts <= self.verified_ts:
            return
        start_ts = max(self.verified_ts, self.cleaned_ts)
        with contextlib.suppress(RangeCleanedError):  # acknowledged meanwhile: nobody will read it again
            for _ in sorter.fetch(self.span, Position(start_ts + 1, 0), Position.fence(end_ts)):
                pass
        self.verified_ts = end_ts

    def _whole(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            yield from batches
        except ROWS_LOST as err:
            self.lose(err)
            raise

    def _check_whole(self) -> None:
        if self.lost is not None:
            first_ts, last_ts = self.checkpoint_ts + 1, self.resolved_ts
            raise SinkRowsLostError(self.lost.message, self.span.table_id, first_ts, last_ts) from self.lost

    def _drop_acknowledged(self) -> None:
        if self._staging.drop_up_to(self.checkpoint_ts):
            self._quota.release(self.span, ResolvedTs(self.checkpoint_ts))

    def _forget_staged(self) -> None:
        self._quota.refund(self._staging.restart(self.checkpoint_ts))
        self._quota.release(self.span, ResolvedTs((1 << 64) - 1))
