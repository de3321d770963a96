"""What the worker asks of a cluster: timestamps, safepoints, regions, locks, ranges. `server.gc_worker` speaks to it.

Keys are raw; an empty end key is no end. Every call is one request, or a few, that either happened or raises.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from storage.model.errors import ConflictError


@dataclass(frozen=True, slots=True)
class KeyRange:
    """`[start_key, end_key)`."""

    start_key: bytes
    end_key: bytes


@dataclass(frozen=True, slots=True)
class Lock:
    """One key's lock; `token` is whatever the cluster needs to know it again."""

    key: bytes
    start_ts: int
    pessimistic: bool
    token: object


@dataclass(frozen=True, slots=True)
class LockPage:
    """Some locks of one region, and the key to go on from, None at the end of the asked range."""

    locks: Sequence[Lock]
    next_key: bytes | None
    region: object
    more: bool = False
    """Whether the region has more locks than came."""


@dataclass(frozen=True, slots=True)
class LowestService:
    """The service with the smallest safepoint."""

    service_id: str
    safe_point: int


class SafePointDecreasesError(ConflictError):
    """The coordinator holds a greater one already: an earlier leader asked for it and died before it could say so."""

    code = "ErrSafePointDecreases"


class Cluster(Protocol):
    """A coordinator and its stores."""

    async def now_ts(self) -> int:
        """A fresh timestamp."""
        ...

    async def hold_safe_point(self, safe_point: int) -> LowestService:
        """Record the GC worker's own service safepoint, for ever; returns who holds GC back most.

        Raises:
            SafePointDecreasesError: a greater one is in force.
        """
        ...

    async def lowest_service(self) -> LowestService | None:
        """Who holds GC back most, the worker itself left out; nothing moves. None if nobody does."""
        ...

    async def publish_safe_point(self, safe_point: int) -> int:
        """Let stores collect up to `safe_point`; returns the one that holds, which never goes back."""
        ...

    async def ranges_by_store(self) -> Mapping[int, Sequence[KeyRange]]:
        """Every region's range, under the store that leads it; there is no key in none of them.

        Regions that change are reported one by one: in between, the coordinator may know none for some keys.
        """
        ...

    async def store_addresses(self) -> Sequence[str]:
        """All stores."""
        ...

    async def scan_locks(self, within: KeyRange, safe_point: int) -> LockPage:
        """Locks of transactions that began before `safe_point`, in the first region of `within`."""
        ...

    async def decide(self, lock: Lock) -> int:
        """End the lock's transaction at its primary; returns its commit_ts, 0 if it is rolled back."""
        ...

    async def rollback_pessimistic(self, lock: Lock) -> None:
        """Remove a lock that holds no data."""
        ...

    async def resolve(self, page: LockPage, commit_ts_of: Mapping[int, int]) -> bool:
        """Commit or roll back these transactions' locks in the page's region; False if that region is no more."""
        ...

    async def destroy_range(self, address: str, within: KeyRange) -> None:
        """Delete everything in the range from one store, all versions at once."""
        ...

    async def limit_writes(self, address: str, bytes_per_s: int) -> None:
        """Have one store hold Do GC to a write rate, 0: to none, from now on and after its restarts."""
        ...

    async def collect(self, within: KeyRange, safe_point: int) -> bytes | None:
        """Have the first region of `within` drop its old versions; returns where the next begins, None at the end.

        Raises:
            CollectUnsupportedError: the stores collect by themselves only.
        """
        ...
