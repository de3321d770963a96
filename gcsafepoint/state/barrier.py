"""A GC barrier: its owner needs the history from a timestamp on, until the barrier expires.

A service safe point is the same thing, so `ServiceSafePoint` stands for both. `Barriers` keeps the
barriers of one scope by id, by timestamp and by expiry, so that the lowest and the expired ones are
found without looking at the others: an update costs O(log n), and renewals leave no more garbage
than there is state.
"""

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gcsafepoint.state.go_text import quoted, time_text

GC_WORKER = "gc_worker"
NATIVE_BR = "native_br"
NEVER_S = (1 << 63) - 1
# PD counts nanoseconds in 63 bits: more is for ever
_LONGEST_TTL_S = NEVER_S // 1_000_000_000
# entries of replaced barriers that a heap may hold beyond twice the barriers
_SPARE = 64


@dataclass(frozen=True, slots=True)
class ServiceSafePoint:
    """One service or GC barrier, and its safe point; `expired_at` in Unix seconds,
    `NEVER_S` for ever.
    """

    service_id: str
    expired_at: int
    safe_point: int

    def ttl_s(self, now_s: float) -> int:
        """Whole seconds left, at least 0; a huge number for one that never ends,
        as PD answers old calls.
        """
        return max(0, self.expired_at - math.ceil(now_s))

    def expired(self, now_s: float) -> bool:
        """Whether its TTL is over: it blocks through `expired_at` itself."""
        return self.expired_at < now_s

    def describe(self, kind: str = "GCBarrier") -> str:
        """PD's text for a barrier that blocks."""
        ends = "<nil>" if self.expired_at == NEVER_S else time_text(self.expired_at)
        fields = (
            f"BarrierID: {quoted(self.service_id)}, BarrierTS: {self.safe_point}, ExpirationTime: "
            f"{quoted(ends)}"
        )
        return f"{kind} {{ {fields} }}"


def expiry(now_s: float, ttl_s: int) -> int:
    """When a TTL that begins now is over: Unix seconds,
    rounded up so that nobody gets less than requested.
    """
    return NEVER_S if ttl_s > _LONGEST_TTL_S else math.ceil(now_s) + ttl_s


class Barriers:
    """The barriers of one scope, and what changed since `take_changes`."""

    def __init__(self, barriers: Iterable[ServiceSafePoint] = ()) -> None:
        self._by_id = {barrier.service_id: barrier for barrier in barriers}
        self._changes: dict[str, ServiceSafePoint | None] = {}
        self._rebuild()

    def __iter__(self) -> Iterator[ServiceSafePoint]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def pending(self) -> int:
        """How many barriers `take_changes` would return."""
        return len(self._changes)

    def get(self, barrier_id: str) -> ServiceSafePoint | None:
        """The barrier of that id, expired or not."""
        return self._by_id.get(barrier_id)

    def snapshot(self) -> list[ServiceSafePoint]:
        """All barriers at one moment; safe to call from another thread."""
        return list(self._by_id.values())

    def put(self, barrier: ServiceSafePoint) -> None:
        """Set or replace."""
        self._by_id[barrier.service_id] = self._changes[barrier.service_id] = barrier
        heapq.heappush(self._by_safe_point, (barrier.safe_point, barrier.service_id))
        heapq.heappush(self._by_expiry, (barrier.expired_at, barrier.service_id))
        if max(len(self._by_safe_point), len(self._by_expiry)) > 2 * len(self._by_id) + _SPARE:
            self._rebuild()

    def remove(self, barrier_id: str) -> ServiceSafePoint | None:
        """Remove; returns what it was."""
        removed = self._by_id.pop(barrier_id, None)
        if removed is not None:
            self._changes[barrier_id] = None
        return removed

    def drop_expired(self, now_s: float) -> None:
        """Remove those whose TTL is over."""
        while self._by_expiry and self._by_expiry[0][0] < now_s:
            expired_at, barrier_id = heapq.heappop(self._by_expiry)
            barrier = self._by_id.get(barrier_id)
            if barrier is not None and barrier.expired_at == expired_at:
                self.remove(barrier_id)

    def lowest(self) -> ServiceSafePoint | None:
        """The one with the smallest timestamp; of equals the first by name."""
        while self._by_safe_point:
            safe_point, barrier_id = self._by_safe_point[0]
            barrier = self._by_id.get(barrier_id)
            if barrier is not None and barrier.safe_point == safe_point:
                return barrier
            heapq.heappop(self._by_safe_point)
        return None

    def mark_all(self) -> None:
        """Make `take_changes` return all that have an end."""
        self._changes |= {
            barrier.service_id: barrier for barrier in self if barrier.expired_at != NEVER_S
        }

    def take_changes(self) -> dict[str, ServiceSafePoint | None]:
        """What was set or (None) removed since the last call."""
        changes, self._changes = self._changes, {}
        return changes

    def _rebuild(self) -> None:
        self._by_safe_point = [(barrier.safe_point, barrier.service_id) for barrier in self]
        self._by_expiry = [(barrier.expired_at, barrier.service_id) for barrier in self]
        heapq.heapify(self._by_safe_point)
        heapq.heapify(self._by_expiry)
