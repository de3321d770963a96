"""The client of transactional stores, ours or real TiKV: raw keys in, Percolator's answers out.

Each call finds its regions, is repeated as `region_router` says, and turns key errors into
exceptions. Locks are never resolved here: that is the business of the transaction client and of the
GC worker.
"""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from kvproto import kvrpcpb_pb2 as kvrpcpb

from server.rpc.credentials import SecurityConfig
from server.rpc.key_error import check, raise_for
from server.rpc.region_router import Placement, RegionRouter
from server.rpc.tikv_locks import KvLocks
from server.rpc.tikv_reads import KvReads

_CHECKED = kvrpcpb.PrewriteRequest.DO_PESSIMISTIC_CHECK
_UNCHECKED = kvrpcpb.PrewriteRequest.SKIP_PESSIMISTIC_CHECK


class KvClient(KvReads, KvLocks):
    """Every transactional call of a cluster; made by `open`.

    Those of a transaction's own writes are here.
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
        """A client for the block; connects when first asked.

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
                txn_size=len(by_key),
                for_update_ts=for_update_ts,
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
        """Let the primary lock live for at least `lock_ttl_ms` from its start_ts;
        returns what holds, in ms.

        Raises:
            TxnNotFoundError: the lock is gone; somebody rolled the transaction back.
        """
        request = kvrpcpb.TxnHeartBeatRequest(
            primary_lock=primary, start_version=start_version, advise_lock_ttl=lock_ttl_ms
        )
        answer = await self.router.call(primary, lambda s: s.KvTxnHeartBeat, request)
        check(answer)
        return answer.lock_ttl
