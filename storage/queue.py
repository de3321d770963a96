"""Queues between tasks of one event loop: `GroupQueue`, which is emptied group by group, and
`ByteBudget`, the number of bytes that several queues may have in memory.

Neither enforces its bound. The producer compares the counts with the bound before it puts, and
refuses or waits as its protocol demands.
"""

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class GroupQueue(Generic[T]):
    """Entries in the order of their arrival; one task takes a group of them at a time, as of calls
    for a batch, or of writes for a group commit.

    Four loops empty such a queue: a gRPC route, the store's and the metadata's group commit, and
    the pump's. There is no timer: while one group is being worked on, the next one gathers. So a
    group is one entry when there is little load, and as large as allowed under much.

    `put` accepts every entry: the producer checks `len`, `waiting_items` or `waiting_bytes` first.
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
        """Return when `put` or `wake` was called since `wait` last returned; for one task only."""
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
        """Remove and return all entries, for a caller that refuses them."""
        entries = [entry for entry, _, _ in self._waiting]
        self._waiting.clear()
        self.waiting_items = self.waiting_bytes = 0
        return entries


class ByteBudget:
    """The bytes that several queues have taken of `limit_bytes`.

    Each queue compares `used_bytes` with the limit itself, and may go beyond it: with an item that
    it must not refuse, and with one item when it is empty. So the backlog of one queue slows the
    others down and stops none.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._freed = asyncio.Event()

    def take(self, size: int) -> None:
        """Count `size` bytes more."""
        self.used_bytes += size

    def free(self, size: int) -> None:
        """Count `size` bytes fewer, and wake `wait_freed`; 0 only wakes, as after a queue was
        closed.
        """
        self.used_bytes -= size
        self._freed.set()

    async def wait_freed(self) -> None:
        """Wait for the next `free`; the caller compares again, since others may have taken it."""
        self._freed.clear()
        await self._freed.wait()
