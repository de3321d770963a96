"""The storage of a Pump as a whole: the way of a binlog from a writer to the readers.

    write, put -> GroupCommit -> value log (fdatasync) -> acknowledged -> Indexer -> Index (LevelDB,
    Matcher) -> pull

A pull reads chunks of commits from the index in commit order, each joined with its prewrite. A
commit whose prewrite is not known goes out as it is, without rows (an orphan): readers that look
for orphans stop there, and TiDB's Drainer passes over it as over a transaction that changed
nothing.

What blocks runs in three kinds of threads (`Threads`); GC runs in the index's, between two groups.
At the start, `recover` replays the log from the index's handle before anything is served.
Source: tidb-binlog's pump/storage, whose `Append` this is.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from storage.kv import KV
from storage.leveldb import LevelDB
from storage.model.errors import CorruptError, InvalidError, NotFoundError
from storage.model.ts import MAX_TS
from storage.pump.binlog import Binlog, join, parse
from storage.pump.gc import Collected, Collector, Readers, Throttle
from storage.pump.index import Commit, Index
from storage.pump.write_pipeline import (
    GroupCommit,
    GroupObserver,
    Indexer,
    IndexQueue,
    PumpClosedError,
    Recovery,
    Threads,
    Writer,
    recover,
)
from storage.value_log import SEGMENT_BYTES, Pointer, ValueLog
from storage.vfs import FS

THROTTLE = Throttle()
CHUNK_COMMITS = 512
CHUNK_BYTES = 4 << 20
_REMEDY = "Move the directory away: the index is built anew from the value log"


class BinlogNotFoundError(NotFoundError):
    """No binlog is filed under that timestamp."""

    code = "ErrBinlogNotFound"


class BinlogPurgedError(InvalidError):
    """A reader asks for commits that GC has already removed."""

    code = "ErrBinlogPurged"


class Cursor(NamedTuple):
    """The last commit that a reader has received; the next one comes after it."""

    commit_ts: int
    start_ts: int = MAX_TS


class Chunk(NamedTuple):
    """A run of joined binlogs, the cursor after it,
    and start_ts of the commits whose prewrite is not known.
    """

    payloads: list[bytes]
    cursor: Cursor
    orphans: list[int]


@dataclass(frozen=True, slots=True)
class Statistics:
    """The state of the storage at one moment; timestamps are TSOs, 0 when there is none."""

    max_commit_ts: int
    gc_ts: int
    waiting_prewrites: int
    oldest_waiting_ts: int
    late_commits: int
    index_behind: bool
    index_failures: int
    log_bytes: int
    segments: int


class PumpStorage:
    """The storage of one Pump; `open_pump_storage` makes it."""

    def __init__(
        self, log: ValueLog, index: Index, recovery: Recovery, threads: Threads, throttle: Throttle
    ) -> None:
        self.recovery = recovery
        self.readers = Readers()
        self._log = log
        self._index = index
        self._threads = threads
        self._index_queue = IndexQueue(log.end)
        self._group_commit = GroupCommit(log, threads.log, self._index_queue)
        self.indexer = Indexer(log, index, self._index_queue, threads, self._notify)
        self._collector = Collector(log, index, self.readers, threads, throttle)
        self._changed = asyncio.Event()
        self._pulling = True

    @property
    def written(self) -> int:
        """Binlogs that are durable since the start."""
        return self._group_commit.written

    @property
    def waiting_writes(self) -> tuple[int, int]:
        """The number of writes that wait for the disk, and their bytes."""
        return self._group_commit.waiting

    def observe_groups(self, observe: GroupObserver) -> None:
        """Call this with each group of binlogs that is durable."""
        self._group_commit.observe = observe

    @property
    def max_commit_ts(self) -> int:
        """Every commit up to here is known and can be pulled."""
        return self._index.max_commit_ts

    @property
    def gc_ts(self) -> int:
        """Commits up to here may be removed."""
        return self._index.gc_ts

    @property
    def all_matched(self) -> bool:
        """Whether every prewrite has its outcome."""
        return self._index.waiting == 0

    @property
    def waiting_bytes(self) -> int:
        """About the memory that prewrites without an outcome take."""
        return self._index.waiting_bytes

    def statistics(self) -> Statistics:
        """The present state."""
        index, segments = self._index, self._log.segments()
        return Statistics(
            max_commit_ts=index.max_commit_ts,
            gc_ts=index.gc_ts,
            waiting_prewrites=index.waiting,
            oldest_waiting_ts=index.oldest_waiting_ts,
            late_commits=index.late_commits,
            index_behind=self._index_queue.behind,
            index_failures=self.indexer.failures,
            log_bytes=self._log.size_bytes(),
            segments=len(segments),
        )

    async def write(self, binlogs: Sequence[Binlog]) -> None:
        """Store binlogs in order; durable when it returns.

        Empty ones are not stored. See `GroupCommit.write`.
        """
        stored = [binlog for binlog in binlogs if not binlog.is_empty]
        if stored:
            await self._group_commit.write(stored)

    def put(self, writer: Writer, size: int) -> None:
        """Let about `size` bytes of binlogs be stored in their turn. See `GroupCommit.put`."""
        self._group_commit.put(writer, size)

    async def get(self, ts: int) -> bytes:
        """The binlog with this commit_ts, else the prewrite with this start_ts, as it was written.

        Raises:
            BinlogNotFoundError: there is none.
        """
        pointer = await self._threads.read(self._index.find, ts)
        if pointer is None:
            raise BinlogNotFoundError(
                f"no binlog is filed under {ts}; it was never written, or removed by GC"
            )
        try:
            return await self.read(pointer)
        except CorruptError:
            if ts > self.gc_ts:
                raise
            # GC removes a segment before the index entries that point into it.
            raise BinlogNotFoundError(f"the binlog filed under {ts} was removed by GC") from None

    async def oldest_waiting(self, limit: int) -> list[tuple[int, Pointer]]:
        """start_ts and pointer of the prewrites that have waited longest for their outcome,
        in the order of the log.
        """
        return await self._threads.index(self._index.oldest_waiting, limit)

    async def read(self, pointer: Pointer) -> bytes:
        """The binlog at a pointer, as it was written. See `ValueLog.read`."""
        return await self._threads.read(self._log.read, pointer)

    async def pull(self, last_ts: int) -> AsyncIterator[Chunk]:
        """Committed binlogs with commit_ts > last_ts, each joined with its prewrite,
        in commit order, without end.

        `last_ts` 0 means from the oldest there is. Sleeps until max_commit_ts moves when there is
        nothing new.

        Raises:
            BinlogPurgedError: commits after last_ts, or after a reader that is too slow, were
                removed by GC.
            CorruptError: the log does not hold what the index says.
            PumpClosedError: `end_pulls` was called.
        """
        cursor = Cursor(last_ts or self.gc_ts)
        _check_not_purged(self._index, cursor.commit_ts)
        with self.readers.registered(cursor.commit_ts) as position:
            while True:
                upto_ts = await self._wait_beyond(cursor.commit_ts)
                while self._pulling and cursor != Cursor(upto_ts):
                    chunk = await self._threads.read(
                        read_chunk, self._index, self._log, cursor, upto_ts
                    )
                    cursor = chunk.cursor
                    if chunk.payloads or chunk.orphans:
                        yield chunk
                    # The reader asked for more, so it has this chunk: GC may pass it now.
                    position.commit_ts = cursor.commit_ts

    def end_pulls(self) -> None:
        """End every `pull`."""
        self._pulling = False
        self._notify()

    async def gc(self, ts: int, *, force_ts: int = 0) -> Collected:
        """Remove commits up to `ts` that every reader has received,
        up to `force_ts` in any case, and their segments.

        Nothing happens when that is not ahead of gc_ts or not behind max_commit_ts.
        """
        return await self._collector.collect(ts, force_ts)

    async def rotate(self) -> None:
        """Finalise the current segment, so that GC can free its space, too."""
        await self._threads.write(self._log.rotate)

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Start the pipeline's loops as children of `tasks`; they end after `close`."""
        tasks.create_task(self._group_commit.run(), name="pump-commit")
        tasks.create_task(self.indexer.run(), name="pump-index")

    def close(self) -> None:
        """Accept no more binlogs; the loops end when all are stored and indexed."""
        self.end_pulls()
        self._group_commit.close()

    async def _wait_beyond(self, ts: int) -> int:
        while self._pulling:
            # Taken before the look: a move after it sets this very event.
            changed = self._changed
            if self.max_commit_ts > ts:
                return self.max_commit_ts
            await changed.wait()
        raise PumpClosedError("the pump is stopping; pull again later")

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


@asynccontextmanager
async def open_pump_storage(
    fs: FS,
    directory: Path,
    *,
    kv: KV | None = None,
    segment_bytes: int = SEGMENT_BYTES,
    sync: bool = True,
    throttle: Throttle = THROTTLE,
) -> AsyncIterator[PumpStorage]:
    """Open or create a Pump's storage for the block: `value/` and `kv/` in `directory`;
    at its end all writes are done.

    Raises:
        ValueLogOpenError: the directory or disk cannot be used.
        SegmentMissingError: a segment that is still needed is gone.
        DirectoryLockedError: another process has it open.
        CorruptDatabaseError: LevelDB is damaged; without its directory the index is built anew from
            the log.
    """
    open_log = partial(
        ValueLog, fs, directory / "value", ts_of=_ts_of, segment_bytes=segment_bytes, sync=sync
    )
    open_kv = partial(LevelDB, directory / "kv", remedy=_REMEDY) if kv is None else lambda: kv
    with ExitStack() as stack:
        log, index, recovery = await asyncio.to_thread(recover, open_log, open_kv, stack)
        storage = PumpStorage(log, index, recovery, Threads(stack), throttle)
        async with asyncio.TaskGroup() as tasks:
            storage.start(tasks)
            try:
                yield storage
            finally:
                storage.close()


def read_chunk(index: Index, log: ValueLog, after: Cursor, upto_ts: int) -> Chunk:
    """The next binlogs after a cursor, up to `upto_ts`;
    the chunk's cursor is `upto_ts` when there are no more.

    Raises:
        BinlogPurgedError: GC has passed the cursor.
        CorruptError: the log does not hold what the index says.
    """
    commits = index.commits(after, upto_ts, CHUNK_COMMITS, CHUNK_BYTES)
    orphans = [
        commit.start_ts for commit in commits if commit.prewrite is None and not _is_fake(commit)
    ]
    # GC runs beside this: what it removed after the look into the index is no damage, and what it
    # removed before is missing in the chunk without an error.
    try:
        payloads = _payloads(log, commits)
    except CorruptError:
        _check_not_purged(index, after.commit_ts)
        raise
    _check_not_purged(index, after.commit_ts)
    cursor = Cursor(commits[-1].commit_ts, commits[-1].start_ts) if commits else Cursor(upto_ts)
    return Chunk(payloads, cursor, orphans)


def _is_fake(commit: Commit) -> bool:
    return commit.start_ts == commit.commit_ts


def _payloads(log: ValueLog, commits: Sequence[Commit]) -> list[bytes]:
    """All records of the commits and of their prewrites in as few reads as the log allows,
    then joined.
    """
    prewrites = [commit.prewrite for commit in commits if commit.prewrite is not None]
    records = iter(log.read_many([*(commit.pointer for commit in commits), *prewrites]))
    own = [next(records) for _ in commits]
    return [
        payload if commit.prewrite is None else join(payload, next(records))
        for commit, payload in zip(commits, own, strict=True)
    ]


def _check_not_purged(index: Index, last_ts: int) -> None:
    """Check that GC has removed no commit after `last_ts`.

    Raises:
        BinlogPurgedError: it has.
    """
    if last_ts < index.gc_ts:
        raise BinlogPurgedError(
            f"binlogs up to {index.gc_ts} were removed by GC, a reader at {last_ts} would lose "
            "rows; start it again from a new dump taken after that"
        )


def _ts_of(payload: bytes) -> int:
    return parse(payload).ts
