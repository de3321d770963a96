"""Queues between tasks of one event loop: `GroupQueue`, taken in groups, and `ByteBudget`, the
bytes that several queues may hold together.

Both only count. Who puts looks first, and refuses, waits or goes on as its protocol demands.
"""

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class GroupQueue(Generic[T]):
    """Items in the order of their arrival, of which one task takes a group at a time: calls before
    their batch, writes before their group commit.

    Four loops empty such a queue: a gRPC route, the store's and the metadata's group commit, and
    the pump's. There is no timer: while one group is being worked on, the next one gathers. So a
    group is one item when all is calm, and as large as it may be under load.

    It refuses nothing: who puts looks at `len`, `waiting_items` and `waiting_bytes` first.
    """

    def __init__(self, group_items: int, group_bytes: int) -> None:
        """A group ends with the entry that brings it to `group_items` items or `group_bytes`
        bytes.
        """
        self.waiting_items = 0
        self.waiting_bytes = 0
        self._group_items = group_items
        self._group_bytes = group_bytes
        self._waiting: deque[tuple[T, int, int]] = deque()
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, entry: T, size: int, items: int = 1) -> None:
        """Add an entry of `items` items and `size` bytes."""
        self._waiting.append((entry, size, items))
        self.waiting_items += items
        self.waiting_bytes += size
        self._wake.set()

    def wake(self) -> None:
        """Let `wait` return though nothing was put."""
        self._wake.set()

    async def wait(self) -> None:
        """Return when something was put, or `wake` was called, since the last time."""
        await self._wake.wait()
        self._wake.clear()

    def take(self) -> list[T]:
        """The next group; empty if nothing waits."""
        group: list[T] = []
        items_taken = bytes_taken = 0
        waiting, most_items, most_bytes = self._waiting, self._group_items, self._group_bytes
        while waiting and items_taken < most_items and bytes_taken < most_bytes:
            entry, size, items = waiting.popleft()
            group.append(entry)
            items_taken += items
            bytes_taken += size
        self.waiting_items -= items_taken
        self.waiting_bytes -= bytes_taken
        return group

    def take_all(self) -> list[T]:
        """Everything that waits, to be refused."""
        entries = [entry for entry, _, _ in self._waiting]
        self._waiting.clear()
        self.waiting_items = self.waiting_bytes = 0
        return entries


class ByteBudget:
    """The bytes that several queues have taken of `limit_bytes`.

    Each queue decides by `used_bytes` what it refuses, and may go beyond the limit with what it
    must never lose, or with one item when it is empty, so that one queue's backlog slows the others
    down and stops none.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._freed = asyncio.Event()

    def take(self, size: int) -> None:
        """A queue holds `size` bytes more."""
        self.used_bytes += size

    def free(self, size: int) -> None:
        """Free `size` bytes, or, with 0, note that a queue was closed: waiting callers
        check again.
        """
        self.used_bytes -= size
        self._freed.set()

    async def wait_freed(self) -> None:
        """Until something is freed."""
        self._freed.clear()
        await self._freed.wait()
