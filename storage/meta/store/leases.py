"""When leases end (pure: the clock is an argument, in monotonic seconds).

Invariants: a lease lives at least its TTL after its last renewal; one that is over is never renewed again; deadlines
are not kept on disk, so every lease gets its whole TTL anew after a restart, as in etcd.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from storage.meta.errors import LeaseExistsError, LeaseNotFoundError, LeaseTtlError

MIN_TTL_S = 2
MAX_TTL_S = 9_000_000_000


@dataclass(slots=True)
class _Lease:
    ttl_s: int
    deadline: float


class Leases:
    """TTL and deadline of each lease, and which are over."""

    def __init__(self, ttls: Iterable[tuple[int, int]] = (), now: float = 0.0) -> None:
        self._leases = {lease: _Lease(ttl_s, now + ttl_s) for lease, ttl_s in ttls}
        self._heap = [(known.deadline, lease) for lease, known in self._leases.items()]
        heapq.heapify(self._heap)

    def __contains__(self, lease: int) -> bool:
        return lease in self._leases

    def check_grant(self, lease: int, ttl_s: int) -> int:
        """The TTL a new lease would get, at least `MIN_TTL_S`.

        Raises:
            LeaseExistsError, LeaseTtlError, LeaseNotFoundError: the id is taken, the TTL too long, the id 0.
        """
        if not lease:
            raise LeaseNotFoundError
        if ttl_s > MAX_TTL_S:
            raise LeaseTtlError
        if lease in self._leases:
            raise LeaseExistsError
        return max(ttl_s, MIN_TTL_S)

    def grant(self, lease: int, ttl_s: int, now: float) -> None:
        """Add a lease that `check_grant` allowed."""
        self._leases[lease] = _Lease(ttl_s, now + ttl_s)
        heapq.heappush(self._heap, (now + ttl_s, lease))

    def renew(self, lease: int, now: float) -> int:
        """Start the lease's TTL anew; returns it, or 0 if the lease is over or unknown."""
        known = self._leases.get(lease)
        if known is None or known.deadline <= now:
            return 0
        known.deadline = now + known.ttl_s
        return known.ttl_s

    def postpone(self, seconds: float) -> None:
        """Move every deadline: the time in which this process could not hear renewals does not count."""
        for known in self._leases.values():
            known.deadline += seconds

    def all(self) -> list[int]:
        """The ids of all leases, the longest known first."""
        return list(self._leases)

    def left(self, lease: int, now: float) -> tuple[int, int]:
        """Whole seconds left and the granted TTL; (-1, 0) if the lease is unknown."""
        known = self._leases.get(lease)
        return (max(0, int(known.deadline - now)), known.ttl_s) if known else (-1, 0)

    def remove(self, lease: int) -> None:
        """Forget a lease, if it is known."""
        self._leases.pop(lease, None)

    def over(self, now: float) -> list[int]:
        """Leases past their deadline; each is named until it is removed."""
        found: set[int] = set()  # an id that was granted anew is in the heap twice
        while self._heap and self._heap[0][0] <= now:
            _, lease = heapq.heappop(self._heap)
            known = self._leases.get(lease)
            if known is None:
                continue
            if known.deadline <= now:
                found.add(lease)
            else:
                heapq.heappush(self._heap, (known.deadline, lease))
        for lease in found:
            heapq.heappush(self._heap, (now, lease))
        return sorted(found)
