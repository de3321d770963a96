"""The client of transactional stores, Tidemark's or TiKV: raw keys in, Percolator's answers out.

Each call finds its regions, is repeated as `region_router` says, and turns key errors into
exceptions. It never resolves locks; the transaction client and the GC worker do.
"""

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from operator import attrgetter

from kvproto import kvrpcpb_pb2 as kvrpcpb

from server.rpc.credentials import SecurityConfig
from server.rpc.key_error import check, raise_for
from server.rpc.region_cache import RegionRoute, after, below, nearer, region_end, region_start
from server.rpc.region_router import Placement, RegionRouter, StoreRefusedError

_DESTROY_S = 300.0
_GC_S = 300.0  # of one region; the store may hold itself to a write rate
_KEY, _VALUE = attrgetter("key"), attrgetter("value")
Pairs = list[tuple[bytes, bytes]]
_CHECKED = kvrpcpb.PrewriteRequest.DO_PESSIMISTIC_CHECK
_UNCHECKED = kvrpcpb.PrewriteRequest.SKIP_PESSIMISTIC_CHECK


@dataclass(frozen=True, slots=True)
class BypassedLocks:
    """Transactions whose locks a read passes: `resolved` ones commit later or never,
    `committed` ones already did.
    """

    resolved: frozenset[int] = frozenset()
    committed: frozenset[int] = frozenset()

    def __or__(self, other: "BypassedLocks") -> "BypassedLocks":
        """The transactions of both."""
        return BypassedLocks(self.resolved | other.resolved, self.committed | other.committed)

    def context(self) -> kvrpcpb.Context:
        """The part of a request's context that says so."""
        return kvrpcpb.Context(resolved_locks=self.resolved, committed_locks=self.committed)


NO_LOCKS_BYPASSED = BypassedLocks()


@dataclass(frozen=True, slots=True)
class LockPage:
    """Locks of one region from a key on; `next_key` is where to go on,
    None at the end of the region's part.
    """

    route: RegionRoute
    locks: tuple[kvrpcpb.LockInfo, ...]
    next_key: bytes | None


class KvClient:
    """Every transactional call of a cluster; made by `open`.

    First come a transaction's own writes, then reads at a timestamp, then calls about locks that
    others have left, and about old versions: for the lock resolver and for GC.
    """

    def __init__(
        self, pd: Placement, security: SecurityConfig | None = None, *, timeout_s: float = 20.0
    ) -> None:
        self.router = RegionRouter(pd, security, timeout_s=timeout_s)

    @classmethod
    @asynccontextmanager
    async def open(
        cls, pd: Placement, security: SecurityConfig | None = None, *, timeout_s: float = 20.0
    ) -> AsyncIterator["KvClient"]:
        """Yield a client for the block; it connects at its first call.

        An operation is given up after `timeout_s` seconds.
        """
        client = cls(pd, security, timeout_s=timeout_s)
        try:
            yield client
        finally:
            await client.close()

    async def close(self) -> None:
        """Close the connections to all stores."""
        await self.router.close()

    async def prewrite(
        self,
        mutations: Iterable[kvrpcpb.Mutation],
        *,
        primary: bytes,
        start_version: int,
        lock_ttl_ms: int,
        for_update_ts: int = 0,
        pessimistic_keys: frozenset[bytes] = frozenset(),
    ) -> None:
        """Lock every key and write its value; durable when it returns.

        `pessimistic_keys` must be locked already.

        Raises:
            LockedError: other transactions' locks are in the way.
            WriteConflictError: a key was committed after `start_version`.
            AlreadyExistError: an insert found its key.
        """
        by_key = {mutation.key: mutation for mutation in mutations}

        def request(keys: list[bytes]) -> kvrpcpb.PrewriteRequest:
            return kvrpcpb.PrewriteRequest(
                mutations=[by_key[key] for key in keys],
                primary_lock=primary,
                start_version=start_version,
                lock_ttl=lock_ttl_ms,
                # Of the whole transaction (kvrpcpb.proto): whoever meets one of its locks decides
                # by it whether to resolve that one alone, or all of the region.
                txn_size=len(by_key),
                for_update_ts=for_update_ts,
                # A reader may push it further while the lock lives; the commit must not be below.
                min_commit_ts=max(start_version, for_update_ts) + 1,
                pessimistic_actions=[
                    _CHECKED if key in pessimistic_keys else _UNCHECKED
                    for key in (keys if for_update_ts else ())
                ],
            )

        answers = await self.router.fan_out(by_key, lambda s: s.KvPrewrite, request)
        raise_for(error for _, answer in answers for error in answer.errors)

    async def commit(self, keys: Iterable[bytes], start_version: int, commit_version: int) -> None:
        """Make prewritten keys visible at `commit_version`; durable when it returns.

        Commit the primary first, alone.

        Raises:
            CommitTsExpiredError: a reader moved min_commit_ts past `commit_version`.
            TxnAbortedError: the transaction was rolled back.
        """
        for _, answer in await self.router.fan_out(
            keys,
            lambda s: s.KvCommit,
            lambda part: kvrpcpb.CommitRequest(
                keys=part, start_version=start_version, commit_version=commit_version
            ),
        ):
            check(answer)

    async def batch_rollback(self, keys: Iterable[bytes], start_version: int) -> None:
        """Remove the transaction's locks and values, and forbid a late prewrite;
        durable when it returns.
        """
        for _, answer in await self.router.fan_out(
            keys,
            lambda s: s.KvBatchRollback,
            lambda part: kvrpcpb.BatchRollbackRequest(keys=part, start_version=start_version),
        ):
            check(answer)

    async def pessimistic_lock(
        self,
        keys: Iterable[bytes],
        *,
        primary: bytes,
        start_version: int,
        for_update_ts: int,
        lock_ttl_ms: int,
        wait_ms: int,
    ) -> dict[bytes, bytes]:
        """Lock keys before writing them; returns the values of those that exist at `for_update_ts`.

        Raises:
            LockedError: still locked by others after `wait_ms` (-1: do not wait).
            WriteConflictError: a key was committed after `for_update_ts`: take a newer one.
            DeadlockError: waiting would never end.
        """
        answers = await self.router.fan_out(
            keys,
            lambda s: s.KvPessimisticLock,
            lambda part: kvrpcpb.PessimisticLockRequest(
                mutations=[kvrpcpb.Mutation(op=kvrpcpb.PessimisticLock, key=key) for key in part],
                primary_lock=primary,
                start_version=start_version,
                lock_ttl=lock_ttl_ms,
                for_update_ts=for_update_ts,
                min_commit_ts=for_update_ts + 1,
                wait_timeout=wait_ms,
                return_values=True,
            ),
        )
        raise_for(error for _, answer in answers for error in answer.errors)
        return {
            key: value
            for part, answer in answers
            for key, value, missing in zip(part, answer.values, answer.not_founds, strict=True)
            if not missing
        }

    async def pessimistic_rollback(
        self, keys: Iterable[bytes], start_version: int, for_update_ts: int
    ) -> None:
        """Remove the transaction's pessimistic locks; prewritten ones stay."""
        answers = await self.router.fan_out(
            keys,
            lambda s: s.KVPessimisticRollback,
            lambda part: kvrpcpb.PessimisticRollbackRequest(
                keys=part, start_version=start_version, for_update_ts=for_update_ts
            ),
        )
        raise_for(error for _, answer in answers for error in answer.errors)

    async def heartbeat(self, primary: bytes, start_version: int, lock_ttl_ms: int) -> int:
        """Extend the primary lock's TTL to at least `lock_ttl_ms` from its start_ts; returns the
        TTL in force, in ms.

        Raises:
            TxnNotFoundError: the lock is gone; somebody rolled the transaction back.
        """
        request = kvrpcpb.TxnHeartBeatRequest(
            primary_lock=primary, start_version=start_version, advise_lock_ttl=lock_ttl_ms
        )
        answer = await self.router.call(primary, lambda s: s.KvTxnHeartBeat, request)
        check(answer)
        return answer.lock_ttl

    async def get(
        self, key: bytes, version: int, passing: BypassedLocks = NO_LOCKS_BYPASSED
    ) -> bytes | None:
        """The value of `key` at timestamp `version`.

        Raises:
            LockedError: a lock older than `version` hides the answer.
        """
        request = kvrpcpb.GetRequest(context=passing.context(), key=key, version=version)
        answer = await self.router.call(key, lambda s: s.KvGet, request)
        check(answer)
        return None if answer.not_found else answer.value

    async def batch_get(
        self, keys: Iterable[bytes], version: int, passing: BypassedLocks = NO_LOCKS_BYPASSED
    ) -> dict[bytes, bytes]:
        """The values of those `keys` that exist at `version`.

        Raises:
            LockedError: with every lock that was met.
        """
        answers = await self.router.fan_out(
            keys,
            lambda s: s.KvBatchGet,
            lambda part: kvrpcpb.BatchGetRequest(
                context=passing.context(), keys=part, version=version
            ),
        )
        pairs = [pair for _, answer in answers for pair in answer.pairs]
        # First: stores that tell the error of each pair may tell the first of them once more.
        raise_for(pair.error for pair in pairs if pair.HasField("error"))
        for _, answer in answers:
            check(answer)
        return {pair.key: pair.value for pair in pairs}

    async def scan(
        self,
        start_key: bytes,
        end_key: bytes,
        version: int,
        limit: int,
        *,
        key_only: bool = False,
        passing: BypassedLocks = NO_LOCKS_BYPASSED,
    ) -> Pairs:
        """Return at most `limit` pairs of `[start_key, end_key)` at `version`, in key order; an
        empty end is unbounded.

        Raises:
            LockedError: with the locks met in the first region that has any.
        """
        pairs_read: Pairs = []
        key: bytes | None = start_key
        while key is not None and len(pairs_read) < limit:
            request = kvrpcpb.ScanRequest(
                context=passing.context(),
                start_key=key,
                version=version,
                limit=limit - len(pairs_read),
                key_only=key_only,
                end_key=end_key,
            )
            pairs, key = await self._scan_region(request)
            raise_for(pair.error for pair in pairs if pair.HasField("error"))
            pairs_read += [(pair.key, pair.value) for pair in pairs]
        return pairs_read

    async def scan_columns(
        self,
        start_key: bytes,
        end_key: bytes,
        version: int,
        limit: int,
        *,
        passing: BypassedLocks = NO_LOCKS_BYPASSED,
    ) -> tuple[list[bytes], list[bytes]]:
        """Like `scan`, for many rows: returns keys and values apart, at half the cost.

        No value is empty, as in TiKV.
        """
        keys: list[bytes] = []
        values: list[bytes] = []
        key: bytes | None = start_key
        while key is not None and len(keys) < limit:
            request = kvrpcpb.ScanRequest(
                context=passing.context(),
                start_key=key,
                version=version,
                limit=limit - len(keys),
                end_key=end_key,
            )
            pairs, key = await self._scan_region(request)
            values_read = list(map(_VALUE, pairs))
            if not all(values_read):  # only then somebody has to look at each
                raise_for(pair.error for pair in pairs if pair.HasField("error"))
            keys += map(_KEY, pairs)
            values += values_read
        return keys, values

    async def last_key(
        self,
        start_key: bytes,
        end_key: bytes,
        version: int,
        *,
        passing: BypassedLocks = NO_LOCKS_BYPASSED,
    ) -> bytes | None:
        """The greatest key of `[start_key, end_key)` at `version`; None: there is none.

        Raises as `scan`.
        """
        upper = end_key
        while True:

            def request(route: RegionRoute, upper: bytes = upper) -> kvrpcpb.ScanRequest:
                return kvrpcpb.ScanRequest(
                    context=passing.context(),
                    start_key=nearer(upper, region_end(route)),
                    end_key=max(start_key, region_start(route)),
                    version=version,
                    limit=1,
                    key_only=True,
                    reverse=True,
                )

            route, answer = await self.router.call_region(below(upper), lambda s: s.KvScan, request)
            check(answer)
            raise_for(pair.error for pair in answer.pairs if pair.HasField("error"))
            if answer.pairs:
                return answer.pairs[0].key
            upper = region_start(route)
            if upper <= start_key:
                return None

    async def _scan_region(
        self, request: kvrpcpb.ScanRequest
    ) -> tuple[Sequence[kvrpcpb.KvPair], bytes | None]:
        end_key = request.end_key

        def clamped(route: RegionRoute) -> kvrpcpb.ScanRequest:
            request.end_key = nearer(end_key, region_end(route))
            return request

        route, answer = await self.router.call_region(
            request.start_key, lambda s: s.KvScan, clamped
        )
        check(answer)
        return answer.pairs, after(route, end_key)

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
        """Ask the primary for the transaction's status; may roll it back, if the request allows
        that.

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
        """Return at most `limit` locks with start_ts <= `max_version` from the part of
        `start_key`'s region below `end_key`.
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
