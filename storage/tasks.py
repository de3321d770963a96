"""Several coroutines at once, owned by one TaskGroup: all end before the caller goes on."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


async def together(children: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
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


def end_if_cancelled() -> None:
    """For loops that go on after errors.

    A TaskGroup that is cancelled while a child fails raises the child's error instead of the
    cancellation: whoever handles the error, and goes on, would never end.

    Raises:
        CancelledError: the running task was cancelled.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


@asynccontextmanager
async def beside(*parts: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
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
