"""The threads of a Pump's storage: one writes the log, one owns the index, a few read.

The event loop never blocks.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

T = TypeVar("T")
_READERS = 4


class Threads:
    """Pools that `stack` joins at its end."""

    def __init__(self, stack: ExitStack) -> None:
        self.log: Executor = stack.enter_context(ThreadPoolExecutor(1, "value-log"))
        self._index = stack.enter_context(ThreadPoolExecutor(1, "pump-index"))
        self._readers = stack.enter_context(ThreadPoolExecutor(_READERS, "pump-read"))

    async def write(self, function: Callable[..., T], *args: object) -> T:
        """Call in the thread that writes the value log."""
        return await _call(self.log, function, *args)

    async def index(self, function: Callable[..., T], *args: object) -> T:
        """Call in the thread that changes the index; calls run one after the other."""
        return await _call(self._index, function, *args)

    async def read(self, function: Callable[..., T], *args: object) -> T:
        """Call a function that only reads."""
        return await _call(self._readers, function, *args)


async def _call(threads: Executor, function: Callable[..., T], *args: object) -> T:
    return await asyncio.get_running_loop().run_in_executor(threads, partial(function, *args))
