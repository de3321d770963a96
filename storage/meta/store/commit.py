"""Group commit: requests that have gathered are applied in memory,
written with one synced batch, and then answered.

Every request, reads too, waits for its turn in one queue, so nobody ever sees what a crash could
undo. When the disk fails, memory is ahead of it, so `run` raises instead of going on.
"""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from storage.defect import request_error
from storage.group_queue import GroupQueue
from storage.kv import KV, WriteBatch
from storage.meta.errors import MetaUnavailableError, TooManyRequestsError
from storage.model.errors import TidemarkError

R = TypeVar("R")
Change = Callable[[WriteBatch], Any]
MAX_WAITING = 16_384
MAX_WAITING_BYTES = 64 << 20
_GROUP = 1024
_GROUP_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class _Request:
    change: Change
    answer: asyncio.Future[Any]


class GroupCommit:
    """One queue in front of one store.

    `applied` completes a group's batch; `durable` is called once the batch is on disk.
    """

    def __init__(
        self, kv: KV, applied: Callable[[WriteBatch], None], durable: Callable[[], None]
    ) -> None:
        self._kv = kv
        self._applied = applied
        self._durable = durable
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="metadata-disk")
        self._queue: GroupQueue[_Request] = GroupQueue(_GROUP, _GROUP_BYTES)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    async def submit(self, change: Callable[[WriteBatch], R], size: int = 0) -> R:
        """Run `change` in its turn; it may add to the batch of its group,
        or raise and then must have done nothing.

        `size` is the request's in bytes.

        Raises:
            TooManyRequestsError: the queue is full.
            MetaUnavailableError: the disk failed, or the server is stopping.
        """
        if len(self._queue) >= MAX_WAITING or self._queue.waiting_bytes >= MAX_WAITING_BYTES:
            raise TooManyRequestsError
        answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._queue.put(_Request(change, answer), size)
        return await answer

    async def run(self) -> None:
        """Apply and answer what is queued, group by group, until cancelled."""
        while True:
            await self._queue.wait()
            while group := self._queue.take():
                await self._commit(group)

    def close(self) -> None:
        """Wait for the write under way, and refuse what is still queued."""
        self._disk.shutdown(wait=True)
        _refuse(self._queue.take_all(), "the metadata server is stopping; try again")

    async def _commit(self, group: list[_Request]) -> None:
        batch = WriteBatch()
        outcomes = [(request.answer, _attempt(request.change, batch)) for request in group]
        self._applied(batch)
        try:
            if len(batch):
                write = partial(self._kv.write, batch, sync=True)
                await asyncio.get_running_loop().run_in_executor(self._disk, write)
        except TidemarkError as err:
            _refuse(group, err.message)
            raise
        except asyncio.CancelledError:
            _refuse(
                group,
                "the metadata server stopped while this was written; read what holds, then decide",
            )
            raise
        self._durable()
        for answer, outcome in outcomes:
            if answer.done():
                continue
            if isinstance(outcome, TidemarkError):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)


def _attempt(change: Change, batch: WriteBatch) -> Any:
    size = len(batch)
    try:
        return change(batch)
    except TidemarkError as err:
        return err
    except Exception as err:
        if len(batch) != size:
            # Half of the change is in memory: only reading everything again from disk is safe.
            raise
        return request_error(err, "metadata request")


def _refuse(group: Iterable[_Request], reason: str) -> None:
    for request in group:
        if not request.answer.done():
            request.answer.set_exception(MetaUnavailableError(reason))
