"""Pump storage as a whole: the way of a binlog from a writer to the readers.

    write -> Committer -> value log (fdatasync) -> acknowledged -> Index (LevelDB, matcher) -> pull

Three kinds of threads do the waiting: one writes the log, one owns the index (and so runs GC between two groups), a few
read. The event loop only passes things on. Recovery replays the log from the index's handle before anything is served.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

from storage.kv import KV
from storage.leveldb import LevelDB
from storage.model.errors import NotFoundError, UnavailableError
from storage.pump.binlog import Binlog, parse
from storage.pump.committer import Committer, PumpClosedError
from storage.pump.gc import BATCHES_PER_ROUND, Sweep
from storage.pump.index import START, Index
from storage.pump.pull import Chunk, Cursor, check_not_purged, read_chunk
from storage.segment import SegmentMissingError
from storage.value_log import SEGMENT_BYTES, Pointer, Skipped, ValueLog
from storage.vfs import FS

T = TypeVar("T")
_READERS = 4
_REPLAY_BATCH = 1024


class BinlogNotFoundError(NotFoundError):
    """No binlog is filed under that timestamp."""

    code = "ErrBinlogNotFound"


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a start found: binlogs replayed, bytes that had to be skipped, and whether the index was built anew."""

    replayed: int
    skipped: tuple[Skipped, ...]
    rebuilt: bool


@dataclass(frozen=True, slots=True)
class Statistics:
    """A moment of the storage; timestamps are TSOs, 0 when there is none."""

    max_commit_ts: int
    gc_ts: int
    waiting_prewrites: int
    oldest_waiting_ts: int
    late_commits: int
    log_bytes: int
    segments: int


class Append:
    """The storage of one Pump; made by `open_append`."""

    def __init__(self, log: ValueLog, index: Index, recovery: Recovery, threads: ExitStack) -> None:
        self.recovery = recovery
        self._log = log
        self._index = index
        self._log_thread = threads.enter_context(ThreadPoolExecutor(1, "value-log"))
        self._index_thread = threads.enter_context(ThreadPoolExecutor(1, "pump-index"))
        self._readers = threads.enter_context(ThreadPoolExecutor(_READERS, "pump-read"))
        self._committer = Committer(log, self._log_thread)
        self._moved = asyncio.Event()
        self._pulling = True
        self._collecting = asyncio.Lock()

    @property
    def max_commit_ts(self) -> int:
        """Every commit up to here is known and can be pulled."""
        return self._index.max_commit_ts

    @property
    def gc_ts(self) -> int:
        """Commits up to here were given up."""
        return self._index.gc_ts

    @property
    def all_matched(self) -> bool:
        """Whether no prewrite waits for its outcome."""
        return self._index.waiting == 0

    @property
    def waiting_bytes(self) -> int:
        """About the memory that prewrites without an outcome take."""
        return self._index.waiting_bytes

    def statistics(self) -> Statistics:
        """The state of now."""
        index, segments = self._index, self._log.segments()
        return Statistics(
            max_commit_ts=index.max_commit_ts,
            gc_ts=index.gc_ts,
            waiting_prewrites=index.waiting,
            oldest_waiting_ts=index.oldest_waiting_ts,
            late_commits=index.late_commits,
            log_bytes=self._log.size_bytes(),
            segments=len(segments),
        )

    async def write(self, binlogs: Sequence[Binlog]) -> None:
        """Store binlogs in order; durable when it returns. Empty ones are not stored. See `Committer.write`."""
        stored = [binlog for binlog in binlogs if not binlog.is_empty]
        if stored:
            await self._committer.write(stored)

    async def get(self, ts: int) -> bytes:
        """The binlog with this commit_ts, else the prewrite with this start_ts, as it was written.

        Raises:
            BinlogNotFoundError: there is none.
        """
        pointer = await self._run(self._readers, self._index.find, ts)
        if pointer is None:
            raise BinlogNotFoundError(f"no binlog is filed under {ts}; it was never written, or removed by GC")
        return await self.read(pointer)

    async def oldest_waiting(self, limit: int) -> list[tuple[int, Pointer]]:
        """start_ts and pointer of the prewrites that have waited longest for their outcome, in the order of the log."""
        return await self._run(self._index_thread, self._index.oldest_waiting, limit)

    async def read(self, pointer: Pointer) -> bytes:
        """The binlog at a pointer, as it was written. See `ValueLog.read`."""
        return await self._run(self._readers, self._log.read, pointer)

    async def pull(self, last_ts: int) -> AsyncIterator[Chunk]:
        """Committed binlogs with commit_ts > last_ts, each joined with its prewrite, in commit order, without end.

        `last_ts` 0 means from the oldest there is. Sleeps until max_commit_ts moves when there is nothing new.

        Raises:
            BinlogPurgedError: commits after last_ts, or after a reader that is too slow, were removed by GC.
            CorruptError: the log does not hold what the index says.
            PumpClosedError: `end_pulls` was called.
        """
        cursor = Cursor(last_ts or self.gc_ts)
        check_not_purged(self._index, cursor.commit_ts)
        while True:
            upto_ts = await self._wait_beyond(cursor.commit_ts)
            while self._pulling and cursor != Cursor(upto_ts):
                chunk = await self._run(self._readers, read_chunk, self._index, self._log, cursor, upto_ts)
                cursor = chunk.cursor
                if chunk.payloads or chunk.orphans:
                    yield chunk

    def end_pulls(self) -> None:
        """Let every `pull` end."""
        self._pulling = False
        self._notify()

    async def gc(self, ts: int) -> int:
        """Remove commits up to `ts`, then the segments nobody can ask for; returns the number of index keys deleted.

        Nothing happens when `ts` is not ahead of gc_ts or not behind max_commit_ts.
        """
        async with self._collecting:
            if not await self._run(self._index_thread, self._index.advance_gc_ts, ts):
                return 0
            sweep = Sweep(self._index.kv, ts)
            deleted = batches = 0
            while count := await self._run(self._index_thread, sweep.delete_batch):
                deleted += count
                batches += 1
                if batches % BATCHES_PER_ROUND == 0:
                    await self._run(self._index_thread, self._drop_segments)
            await self._run(self._index_thread, self._drop_segments)
            return deleted

    def _drop_segments(self) -> None:
        for fid in self._index.droppable(self._log.segments()):
            self._log.drop(fid)
            self._index.forget_segment(fid)

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Start the pipeline's loops as children of `tasks`; they end after `close`."""
        tasks.create_task(self._committer.run(), name="pump-committer")
        tasks.create_task(self._index_groups(), name="pump-index")

    def close(self) -> None:
        """Accept no more binlogs; the loops end when all are stored and indexed."""
        self.end_pulls()
        self._committer.close()

    async def _index_groups(self) -> None:
        """Index what is stored. A disk that refuses ends writing, not reading: a restart replays the rest."""
        failed = False
        while (group := await self._committer.groups.get()) is not None:
            if failed:
                continue
            try:
                await self._run(self._index_thread, self._index.apply, group.entries, group.pointers)
            except UnavailableError as err:
                self._committer.refuse(err)
                failed = True
            self._notify()

    async def _wait_beyond(self, ts: int) -> int:
        while self._pulling:
            moved = self._moved
            if self.max_commit_ts > ts:
                return self.max_commit_ts
            await moved.wait()
        raise PumpClosedError("the pump is stopping; pull again later")

    def _notify(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    @staticmethod
    async def _run(threads: ThreadPoolExecutor, function: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(threads, partial(function, *args))


@asynccontextmanager
async def open_append(
    fs: FS, directory: Path, *, kv: KV | None = None, segment_bytes: int = SEGMENT_BYTES, sync: bool = True
) -> AsyncIterator[Append]:
    """Open or create a Pump's storage for the block: `value/` and `kv/` in `directory`; drains on the way out.

    Raises:
        ValueLogOpenError: the directory or disk cannot be used.
        SegmentMissingError: a segment that is still needed is gone.
        DirectoryLockedError: another process has it open.
        CorruptDatabaseError: LevelDB is damaged; without its directory the index is built anew from the log.
    """
    open_log = partial(ValueLog, fs, directory / "value", ts_of=_ts_of, segment_bytes=segment_bytes, sync=sync)
    open_kv = partial(LevelDB, directory / "kv") if kv is None else lambda: kv
    with ExitStack() as stack:
        log, index, recovery = await asyncio.to_thread(_recover, open_log, open_kv, stack)
        append = Append(log, index, recovery, stack)
        async with asyncio.TaskGroup() as tasks:
            append.start(tasks)
            try:
                yield append
            finally:
                append.close()


def _recover(
    open_log: Callable[[], ValueLog], open_kv: Callable[[], KV], stack: ExitStack
) -> tuple[ValueLog, Index, Recovery]:
    kv = open_kv()  # first: LevelDB's lock keeps a second process off the log too
    stack.callback(kv.close)
    log = open_log()
    stack.callback(log.close)
    index = Index(kv)
    rebuilt = _rebuild(log, index)
    skipped = dict.fromkeys(log.skipped)
    found = log.scan(index.handle)
    replayed = 0
    while batch := list(islice(found, _REPLAY_BATCH)):
        records = [item for item in batch if not isinstance(item, Skipped)]
        skipped |= dict.fromkeys(item for item in batch if isinstance(item, Skipped))
        if records:
            index.apply([parse(payload)[:3] for _, payload in records], [pointer for pointer, _ in records])
        replayed += len(records)
    return log, index, Recovery(replayed, tuple(skipped), rebuilt)


def _rebuild(log: ValueLog, index: Index) -> bool:
    """Empty the index when it does not fit the log: it is new, or knows records that the disk has lost."""
    segments = log.segments()
    if index.head.fid not in segments and index.head != START:
        raise SegmentMissingError(f"segment {index.head.fid} of the value log is missing; restore its file")
    first = next(iter(segments), 0)
    unfit = log.end < index.head or (index.head == START and first > 0)
    if unfit:
        index.reset(first)
    return unfit


def _ts_of(payload: bytes) -> int:
    return parse(payload).ts
