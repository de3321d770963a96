"""Group commit: whatever waits goes into the value log together, with one write and one fdatasync.

Order: log, then acknowledgement, then the feed of the index. There is no timer: while
one group is on its way to the disk the next one gathers.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import NamedTuple

from storage.model.errors import ClosedError, TidemarkError, UnavailableError
from storage.pump.binlog import Binlog
from storage.pump.feed import Feed, Group
from storage.value_log import Pointer, ValueLog

GROUP_BYTES = 4 << 20
WAITING_BYTES_MAX = 256 << 20


class PumpBusyError(UnavailableError):
    """More binlogs wait for the disk than the Pump will hold."""

    code = "ErrPumpBusy"


class PumpClosedError(ClosedError):
    """The Pump is stopping."""

    code = "ErrPumpClosed"


class _Write(NamedTuple):
    binlogs: Sequence[Binlog]
    size: int
    done: "asyncio.Future[None]"


class Committer:
    """The queue in front of the value log and the loop that empties it."""

    def __init__(self, log: ValueLog, thread: Executor, feed: Feed) -> None:
        self._feed = feed
        self._log = log
        self._thread = thread
        self._waiting: deque[_Write] = deque()
        self._waiting_bytes = 0
        self._wake = asyncio.Event()
        self._refusal: TidemarkError | None = None

    async def write(self, binlogs: Sequence[Binlog]) -> None:
        """Store binlogs in order; they are durable when it returns.

        Raises:
            ValueLogWriteError: the disk refused them; none of them was stored.
            PumpBusyError: too much is waiting already.
            TidemarkError: writing has ended, see `refuse`.
        """
        if self._refusal is not None:
            raise self._refusal
        size = sum(len(binlog.payload) for binlog in binlogs)
        if self._waiting and self._waiting_bytes + size > WAITING_BYTES_MAX:
            raise PumpBusyError(f"{self._waiting_bytes} bytes wait for the disk; slow down and write again")
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Write(binlogs, size, done))
        self._waiting_bytes += size
        self._wake.set()
        await done

    def refuse(self, reason: TidemarkError) -> None:
        """Accept no more; whoever waits gets the reason too."""
        self._refusal = self._refusal or reason
        while self._waiting:
            self._answer([self._waiting.popleft()], reason)
        self._waiting_bytes = 0

    def close(self) -> None:
        """Accept no more; `run` ends when what waits is stored."""
        self._refusal = self._refusal or _stopping()
        self._wake.set()

    async def run(self) -> None:
        """Store groups until closed; then close the feed."""
        try:
            while self._waiting or self._refusal is None:
                await self._wake.wait()
                self._wake.clear()
                while writes := self._take():
                    await self._store(writes)
        finally:
            self.refuse(_stopping())
        self._feed.close()

    def _take(self) -> list[_Write]:
        taken: list[_Write] = []
        size = 0
        while self._waiting and size < GROUP_BYTES:
            taken.append(self._waiting.popleft())
            size += taken[-1].size
        self._waiting_bytes -= size
        return taken

    async def _store(self, writes: list[_Write]) -> None:
        binlogs = [binlog for write in writes for binlog in write.binlogs]
        payloads = [binlog.payload for binlog in binlogs]
        max_ts = max(binlog.ts for binlog in binlogs)
        loop = asyncio.get_running_loop()
        failure: TidemarkError | None = _stopping()
        pointers: list[Pointer] = []
        try:
            pointers = await loop.run_in_executor(self._thread, self._log.append, payloads, max_ts)
            failure = None
        except TidemarkError as err:
            failure = err
        finally:
            self._answer(writes, failure)
        if pointers:
            await self._feed.put(Group([binlog[:3] for binlog in binlogs], pointers))

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
