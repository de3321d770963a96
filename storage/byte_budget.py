"""Bytes that several queues may hold together."""

import asyncio


class ByteBudget:
    """What was taken of `limit_bytes`; its queues are all on one event loop.

    It only counts: each queue decides by `used_bytes` what it refuses, and may go beyond the limit
    with what it must never lose, or with one item when it is empty, so that one queue's backlog
    slows the others down and stops none.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._freed = asyncio.Event()

    def take(self, size: int) -> None:
        """A queue holds `size` bytes more."""
        self.used_bytes += size

    def free(self, size: int) -> None:
        """A queue holds `size` bytes less, or, with 0, was closed: whoever waits looks again."""
        self.used_bytes -= size
        self._freed.set()

    async def wait_freed(self) -> None:
        """Until something is freed."""
        self._freed.clear()
        await self._freed.wait()
