"""A cluster that checks the lease before each request: a worker that lost it stops before its next one."""

from collections.abc import Callable, Mapping, Sequence

from gcsafepoint.worker.cluster import Cluster, KeyRange, Lock, LockPage, LowestService


class GuardedCluster:
    """`inner`, with `check` called first; what `check` raises is raised."""

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
