"""When leases end (pure: the clock is an argument, in monotonic seconds).

Invariants: a lease lives at least its TTL after its last renewal; one that has expired is never
renewed again; deadlines are not kept on disk, so every lease gets its whole TTL again after a
restart, as in etcd.
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
    """TTL and deadline of each lease, and which have expired."""

    def __init__(self, ttls: Iterable[tuple[int, int]] = (), now: float = 0.0) -> None:
        self._leases = {lease: _Lease(ttl_s, now + ttl_s) for lease, ttl_s in ttls}
        self._heap = [(entry.deadline, lease) for lease, entry in self._leases.items()]
        heapq.heapify(self._heap)

    def __contains__(self, lease: int) -> bool:
        return lease in self._leases

    def check_grant(self, lease: int, ttl_s: int) -> int:
        """The TTL a new lease would get, at least `MIN_TTL_S`.

        Raises:
            LeaseExistsError, LeaseTtlError, LeaseNotFoundError: the id is taken, the TTL too long,
                the id 0.
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
        """Restart the lease's TTL; returns it, or 0 if the lease has expired or is unknown."""
        entry = self._leases.get(lease)
        if entry is None or entry.deadline <= now:
            return 0
        # The heap keeps the old deadline: `expired` sees the new one when that comes up, so a
        # renewal costs no heap operation.
        entry.deadline = now + entry.ttl_s
        return entry.ttl_s

    def postpone(self, seconds: float) -> None:
        """Move every deadline: the time in which this process could not receive renewals does not
        count.
        """
        for entry in self._leases.values():
            entry.deadline += seconds

    def all(self) -> list[int]:
        """The ids of all leases, the oldest first."""
        return list(self._leases)

    def time_left(self, lease: int, now: float) -> tuple[int, int]:
        """Whole seconds left and the granted TTL; (-1, 0) if the lease is unknown."""
        entry = self._leases.get(lease)
        return (max(0, int(entry.deadline - now)), entry.ttl_s) if entry else (-1, 0)

    def remove(self, lease: int) -> None:
        """Remove a lease, if it exists."""
        self._leases.pop(lease, None)

    def expired(self, now: float) -> list[int]:
        """Leases past their deadline; each is returned again until it is removed."""
        # an id that was granted again is in the heap twice
        expired: set[int] = set()
        while self._heap and self._heap[0][0] <= now:
            _, lease = heapq.heappop(self._heap)
            entry = self._leases.get(lease)
            if entry is None:
                continue
            if entry.deadline <= now:
                expired.add(lease)
            else:
                heapq.heappush(self._heap, (entry.deadline, lease))
        # Revoking them may be refused under load: until it is done they must come up again.
        for lease in expired:
            heapq.heappush(self._heap, (now, lease))
        return sorted(expired)
