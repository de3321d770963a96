"""One table (span) of the sorter: how far it is resolved and cleaned, and its rows,
behind one lock.

Invariants: no row at or below `resolved_ts` is ever added; nothing at or below `cleaned` is handed
out. A table without rows, or with few and none of them in memory, costs a few hundred bytes: its
`Backlog` is frozen to bytes after each call, and made again by the next.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache

import pyarrow as pa

from sorter.backlog import Backlog, Extent, RunMerge
from sorter.block import Share
from sorter.buffer import Rows
from sorter.checksum_log import Checksum, by_bucket
from sorter.errors import (
    EventBelowResolvedError,
    NotResolvedError,
    RangeCleanedError,
    ResolvedRegressedError,
    SorterDiskError,
    TableDamagedError,
    TableNotFoundError,
)
from sorter.index import Entry
from sorter.merge import Run, merge
from sorter.stats import FetchCounts, TableStats
from sorter.store import BlockStore
from storage.model.event import Position
from storage.model.span import Span

_NEVER_S = float("-inf")


class Table:
    """One incarnation of a span; safe to call from several threads."""

    __slots__ = (
        "_backlog",
        "_dropped_at_s",
        "_dropped_ts",
        "_fetches",
        "_removed",
        "cleaned",
        "lock",
        "newest_ts",
        "resolved_ts",
        "span",
        "store",
        "unique_id",
    )

    def __init__(
        self, span: Span, unique_id: int, start_ts: int, store: BlockStore, lock: threading.Lock
    ) -> None:
        """`lock` may be shared with other tables; only `sorter.spill.spill_shared` takes several
        locks.
        """
        self.span = span
        self.unique_id = unique_id
        self.store = store
        self.lock = lock
        self.resolved_ts = start_ts
        self.newest_ts = start_ts
        """No row has a commit_ts above it."""
        self.cleaned = _start_position(start_ts)
        self._backlog: Backlog | bytes = b""
        self._fetches: FetchCounts | None = None  # made by the first fetch
        self._dropped_ts = start_ts
        self._dropped_at_s = _NEVER_S
        self._removed = False

    @property
    def memory_bytes(self) -> int:
        """The memory that its rows take."""
        backlog = self._backlog
        return backlog.buffer.bytes if isinstance(backlog, Backlog) else 0

    def is_empty(self) -> bool:
        """See `Sorter.is_empty`; a row is in the checksum log first and longest,
        so no lock is needed.
        """
        backlog = self._backlog
        return not (len(backlog.checksums) if isinstance(backlog, Backlog) else backlog)

    def add(self, rows: Rows) -> None:
        """See `Sorter.add`."""
        with self.lock:
            self._check_present()
            # Readers may have had the range already: such a row would be missing downstream, and
            # nobody would notice.
            if rows.min_commit_ts <= self.resolved_ts:
                raise EventBelowResolvedError(
                    f"table {self.span.table_id} got a row with commit_ts {rows.min_commit_ts}, "
                    f"but all up to {self.resolved_ts} had been promised; this is a defect of the "
                    "puller: the batch was not taken"
                )
            # First: whoever asks without the lock must not miss a row that is there.
            self.newest_ts = max(self.newest_ts, rows.max_commit_ts)
            self._thaw().add(rows)

    def resolve(self, ts: int) -> None:
        """See `Sorter.resolve`."""
        with self.lock:
            self._check_present()
            if ts < self.resolved_ts:
                raise ResolvedRegressedError(
                    f"resolved_ts of table {self.span.table_id} cannot go back from "
                    f"{self.resolved_ts} to {ts}"
                )
            self.resolved_ts = ts

    def flush(self, block_bytes: int) -> None:
        """Write resolved rows, once they fill a block."""
        with self.locked_backlog() as backlog:
            if backlog is not None:
                backlog.flush(block_bytes, self.resolved_ts)

    def spill(self, run_bytes: int) -> bool:
        """See `Backlog.spill`."""
        with self.locked_backlog() as backlog:
            return backlog is not None and backlog.spill(run_bytes, self.resolved_ts)

    def share_of_memory(self) -> Share | None:
        """All rows in memory, if there are any, for a shared block; the caller has the lock."""
        backlog = self._backlog
        if self._removed or not isinstance(backlog, Backlog) or not backlog.buffer.bytes:
            return None
        return Share(self.unique_id, self.span.table_id, backlog.buffer.batches())

    def moved_to_disk(self, entry: Entry) -> bool:
        """Drop the rows of `share_of_memory`, which are on disk now;
        returns whether runs should be merged.
        """
        backlog = self._thaw()
        backlog.moved_to_disk(entry)
        self._freeze()
        return backlog.wants_merge

    def merge_runs(self) -> None:
        """Merge the small runs that spills have left; called by one thread at a time.

        The lock is held to choose the runs and to put the merged one in their place, not while they
        are read and written. Runs that cannot be merged stay as they are: a full disk is tried
        again at the next spill, and damaged rows raise an error where they are fetched, not here,
        where another table's rows are being added.
        """
        with contextlib.suppress(SorterDiskError, TableDamagedError):
            while (run_merge := self._begin_merge()) is not None:
                self._end_merge(run_merge, self._write_merged(run_merge))

    def move(self, entries: Sequence[Entry]) -> None:
        """See `Backlog.move`."""
        with self.locked_backlog() as backlog:
            if backlog is not None:
                backlog.move(entries)

    @contextlib.contextmanager
    def locked_backlog(self) -> Iterator[Backlog | None]:
        """Its rows, while its lock is held; None: it was removed."""
        with self.lock:
            if self._removed:
                yield None
            else:
                # Not in a `finally`: after an error the backlog stays as it is, which is never
                # wrong, only larger.
                yield self._thaw()
                self._freeze()

    def fetch(
        self, lower: Position, upper: Position, window_bytes: int
    ) -> Iterator[pa.RecordBatch]:
        """See `Sorter.fetch`; what it yields is fixed when this returns."""
        # The runs are fixed under the lock, and read without it: a reader that takes hours delays
        # neither the feed nor cleaning.
        with self.lock:
            self._check_range(lower, upper)
            backlog, runs = self._thaw(), list[Run]()
            # Buckets may become wider while the rows are read; `check` widens the sums then.
            shift = backlog.checksums.shift
            if lower <= upper:
                runs, blocks, rows = backlog.runs(lower, upper, self.resolved_ts)
                self._fetches = self._fetches or FetchCounts()
                self._fetches.add_fetch(blocks, rows)
            self._freeze()
        return self._checked(lower, upper, runs, window_bytes, shift)

    def stats(self) -> TableStats:
        """See `Sorter.table_stats`."""
        with self.lock:
            fetches, backlog = self._fetches or FetchCounts(), self._thaw()
            self._freeze()
            return TableStats(
                self.span.table_id,
                self.resolved_ts,
                self.cleaned.commit_ts,
                backlog.buffer.bytes,
                backlog.index.blocks,
                backlog.runs_on_disk,
                fetches.fetches,
                fetches.blocks,
                fetches.rows_read,
                fetches.rows_out,
            )

    def extents(self, lower_ts: int, upper_ts: int) -> list[Extent]:
        """See `Sorter.extents`."""
        with self.lock:
            self._check_range(Position(lower_ts, 0), Position.fence(upper_ts))
            if not self._backlog:
                return []
            extents = self._thaw().extents(lower_ts, upper_ts, self.resolved_ts)
            self._freeze()
            return extents

    def clean(self, upper: Position, now_s: float, interval_s: float) -> None:
        """See `Sorter.clean`."""
        with self.lock:
            self._check_present()
            if upper.commit_ts > self.resolved_ts:
                raise NotResolvedError(
                    f"cannot clean table {self.span.table_id} up to {upper.commit_ts}: "
                    f"it is resolved up to {self.resolved_ts} only"
                )
            self.cleaned = max(self.cleaned, upper)
            self._drop_cleaned(now_s, interval_s)

    def drop_cleaned(self, now_s: float, interval_s: float) -> None:
        """Drop rows that `clean` left because the interval since the last time had not passed."""
        # Without the lock at first: it is called after every `resolve`, and mostly in vain.
        if self.cleaned.commit_ts > self._dropped_ts:
            with self.lock:
                self._drop_cleaned(now_s, interval_s)

    def remove(self) -> None:
        """Drop all rows; later calls find no table."""
        with self.lock:
            self._removed = True
            if self._backlog:
                self._thaw().drop_all()
                self._backlog = b""

    def _begin_merge(self) -> RunMerge | None:
        with self.locked_backlog() as backlog:
            return backlog.begin_merge() if backlog is not None else None

    def _write_merged(self, run_merge: RunMerge) -> list[Entry]:
        try:
            return self.store.append_run(
                run_merge.index, run_merge.rows, min(run_merge.runs), run_merge.block_bytes
            )
        except TableDamagedError:
            with self.locked_backlog() as backlog:
                if backlog is not None:
                    backlog.abandon_merge(run_merge)
            raise

    def _end_merge(self, run_merge: RunMerge, entries: list[Entry]) -> None:
        with self.locked_backlog() as backlog:
            # The table was removed while its rows were merged: no index will have these blocks.
            if backlog is None:
                self.store.release(entries)
            else:
                backlog.end_merge(run_merge, entries)

    def _thaw(self) -> Backlog:
        backlog = self._backlog
        if not isinstance(backlog, Backlog):
            backlog = Backlog.thaw(
                self.store, self.unique_id, self.span.table_id, self._dropped_ts, backlog
            )
            self._backlog = backlog
        return backlog

    def _freeze(self) -> None:
        if isinstance(self._backlog, Backlog):
            frozen = self._backlog.freeze()
            if frozen is not None:
                self._backlog = frozen

    def _drop_cleaned(self, now_s: float, interval_s: float) -> None:
        # Within a commit_ts some transactions are cleaned, others not: its rows stay together.
        dead_ts = (
            self.cleaned.commit_ts if self.cleaned.is_commit_fence else self.cleaned.commit_ts - 1
        )
        if dead_ts <= self._dropped_ts or now_s - self._dropped_at_s < interval_s:
            return
        if self._backlog:
            self._thaw().drop_up_to(dead_ts, self.resolved_ts)
            self._freeze()
        self._dropped_ts, self._dropped_at_s = dead_ts, now_s

    def _checked(
        self, lower: Position, upper: Position, runs: list[Run], window_bytes: int, shift: int
    ) -> Iterator[pa.RecordBatch]:
        """Yield the merged rows; at their end, the sums of rows read are compared with those of
        rows added.
        """
        read: dict[int, Checksum] = {}

        def add_checksums(batch: pa.RecordBatch) -> None:
            for bucket, checksum in by_bucket(batch, shift).items():
                read[bucket] = read.get(bucket, Checksum()) + checksum

        for batch in merge(runs, window_bytes, add_checksums):
            self.store.counters.add_rows_out(batch)
            if self._fetches is not None:
                self._fetches.rows_out += batch.num_rows
            yield batch
        with self.lock:
            # Sums are kept by commit_ts, so a range that cuts one cannot be compared. What was
            # cleaned meanwhile, or removed, is out of the log already.
            whole = not lower.start_ts and upper.is_commit_fence and lower <= upper
            if whole and lower > self.cleaned and not self._removed:
                self._thaw().checksums.check(lower.commit_ts, upper.commit_ts, read, shift)
                self._freeze()

    def _check_present(self) -> None:
        if self._removed:
            raise TableNotFoundError(f"table {self.span.table_id} has been removed from the sorter")

    def _check_range(self, lower: Position, upper: Position) -> None:
        self._check_present()
        if upper.commit_ts > self.resolved_ts:
            raise NotResolvedError(
                f"table {self.span.table_id} is complete up to {self.resolved_ts}, not yet to "
                f"{upper.commit_ts}; wait for its resolved_ts"
            )
        if lower <= self.cleaned:
            raise RangeCleanedError(
                f"table {self.span.table_id} is cleaned up to commit_ts {self.cleaned.commit_ts}, "
                f"rows from {lower.commit_ts} on are gone; start at the checkpoint_ts"
            )


@lru_cache(maxsize=1)
def _start_position(start_ts: int) -> Position:
    """The `cleaned` of a new table: one object for all tables that start at the same ts."""
    return Position.fence(start_ts)
