"""Keeps Python's cycle collector from visiting the objects of very many tables.

A changefeed of a hundred thousand tables has millions of objects that live as long as it does. Each
full collection looks at all of them, and the process stands still meanwhile, with all its threads:
0.3 s and more for a hundred thousand tables, several times while they are read.

So the collector is off while they are made (`building_tables`), and then `gc.freeze` takes them out
of its generations. Frozen objects without references are freed as usual, but not cycles of them. A
run that ends leaves some cycles, so `dropped_tables` lets the collector visit everything once, and
freezes what is left. State that tables get with their first rows is frozen by the first full
collection that takes long.
"""

import asyncio
import gc
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

TABLES_MIN: Final = 10_000
"""With fewer tables a full collection takes a few hundredths of a second."""
_FREE_AFTER_S: Final = 5.0
_LONG_S: Final = 0.05
"""A full collection that takes this CPU time has looked at a great many objects."""
_lock = threading.Lock()


class _Collections:
    """Freezes what a long collection has left."""

    def __init__(self) -> None:
        self._began_s = 0.0

    def ended(self, phase: str, info: Mapping[str, int]) -> None:
        """See `gc.callbacks`: called before and after each collection, in its thread."""
        if info["generation"] != 2:
            return
        if phase == "start":
            self._began_s = time.thread_time()
        elif time.thread_time() - self._began_s > _LONG_S:
            gc.freeze()


_collections = _Collections()
_under_way: list[int] = []
"""The sizes of the sets of tables that are being built now."""


@contextmanager
def building_tables(tables: int) -> Iterator[None]:
    """Keep the collector off while the block makes the objects of so many tables; in any thread."""
    if tables < TABLES_MIN:
        yield
        return
    with _lock:
        _under_way.append(tables)
        gc.disable()
        if _collections.ended not in gc.callbacks:
            gc.callbacks.append(_collections.ended)
    try:
        yield
    finally:
        with _lock:
            _under_way.remove(tables)
            if not _under_way:
                gc.freeze()
                gc.enable()


def dropped_tables(tables: int) -> None:
    """Note that a number of tables has been dropped; called on the event loop."""
    if tables >= TABLES_MIN:
        # Later: the call that has dropped them may still use them for its answer.
        asyncio.get_running_loop().call_later(_FREE_AFTER_S, collect_cycles)


def collect_cycles() -> None:
    """Free what is left in cycles; the process stands still meanwhile."""
    with _lock:
        gc.unfreeze()
        gc.collect()
        gc.freeze()
