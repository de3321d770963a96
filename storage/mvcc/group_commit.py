"""Group commit: commands from all connections, in arrival order, become durable a group at a time.

While one group is written in an executor thread, the next one gathers; there is no timer. When a
group is durable its changes go to the observer first, then its callers get their answers: a caller
with an answer knows that every observer has seen the change. Between two groups no write is in
flight. `quiet` runs functions there: a change feed takes its snapshot and begins to observe in one
such function, so that each change is either in the snapshot or observed.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple, TypeVar

from storage.model.errors import UnavailableError
from storage.mvcc.engine import Change, Command, Engine
from storage.mvcc.errors import StoreStoppedError
from storage.mvcc.read_fence import ReadFence
from storage.queue import GroupQueue

T = TypeVar("T")
MAX_GROUP_COMMANDS = 1024
MAX_GROUP_BYTES = 4 << 20
MAX_WAITING_COMMANDS = 65_536
MAX_WAITING_BYTES = 128 << 20


class StoreBusyError(UnavailableError):
    """More commands wait than the store's limit."""

    code = "ErrServerBusy"


class _Waiter(NamedTuple):
    """The commands of one `submit`, and the future of their results."""

    commands: Sequence[Command]
    future: "asyncio.Future[Sequence[Any]]"


class GroupCommit:
    """The queue before the engine; belongs to one event loop."""

    def __init__(
        self,
        engine: Engine,
        executor: Executor,
        observe: Callable[[Sequence[Change]], None],
        on_group: Callable[[int, float], None] = lambda _commands, _seconds: None,
    ) -> None:
        """`executor` must have one thread; `observe` is called on the loop and must not block.

        `on_group` is called after each group with the number of its commands, and the seconds from
        its start to durability.
        """
        self._engine = engine
        self._executor = executor
        self._observe = observe
        self._on_group = on_group
        self._queue: GroupQueue[_Waiter] = GroupQueue(MAX_GROUP_COMMANDS, MAX_GROUP_BYTES)
        self._on_unlocked: Callable[[Sequence[bytes]], None] = lambda _keys: None
        self._quiet: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._stopped = False

    @property
    def fence(self) -> ReadFence:
        """The fence that reads enter before they take a snapshot."""
        return self._engine.fence

    def watch_unlocked(self, on_unlocked: Callable[[Sequence[bytes]], None]) -> None:
        """Have `on_unlocked` called on the loop with the encoded keys that a durable group
        unlocked.

        It is called one turn of the loop after the group's callers got their results: a caller that
        was refused because of such a lock is a waiter by then, and is woken.
        """
        self._on_unlocked = on_unlocked

    async def submit(self, commands: Sequence[Command], size: int = 0) -> Sequence[Any]:
        """Run commands; returns their results, MvccError and CorruptError as values,
        once they are durable.

        `size` is about how many bytes they hold in memory.

        Raises:
            StoreBusyError: too many commands or bytes wait.
            StoreStoppedError: the store is closing; the outcome of the commands is unknown.
        """
        self._check_open()
        queue = self._queue
        if (
            queue.waiting_items + len(commands) > MAX_WAITING_COMMANDS
            or queue.waiting_bytes > MAX_WAITING_BYTES
        ):
            raise StoreBusyError(
                f"{queue.waiting_items} writes are waiting; slow down and try again"
            )
        future: asyncio.Future[Sequence[Any]] = asyncio.get_running_loop().create_future()
        queue.put(_Waiter(commands, future), size, len(commands))
        return await future

    async def quiet(self, function: Callable[[], T]) -> T:
        """Run a short function on the loop while no group is in flight; its exceptions are raised
        here.

        Raises:
            StoreStoppedError: the store is closing.
        """
        self._check_open()
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._quiet.append((function, future))
        self._queue.wake()
        return await future

    async def run(self) -> None:
        """Write groups until cancelled; a failing disk ends it, and the daemon with it."""
        try:
            while True:
                await self._queue.wait()
                while self._queue or self._quiet:
                    self._run_quiet()
                    if self._queue:
                        await self._write(self._queue.take())
        finally:
            self._stop()

    def _check_open(self) -> None:
        if self._stopped:
            raise StoreStoppedError("the store is shutting down; try again when it is back")

    def _run_quiet(self) -> None:
        while self._quiet:
            function, future = self._quiet.popleft()
            if future.cancelled():
                continue
            # To its caller: raised here, an exception would end the loop, and the store with it.
            try:
                future.set_result(function())
            except Exception as err:  # noqa: BLE001 - raised in the task that waits for it
                future.set_exception(err)

    async def _write(self, waiters: list[_Waiter]) -> None:
        commands = [command for waiter in waiters for command in waiter.commands]
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            group = await loop.run_in_executor(self._executor, self._engine.apply, commands)
            if group.changes:
                self._observe(group.changes)
        except BaseException:
            # The batch may be on disk or not, so neither success nor failure may be answered.
            for waiter in waiters:
                self._refuse(waiter.future)
            raise
        # Only now: readers that wait in the fence must find the group on disk, and a change feed
        # that asks it for a timestamp must have observed the group.
        self._engine.fence.release()
        self._on_group(len(commands), loop.time() - began)
        first = 0
        for waiter in waiters:
            end = first + len(waiter.commands)
            if not waiter.future.done():
                waiter.future.set_result(group.results[first:end])
            first = end
        if group.unlocked:
            loop.call_soon(self._on_unlocked, group.unlocked)

    def _stop(self) -> None:
        self._stopped = True
        self._engine.fence.close()
        for future in (
            *(waiter.future for waiter in self._queue.take_all()),
            *(future for _, future in self._quiet),
        ):
            self._refuse(future)
        self._quiet.clear()

    @staticmethod
    def _refuse(future: "asyncio.Future[Any]") -> None:
        if not future.done():
            future.set_exception(
                StoreStoppedError("the store is shutting down; the outcome of the write is unknown")
            )
