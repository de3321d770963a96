"""GC of a Pump: how far it may go, and at which pace; `gc.Sweep` does the deleting.

1. gc_ts is durable before anything is deleted, so that no reader begins in what is half gone.
2. It stays behind the slowest reader, except up to `force_ts`: disk space is worth more than a reader that old.
3. Writers come first: GC takes a share of the time only, and pauses as long as LevelDB has many level-0 files.
"""

import asyncio
from typing import NamedTuple

from storage.pump.gc import BATCHES_PER_ROUND, Sweep
from storage.pump.index import Index
from storage.pump.readers import Readers
from storage.pump.threads import Threads
from storage.value_log import ValueLog


class Throttle(NamedTuple):
    """Pause for `seconds` while there are `files` level-0 files or more, and take only a `share` of the time.

    Source: tidb-binlog's doGCTS, but for the share: there GC has a processor of its own.
    """

    files: int = 8
    seconds: float = 5.0
    share: float = 0.1


class Collected(NamedTuple):
    """What a GC did: index keys and segments removed, pauses made, readers that had not read all of it."""

    gc_ts: int
    keys: int = 0
    segments: int = 0
    pauses: int = 0
    overtaken: int = 0


class Collector:
    """Runs one GC at a time."""

    def __init__(self, log: ValueLog, index: Index, readers: Readers, threads: Threads, throttle: Throttle) -> None:
        self._log = log
        self._index = index
        self._readers = readers
        self._threads = threads
        self._throttle = throttle
        self._running = asyncio.Lock()

    async def collect(self, ts: int, force_ts: int) -> Collected:
        """Remove commits up to `ts` that all readers have had, and up to `force_ts` in any case."""
        async with self._running:
            target_ts = max(min(ts, self._readers.lowest_ts), force_ts)
            overtaken = self._readers.behind(target_ts)
            if not await self._threads.index(self._index.advance_gc_ts, target_ts):
                return Collected(self._index.gc_ts)
            return (await self._sweep(target_ts))._replace(overtaken=overtaken)

    async def _sweep(self, gc_ts: int) -> Collected:
        sweep = Sweep(self._index.kv, gc_ts)
        keys = batches = segments = pauses = 0
        loop = asyncio.get_running_loop()
        began = loop.time()
        while count := await self._threads.index(sweep.delete_batch):
            await asyncio.sleep((loop.time() - began) * (1 / self._throttle.share - 1))
            keys += count
            batches += 1
            if batches % BATCHES_PER_ROUND == 0:
                segments += await self._threads.index(self._drop_segments)
            pauses += await self._pause()
            began = loop.time()
        segments += await self._threads.index(self._drop_segments)
        return Collected(gc_ts, keys, segments, pauses)

    async def _pause(self) -> int:
        pauses = 0
        while await self._threads.read(self._index.kv.level0_files) >= self._throttle.files:
            pauses += 1
            await asyncio.sleep(self._throttle.seconds)
        return pauses

    def _drop_segments(self) -> int:
        dropped = self._index.droppable(self._log.segments())
        for fid in dropped:
            self._log.drop(fid)
            self._index.forget_segment(fid)
        return len(dropped)
