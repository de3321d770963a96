"""The phase Resolve Locks: all locks older than the safepoint are resolved before the records by
which they are decided are collected.

A worker handles one page of one store's locks at a time and checks the primaries of a page
concurrently, so that stores can make their rollbacks durable together. A transaction's outcome is
final, so its primary is checked once however many regions the transaction touched.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from gcsafepoint.worker.cluster import Cluster, Lock, LockPage, walk
from gcsafepoint.worker.config import GCConfig
from storage.model.span import KeyRange
from storage.tasks import gather

Count = Callable[[LockPage], None]
"""Called with each page whose locks are resolved; all other locks of its transactions in the region
are resolved then, too.
"""

_CONCURRENT_CHECKS = 16
_DECISIONS_KEPT = 1 << 16


async def resolve_locks(
    cluster: Cluster,
    config: GCConfig,
    stores: Mapping[int, Sequence[KeyRange]],
    safe_point: int,
    count: Count,
) -> None:
    """Commit or roll back every lock of transactions that began before `safe_point`;
    durable when it returns.
    """
    decisions = TransactionDecisions(cluster)

    async def step(within: KeyRange) -> bytes | None:
        page = await cluster.scan_locks(within, safe_point)
        decided = await decisions.decide_page(page)
        # The region split or moved: scan from the same key again.
        if decided and not await cluster.resolve(page, decided):
            return within.start_key
        count(page)
        return page.next_key

    async def ended(_: KeyRange) -> None:
        return

    await walk(stores.values(), config.workers(len(stores)), step, ended)


class TransactionDecisions:
    """The outcomes of one round's transactions: start_ts → commit_ts, 0 if rolled back;
    of the last 65536.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._commit_ts: dict[int, int] = {}

    async def decide_page(self, page: LockPage) -> dict[int, int]:
        """Decide all transactions of a page, and remove its pessimistic locks, which need no
        decision.
        """
        # One lock of each transaction: all of them name the same primary.
        first = {lock.start_ts: lock for lock in reversed(page.locks) if not lock.pessimistic}
        decided = {
            start_ts: self._commit_ts[start_ts] for start_ts in first if start_ts in self._commit_ts
        }
        unknown = [lock for start_ts, lock in first.items() if start_ts not in decided]
        waiting = iter([*unknown, *(lock for lock in page.locks if lock.pessimistic)])
        await gather(self._work(waiting, decided) for _ in range(_CONCURRENT_CHECKS))
        self._commit_ts |= decided
        for start_ts in list(self._commit_ts)[: max(0, len(self._commit_ts) - _DECISIONS_KEPT)]:
            del self._commit_ts[start_ts]
        return decided

    async def _work(self, waiting: Iterator[Lock], decided: dict[int, int]) -> None:
        for lock in waiting:
            if lock.pessimistic:
                await self._cluster.rollback_pessimistic(lock)
            else:
                decided[lock.start_ts] = await self._cluster.decide(lock)
