"""Segments that are kept alive by a few blocks, of tables that stand still, are emptied.

Invariants: a segment is emptied when a quarter of it is alive at most, so at most a third of what comes free is written
again; only when a new segment was begun, so that tables that nothing is written to cost nothing.
"""

import contextlib
import threading
from collections.abc import Iterable

from sorter.errors import SorterDiskError
from sorter.store import BlockStore
from sorter.table import Table
from storage.model.errors import CorruptError


class Compaction:
    """Empties sparse segments, in the thread of whoever writes; safe to call from several."""

    def __init__(self) -> None:
        self._running = threading.Lock()

    def run(self, store: BlockStore, tables: Iterable[Table]) -> None:
        """Move what is alive in the sparse segments of `store` if there are several; `tables` are all there are."""
        if not self._running.acquire(blocking=False):
            return
        try:
            sparse = store.sparse()
            if sparse:
                with contextlib.suppress(SorterDiskError, CorruptError):  # next time; who fetches is told what is wrong
                    _empty(store, sparse, {table.unique_id: table for table in tables})
        finally:
            self._running.release()

    def stop(self) -> None:
        """Wait for one that runs; there is none any more."""
        self._running.acquire()


def _empty(store: BlockStore, sparse: frozenset[int], tables: dict[int, Table]) -> None:
    for unique_id, entries in store.entries_in(sparse):
        table = tables.get(unique_id)
        if table is not None:  # else it was removed meanwhile
            table.move(entries)
