"""A long scan in steps: each step in an executor thread, closed only when no step is running."""

import asyncio
import threading
from collections.abc import AsyncIterator, Generator
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from storage.kv import Snapshot

T = TypeVar("T")


class Cursor(Generic[T]):
    """Steps through a generator over a snapshot, both of which it owns."""

    def __init__(self, snapshot: Snapshot, steps: Generator[T, None, None], executor: Executor) -> None:
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
            return None if self._closed else next(self._steps, None)


@asynccontextmanager
async def cursor(snapshot: Snapshot, steps: Generator[T, None, None], executor: Executor) -> AsyncIterator[Cursor[T]]:
    """A cursor for the block; cancelling the block never waits for the disk."""
    opened = Cursor(snapshot, steps, executor)
    try:
        yield opened
    finally:
        executor.submit(opened.close)
