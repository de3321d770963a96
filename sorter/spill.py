"""Who goes to disk when memory is short: large tables by themselves, small ones together in shared blocks."""

import threading
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

import pyarrow as pa

from sorter.merging import merge_runs
from sorter.stats import Counters
from sorter.store import BlockStore
from sorter.table import Table

_MOST_RUN_BYTES: Final = 32 << 20
_SMALL_SHARE: Final = 8
_SHARED_SHARE: Final = 2


class Spiller:
    """Keeps the rows of all tables within `memory_bytes`; every method may be called from any thread."""

    def __init__(self, counters: Counters, memory_bytes: int, block_bytes: int) -> None:
        self._counters = counters
        self._memory_bytes = memory_bytes
        self._run_bytes = min(max(memory_bytes // 2, block_bytes), max(_MOST_RUN_BYTES, block_bytes))
        self._small_bytes = block_bytes // _SMALL_SHARE
        self._shared_bytes = block_bytes // _SHARED_SHARE
        self._spilling = threading.Lock()
        self._stopped = False
        self._in_memory: dict[Table, None] = {}  # those with rows in memory, and some that had

    def stop(self) -> None:
        """Wait until what is being written is written; nothing is any more."""
        with self._spilling:
            self._stopped = True

    @property
    def is_short(self) -> bool:
        """Whether there are more rows in memory than there should be."""
        return self._counters.memory_bytes > self._memory_bytes

    def has_rows(self, table: Table) -> None:
        """A table got rows."""
        self._in_memory[table] = None

    def forget(self, table: Table) -> None:
        """A table left."""
        self._in_memory.pop(table, None)

    def spill(self) -> None:
        """Write the largest tables until three quarters of the memory are enough; who adds meanwhile waits here.

        Raises:
            SorterDiskError: the disk does not take them; what it took not is in memory still.
        """
        with self._spilling:
            if self._stopped or not self.is_short:
                return
            enough = self._memory_bytes * 3 // 4
            small: dict[BlockStore, list[Table]] = defaultdict(list)
            for table in self._victims():
                if table.memory_bytes >= self._small_bytes:
                    self._spill(table, enough)
                    self._wrote([table])
                else:
                    together = small[table.store]
                    together.append(table)
                    if sum(it.memory_bytes for it in together) >= self._shared_bytes:
                        share(table.store, together)
                        self._wrote(small.pop(table.store))
                if self._counters.memory_bytes <= enough:
                    return
            for store, together in small.items():
                share(store, together)
                self._wrote(together)

    def _spill(self, table: Table, enough: int) -> None:
        """Write a table's rows, run by run; it can be used in between."""
        while table.spill(self._run_bytes):
            pa.default_memory_pool().release_unused()  # what sorting took; else it stays ours beside the next rows
            merge_runs(table)
            if self._counters.memory_bytes <= enough:
                return
        merge_runs(table)

    def _victims(self) -> list[Table]:
        """Tables with rows in memory, the largest first: the fewest and largest blocks for the memory that comes back.

        None is spared for long: a table that takes no part grows until it is among the largest.
        """
        return sorted(self._in_memory.copy(), key=lambda table: table.memory_bytes, reverse=True)

    def _wrote(self, tables: Sequence[Table]) -> None:
        for table in tables:
            if not table.memory_bytes:
                self._in_memory.pop(table, None)
                if table.memory_bytes:  # rows came meanwhile
                    self._in_memory[table] = None


def share(store: BlockStore, tables: Sequence[Table]) -> None:
    """Write all rows that these tables of `store` have in memory, as one block.

    It has all their locks meanwhile, and is called by one thread at a time; others take one lock only.

    Raises:
        SorterDiskError: the disk does not take them; nothing has changed.
    """
    merging: list[Table] = []
    with ExitStack() as held:
        for lock in dict.fromkeys(table.lock for table in tables):
            held.enter_context(lock)
        ascending = sorted(tables, key=lambda table: table.unique_id)
        rows = {table: share for table in ascending if (share := table.unwritten()) is not None}
        entries = store.write_shared(list(rows.values())) if rows else []
        for table, entry in zip(rows, entries, strict=True):
            if table.took(entry):
                merging.append(table)
    for table in merging:
        merge_runs(table)
