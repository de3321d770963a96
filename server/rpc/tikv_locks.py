"""What becomes of locks that others have left, and of old versions:
for the lock resolver and for GC.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvproto import kvrpcpb_pb2 as kvrpcpb

from server.rpc.key_error import check
from server.rpc.pd import RegionRoute
from server.rpc.region_cache import after, nearer, region_end
from server.rpc.region_router import RegionRouter, StoreRefusedError

_DESTROY_S = 300.0
_GC_S = 300.0  # of one region; the store may hold itself to a write rate


@dataclass(frozen=True, slots=True)
class LockPage:
    """Locks of one region from a key on; `next_key` is where to go on,
    None at the end of the region's part.
    """

    route: RegionRoute
    locks: tuple[kvrpcpb.LockInfo, ...]
    next_key: bytes | None


class KvLocks:
    """The calls of `KvClient` for locks of any transaction, and for GC."""

    router: RegionRouter

    async def cleanup(self, key: bytes, start_version: int, current_ts: int = 0) -> int:
        """Roll the transaction back at its primary `key` if its lock is expired at `current_ts` (0:
        in any case).

        Returns the commit_ts if it was committed, else 0.

        Raises:
            LockedError: the lock still lives.
        """
        request = kvrpcpb.CleanupRequest(
            key=key, start_version=start_version, current_ts=current_ts
        )
        answer = await self.router.call(key, lambda s: s.KvCleanup, request)
        check(answer)
        return answer.commit_version

    async def check_txn_status(
        self, request: kvrpcpb.CheckTxnStatusRequest
    ) -> kvrpcpb.CheckTxnStatusResponse:
        """Ask the primary what became of the transaction; may roll it back, as the request says.

        Raises:
            TxnNotFoundError: there is nothing, and `rollback_if_not_exist` is not set.
        """
        answer = await self.router.call(request.primary_key, lambda s: s.KvCheckTxnStatus, request)
        check(answer)
        return answer

    async def check_secondary_locks(
        self, keys: Iterable[bytes], start_version: int
    ) -> list[tuple[list[bytes], kvrpcpb.CheckSecondaryLocksResponse]]:
        """Ask an async-commit transaction's secondaries for their locks;
        each answer with the keys it is for.
        """
        answers = await self.router.fan_out(
            keys,
            lambda s: s.KvCheckSecondaryLocks,
            lambda part: kvrpcpb.CheckSecondaryLocksRequest(keys=part, start_version=start_version),
        )
        for _, answer in answers:
            check(answer)
        return answers

    async def resolve_lock(
        self, keys: Iterable[bytes], start_version: int, commit_version: int
    ) -> None:
        """Commit one transaction's locks on `keys`, or roll them back (`commit_version` 0);
        durable when it returns.
        """
        for _, answer in await self.router.fan_out(
            keys,
            lambda s: s.KvResolveLock,
            lambda part: kvrpcpb.ResolveLockRequest(
                keys=part, start_version=start_version, commit_version=commit_version
            ),
        ):
            check(answer)

    async def scan_lock(
        self, start_key: bytes, end_key: bytes, max_version: int, limit: int
    ) -> LockPage:
        """Up to `limit` locks with start_ts <= `max_version` in the part of `start_key`'s region
        below `end_key`.
        """

        def request(route: RegionRoute) -> kvrpcpb.ScanLockRequest:
            upper = nearer(end_key, region_end(route))
            return kvrpcpb.ScanLockRequest(
                start_key=start_key, end_key=upper, max_version=max_version, limit=limit
            )

        route, answer = await self.router.call_region(start_key, lambda s: s.KvScanLock, request)
        check(answer)
        if len(answer.locks) == limit:
            return LockPage(route, tuple(answer.locks), answer.locks[-1].key + b"\0")
        return LockPage(route, tuple(answer.locks), after(route, end_key))

    async def resolve_region(self, route: RegionRoute, commit_ts_of: Mapping[int, int]) -> None:
        """Resolve every lock in exactly this region of the transactions {start_ts: commit_ts,
        0 to roll back}.

        Raises:
            RegionError: the region is another one by now; scan it again.
        """
        infos = [
            kvrpcpb.TxnInfo(txn=start_ts, status=commit_ts)
            for start_ts, commit_ts in commit_ts_of.items()
        ]
        request = kvrpcpb.ResolveLockRequest(txn_infos=infos)
        check(await self.router.ask(route, lambda s: s.KvResolveLock, request))

    async def gc(self, start_key: bytes, end_key: bytes, safe_point: int) -> bytes | None:
        """Have `start_key`'s region collect its old versions; returns where `[start_key,
        end_key)` goes on, if it does.

        Raises:
            StoreRefusedError: the store collects by itself only.
        """
        route, answer = await self.router.call_region(
            start_key,
            lambda s: s.KvGC,
            lambda _: kvrpcpb.GCRequest(safe_point=safe_point),
            attempt_s=_GC_S,
        )
        check(answer)
        return after(route, end_key)

    async def unsafe_destroy_range(self, address: str, start_key: bytes, end_key: bytes) -> None:
        """Delete all versions and locks of `[start_key, end_key)` from one store,
        in all its regions at once.

        Raises:
            StoreRefusedError: the store says why it did not.
        """
        request = kvrpcpb.UnsafeDestroyRangeRequest(start_key=start_key, end_key=end_key)
        answer = await self.router.ask_store(
            address, lambda s: s.UnsafeDestroyRange, request, timeout_s=_DESTROY_S
        )
        if answer.error or answer.HasField("region_error"):
            raise StoreRefusedError(
                f"the store at {address} did not destroy a range: {answer.error}"
            )
