"""Groups on their way from the log to the index: a short queue, and when the index does not keep up, none at all.

The log never waits longer than `slow_seconds` for the index. After that the feed is *behind*: it only remembers where
the log ends, and whoever feeds the index reads the log itself until it may resume. Invariants:

1. The groups in the queue follow each other in the log; the last one ends at `end` unless the feed is behind.
2. After `resume` the queue begins exactly at the pointer it returned.
"""

import asyncio
from collections import deque
from typing import NamedTuple

from storage.pump.index import Entry
from storage.value_log import Pointer

GROUPS_MAX = 64
SLOW_SECONDS = 3.0


class Group(NamedTuple):
    """Binlogs that are in the log and wait for the index."""

    entries: list[Entry]
    pointers: list[Pointer]

    @property
    def end(self) -> Pointer:
        """Just after its last record."""
        last = self.pointers[-1]
        return Pointer(last.fid, last.offset + last.length, 0)


class Feed:
    """One producer, one consumer, on one event loop."""

    def __init__(self, end: Pointer, *, slow_seconds: float | None = None) -> None:
        self.end = end
        self.behind = False
        self.closed = False
        self._slow_seconds = SLOW_SECONDS if slow_seconds is None else slow_seconds
        self._groups: deque[Group] = deque()
        self._changed = asyncio.Event()

    async def put(self, group: Group) -> None:
        """Pass a group on; waits a while for room, then falls behind."""
        try:
            async with asyncio.timeout(self._slow_seconds):
                while len(self._groups) >= GROUPS_MAX and not self.behind:
                    await self._change()
        except TimeoutError:
            self.behind = True
        self.end = group.end
        if not self.behind:
            self._groups.append(group)
        self._notify()

    async def get(self) -> Group | None:
        """The next group; None when there is none in the queue, and it is behind or closed."""
        while not (self._groups or self.behind or self.closed):
            await self._change()
        if not self._groups:
            return None
        self._notify()
        return self._groups.popleft()

    def fall_behind(self) -> None:
        """Forget what is in the queue: the consumer will read it from the log."""
        self._groups.clear()
        self.behind = True
        self._notify()

    def resume(self) -> Pointer:
        """Queue groups again; returns where they begin: the consumer reads the log up to there."""
        self.behind = False
        return self.end

    def close(self) -> None:
        """There will be no more."""
        self.closed = True
        self._notify()

    async def _change(self) -> None:
        changed = self._changed
        await changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
