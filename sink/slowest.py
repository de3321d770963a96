"""The least of many timestamps that only grow: a heap whose entries are brought up to date when they come up. Pure.

A timestamp that moves costs a dictionary entry, and at most one heap operation later: so the minimum over 100,000
tables is known after each of their steps.
"""

import heapq
import itertools
from typing import Generic, TypeVar

Key = TypeVar("Key")


class Slowest(Generic[Key]):
    """Keys with their timestamps; the caller serialises the calls."""

    def __init__(self) -> None:
        self._ts: dict[Key, int] = {}
        self._heap: list[tuple[int, int, Key]] = []  # of each key an entry at or below its timestamp
        self._serials = itertools.count()  # of entries with one timestamp the first comes up first

    def __len__(self) -> int:
        return len(self._ts)

    def add(self, key: Key, ts: int) -> None:
        """Begin with a key anew; what is left of an earlier time is dropped when it comes up."""
        self._ts[key] = ts
        heapq.heappush(self._heap, (ts, next(self._serials), key))
        self._tidy()

    def remove(self, key: Key) -> None:
        """Forget a key; one that is not there is no error."""
        self._ts.pop(key, None)
        self._tidy()

    def move(self, key: Key, ts: int) -> None:
        """The key's timestamp, which is there, is at least `ts`."""
        self._ts[key] = max(self._ts[key], ts)

    def least(self) -> tuple[int, Key] | None:
        """The least timestamp and whose it is."""
        heap = self._heap
        while heap:
            ts, serial, key = heap[0]
            now = self._ts.get(key)
            if now is None:
                heapq.heappop(heap)
            elif now != ts:
                heapq.heapreplace(heap, (now, serial, key))
            else:
                return ts, key
        return None

    def _tidy(self) -> None:
        if len(self._heap) > 2 * len(self._ts):
            self._heap = [(ts, next(self._serials), key) for key, ts in self._ts.items()]
            heapq.heapify(self._heap)
