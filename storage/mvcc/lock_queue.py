"""Who waits for which pessimistic lock, who is woken next, and who would wait for himself. Pure.

Waiters of a key are woken one by one, oldest transaction first: the woken one tries again, and if
it does not take the lock, the next one is woken. The wait-for graph has an edge from every waiter
to the transaction that holds its key; it is the graph of one store, so a deadlock across stores
ends by the time-outs of its waits.
"""

from bisect import insort
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple


class Edge(NamedTuple):
    """`start_ts` waits for `holder`, which has locked the raw `key`."""

    start_ts: int
    holder: int
    key: bytes


@dataclass(slots=True, eq=False)
class Waiter:
    """One wait of one transaction; told apart by identity,
    as a transaction may wait for several keys.
    """

    start_ts: int
    key: bytes


@dataclass(slots=True)
class _Queue:
    holder: int
    waiters: list[Waiter] = field(default_factory=list)


class LockQueue:
    """All waits of a store, by key."""

    def __init__(self) -> None:
        self._queues: dict[bytes, _Queue] = {}
        self._by_txn: dict[int, list[Waiter]] = defaultdict(list)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def cycle(self, start_ts: int, holder: int, key: bytes) -> list[Edge]:
        """The edges that lead from `holder` back to `start_ts`,
        then the one that would close them; [] if none do.
        """
        path = self._path(holder, start_ts)
        return [*path, Edge(start_ts, holder, key)] if path or holder == start_ts else []

    def add(self, waiter: Waiter, holder: int) -> None:
        """Wait for `holder`; ask `cycle` before."""
        queue = self._queues.setdefault(waiter.key, _Queue(holder))
        queue.holder = holder
        insort(queue.waiters, waiter, key=lambda other: other.start_ts)
        self._by_txn[waiter.start_ts].append(waiter)
        self._size += 1

    def remove(self, waiter: Waiter) -> None:
        """Wait no longer."""
        queue = self._queues[waiter.key]
        queue.waiters.remove(waiter)
        if not queue.waiters:
            del self._queues[waiter.key]
        mine = self._by_txn[waiter.start_ts]
        mine.remove(waiter)
        if not mine:
            del self._by_txn[waiter.start_ts]
        self._size -= 1

    def pop(self, key: bytes) -> Waiter | None:
        """Remove and return who is next for `key`."""
        queue = self._queues.get(key)
        if queue is None:
            return None
        waiter = queue.waiters[0]
        self.remove(waiter)
        return waiter

    def hold(self, key: bytes, holder: int) -> None:
        """The key has a new owner, for whom its waiters wait from now on."""
        queue = self._queues.get(key)
        if queue is not None:
            queue.holder = holder

    def _edges(self, start_ts: int) -> Iterator[Edge]:
        for waiter in self._by_txn.get(start_ts, ()):
            yield Edge(start_ts, self._queues[waiter.key].holder, waiter.key)

    def _path(self, begin: int, end: int) -> list[Edge]:
        """The edges from `begin` to `end`, [] if there is no way."""
        reached_by: dict[int, Edge] = {}
        ahead = [begin]
        while ahead:
            for edge in self._edges(ahead.pop()):
                if edge.holder in reached_by or edge.holder == begin:
                    continue
                reached_by[edge.holder] = edge
                if edge.holder == end:
                    return _walked(reached_by, begin, end)
                ahead.append(edge.holder)
        return []


def _walked(reached_by: dict[int, Edge], begin: int, end: int) -> list[Edge]:
    path = [reached_by[end]]
    while path[-1].start_ts != begin:
        path.append(reached_by[path[-1].start_ts])
    return path[::-1]
