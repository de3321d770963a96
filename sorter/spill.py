"""Moving rows from memory to disk, and live blocks out of segments that are mostly dead.

`Spiller` writes rows when memory is short: large tables by themselves, small ones together in
shared blocks. `DiskStatus` says whether the disk takes writes: while it refuses them, threads that
add rows wait, and go on by themselves when it takes them again. `Compaction` frees segments that a
few live blocks, as of tables that are not read, would keep.

Invariants: rows of a write that failed are still in memory. No thread waits for a full disk while
it holds a lock.
"""

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Final

import pyarrow as pa
import structlog
from prometheus_client import Gauge

from sorter.errors import SorterDiskError
from sorter.stats import Counters
from sorter.store import BlockStore
from sorter.table import Table
from storage.model.errors import CorruptError

_MOST_RUN_BYTES: Final = 32 << 20
_SMALL_SHARE: Final = 8
"""A table with less than 1/8 of a block in memory is written into a shared block."""
_SHARED_SHARE: Final = 2
"""A shared block is written once its tables have 1/2 of a block in memory."""
_WAITING: Final = Gauge(
    "tidemark_sorter_disk_waiting", "Batches that wait until the disk takes rows again"
)

_log = structlog.get_logger(__name__)


class Spiller:
    """Keeps the rows of all tables within `memory_bytes`;
    every method may be called from any thread.
    """

    def __init__(self, counters: Counters, memory_bytes: int, block_bytes: int) -> None:
        self._counters = counters
        self._memory_bytes = memory_bytes
        self._run_bytes = min(
            max(memory_bytes // 2, block_bytes), max(_MOST_RUN_BYTES, block_bytes)
        )
        self._small_bytes = block_bytes // _SMALL_SHARE
        self._shared_bytes = block_bytes // _SHARED_SHARE
        self._spilling = threading.Lock()
        self._stopped = False
        self._tables: dict[Table, None] = {}
        """An ordered set of all tables with rows in memory, and some without."""

    def stop(self) -> None:
        """Wait until the write under way has ended, and write nothing more."""
        with self._spilling:
            self._stopped = True

    @property
    def is_short(self) -> bool:
        """Whether memory holds more rows than it should."""
        return self._counters.memory_bytes > self._memory_bytes

    def add(self, table: Table) -> None:
        """Add a table that got rows."""
        self._tables[table] = None

    def remove(self, table: Table) -> None:
        """Remove a table that is sorted no more."""
        self._tables.pop(table, None)

    def spill(self) -> None:
        """Write the largest tables until three quarters of the memory are enough;
        other threads that add rows wait here, which holds their feeds back.

        Raises:
            SorterDiskError: the disk does not take them; what was not written is still in memory.
        """
        with self._spilling:
            # Whoever waited for the lock may find that the thread before it has written enough.
            if self._stopped or not self.is_short:
                return
            # A quarter below the limit, so that the next batch does not make memory short again.
            enough = self._memory_bytes * 3 // 4
            small: dict[BlockStore, list[Table]] = defaultdict(list)
            for table in self._victims():
                if table.memory_bytes >= self._small_bytes:
                    self._spill(table, enough)
                    self._remove_written([table])
                else:
                    gathered = small[table.store]
                    gathered.append(table)
                    if sum(member.memory_bytes for member in gathered) >= self._shared_bytes:
                        spill_shared(table.store, gathered)
                        self._remove_written(small.pop(table.store))
                if self._counters.memory_bytes <= enough:
                    return
            # Only small tables are left: they are written now, though they do not fill a block.
            for store, gathered in small.items():
                spill_shared(store, gathered)
                self._remove_written(gathered)

    def _spill(self, table: Table, enough: int) -> None:
        """Write a table's rows, run by run; it can be used in between."""
        while table.spill(self._run_bytes):
            # Give back what sorting took: otherwise the pool keeps it while the next rows come.
            pa.default_memory_pool().release_unused()
            table.merge_runs()
            if self._counters.memory_bytes <= enough:
                return
        table.merge_runs()

    def _victims(self) -> list[Table]:
        """Tables with rows in memory, the largest first:
        the fewest and largest blocks for the memory that comes back.

        No table is left out for long: one that is not written grows until it is among the largest.
        """
        return sorted(self._tables.copy(), key=lambda table: table.memory_bytes, reverse=True)

    def _remove_written(self, tables: Sequence[Table]) -> None:
        for table in tables:
            if not table.memory_bytes:
                self._tables.pop(table, None)
                # Rows that came in between found the table still listed, so `add` did not list it
                # again: without this, they would never be written.
                if table.memory_bytes:
                    self._tables[table] = None


def spill_shared(store: BlockStore, tables: Sequence[Table]) -> None:
    """Write all rows that these tables of `store` have in memory, as one block.

    It takes the locks of all of them, and is called by one thread at a time. Other callers take one
    lock only, so there is no deadlock.

    Raises:
        SorterDiskError: the disk does not take them; nothing has changed.
    """
    to_merge: list[Table] = []
    with ExitStack() as locks:
        # Tables share locks: one that was taken twice by this thread would deadlock.
        for lock in dict.fromkeys(table.lock for table in tables):
            locks.enter_context(lock)
        # A reader finds its table in the block's directory by binary search over unique ids.
        ascending = sorted(tables, key=lambda table: table.unique_id)
        shares = {
            table: share for table in ascending if (share := table.share_of_memory()) is not None
        }
        entries = store.write_shared(list(shares.values())) if shares else []
        for table, entry in zip(shares, entries, strict=True):
            if table.moved_to_disk(entry):
                to_merge.append(table)
    # Merging takes a table's lock itself, and reads and writes without it.
    for table in to_merge:
        table.merge_runs()


class DiskStatus:
    """The state of one sorter's disk: whether it takes rows. Thread-safe."""

    def __init__(self, retry_s: float, clock: Callable[[], float]) -> None:
        """A refused write is tried again after `retry_s`; `clock` gives monotonic seconds."""
        self.error = ""
        self.waiting = 0
        self._retry_s = retry_s
        self._clock = clock
        self._retry_at_s = float("-inf")
        self._changed = threading.Condition()
        self._closed = False

    def may_write(self) -> bool:
        """Whether a write that can wait should be tried now."""
        return not self.error or self._clock() >= self._retry_at_s

    def record_failure(self, err: SorterDiskError) -> None:
        """Note that a write failed."""
        with self._changed:
            if not self.error:
                _log.warning(
                    "sorter's disk takes no rows, feeds pause when memory is short",
                    error=err.message,
                )
            self.error = err.message
            self._retry_at_s = self._clock() + self._retry_s

    def record_success(self) -> None:
        """Note that a write succeeded; those that wait try again."""
        # Read without the lock: this is called after each write, and an error that is set just now
        # is cleared by the next one.
        if self.error:
            with self._changed:
                self.error = ""
                self._changed.notify_all()
            _log.info("sorter's disk takes rows again")

    def wait_for_retry(self) -> bool:
        """Wait until a write should be tried again, at most the retry interval; False:
        the sorter was closed.
        """
        with self._changed:
            self.waiting += 1
            _WAITING.inc()
            try:
                # The `notify_all` of a `close` before this wait would not wake it.
                if not self._closed:
                    self._changed.wait(self._retry_s)
            finally:
                self.waiting -= 1
                _WAITING.dec()
            return not self._closed

    def close(self) -> None:
        """End all waits, and let none begin."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Compaction:
    """Empties sparse segments, in the thread that writes rows; safe to call from several.

    A few live blocks, as of tables that are not read, would keep whole segments. A segment is
    emptied when at most a quarter of it is alive, so at most a third of the freed space is written
    again. `Sorter` runs it only when a segment was begun, so without writes it costs nothing.
    """

    def __init__(self) -> None:
        self._running = threading.Lock()

    def run(self, store: BlockStore, tables: Iterable[Table]) -> None:
        """Move the live blocks of the sparse segments of `store`, if there are several; `tables`
        are all tables.
        """
        # One compaction at a time is enough; a thread that adds rows must not wait for another's.
        if not self._running.acquire(blocking=False):
            return
        try:
            sparse = store.sparse()
            if sparse:
                # It is tried again at the next segment; fetching a damaged block raises its error.
                with contextlib.suppress(SorterDiskError, CorruptError):
                    _empty_segments(store, sparse, {table.unique_id: table for table in tables})
        finally:
            self._running.release()

    def stop(self) -> None:
        """Wait for the one that runs, and let none begin."""
        # Never released: `run` gives up where it cannot have the lock at once.
        self._running.acquire()


def _empty_segments(store: BlockStore, sparse: frozenset[int], tables: dict[int, Table]) -> None:
    for unique_id, entries in store.entries_in(sparse):
        # A table that was removed meanwhile has no blocks to save.
        table = tables.get(unique_id)
        if table is not None:
            table.move(entries)
