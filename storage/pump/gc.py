"""GC of a Pump: the readers that hold it back (`Readers`), its progress (`Collector`), its
deletions (`Sweep`), and its pace (`Throttle`).

1. gc_ts is durable before anything is deleted, so that no reader begins in a range that is half
   deleted.
2. It stays behind the slowest reader, except up to `force_ts`: disk space is worth more than a
   reader that old.
3. Writers come first: GC takes a share of the time only, and pauses as long as LevelDB has many
   level-0 files.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple

from storage.kv import KV, WriteBatch
from storage.model.ts import MAX_TS
from storage.pump.index import COMMIT_PREFIX, Index, commit_key, prewrite_of
from storage.pump.write_pipeline import Threads
from storage.value_log import ValueLog

BATCH_KEYS = 1024
BATCHES_PER_ROUND = 100


class ReaderPosition:
    """The commit_ts up to which a reader has received everything; moved when it asks for more."""

    __slots__ = ("commit_ts",)

    def __init__(self, commit_ts: int) -> None:
        self.commit_ts = commit_ts


class Readers:
    """The open pulls of a storage; GC stays behind the slowest of them."""

    def __init__(self) -> None:
        self._positions: set[ReaderPosition] = set()

    @contextmanager
    def registered(self, commit_ts: int) -> Iterator[ReaderPosition]:
        """Register a reader for the block, at `commit_ts`; the reader moves its position itself."""
        position = ReaderPosition(commit_ts)
        self._positions.add(position)
        try:
            yield position
        finally:
            self._positions.discard(position)

    @property
    def lowest_ts(self) -> int:
        """Return the slowest reader's commit_ts; MAX_TS without readers."""
        return min((position.commit_ts for position in self._positions), default=MAX_TS)

    def behind(self, ts: int) -> int:
        """The number of readers that have not received everything up to `ts`."""
        return sum(position.commit_ts < ts for position in self._positions)


class Throttle(NamedTuple):
    """Pause for `seconds` while there are `files` level-0 files or more,
    and take only a `share` of the time.

    Source: tidb-binlog's doGCTS, but for the share: there GC has a processor of its own.
    """

    files: int = 8
    seconds: float = 5.0
    share: float = 0.1


class Collected(NamedTuple):
    """The outcome of a GC: index keys and segments removed, pauses made, and readers that had not
    received all of it.
    """

    gc_ts: int
    keys: int = 0
    segments: int = 0
    pauses: int = 0
    overtaken: int = 0


class Collector:
    """Runs one GC at a time."""

    def __init__(
        self, log: ValueLog, index: Index, readers: Readers, threads: Threads, throttle: Throttle
    ) -> None:
        self._log = log
        self._index = index
        self._readers = readers
        self._threads = threads
        self._throttle = throttle
        self._running = asyncio.Lock()

    async def collect(self, ts: int, force_ts: int) -> Collected:
        """Remove commits up to `ts` that all readers have received,
        and up to `force_ts` in any case.
        """
        async with self._running:
            target_ts = max(min(ts, self._readers.lowest_ts), force_ts)
            # Counted before gc_ts moves: these readers will get BinlogPurgedError.
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
            # A batch that took 1 ms is followed by a pause of 9 ms, at a share of a tenth.
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
            self._index.delete_segment(fid)
        return len(dropped)


class Sweep:
    """One pass that deletes index keys of commits up to `gc_ts`, batch by batch;
    a prewrite goes with its commit.

    tidb-binlog's loop, `for iter.Next() && batches < 100`, steps onto one more key before it sees
    that the round is full; the iterator is kept for the next round and never comes back to that
    key, which leaks. Here a batch ends with the last key it deletes, and the next one begins just
    after it.
    """

    def __init__(self, kv: KV, gc_ts: int, *, batch_keys: int = BATCH_KEYS) -> None:
        assert batch_keys >= 2, "a commit and its prewrite are two keys"
        self._kv = kv
        self._next = COMMIT_PREFIX
        self._end = commit_key(gc_ts + 1, 0)
        self._commits = batch_keys // 2

    def delete_batch(self) -> int:
        """Delete the next keys in one write; returns how many, 0 at the end of the pass."""
        batch = WriteBatch()
        for key, _ in islice(self._kv.scan(self._next, self._end), self._commits):
            batch.delete(key)
            batch.delete(prewrite_of(key))
            self._next = key + b"\0"
        if batch:
            self._kv.write(batch, sync=False)
        return len(batch)
