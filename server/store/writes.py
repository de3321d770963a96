"""Write requests as commands for the engine, and their results as responses:
one pair of functions a request.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from kvproto import kvrpcpb_pb2 as kvrpcpb

from server.store.key_error import key_errors, lock_info
from storage.mvcc import percolator, pessimistic
from storage.mvcc.engine import Command
from storage.mvcc.errors import MvccError
from storage.mvcc.percolator import SecondariesStatus, StatusCheck, TxnStatus
from storage.mvcc.pessimistic import LockedKey, PessimisticLock
from storage.mvcc.prewrite import Mutation, Prewrite, Prewritten
from storage.mvcc.prewrite import prewrite as prewrite_command
from storage.mvcc.region import Region


def prewrite(request: kvrpcpb.PrewriteRequest, _: Region) -> Command:
    """KvPrewrite."""
    txn = Prewrite(
        mutations=_mutations(request.mutations),
        primary=request.primary_lock,
        start_ts=request.start_version,
        ttl_ms=_ttl_ms(request.lock_ttl),
        txn_size=request.txn_size,
        min_commit_ts=request.min_commit_ts,
        for_update_ts=request.for_update_ts,
        actions=request.pessimistic_actions,
        check_assertions=request.assertion_level != kvrpcpb.Off,
        skip_newer_check=request.skip_constraint_check,
        locked_at={
            item.index: item.expected_for_update_ts for item in request.for_update_ts_constraints
        },
        async_commit=request.use_async_commit,
        one_pc=request.try_one_pc,
        secondaries=request.secondaries,
        max_commit_ts=request.max_commit_ts,
        txn_source=request.context.txn_source,
    )
    return partial(prewrite_command, txn=txn)


def prewrite_ts(request: kvrpcpb.PrewriteRequest) -> int:
    """The newest timestamp of KvPrewrite."""
    return max(request.start_version, request.for_update_ts, request.min_commit_ts)


def prewrite_response(done: Prewritten, _: Any) -> kvrpcpb.PrewriteResponse:
    """The answer to KvPrewrite; zeros tell the client to go on with an ordinary commit."""
    return kvrpcpb.PrewriteResponse(
        min_commit_ts=done.min_commit_ts, one_pc_commit_ts=done.one_pc_commit_ts
    )


def commit(request: kvrpcpb.CommitRequest, _: Region) -> Command:
    """KvCommit."""
    return partial(
        percolator.commit,
        keys=request.keys,
        start_ts=request.start_version,
        commit_ts=request.commit_version,
    )


def commit_response(_: Any, request: kvrpcpb.CommitRequest) -> kvrpcpb.CommitResponse:
    """The answer to KvCommit."""
    return kvrpcpb.CommitResponse(commit_version=request.commit_version)


def batch_rollback(request: kvrpcpb.BatchRollbackRequest, _: Region) -> Command:
    """KvBatchRollback."""
    return partial(percolator.rollback, keys=request.keys, start_ts=request.start_version)


def cleanup(request: kvrpcpb.CleanupRequest, _: Region) -> Command:
    """KvCleanup."""
    return partial(
        percolator.cleanup,
        key=request.key,
        start_ts=request.start_version,
        current_ts=request.current_ts,
    )


def cleanup_response(commit_ts: int, _: Any) -> kvrpcpb.CleanupResponse:
    """The answer to KvCleanup."""
    return kvrpcpb.CleanupResponse(commit_version=commit_ts)


def pessimistic_lock(request: kvrpcpb.PessimisticLockRequest, _: Region) -> Command:
    """KvPessimisticLock; the waiting is `lock_wait`'s."""
    locks = PessimisticLock(
        mutations=_mutations(request.mutations),
        primary=request.primary_lock,
        start_ts=request.start_version,
        ttl_ms=_ttl_ms(request.lock_ttl),
        for_update_ts=request.for_update_ts,
        min_commit_ts=request.min_commit_ts,
        return_values=request.return_values or request.check_existence,
        only_if_exists=request.lock_only_if_exists,
        force=_is_forced(request),
    )
    return partial(pessimistic.pessimistic_lock, request=locks)


def lock_ts(request: kvrpcpb.PessimisticLockRequest) -> int:
    """The newest timestamp of KvPessimisticLock."""
    return max(request.start_version, request.for_update_ts)


def pessimistic_lock_response(
    locked: Sequence[LockedKey], request: kvrpcpb.PessimisticLockRequest
) -> kvrpcpb.PessimisticLockResponse:
    """The answer to KvPessimisticLock: values of all keys,
    or one result a key in force-lock mode.
    """
    response = kvrpcpb.PessimisticLockResponse()
    if _is_forced(request):
        for key in locked:
            value = key.value or b"" if request.return_values or key.conflict_ts else b""
            kind = (
                kvrpcpb.LockResultLockedWithConflict
                if key.conflict_ts
                else kvrpcpb.LockResultNormal
            )
            response.results.add(
                type=kind,
                value=value,
                existence=key.value is not None,
                locked_with_conflict_ts=key.conflict_ts,
            )
        return response
    if request.return_values:
        response.values.extend(key.value or b"" for key in locked)
    if request.return_values or request.check_existence:
        response.not_founds.extend(key.value is None for key in locked)
    return response


def pessimistic_refusal(
    err: MvccError, request: kvrpcpb.PessimisticLockRequest
) -> kvrpcpb.PessimisticLockResponse:
    """The answer to KvPessimisticLock when nothing was locked."""
    failed = kvrpcpb.PessimisticLockKeyResult(type=kvrpcpb.LockResultFailed)
    results = [failed for _ in request.mutations] if _is_forced(request) else ()
    return kvrpcpb.PessimisticLockResponse(errors=key_errors(err), results=results)


def _is_forced(request: kvrpcpb.PessimisticLockRequest) -> bool:
    return request.wake_up_mode == kvrpcpb.WakeUpModeForceLock


def pessimistic_rollback(request: kvrpcpb.PessimisticRollbackRequest, region: Region) -> Command:
    """KVPessimisticRollback: known keys, or without any all such locks of the region."""
    if request.keys:
        return partial(
            pessimistic.pessimistic_rollback,
            keys=request.keys,
            start_ts=request.start_version,
            for_update_ts=request.for_update_ts,
        )
    return partial(
        pessimistic.pessimistic_rollback_range,
        lower=region.start_key,
        upper=region.end_key,
        start_ts=request.start_version,
        for_update_ts=request.for_update_ts,
    )


def heartbeat(request: kvrpcpb.TxnHeartBeatRequest, _: Region) -> Command:
    """KvTxnHeartBeat."""
    return partial(
        percolator.heartbeat,
        primary=request.primary_lock,
        start_ts=request.start_version,
        ttl_ms=request.advise_lock_ttl,
    )


def heartbeat_response(ttl_ms: int, _: Any) -> kvrpcpb.TxnHeartBeatResponse:
    """The answer to KvTxnHeartBeat."""
    return kvrpcpb.TxnHeartBeatResponse(lock_ttl=ttl_ms)


def check_txn_status(request: kvrpcpb.CheckTxnStatusRequest, _: Region) -> Command:
    """KvCheckTxnStatus."""
    check = StatusCheck(
        primary=request.primary_key,
        start_ts=request.lock_ts,
        caller_start_ts=request.caller_start_ts,
        current_ts=request.current_ts,
        rollback_if_not_exist=request.rollback_if_not_exist,
        resolving_pessimistic_lock=request.resolving_pessimistic_lock,
        verify_is_primary=request.verify_is_primary,
        force_sync_commit=request.force_sync_commit,
    )
    return partial(percolator.check_txn_status, check=check)


def check_txn_status_response(
    status: TxnStatus, request: kvrpcpb.CheckTxnStatusRequest
) -> kvrpcpb.CheckTxnStatusResponse:
    """The answer to KvCheckTxnStatus."""
    action = kvrpcpb.Action.ValueType(status.action)
    if status.lock is None:
        return kvrpcpb.CheckTxnStatusResponse(commit_version=status.commit_ts, action=action)
    info = lock_info(request.primary_key, status.lock)
    return kvrpcpb.CheckTxnStatusResponse(
        lock_ttl=status.lock.ttl_ms, action=action, lock_info=info
    )


def check_secondaries(request: kvrpcpb.CheckSecondaryLocksRequest, _: Region) -> Command:
    """KvCheckSecondaryLocks."""
    return partial(percolator.check_secondaries, keys=request.keys, start_ts=request.start_version)


def check_secondaries_response(
    status: SecondariesStatus, _: Any
) -> kvrpcpb.CheckSecondaryLocksResponse:
    """The answer to KvCheckSecondaryLocks."""
    locks = [lock_info(key, lock) for key, lock in status.locks]
    return kvrpcpb.CheckSecondaryLocksResponse(locks=locks, commit_ts=status.commit_ts)


def resolve_lock(request: kvrpcpb.ResolveLockRequest, region: Region) -> Command:
    """KvResolveLock: known keys, or all locks of the region that belong to one or several
    transactions.
    """
    if request.keys:
        return partial(
            percolator.resolve_keys,
            keys=request.keys,
            start_ts=request.start_version,
            commit_ts=request.commit_version,
        )
    outcomes = {info.txn: info.status for info in request.txn_infos} or {
        request.start_version: request.commit_version
    }
    return partial(
        percolator.resolve_range, lower=region.start_key, upper=region.end_key, outcomes=outcomes
    )


def _mutations(mutations: Sequence[kvrpcpb.Mutation]) -> list[Mutation]:
    return [Mutation(m.op, m.key, m.value, m.assertion) for m in mutations]


def _ttl_ms(requested_ms: int) -> int:
    """A lock lives for a millisecond at least: a status with lock_ttl 0 means that the transaction
    is over.
    """
    return max(1, requested_ms)
