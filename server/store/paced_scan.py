"""Long scans that leave room for others: in steps, each in an executor thread,
at a bounded rate of bytes per second.

A `Cursor` is closed only when no step is running. `ByteRate` is a virtual clock: every taking moves
it by the time its bytes are worth, and who takes waits until the clock as it was before. Unused
time is kept for `_BURST_S` only.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Generator
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from storage.kv import Snapshot
from storage.tasks import wait_at_most

T = TypeVar("T")
_BURST_S = 0.1


class Cursor(Generic[T]):
    """Steps through a generator over a snapshot, both of which it owns."""

    def __init__(
        self, snapshot: Snapshot, steps: Generator[T, None, None], executor: Executor
    ) -> None:
        self._snapshot = snapshot
        self._steps = steps
        self._executor = executor
        self._lock = threading.Lock()
        self._closed = False

    async def next(self) -> T | None:
        """The next step's result, or None at the end."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._step)

    def close(self) -> None:
        """Release the snapshot; waits for a running step."""
        with self._lock:
            self._closed = True
            self._steps.close()
            self._snapshot.close()

    def _step(self) -> T | None:
        with self._lock:
            # LevelDB's iterator must not be used after its snapshot is released, which would crash
            # the process.
            return None if self._closed else next(self._steps, None)


@asynccontextmanager
async def cursor(
    snapshot: Snapshot, steps: Generator[T, None, None], executor: Executor
) -> AsyncIterator[Cursor[T]]:
    """A cursor for the block; cancelling the block never waits for the disk."""
    opened = Cursor(snapshot, steps, executor)
    try:
        yield opened
    finally:
        # In the executor: closing waits for the running step, and the loop must not.
        executor.submit(opened.close)


class ByteRate:
    """`bytes_per_s` 0 is no limit."""

    def __init__(self, bytes_per_s: int = 0) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at_s = 0.0
        self._changed = asyncio.Event()

    def limit(self, bytes_per_s: int) -> None:
        """Change the rate; earlier use no longer counts, and waiting readers continue."""
        self.bytes_per_s = bytes_per_s
        self._free_at_s = 0.0
        self._changed.set()
        self._changed = asyncio.Event()

    def take(self, size: int, now_s: float) -> float:
        """Take `size` bytes at the monotonic instant `now_s`;
        returns the seconds to wait before using them.
        """
        if not self.bytes_per_s:
            return 0.0
        # Unused time is kept for a tenth of a second only, so that an idle hour does not allow a
        # flood.
        begin_s = max(self._free_at_s, now_s - _BURST_S)
        self._free_at_s = begin_s + size / self.bytes_per_s
        return max(0.0, begin_s - now_s)

    async def throttle(self, size: int) -> None:
        """Take `size` bytes and wait for them."""
        wait_s = self.take(size, asyncio.get_running_loop().time())
        if wait_s:
            await wait_at_most(self._changed, wait_s)
