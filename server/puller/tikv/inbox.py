"""What the event feeds hand to one puller: a queue bounded in bytes; a full one stops the store's stream.

The pullers of a changefeed share a room, so that what has arrived for any number of tables is bounded, too.
"""

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Room:
    """Bytes that inboxes may hold together, beyond one item each; they are all on one event loop."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._freed = asyncio.Event()

    def took(self, size: int) -> None:
        """An inbox holds `size` bytes more."""
        self.used_bytes += size

    def freed(self, size: int) -> None:
        """An inbox holds `size` bytes less, or was closed."""
        self.used_bytes -= size
        self._freed.set()

    async def wait(self) -> None:
        """Until something is freed."""
        self._freed.clear()
        await self._freed.wait()


class Inbox(Generic[T]):
    """Items with their size, in order; many producers, one consumer, all on one event loop."""

    def __init__(self, limit_bytes: int, take_bytes: int, room: Room | None = None) -> None:
        """Hold up to `limit_bytes`, and what `room` leaves; None: it has one of its own."""
        self._limit = limit_bytes
        self._take = take_bytes
        self._room = room or Room(limit_bytes)
        self._items: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._filled = asyncio.Event()
        self._closed = False

    async def put(self, item: T, size: int) -> None:
        """Append; waits while there is no room. An item of any size fits when nothing else is in this inbox."""
        while self._bytes and not self._fits(size) and not self._closed:
            await self._room.wait()
        self.put_now(item, size)

    def put_now(self, item: T, size: int = 0) -> None:
        """Append without waiting: for the few items that must never be lost."""
        if self._closed:
            return
        self._items.append((item, size))
        self._bytes += size
        self._room.took(size)
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
        self._room.freed(size)
        return taken

    def close(self) -> None:
        """The consumer is gone: drop everything, now and later, so that no producer waits for it."""
        self._closed = True
        self._items.clear()
        self._filled.clear()
        self._room.freed(self._bytes)
        self._bytes = 0

    def _fits(self, size: int) -> bool:
        return self._bytes + size <= self._limit and self._room.used_bytes + size <= self._room.limit_bytes
