"""The write path of a Pump: a group of binlogs is written to the value log, acknowledged, and then
indexed.

1. `GroupCommit` writes all queued binlogs to the log with one write and one fdatasync, acknowledges
   them, and passes them to the `IndexQueue`, in this order. There is no timer: while one group is
   written to the disk, the next one gathers.
2. `Indexer` feeds the index from the queue while the index keeps up, and from the log while it does
   not (tidb-binlog's SlowChaser). Groups gather for `GATHER_SECONDS` before they are indexed, which
   delays readers only. So does an index that stalls or fails: writers never wait for it for longer
   than `SLOW_SECONDS`, since what is acknowledged is in the log, from which the index is derived.
   After a failed write the index in memory may differ from the disk, so it is loaded again and
   replays the log from its handle, as after a restart. A daemon that stops does not wait for the
   index to catch up: the next start replays the rest.
3. `recover` replays the log at a start, from the index's handle.

Blocking calls run in `Threads`, never on the event loop.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

from storage.kv import KV
from storage.model.errors import ClosedError, TidemarkError, UnavailableError
from storage.pump.binlog import Binlog, parse
from storage.pump.index import START, Entry, Index
from storage.queue import GroupQueue
from storage.tasks import run_to_end
from storage.value_log import Pointer, SegmentMissingError, Skipped, ValueLog

GROUP_BYTES = 4 << 20
GROUP_WRITES = 1024
"""The most writes of one group: all of them are parsed on the event loop, in one turn."""
WAITING_BYTES_MAX = 256 << 20
"""Bytes that may be queued for the disk; beyond them writes are refused."""
GROUPS_MAX = 64
"""Groups that may be queued for the index."""
SLOW_SECONDS = 3.0
"""How long the log waits for room in a full index queue before the queue falls behind."""
RETRY_SECONDS = 1.0
"""The pause before the index is tried again after its disk refused a write."""
CATCH_UP_SECONDS = 1.0
"""A pass over the log that takes less is the last but one before the queue is used again."""
GATHER_SECONDS = 0.002
"""How long queued groups wait for others before they are indexed in one write."""
REPLAY_BATCH = 1024
"""Binlogs of one write into the index; the group that reaches the number is taken whole."""
_READERS = 4
T = TypeVar("T")
IndexedRecord: TypeAlias = tuple[Pointer, Entry]
"""The part of a record of the log that the index needs: its place, and its entry."""


class PumpBusyError(UnavailableError):
    """More binlogs wait for the disk than the Pump's limit."""

    code = "ErrPumpBusy"


class PumpClosedError(ClosedError):
    """The Pump is stopping."""

    code = "ErrPumpClosed"


class Threads:
    """The thread pools of a storage; `stack` joins them at its end."""

    def __init__(self, stack: ExitStack) -> None:
        self.log: Executor = stack.enter_context(ThreadPoolExecutor(1, "value-log"))
        self._index = stack.enter_context(ThreadPoolExecutor(1, "pump-index"))
        self._readers = stack.enter_context(ThreadPoolExecutor(_READERS, "pump-read"))

    async def write(self, function: Callable[..., T], *args: object) -> T:
        """Call in the thread that writes the value log."""
        return await _call(self.log, function, *args)

    async def index(self, function: Callable[..., T], *args: object) -> T:
        """Call in the thread that changes the index; calls run one after the other."""
        return await _call(self._index, function, *args)

    async def index_alone(self, function: Callable[[], T]) -> T:
        """The same, while nothing reads."""
        gate = threading.Barrier(_READERS + 1)
        for _ in range(_READERS):
            self._readers.submit(_stand_aside, gate)
        # To its end: a call that is cancelled in its queue would leave all readers at the gate.
        return await run_to_end(_call(self._index, _call_between, gate, function))

    async def read(self, function: Callable[..., T], *args: object) -> T:
        """Call a function that only reads."""
        return await _call(self._readers, function, *args)


def _stand_aside(gate: threading.Barrier) -> None:
    gate.wait()  # this thread reads nothing now
    gate.wait()


def _call_between(gate: threading.Barrier, function: Callable[[], T]) -> T:
    gate.wait()
    try:
        return function()
    finally:
        gate.wait()


async def _call(threads: Executor, function: Callable[..., T], *args: object) -> T:
    return await asyncio.get_running_loop().run_in_executor(threads, partial(function, *args))


class Group(NamedTuple):
    """Binlogs that are in the log and wait for the index."""

    entries: list[Entry]
    pointers: list[Pointer]

    @property
    def end(self) -> Pointer:
        """Just after its last record."""
        last = self.pointers[-1]
        return Pointer(last.fid, last.offset + last.length, 0)


class IndexQueue:
    """Groups on their way from the log to the index; one producer, one consumer, on one event loop.

    The log never waits longer than `slow_seconds` for the index. After that the queue is *behind*:
    it accepts no more groups and only records where the log ends. The consumer takes the groups
    that are left, and then reads the log itself until it calls `resume`. Invariants:

    1. The groups in the queue follow each other in the log; the last one ends at `end` unless the
       queue is behind.
    2. After `resume` the queue begins exactly at the pointer that it returned.
    """

    def __init__(self, end: Pointer, *, slow_seconds: float | None = None) -> None:
        self.end = end
        self.behind = False
        self.closed = False
        self._slow_seconds = SLOW_SECONDS if slow_seconds is None else slow_seconds
        self._groups: deque[Group] = deque()
        self._changed = asyncio.Event()

    async def put(self, group: Group) -> None:
        """Add a group; waits for room at most `slow_seconds`, then falls behind."""
        if len(self._groups) >= GROUPS_MAX and not self.behind:
            await self._wait_for_room()
        self.end = group.end
        if not self.behind:
            self._groups.append(group)
        self._notify()

    async def get(self) -> Group | None:
        """The next groups as one; None when there is none in the queue, and it is behind or closed.

        Waits `GATHER_SECONDS` for more: each write into the index wakes another thread, and that
        one this loop, which costs more than the entries of a binlog or two.
        """
        while not (self._groups or self.behind or self.closed):
            await self._wait_for_change()
        if not (self.behind or self.closed):
            await asyncio.sleep(GATHER_SECONDS)
        entries: list[Entry] = []
        pointers: list[Pointer] = []
        while self._groups and len(entries) < REPLAY_BATCH:
            group = self._groups.popleft()
            entries += group.entries
            pointers += group.pointers
        if not entries:
            return None
        self._notify()
        return Group(entries, pointers)

    def fall_behind(self) -> None:
        """Empty the queue: the consumer will read from the log."""
        self._groups.clear()
        self.behind = True
        self._notify()

    def resume(self) -> Pointer:
        """Accept groups again; returns where the first one will begin: the consumer must read the
        log up to there.
        """
        self.behind = False
        return self.end

    def close(self) -> None:
        """No group will follow."""
        self.closed = True
        self._notify()

    async def _wait_for_room(self) -> None:
        try:
            async with asyncio.timeout(self._slow_seconds):
                while len(self._groups) >= GROUPS_MAX and not self.behind:
                    await self._wait_for_change()
        except TimeoutError:
            self.behind = True

    async def _wait_for_change(self) -> None:
        changed = self._changed
        await changed.wait()

    def _notify(self) -> None:
        # Each waiter holds the event it waits for, so a new one cannot make it miss this wake-up.
        self._changed.set()
        self._changed = asyncio.Event()


GroupObserver: TypeAlias = Callable[[float, int, int], None]
"""Called with the seconds that a group took to be durable, its binlogs and their bytes."""


class Writer(Protocol):
    """A queued write: it gives its binlogs when its group begins, and is told the outcome."""

    def begin(self) -> Sequence[Binlog]:
        """The binlogs to write now; none if they were refused, or nobody waits for them any more.
        Then `stored` is not called.
        """

    def stored(self, failure: TidemarkError | None, /) -> None:
        """Report the outcome: None when the binlogs are durable, else the reason why none of them
        was acknowledged. Only the first call counts.
        """


class _AwaitedWrite:
    """A `Writer` whose outcome is a future, for the task that waits in `write`."""

    def __init__(self, binlogs: Sequence[Binlog]) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._binlogs = binlogs

    def begin(self) -> Sequence[Binlog]:
        return () if self.future.done() else self._binlogs

    def stored(self, failure: TidemarkError | None) -> None:
        if self.future.done():
            return
        if failure is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(failure)


class GroupCommit:
    """The queue in front of the value log and the loop that empties it; of one event loop."""

    def __init__(self, log: ValueLog, thread: Executor, index_queue: IndexQueue) -> None:
        self.written = 0
        """Binlogs that are durable since the start."""
        self.observe: GroupObserver = lambda _seconds, _binlogs, _bytes: None
        self._index_queue = index_queue
        self._log = log
        self._thread = thread
        self._queue: GroupQueue[Writer] = GroupQueue(GROUP_WRITES, GROUP_BYTES)
        self._refusal: TidemarkError | None = None

    @property
    def waiting(self) -> tuple[int, int]:
        """The number of writes that wait for the disk, and their bytes."""
        return len(self._queue), self._queue.waiting_bytes

    async def write(self, binlogs: Sequence[Binlog]) -> None:
        """Store binlogs in order; they are durable when it returns.

        Raises:
            ValueLogWriteError: the disk refused them; none of them was stored.
            PumpBusyError, TidemarkError: see `put`.
        """
        writer = _AwaitedWrite(binlogs)
        self.put(writer, sum(len(binlog.payload) for binlog in binlogs))
        await writer.future

    def put(self, writer: Writer, size: int) -> None:
        """Queue a write of about `size` bytes of binlogs.

        Raises:
            PumpBusyError: `WAITING_BYTES_MAX` are waiting already.
            TidemarkError: no more is accepted, see `refuse`.
        """
        if self._refusal is not None:
            raise self._refusal
        # With an empty queue any size is taken: a write above the limit could never be stored
        # otherwise.
        if self._queue and self._queue.waiting_bytes + size > WAITING_BYTES_MAX:
            raise PumpBusyError(
                f"{self._queue.waiting_bytes} bytes wait for the disk; slow down and write again"
            )
        self._queue.put(writer, size)

    def refuse(self, reason: TidemarkError) -> None:
        """Accept no more writes; queued ones fail with the reason, too."""
        self._refusal = self._refusal or reason
        self._answer(self._queue.take_all(), reason)

    def close(self) -> None:
        """Accept no more writes; `run` ends when the queued ones are stored."""
        self._refusal = self._refusal or _stopping()
        self._queue.wake()

    async def run(self) -> None:
        """Store groups until closed; then close the index queue."""
        try:
            while self._queue or self._refusal is None:
                await self._queue.wait()
                while writers := self._queue.take():
                    await self._store(writers)
        finally:
            self.refuse(_stopping())
        self._index_queue.close()

    async def _store(self, group: list[Writer]) -> None:
        writers: list[Writer] = []
        binlogs: list[Binlog] = []
        for writer in group:
            if begun := writer.begin():
                writers.append(writer)
                binlogs += begun
        if not writers:
            return
        pointers = await self._append(writers, binlogs)
        if pointers:
            await self._index_queue.put(Group([binlog[:3] for binlog in binlogs], pointers))

    async def _append(self, writers: list[Writer], binlogs: list[Binlog]) -> list[Pointer]:
        """Append a group to the log and answer its writers; returns its pointers, none if it was
        refused.
        """
        payloads = [binlog.payload for binlog in binlogs]
        max_ts = max(binlog.ts for binlog in binlogs)
        loop = asyncio.get_running_loop()
        began = loop.time()
        appended: asyncio.Future[list[Pointer]] = loop.create_future()

        def in_thread() -> None:
            outcome: list[Pointer] | BaseException
            try:
                outcome = self._log.append(payloads, max_ts)
            except BaseException as err:  # noqa: BLE001 - raised in the task that waits for it
                outcome = err
            loop.call_soon_threadsafe(in_loop, outcome)

        def in_loop(outcome: list[Pointer] | BaseException) -> None:
            # The task was cancelled, and has answered the writers with an error already.
            if appended.done():
                return
            # Writers are answered here, two turns of the loop before the task below goes on, and
            # before the index has the group: a binlog in the log is durable, and the index can be
            # rebuilt from the log.
            try:
                if isinstance(outcome, list):
                    self.written += len(binlogs)
                    self.observe(loop.time() - began, len(binlogs), sum(map(len, payloads)))
                    self._answer(writers, None)
                elif isinstance(outcome, TidemarkError):
                    self._answer(writers, outcome)
                    outcome = []
            except BaseException as err:  # noqa: BLE001 - as above
                outcome = err
            if isinstance(outcome, list):
                appended.set_result(outcome)
            else:
                appended.set_exception(outcome)

        self._thread.submit(in_thread)
        try:
            return await appended
        except BaseException:
            self._answer(writers, _stopping())
            raise

    @staticmethod
    def _answer(writers: Sequence[Writer], failure: TidemarkError | None) -> None:
        for writer in writers:
            writer.stored(failure)


def _stopping() -> PumpClosedError:
    return PumpClosedError("the pump is stopping; write to another one")


class Indexer:
    """The loop between the index queue and the index."""

    def __init__(
        self,
        log: ValueLog,
        index: Index,
        queue: IndexQueue,
        threads: Threads,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called whenever max_commit_ts may have moved."""
        self.failures = 0
        self.last_failure: UnavailableError | None = None
        self.skipped: list[Skipped] = []
        self._log = log
        self._index = index
        self._queue = queue
        self._threads = threads
        self._on_change = on_change
        self._must_reload = False

    async def run(self) -> None:
        """Index until the queue is closed and empty;
        a disk that refuses is tried again every `RETRY_SECONDS`.
        """
        while True:
            try:
                group = await self._queue.get()
                if group is not None:
                    await self._threads.index(self._index.apply, group.entries, group.pointers)
                elif self._queue.closed:
                    return
                else:
                    await self._catch_up()
            except UnavailableError as err:
                self.failures += 1
                self.last_failure = err
                # A failed batch may have changed the matcher in memory but not the index on disk.
                self._must_reload = True
                # The queue would go on after the group that failed; the log still has it.
                self._queue.fall_behind()
                await asyncio.sleep(RETRY_SECONDS)
            self._on_change()

    async def _catch_up(self) -> None:
        """Read the log until a pass takes less than `CATCH_UP_SECONDS`,
        then up to where the queue resumes.
        """
        if self._must_reload:
            await self._threads.index_alone(self._index.renew)
            self._must_reload = False
        loop = asyncio.get_running_loop()
        while not self._queue.closed:
            began = loop.time()
            await self._replay(self._queue.end)
            if loop.time() - began < CATCH_UP_SECONDS:
                # The queue takes groups again from where it ends now, so this last pass closes the
                # gap between the log and the queue.
                await self._replay(self._queue.resume())
                return

    async def _replay(self, upto: Pointer) -> None:
        records = takewhile(
            lambda item: item[0] < upto,
            _records(self._log.scan(self._index.replay_from), self.skipped),
        )
        while batch := await self._threads.read(_take_batch, records):
            await self._threads.index(_apply, self._index, batch)
            self._on_change()


@dataclass(frozen=True, slots=True)
class Recovery:
    """The outcome of a start: binlogs replayed, damaged bytes skipped, and whether the index was
    rebuilt.
    """

    replayed: int
    skipped: tuple[Skipped, ...]
    rebuilt: bool


def recover(
    open_log: Callable[[], ValueLog], open_kv: Callable[[], KV], stack: ExitStack
) -> tuple[ValueLog, Index, Recovery]:
    """Open log and index, rebuild the index if it does not fit the log, and replay;
    `stack` closes them.

    Raises:
        SegmentMissingError: a segment that is still needed is gone.
        TidemarkError: the log or LevelDB cannot be opened.
    """
    # LevelDB comes first: its lock keeps a second process off the log, too.
    kv = open_kv()
    stack.callback(kv.close)
    log = open_log()
    stack.callback(log.close)
    index = Index(kv)
    rebuilt = _rebuild_if_unfit(log, index)
    skipped = list(log.skipped)
    replayed = 0
    records = _records(log.scan(index.replay_from), skipped)
    while batch := _take_batch(records):
        replayed += _apply(index, batch)
    return log, index, Recovery(replayed, tuple(dict.fromkeys(skipped)), rebuilt)


def _rebuild_if_unfit(log: ValueLog, index: Index) -> bool:
    """Empty the index if it must be built anew: it is new while the log is not, or it is ahead of
    the log. Returns whether it was emptied.

    Raises:
        SegmentMissingError: the segment where the index ends is gone.
    """
    segments = log.segments()
    if index.head.fid not in segments and index.head != START:
        raise SegmentMissingError(
            f"segment {index.head.fid} of the value log is missing; restore its file"
        )
    first = next(iter(segments), 0)
    # An index ahead of its log: the disk has lost records, or the log was written without sync.
    unfit = log.end < index.head or (index.head == START and first > 0)
    if unfit:
        # GC has removed the segments before `first`, and how far it went was lost with the index.
        # The first segment that is left was not below it as a whole.
        is_lost = first > 0 and index.gc_ts == 0
        index.reset(first, segments[first] if is_lost else 0)
    return unfit


def _take_batch(records: Iterator[IndexedRecord]) -> list[IndexedRecord]:
    return list(islice(records, REPLAY_BATCH))


def _records(
    scan: Iterator[tuple[Pointer, bytes] | Skipped], skipped: list[Skipped]
) -> Iterator[IndexedRecord]:
    """The records of a scan as the index needs them; damaged bytes are added to `skipped`."""
    for item in scan:
        if isinstance(item, Skipped):
            skipped.append(item)
        else:
            yield item[0], parse(item[1])[:3]


def _apply(index: Index, batch: Sequence[IndexedRecord]) -> int:
    """Index records of the log; returns how many."""
    index.apply([entry for _, entry in batch], [pointer for pointer, _ in batch])
    return len(batch)
