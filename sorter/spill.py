"""Writing rows to disk when memory is short: large tables by themselves,
small ones together in shared blocks.
"""

import threading
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

import pyarrow as pa

from sorter.stats import Counters
from sorter.store import BlockStore
from sorter.table import Table

_MOST_RUN_BYTES: Final = 32 << 20
# a table with less than this share of a block in memory goes into a shared one
_SMALL_SHARE: Final = 8
_SHARED_SHARE: Final = 2  # of which each has about this share of a block


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
        # those with rows in memory, and some that had
        self._tables: dict[Table, None] = {}

    def stop(self) -> None:
        """Wait until what is being written is written, and write nothing more."""
        with self._spilling:
            self._stopped = True

    @property
    def is_short(self) -> bool:
        """Whether there are more rows in memory than there should be."""
        return self._counters.memory_bytes > self._memory_bytes

    def add(self, table: Table) -> None:
        """Add a table that got rows."""
        self._tables[table] = None

    def remove(self, table: Table) -> None:
        """Remove a table that is sorted no more."""
        self._tables.pop(table, None)

    def spill(self) -> None:
        """Write the largest tables until three quarters of the memory are enough;
        other threads that add wait here.

        Raises:
            SorterDiskError: the disk does not take them; what was not written is still in memory.
        """
        with self._spilling:
            if self._stopped or not self.is_short:
                return
            # Below the limit by a quarter, so that the next batch does not bring the writers here
            # again.
            enough = self._memory_bytes * 3 // 4
            small: dict[BlockStore, list[Table]] = defaultdict(list)
            for table in self._victims():
                if table.memory_bytes >= self._small_bytes:
                    self._spill(table, enough)
                    self._remove_written([table])
                else:
                    together = small[table.store]
                    together.append(table)
                    if sum(member.memory_bytes for member in together) >= self._shared_bytes:
                        spill_shared(table.store, together)
                        self._remove_written(small.pop(table.store))
                if self._counters.memory_bytes <= enough:
                    return
            for store, together in small.items():
                spill_shared(store, together)
                self._remove_written(together)

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
                if table.memory_bytes:  # rows came in between
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
        ascending = sorted(tables, key=lambda table: table.unique_id)
        shares = {
            table: share for table in ascending if (share := table.share_of_memory()) is not None
        }
        entries = store.write_shared(list(shares.values())) if shares else []
        for table, entry in zip(shares, entries, strict=True):
            if table.moved_to_disk(entry):
                to_merge.append(table)
    for table in to_merge:
        table.merge_runs()
