"""The phase Resolve Locks: no lock older than the safepoint may outlive the records that would decide it.

A worker has one page of one store's locks in hand at a time; it asks the primaries of a page together, so that stores
can make their rollbacks durable together. What became of a transaction is final, and asked once however many regions it
touched.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from gcsafepoint.worker.cluster import Cluster, KeyRange, Lock, LockPage
from gcsafepoint.worker.config import GCConfig
from gcsafepoint.worker.walk import walk
from storage.tasks import together

Count = Callable[[LockPage], None]
"""Told of each page whose locks are gone; a page takes other locks of its transactions in the region with it."""

_ASKED_AT_ONCE = 16
_REMEMBERED = 1 << 16


async def resolve_locks(
    cluster: Cluster, config: GCConfig, stores: Mapping[int, Sequence[KeyRange]], safe_point: int, count: Count
) -> None:
    """Commit or roll back every lock of transactions that began before `safe_point`; durable when it returns."""
    fates = Fates(cluster)

    async def step(within: KeyRange) -> bytes | None:
        page = await cluster.scan_locks(within, safe_point)
        decided = await fates.of(page)
        if decided and not await cluster.resolve(page, decided):
            return within.start_key  # another region by now: scan from the same key again
        count(page)
        return page.next_key

    async def ended(_: KeyRange) -> None:
        return

    await walk(stores.values(), config.workers(len(stores)), step, ended)


class Fates:
    """What became of the transactions of one round: start_ts → commit_ts, 0 if rolled back; of the last 65536."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: dict[int, int] = {}

    async def of(self, page: LockPage) -> dict[int, int]:
        """Decide all of a page's transactions; pessimistic locks need no answer, they are removed."""
        first = {lock.start_ts: lock for lock in reversed(page.locks) if not lock.pessimistic}
        decided = {start_ts: self._known[start_ts] for start_ts in first if start_ts in self._known}
        unknown = [lock for start_ts, lock in first.items() if start_ts not in decided]
        waiting = iter([*unknown, *(lock for lock in page.locks if lock.pessimistic)])
        await together(self._work(waiting, decided) for _ in range(_ASKED_AT_ONCE))
        self._known |= decided
        for start_ts in list(self._known)[: max(0, len(self._known) - _REMEMBERED)]:
            del self._known[start_ts]
        return decided

    async def _work(self, waiting: Iterator[Lock], decided: dict[int, int]) -> None:
        for lock in waiting:
            if lock.pessimistic:
                await self._cluster.rollback_pessimistic(lock)
            else:
                decided[lock.start_ts] = await self._cluster.decide(lock)
