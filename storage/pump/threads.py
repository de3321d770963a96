"""The threads of a Pump's storage: one writes the log, one owns the index, a few read. The event loop never waits."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

T = TypeVar("T")
_READERS = 4


class Threads:
    """Made on the way into `stack`, joined on the way out of it."""

    def __init__(self, stack: ExitStack) -> None:
        self.log: Executor = stack.enter_context(ThreadPoolExecutor(1, "value-log"))
        self._index = stack.enter_context(ThreadPoolExecutor(1, "pump-index"))
        self._readers = stack.enter_context(ThreadPoolExecutor(_READERS, "pump-read"))

    async def write(self, function: Callable[..., T], *args: object) -> T:
        """Call where the value log is written."""
        return await _called(self.log, function, *args)

    async def index(self, function: Callable[..., T], *args: object) -> T:
        """Call where the index is changed; calls come one after the other."""
        return await _called(self._index, function, *args)

    async def read(self, function: Callable[..., T], *args: object) -> T:
        """Call what only reads."""
        return await _called(self._readers, function, *args)


async def _called(threads: Executor, function: Callable[..., T], *args: object) -> T:
    return await asyncio.get_running_loop().run_in_executor(threads, partial(function, *args))
