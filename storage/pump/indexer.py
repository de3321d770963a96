"""Feeds the index, from memory while it keeps up, from the log when it did not: the seed's SlowChaser.

A stalled or failing index delays readers, never writers: what is acknowledged is in the log, and the index is derived
from it. After a failed write nobody knows what the index's memory holds, so it is loaded anew and fed from its handle,
as after a restart. At the end of the daemon a chase is left off: the next start replays the rest.
"""

import asyncio
from collections.abc import Callable, Iterator
from itertools import islice, takewhile

from storage.model.errors import UnavailableError
from storage.pump.feed import Feed
from storage.pump.index import Index
from storage.pump.recovery import REPLAY_BATCH, Entered, apply, entries
from storage.pump.threads import Threads
from storage.value_log import Pointer, Skipped, ValueLog

RETRY_SECONDS = 1.0
CATCH_UP_SECONDS = 1.0


class Indexer:
    """The loop between the feed and the index."""

    def __init__(self, log: ValueLog, index: Index, feed: Feed, threads: Threads, moved: Callable[[], None]) -> None:
        self.failures = 0
        self.last_failure: UnavailableError | None = None
        self.skipped: list[Skipped] = []
        self._log = log
        self._index = index
        self._feed = feed
        self._threads = threads
        self._moved = moved
        self._unsure = False

    async def run(self) -> None:
        """Index until the feed is closed and empty; a disk that refuses is tried again and again."""
        while True:
            try:
                group = await self._feed.get()
                if group is not None:
                    await self._threads.index(self._index.apply, group.entries, group.pointers)
                elif self._feed.closed:
                    return
                else:
                    await self._chase()
            except UnavailableError as err:
                self.failures += 1
                self.last_failure = err
                self._unsure = True
                self._feed.fall_behind()
                await asyncio.sleep(RETRY_SECONDS)
            self._moved()

    async def _chase(self) -> None:
        """Read the log until a pass is quick, then let the queue fill again and read what is before it."""
        if self._unsure:
            await self._threads.index(self._index.reload)
            self._unsure = False
        loop = asyncio.get_running_loop()
        while not self._feed.closed:
            began = loop.time()
            await self._replay(self._feed.end)
            if loop.time() - began < CATCH_UP_SECONDS:
                await self._replay(self._feed.resume())
                return

    async def _replay(self, upto: Pointer) -> None:
        found = takewhile(lambda item: item[0] < upto, entries(self._log.scan(self._index.replay_from), self.skipped))
        while batch := await self._threads.read(_taken, found):
            await self._threads.index(apply, self._index, batch)
            self._moved()


def _taken(found: Iterator[Entered]) -> list[Entered]:
    return list(islice(found, REPLAY_BATCH))
