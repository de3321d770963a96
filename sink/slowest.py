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
        self._ts: dict[Key, tuple[int, int]] = {}  # with the serial number of the key's entry in the heap
        self._heap: list[tuple[int, int, Key]] = []
        self._serials = itertools.count()

    def __len__(self) -> int:
        return len(self._ts)

    def add(self, key: Key, ts: int) -> None:
        """Begin with a key anew."""
        serial = next(self._serials)
        self._ts[key] = ts, serial
        heapq.heappush(self._heap, (ts, serial, key))

    def remove(self, key: Key) -> None:
        """Forget a key; one that is not there is no error."""
        self._ts.pop(key, None)
        if len(self._heap) > 2 * len(self._ts):
            self._heap = [(ts, serial, key) for key, (ts, serial) in self._ts.items()]
            heapq.heapify(self._heap)

    def move(self, key: Key, ts: int) -> None:
        """The key's timestamp, which is there, is at least `ts`."""
        before, serial = self._ts[key]
        if ts > before:
            self._ts[key] = ts, serial

    def least(self) -> tuple[int, Key] | None:
        """The least timestamp and whose it is."""
        heap = self._heap
        while heap:
            ts, serial, key = heap[0]
            now = self._ts.get(key)
            if now is None or now[1] != serial:
                heapq.heappop(heap)
            elif now[0] != ts:
                heapq.heapreplace(heap, (now[0], serial, key))
            else:
                return ts, key
        return None
