"""Structured concurrency over `asyncio.TaskGroup`: coroutines that run at once and end before the
caller goes on.

`run_to_end` and `Changes` are for what must not stop half-way. A handler is cancelled when its
client gives up, also in the moment between a write and the change in memory that belongs to it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

T = TypeVar("T")
_to_end: set[asyncio.Task[Any]] = set()
"""Held here: the loop alone does not keep a task from being collected."""


async def gather(children: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all at once, as `asyncio.gather` does; returns their results in order.

    The first failure cancels the others, and is raised itself, not in an ExceptionGroup.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(child) for child in children]
    except ExceptionGroup as group:
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None
    return [task.result() for task in running]


async def wait_at_most(event: asyncio.Event, seconds: float) -> None:
    """Wait until the event is set, at most for `seconds`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


async def run_in_task(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a task of its own and raise what it raises; for loops that handle its
    errors and go on.

    If the caller is cancelled, CancelledError is raised, whatever the coroutine raises meanwhile. A
    TaskGroup that is cancelled while a child fails raises the child's error instead: a loop that
    handles that error would swallow the cancellation and never end.
    """
    task = asyncio.get_running_loop().create_task(coroutine)
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it
        raise
    return task.result()


async def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, and do not stop it when the caller is cancelled: nobody gets its outcome then."""
    task = asyncio.get_running_loop().create_task(work)
    _to_end.add(task)
    task.add_done_callback(_to_end.discard)
    return await asyncio.shield(task)


class Changes:
    """Changes that are made one at a time, each of them to its end: a caller that is cancelled
    before its turn changes nothing, and later no longer stops it.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def make(self, change: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Make a change when its turn comes; returns what `change` returns."""
        await self._turn.acquire()
        return await run_to_end(self._make(change))

    async def _make(self, change: Callable[[], Coroutine[Any, Any, T]]) -> T:
        # Here and not in the caller: the next change waits for this one, whoever has left.
        try:
            return await change()
        finally:
            self._turn.release()


@asynccontextmanager
async def background_tasks(*parts: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run all in the background of the block, and cancel them at its end. The failure of one
    cancels the block, and is raised in an ExceptionGroup.
    """
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(part) for part in parts]
        try:
            yield
        finally:
            for task in running:
                task.cancel()
