"""Group commit: what has gathered is applied in memory, written with one synced batch, and only then answered.

Every request, reads too, takes its turn in one queue, so nobody ever sees what a crash could take back. When the disk
fails, memory is ahead of it, so `run` raises instead of going on.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from storage.kv import KV, WriteBatch
from storage.meta.errors import MetaUnavailableError, TooManyRequestsError
from storage.model.errors import TidemarkError

R = TypeVar("R")
Change = Callable[[WriteBatch], Any]
MAX_WAITING = 16_384
_GROUP = 1024


class GroupCommit:
    """One queue before one store; `applied` completes a group's batch, `durable` shows it once it is on disk."""

    def __init__(self, kv: KV, applied: Callable[[WriteBatch], None], durable: Callable[[], None]) -> None:
        self._kv = kv
        self._applied = applied
        self._durable = durable
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="metadata-disk")
        self._waiting: deque[tuple[Change, asyncio.Future[Any]]] = deque()
        self._wake = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    async def submit(self, change: Callable[[WriteBatch], R]) -> R:
        """Run `change` in its turn; it may add to the batch of its group, or raise and then must have done nothing.

        Raises:
            TooManyRequestsError: the queue is full.
            MetaUnavailableError: the disk failed, or the server is stopping.
        """
        if len(self._waiting) >= MAX_WAITING:
            raise TooManyRequestsError
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((change, future))
        self._wake.set()
        return await future

    async def run(self) -> None:
        """Apply and answer what is queued, group by group, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                await self._commit([self._waiting.popleft() for _ in range(min(_GROUP, len(self._waiting)))])

    def close(self) -> None:
        """Wait for a write under way, and refuse what is still queued."""
        self._disk.shutdown(wait=True)
        _refuse(list(self._waiting), "the metadata server is stopping; try again")
        self._waiting.clear()

    async def _commit(self, group: list[tuple[Change, asyncio.Future[Any]]]) -> None:
        batch = WriteBatch()
        outcomes = [(future, _attempt(change, batch)) for change, future in group]
        self._applied(batch)
        try:
            if len(batch):
                write = partial(self._kv.write, batch, sync=True)
                await asyncio.get_running_loop().run_in_executor(self._disk, write)
        except TidemarkError as err:
            _refuse(group, err.message)
            raise
        except asyncio.CancelledError:
            _refuse(group, "the metadata server stopped while this was written; read what holds, then decide")
            raise
        self._durable()
        for future, outcome in outcomes:
            if future.done():
                continue
            if isinstance(outcome, TidemarkError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)


def _attempt(change: Change, batch: WriteBatch) -> Any:
    try:
        return change(batch)
    except TidemarkError as err:
        return err


def _refuse(group: list[tuple[Change, asyncio.Future[Any]]], reason: str) -> None:
    for _, future in group:
        if not future.done():
            future.set_exception(MetaUnavailableError(reason))
