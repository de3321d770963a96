"""Resolves the locks of transactions whose client may be dead: asks the primary lock, then commits
or rolls back the others.

The primary decides alone, except for async commit, where the transaction is committed once every
secondary is locked. Source: Percolator (Peng and Dabek, OSDI 2010) §2.2; TiKV's async commit
design.
"""

from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kvproto import kvrpcpb_pb2 as kvrpcpb

from server.rpc.key_error import PrimaryMismatchError, TxnNotFoundError
from server.rpc.pd import PdClient
from server.rpc.region_cache import region_end, region_start
from server.rpc.tikv import BypassedLocks, KvClient
from storage.model.errors import ConflictError
from storage.model.ts import MAX_TS, physical_ms

_LOCKS_A_PAGE: Final = 1024


class LockRemainsError(ConflictError):
    """A lock that had to go did not."""

    code = "ErrLockRemains"


class TsoClient(Protocol):
    """Hands out timestamps: `PdClient`."""

    async def tso(self, count: int = 1) -> int:
        """A new timestamp."""
        ...


@dataclass(frozen=True, slots=True)
class TxnStatus:
    """A transaction's fate: committed at `commit_ts`, rolled back (0), or alive for `ttl_ms` more.

    A living one that is `pushed` will not commit at or before the reader's timestamp. `keys` are
    all that is known to be locked by an async commit: they share its fate.
    """

    commit_ts: int = 0
    ttl_ms: int = 0
    pushed: bool = False
    keys: tuple[bytes, ...] = ()


def async_commit_ts(
    primary_min_commit_ts: int,
    answers: Sequence[tuple[Sequence[bytes], kvrpcpb.CheckSecondaryLocksResponse]],
) -> int | None:
    """The commit_ts of an async-commit transaction (0: rolled back);
    None if it fell back to an ordinary commit.
    """
    commit_ts = primary_min_commit_ts
    for keys, answer in answers:
        # A missing lock settles it: either that key is committed, at `commit_ts`, or it can never
        # be (0).
        if len(answer.locks) < len(keys):
            return answer.commit_ts
        if not all(lock.use_async_commit for lock in answer.locks):
            return None
        commit_ts = max(commit_ts, *(lock.min_commit_ts for lock in answer.locks))
    return commit_ts


async def region_locks(
    pd: PdClient, kv: KvClient, region_id: int, ts: int
) -> AsyncIterator[Sequence[kvrpcpb.LockInfo]]:
    """The locks of a region that transactions hold which began up to `ts`, in pages.

    Raises:
        RegionMissingError: there is no such region.
    """
    route = await pd.region_by_id(region_id)
    start: bytes | None = region_start(route)
    while start is not None:
        page = await kv.scan_lock(start, region_end(route), ts, _LOCKS_A_PAGE)
        yield page.locks
        start = page.next_key


class LockResolver:
    """Resolves the locks that reads and writes run into;
    `decide` alone also serves the GC worker.
    """

    def __init__(self, clock: TsoClient, kv: KvClient) -> None:
        self._clock = clock
        self._kv = kv

    async def resolve(self, locks: Iterable[kvrpcpb.LockInfo], caller_start_ts: int) -> float:
        """Remove the locks of dead transactions; returns seconds until the first live one expires,
        0 if none lives.

        `caller_start_ts` is the reader's timestamp, 0 for a writer.
        """
        statuses = await self._resolve(locks, caller_start_ts)
        return (
            min((status.ttl_ms for status in statuses.values() if status.ttl_ms), default=0) / 1e3
        )

    async def resolve_for_read(
        self, locks: Iterable[kvrpcpb.LockInfo], read_ts: int
    ) -> tuple[BypassedLocks, float]:
        """Like `resolve`, but a reader at `read_ts` does not wait for a transaction that can be
        made to commit later.

        Returns the transactions whose locks the read may pass, and seconds until the first of the
        others expires.
        """
        statuses = await self._resolve(locks, read_ts)
        waited_for = [
            status.ttl_ms for status in statuses.values() if status.ttl_ms and not status.pushed
        ]
        passable = {
            start_ts: status
            for start_ts, status in statuses.items()
            if status.pushed or not status.ttl_ms
        }
        committed = {
            start_ts for start_ts, status in passable.items() if 0 < status.commit_ts <= read_ts
        }
        passing = BypassedLocks(frozenset(passable) - committed, frozenset(committed))
        return passing, min(waited_for, default=0) / 1e3

    async def decide(self, lock: kvrpcpb.LockInfo) -> int:
        """End the lock's transaction now, expired or not; returns its commit_ts,
        0 if it is rolled back.

        Raises:
            LockRemainsError: the store keeps it alive in spite of that.
        """
        status = await self._status(lock, MAX_TS, 0, rollback_if_not_exist=True)
        if status.ttl_ms:
            raise LockRemainsError(
                f"the transaction {lock.lock_version} is still alive on {lock.primary_lock.hex()}"
            )
        return status.commit_ts

    async def rollback_pessimistic(self, lock: kvrpcpb.LockInfo) -> None:
        """Remove one pessimistic lock: it holds no data,
        so its transaction's fate does not matter.
        """
        await self._kv.pessimistic_rollback(
            [lock.key], lock.lock_version, lock.lock_for_update_ts or lock.lock_version
        )

    async def _resolve(
        self, locks: Iterable[kvrpcpb.LockInfo], caller_start_ts: int
    ) -> dict[int, TxnStatus]:
        now = await self._clock.tso()
        by_txn: dict[int, list[kvrpcpb.LockInfo]] = defaultdict(list)
        for lock in locks:
            by_txn[lock.lock_version].append(lock)
        statuses: dict[int, TxnStatus] = {}
        for start_ts, group in by_txn.items():
            status = statuses[start_ts] = await self._ask(group[0], now, caller_start_ts)
            if not status.ttl_ms:
                await self._clear(group, start_ts, status)
        return statuses

    async def _ask(self, lock: kvrpcpb.LockInfo, now: int, caller_start_ts: int) -> TxnStatus:
        try:
            return await self._status(lock, now, caller_start_ts, rollback_if_not_exist=False)
        except TxnNotFoundError:
            # the primary may not be written yet, as prewrites run in parallel: believe in its
            # absence after the TTL
            left_ms = physical_ms(lock.lock_version) + lock.lock_ttl - physical_ms(now)
            if left_ms > 0:
                return TxnStatus(ttl_ms=left_ms)
            return await self._status(lock, now, caller_start_ts, rollback_if_not_exist=True)
        except PrimaryMismatchError:
            if lock.lock_type != kvrpcpb.PessimisticLock:
                raise
            # it was left behind when the transaction chose another primary
            return TxnStatus()

    async def _status(
        self, lock: kvrpcpb.LockInfo, now: int, caller_start_ts: int, *, rollback_if_not_exist: bool
    ) -> TxnStatus:
        request = kvrpcpb.CheckTxnStatusRequest(
            primary_key=lock.primary_lock,
            lock_ts=lock.lock_version,
            caller_start_ts=caller_start_ts,
            current_ts=now,
            rollback_if_not_exist=rollback_if_not_exist,
            resolving_pessimistic_lock=lock.lock_type == kvrpcpb.PessimisticLock and now != MAX_TS,
            verify_is_primary=True,
        )
        # The primary's state decides for all keys of the transaction (Percolator §2.2).
        # `force_sync_commit` below makes an async commit that fell back obey the same rule.
        answer = await self._kv.check_txn_status(request)
        if answer.HasField("lock_info") and answer.lock_info.use_async_commit:
            status = await self._async_commit_status(answer.lock_info, now)
            if status is not None:
                return status
            request.force_sync_commit = True
            answer = await self._kv.check_txn_status(request)
        if answer.lock_ttl:
            left_ms = physical_ms(lock.lock_version) + answer.lock_ttl - physical_ms(now)
            return TxnStatus(
                ttl_ms=max(1, left_ms), pushed=answer.action == kvrpcpb.MinCommitTSPushed
            )
        return TxnStatus(commit_ts=answer.commit_version)

    async def _async_commit_status(self, primary: kvrpcpb.LockInfo, now: int) -> TxnStatus | None:
        """The fate of an async commit by its primary's lock; None if a lock of it is ordinary:
        its primary decides.
        """
        left_ms = physical_ms(primary.lock_version) + primary.lock_ttl - physical_ms(now)
        if left_ms > 0 and now != MAX_TS:
            return TxnStatus(ttl_ms=left_ms)
        secondaries = await self._kv.check_secondary_locks(
            primary.secondaries, primary.lock_version
        )
        commit_ts = async_commit_ts(primary.min_commit_ts, secondaries)
        if commit_ts is None:
            return None
        return TxnStatus(commit_ts=commit_ts, keys=(primary.primary_lock, *primary.secondaries))

    async def _clear(
        self, locks: Sequence[kvrpcpb.LockInfo], start_ts: int, status: TxnStatus
    ) -> None:
        pessimistic = [lock for lock in locks if lock.lock_type == kvrpcpb.PessimisticLock]
        for lock in pessimistic:
            await self.rollback_pessimistic(lock)
        keys = {lock.key for lock in locks if lock.lock_type != kvrpcpb.PessimisticLock}.union(
            status.keys
        )
        if keys:
            await self._kv.resolve_lock(keys, start_ts, status.commit_ts)
