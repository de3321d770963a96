"""The phase Resolve Locks: no lock older than the safepoint may outlive the records that would decide it.

Stores are worked on in parallel, each by at most one worker; within a store, range by range. A region that splits or
moves meanwhile is simply met again: what is walked are key ranges, not regions.
"""

from collections import deque
from collections.abc import Callable

from gcsafepoint.worker.cluster import Cluster, KeyRange, LockPage
from gcsafepoint.worker.config import GCConfig
from storage.tasks import together

Count = Callable[[int], None]
"""Told the locks of each page that is done."""


async def resolve_locks(cluster: Cluster, config: GCConfig, safe_point: int, count: Count) -> None:
    """Commit or roll back every lock of transactions that began at or before `safe_point`; durable when it returns."""
    stores = deque((await cluster.ranges_by_store()).values())

    async def work() -> None:
        while stores:
            for within in stores.popleft():
                await _resolve_range(cluster, within, safe_point, count)

    await together(work() for _ in range(config.workers(len(stores))))


async def _resolve_range(cluster: Cluster, within: KeyRange, safe_point: int, count: Count) -> None:
    key: bytes | None = within.start_key
    while key is not None:
        page = await cluster.scan_locks(KeyRange(key, within.end_key), safe_point)
        fates = await _decide(cluster, page)
        if fates and not await cluster.resolve(page, fates):
            continue  # another region by now: scan from the same key again
        count(len(page.locks))
        key = page.next_key


async def _decide(cluster: Cluster, page: LockPage) -> dict[int, int]:
    """Ask each transaction's primary once; pessimistic locks need no answer."""
    fates: dict[int, int] = {}
    for lock in page.locks:
        if lock.pessimistic:
            await cluster.rollback_pessimistic(lock)
        elif lock.start_ts not in fates:
            fates[lock.start_ts] = await cluster.decide(lock)
    return fates
