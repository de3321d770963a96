"""What the event feeds hand to one puller: a queue bounded in bytes;
a full one stops the store's stream.

The pullers of a changefeed share a budget, so that what has arrived for any number of tables is
bounded, too.
"""

import asyncio
from collections import deque
from typing import Generic, TypeVar

from storage.byte_budget import ByteBudget

T = TypeVar("T")


class Inbox(Generic[T]):
    """Items with their size, in order; many producers, one consumer, all on one event loop."""

    def __init__(self, limit_bytes: int, take_bytes: int, shared: ByteBudget | None = None) -> None:
        """Hold up to `limit_bytes`, and what the `shared` budget leaves; None:
        it has one of its own.
        """
        self._limit = limit_bytes
        self._take = take_bytes
        self._budget = shared or ByteBudget(limit_bytes)
        self._items: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._filled = asyncio.Event()
        self._closed = False

    async def put(self, item: T, size: int) -> None:
        """Append; waits while there is no room.

        An item of any size fits when nothing else is in this inbox.
        """
        while self._bytes and not self._fits(size) and not self._closed:
            await self._budget.wait_freed()
        self.put_now(item, size)

    def put_now(self, item: T, size: int = 0) -> None:
        """Append without waiting: for the few items that must never be lost."""
        if self._closed:
            return
        self._items.append((item, size))
        self._bytes += size
        self._budget.take(size)
        self._filled.set()

    async def take(self) -> list[T]:
        """Wait for items, and remove up to the take limit in bytes of them, at least one."""
        await self._filled.wait()
        taken: list[T] = []
        size = 0
        while self._items and (not taken or size + self._items[0][1] <= self._take):
            item, item_size = self._items.popleft()
            taken.append(item)
            size += item_size
        self._bytes -= size
        if not self._items:
            self._filled.clear()
        self._budget.free(size)
        return taken

    def close(self) -> None:
        """The consumer is gone: drop everything, now and later,
        so that no producer waits for it.
        """
        self._closed = True
        self._items.clear()
        self._filled.clear()
        self._budget.free(self._bytes)
        self._bytes = 0

    def _fits(self, size: int) -> bool:
        return (
            self._bytes + size <= self._limit
            and self._budget.used_bytes + size <= self._budget.limit_bytes
        )
