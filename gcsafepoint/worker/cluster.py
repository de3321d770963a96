"""The GC worker's view of the cluster: timestamps, safepoints, regions, locks, ranges; and a walk
through the key space.

`Cluster` is the Protocol that `server.gc_worker.cluster` implements over PD and TiKV. Keys are raw;
an empty end key is no end. A call returns when all of its requests have succeeded; one that raises
may have done a part, and every call may be repeated. `LeasedCluster` checks the worker's lease
before each request, so that a worker that lost it stops before its next one.

`walk` goes through the whole key space: stores in parallel, at most one task a store, the ranges of
a store one after another. It walks key ranges, not regions: a region that splits or moves meanwhile
is visited again.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from storage.model.errors import ConflictError
from storage.model.span import KeyRange
from storage.tasks import gather


@dataclass(frozen=True, slots=True)
class Lock:
    """One key's lock; `token` is opaque, for the cluster to recognise it by."""

    key: bytes
    start_ts: int
    pessimistic: bool
    token: object


@dataclass(frozen=True, slots=True)
class LockPage:
    """Some locks of one region, and the key to go on from, None at the end of the scanned range."""

    locks: Sequence[Lock]
    next_key: bytes | None
    region: object
    more: bool = False
    """Whether the region has more locks than this page holds."""


@dataclass(frozen=True, slots=True)
class LowestService:
    """The service with the smallest safepoint."""

    service_id: str
    safe_point: int


class SafePointDecreasesError(ConflictError):
    """The coordinator has a greater service safepoint of `gc_worker` already: an earlier leader set
    it, and ended before it recorded it.
    """

    code = "ErrSafePointDecreases"


class Cluster(Protocol):
    """A coordinator (or PD) and its stores."""

    async def now_ts(self) -> int:
        """A fresh timestamp."""
        ...

    async def hold_safe_point(self, safe_point: int) -> LowestService:
        """Set the service safepoint `gc_worker` for ever (UpdateServiceGCSafePoint); returns the
        service that holds GC back most.

        Raises:
            SafePointDecreasesError: a greater one is in force.
        """
        ...

    async def lowest_service(self) -> LowestService | None:
        """The service that holds GC back most, the worker itself left out; nothing moves.

        None if nobody does.
        """
        ...

    async def publish_safe_point(self, safe_point: int) -> int:
        """Let stores collect up to `safe_point` (UpdateGCSafePoint); returns the safepoint in
        force, which may be greater.
        """
        ...

    async def ranges_by_store(self) -> Mapping[int, Sequence[KeyRange]]:
        """Every region's range, by the store that leads it; together they cover every key.

        While regions change, the coordinator may know none for some keys: these belong to the range
        of the next region, whose requests find their own region when they are sent.
        """
        ...

    async def store_addresses(self) -> Sequence[str]:
        """All stores."""
        ...

    async def scan_locks(self, within: KeyRange, safe_point: int) -> LockPage:
        """Locks of transactions that began before `safe_point`, in the first region of `within`."""
        ...

    async def decide(self, lock: Lock) -> int:
        """Decide the lock's transaction at its primary, by a rollback if it is not committed;
        returns its commit_ts, 0 if it is rolled back.
        """
        ...

    async def rollback_pessimistic(self, lock: Lock) -> None:
        """Remove a lock that holds no data."""
        ...

    async def resolve(self, page: LockPage, commit_ts_of: Mapping[int, int]) -> bool:
        """Commit or roll back these transactions' locks in the page's region;
        False if that region is no more.
        """
        ...

    async def destroy_range(self, address: str, within: KeyRange) -> None:
        """Delete everything in the range from one store, all versions at once."""
        ...

    async def limit_writes(self, address: str, bytes_per_s: int) -> None:
        """Limit the write rate of one store's Do GC (0: no limit), from now on and after its
        restarts.
        """
        ...

    async def collect(self, within: KeyRange, safe_point: int) -> bytes | None:
        """Have the first region of `within` drop its old versions;
        returns where the next begins, None at the end.

        Raises:
            CollectUnsupportedError: the stores collect by themselves only.
        """
        ...


class LeasedCluster:
    """A `Cluster` that calls `check` before each request to `inner`; errors of `check`
    are raised.
    """

    def __init__(self, inner: Cluster, check: Callable[[], None]) -> None:
        self._inner = inner
        self._check = check

    async def now_ts(self) -> int:
        """See `Cluster`."""
        self._check()
        return await self._inner.now_ts()

    async def hold_safe_point(self, safe_point: int) -> LowestService:
        """See `Cluster`."""
        self._check()
        return await self._inner.hold_safe_point(safe_point)

    async def lowest_service(self) -> LowestService | None:
        """See `Cluster`."""
        self._check()
        return await self._inner.lowest_service()

    async def publish_safe_point(self, safe_point: int) -> int:
        """See `Cluster`."""
        self._check()
        return await self._inner.publish_safe_point(safe_point)

    async def ranges_by_store(self) -> Mapping[int, Sequence[KeyRange]]:
        """See `Cluster`."""
        self._check()
        return await self._inner.ranges_by_store()

    async def store_addresses(self) -> Sequence[str]:
        """See `Cluster`."""
        self._check()
        return await self._inner.store_addresses()

    async def scan_locks(self, within: KeyRange, safe_point: int) -> LockPage:
        """See `Cluster`."""
        self._check()
        return await self._inner.scan_locks(within, safe_point)

    async def decide(self, lock: Lock) -> int:
        """See `Cluster`."""
        self._check()
        return await self._inner.decide(lock)

    async def rollback_pessimistic(self, lock: Lock) -> None:
        """See `Cluster`."""
        self._check()
        await self._inner.rollback_pessimistic(lock)

    async def resolve(self, page: LockPage, commit_ts_of: Mapping[int, int]) -> bool:
        """See `Cluster`."""
        self._check()
        return await self._inner.resolve(page, commit_ts_of)

    async def destroy_range(self, address: str, within: KeyRange) -> None:
        """See `Cluster`."""
        self._check()
        await self._inner.destroy_range(address, within)

    async def limit_writes(self, address: str, bytes_per_s: int) -> None:
        """See `Cluster`."""
        self._check()
        await self._inner.limit_writes(address, bytes_per_s)

    async def collect(self, within: KeyRange, safe_point: int) -> bytes | None:
        """See `Cluster`."""
        self._check()
        return await self._inner.collect(within, safe_point)


Step: TypeAlias = Callable[[KeyRange], Awaitable[bytes | None]]
"""Works on the first region of a range; returns the key to go on from, None at the range's end."""


async def walk(
    stores: Iterable[Sequence[KeyRange]],
    workers: int,
    step: Step,
    ended: Callable[[KeyRange], Awaitable[None]],
) -> None:
    """Call `step` through every range of `stores`, at most `workers` stores at a time; `ended` is
    awaited after each range. The first error cancels the walk of the other stores, and is raised.
    """
    waiting = deque(stores)

    # One task takes all ranges of a store: a store never serves two of them at a time.
    async def work() -> None:
        while waiting:
            for within in waiting.popleft():
                key: bytes | None = within.start_key
                while key is not None:
                    key = await step(KeyRange(key, within.end_key))
                await ended(within)

    await gather(work() for _ in range(workers))
