"""Group commit: all binlogs that wait go into the value log together,
with one write and one fdatasync.

`GroupCommit` writes a group, acknowledges it, and passes it to the `IndexQueue`, in this order.
There is no timer: while one group is on its way to the disk, the next one gathers.
"""

import asyncio
import sys
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import NamedTuple

from storage.group_queue import GroupQueue
from storage.model.errors import ClosedError, TidemarkError, UnavailableError
from storage.pump.binlog import Binlog
from storage.pump.index import Entry
from storage.value_log import Pointer, ValueLog

GROUP_BYTES = 4 << 20
WAITING_BYTES_MAX = 256 << 20
GROUPS_MAX = 64
SLOW_SECONDS = 3.0


class PumpBusyError(UnavailableError):
    """More binlogs wait for the disk than the Pump will hold."""

    code = "ErrPumpBusy"


class PumpClosedError(ClosedError):
    """The Pump is stopping."""

    code = "ErrPumpClosed"


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
    it is empty and only knows where the log ends, and the consumer reads the log itself until it
    calls `resume`. Invariants:

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
        try:
            async with asyncio.timeout(self._slow_seconds):
                while len(self._groups) >= GROUPS_MAX and not self.behind:
                    await self._wait_for_change()
        except TimeoutError:
            self.behind = True
        self.end = group.end
        if not self.behind:
            self._groups.append(group)
        self._notify()

    async def get(self) -> Group | None:
        """The next group; None when there is none in the queue, and it is behind or closed."""
        while not (self._groups or self.behind or self.closed):
            await self._wait_for_change()
        if not self._groups:
            return None
        self._notify()
        return self._groups.popleft()

    def fall_behind(self) -> None:
        """Empty the queue: the consumer will read from the log."""
        self._groups.clear()
        self.behind = True
        self._notify()

    def resume(self) -> Pointer:
        """Take groups again; returns where they will begin:
        the consumer reads the log up to there.
        """
        self.behind = False
        return self.end

    def close(self) -> None:
        """No group will follow."""
        self.closed = True
        self._notify()

    async def _wait_for_change(self) -> None:
        changed = self._changed
        await changed.wait()

    def _notify(self) -> None:
        # Each waiter holds the event it waits for, so a new one cannot make it miss this wake-up.
        self._changed.set()
        self._changed = asyncio.Event()


class _Write(NamedTuple):
    """A call of `write` that waits."""

    binlogs: Sequence[Binlog]
    done: "asyncio.Future[None]"


class GroupCommit:
    """The queue in front of the value log and the loop that empties it."""

    def __init__(self, log: ValueLog, thread: Executor, index_queue: IndexQueue) -> None:
        self._index_queue = index_queue
        self._log = log
        self._thread = thread
        self._queue: GroupQueue[_Write] = GroupQueue(sys.maxsize, GROUP_BYTES)
        self._refusal: TidemarkError | None = None

    async def write(self, binlogs: Sequence[Binlog]) -> None:
        """Store binlogs in order; they are durable when it returns.

        Raises:
            ValueLogWriteError: the disk refused them; none of them was stored.
            PumpBusyError: `WAITING_BYTES_MAX` are waiting already.
            TidemarkError: no more is accepted, see `refuse`.
        """
        if self._refusal is not None:
            raise self._refusal
        size = sum(len(binlog.payload) for binlog in binlogs)
        # With an empty queue any size is taken: a write above the limit could never be stored
        # otherwise.
        if self._queue and self._queue.waiting_bytes + size > WAITING_BYTES_MAX:
            raise PumpBusyError(
                f"{self._queue.waiting_bytes} bytes wait for the disk; slow down and write again"
            )
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put(_Write(binlogs, done), size)
        await done

    def refuse(self, reason: TidemarkError) -> None:
        """Accept no more; writes that wait fail with the reason, too."""
        self._refusal = self._refusal or reason
        self._answer(self._queue.take_all(), reason)

    def close(self) -> None:
        """Accept no more; `run` ends when the writes that wait are stored."""
        self._refusal = self._refusal or _stopping()
        self._queue.wake()

    async def run(self) -> None:
        """Store groups until closed; then close the index queue."""
        try:
            while self._queue or self._refusal is None:
                await self._queue.wait()
                while writes := self._queue.take():
                    await self._store(writes)
        finally:
            self.refuse(_stopping())
        self._index_queue.close()

    async def _store(self, writes: list[_Write]) -> None:
        binlogs = [binlog for write in writes for binlog in write.binlogs]
        payloads = [binlog.payload for binlog in binlogs]
        max_ts = max(binlog.ts for binlog in binlogs)
        loop = asyncio.get_running_loop()
        # What a cancelled append leaves behind is unknown, so its writers get an error.
        failure: TidemarkError | None = _stopping()
        pointers: list[Pointer] = []
        try:
            pointers = await loop.run_in_executor(self._thread, self._log.append, payloads, max_ts)
            failure = None
        except TidemarkError as err:
            failure = err
        finally:
            # Writers are answered before the index has the group: a binlog in the log is durable,
            # and the index can be rebuilt from the log.
            self._answer(writes, failure)
        if pointers:
            await self._index_queue.put(Group([binlog[:3] for binlog in binlogs], pointers))

    @staticmethod
    def _answer(writes: list[_Write], err: TidemarkError | None) -> None:
        for write in writes:
            if write.done.done():
                continue
            if err is None:
                write.done.set_result(None)
            else:
                write.done.set_exception(err)


def _stopping() -> PumpClosedError:
    return PumpClosedError("the pump is stopping; write to another one")
