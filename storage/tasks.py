"""Several coroutines at once, owned by one TaskGroup: all end before the caller goes on."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def gather(children: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all; returns their results in order.

    The first failure cancels the others and is raised without its group.
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
    """Wait until the event is set, or so long."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


async def run_in_task(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run it as a task of its own, for loops that go on after its errors; raises what it raises.

    A TaskGroup that is cancelled while a child fails raises the child's error instead of the
    cancellation: a loop that handles the error, and goes on, would never end. Here the caller is
    the one that is cancelled, whatever the coroutine raises then.
    """
    task = asyncio.get_running_loop().create_task(coroutine)
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # it is known, and nobody asks any more
        raise
    return task.result()


@asynccontextmanager
async def background_tasks(*parts: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run all for the block, and cancel them at its end; the failure of one ends the block,
    and comes in a group.
    """
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(part) for part in parts]
        try:
            yield
        finally:
            for task in running:
                task.cancel()
