"""The phase Resolve Locks: no lock older than the safepoint may outlive the records that would decide it."""

from collections.abc import Callable, Mapping, Sequence

from gcsafepoint.worker.cluster import Cluster, KeyRange, LockPage
from gcsafepoint.worker.config import GCConfig
from gcsafepoint.worker.walk import walk

Count = Callable[[LockPage], None]
"""Told of each page whose locks are gone."""


async def resolve_locks(
    cluster: Cluster, config: GCConfig, stores: Mapping[int, Sequence[KeyRange]], safe_point: int, count: Count
) -> None:
    """Commit or roll back every lock of transactions that began before `safe_point`; durable when it returns."""

    async def step(within: KeyRange) -> bytes | None:
        page = await cluster.scan_locks(within, safe_point)
        fates = await _decide(cluster, page)
        if fates and not await cluster.resolve(page, fates):
            return within.start_key  # another region by now: scan from the same key again
        count(page)
        return page.next_key

    async def ended(_: KeyRange) -> None:
        return

    await walk(stores.values(), config.workers(len(stores)), step, ended)


async def _decide(cluster: Cluster, page: LockPage) -> dict[int, int]:
    """Ask each transaction's primary once; pessimistic locks need no answer."""
    fates: dict[int, int] = {}
    for lock in page.locks:
        if lock.pessimistic:
            await cluster.rollback_pessimistic(lock)
        elif lock.start_ts not in fates:
            fates[lock.start_ts] = await cluster.decide(lock)
    return fates
