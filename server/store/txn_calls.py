"""Requests of transactions: one function a read, one or two a write.

A read is answered from a frozen state of the store, in a reader thread; at a timestamp it tells by
a `Touch` what it looks at. A write becomes a command for the engine, and the command's result, or
what refused it, an answer. `server.store.methods` has the table of both.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from kvproto import kvrpcpb_pb2 as kvrpcpb

from server.store.key_error import OPS, key_error, key_errors, lock_info
from storage.codec import encode_bytes
from storage.kv import Reader
from storage.mvcc import percolator, pessimistic
from storage.mvcc.engine import Command
from storage.mvcc.errors import KeyIsLockedError, MvccError
from storage.mvcc.percolator import SecondariesStatus, StatusCheck, TxnStatus
from storage.mvcc.pessimistic import LockedKey, PessimisticLock
from storage.mvcc.prewrite import Mutation, Prewrite, Prewritten
from storage.mvcc.prewrite import prewrite as prewrite_command
from storage.mvcc.read_fence import Touch
from storage.mvcc.record import Lock
from storage.mvcc.region import Region
from storage.mvcc.snapshot import Snapshot, key_history, key_of_transaction, scan_locks


def get(reader: Reader, request: kvrpcpb.GetRequest, _: Region) -> kvrpcpb.GetResponse:
    """KvGet."""
    snapshot = _snapshot(reader, request)
    if not request.need_commit_ts:
        value = snapshot.get(request.key)
        return (
            kvrpcpb.GetResponse(not_found=True)
            if value is None
            else kvrpcpb.GetResponse(value=value)
        )
    version = snapshot.version(request.key)
    if version is None:
        return kvrpcpb.GetResponse(not_found=True)
    return kvrpcpb.GetResponse(value=version[0], commit_ts=version[1])


def touched_keys(request: kvrpcpb.GetRequest | kvrpcpb.BatchGetRequest) -> Touch:
    """The keys that KvGet and KvBatchGet read."""
    return Touch(
        request.version, (request.key,) if isinstance(request, kvrpcpb.GetRequest) else request.keys
    )


def touched_span(request: kvrpcpb.ScanRequest | kvrpcpb.ScanLockRequest) -> Touch:
    """The range that KvScan and KvScanLock read; the region is not asked, so it may be more than
    they read.
    """
    if isinstance(request, kvrpcpb.ScanLockRequest):
        return Touch(request.max_version, span=(request.start_key, request.end_key))
    start, end = request.start_key, request.end_key
    return Touch(request.version, span=(end, start) if request.reverse else (start, end))


def batch_get(
    reader: Reader, request: kvrpcpb.BatchGetRequest, _: Region
) -> kvrpcpb.BatchGetResponse:
    """KvBatchGet: absent keys are left out, locked ones carry their error."""
    snapshot = _snapshot(reader, request)
    response = kvrpcpb.BatchGetResponse()
    for key in request.keys:
        try:
            version = snapshot.version(key)
        except KeyIsLockedError as err:
            response.pairs.add(error=key_error(err), key=key)
            # TiKV's clients look at the first error of the answer, and at each pair's.
            if not response.HasField("error"):
                response.error.CopyFrom(response.pairs[-1].error)
        else:
            if version is not None:
                response.pairs.add(
                    key=key, value=version[0], commit_ts=version[1] if request.need_commit_ts else 0
                )
    return response


def scan(reader: Reader, request: kvrpcpb.ScanRequest, region: Region) -> kvrpcpb.ScanResponse:
    """KvScan: a reverse scan starts below start_key and goes down to end_key."""
    start, end = (encode_bytes(key) if key else b"" for key in (request.start_key, request.end_key))
    lower, upper = region.clamp(*((end, start) if request.reverse else (start, end)))
    response = kvrpcpb.ScanResponse()
    rows = _snapshot(reader, request).scan(
        lower, upper, request.limit, key_only=request.key_only, reverse=request.reverse
    )
    for row in rows:
        if row.error is None:
            response.pairs.add(key=row.key, value=row.value)
        else:
            response.pairs.add(key=row.key, error=key_error(row.error))
    return response


def scan_lock(
    reader: Reader, request: kvrpcpb.ScanLockRequest, region: Region
) -> kvrpcpb.ScanLockResponse:
    """KvScanLock: all kinds of locks up to max_version."""
    start, end = (encode_bytes(key) if key else b"" for key in (request.start_key, request.end_key))
    locks = scan_locks(reader, *region.clamp(start, end), request.max_version, request.limit)
    return kvrpcpb.ScanLockResponse(locks=[lock_info(key, lock) for key, lock in locks])


def mvcc_get_by_key(
    reader: Reader, request: kvrpcpb.MvccGetByKeyRequest, _: Region
) -> kvrpcpb.MvccGetByKeyResponse:
    """MvccGetByKey: everything there is of one key."""
    return kvrpcpb.MvccGetByKeyResponse(info=_mvcc_info(reader, request.key))


def mvcc_get_by_start_ts(
    reader: Reader, request: kvrpcpb.MvccGetByStartTsRequest, region: Region
) -> kvrpcpb.MvccGetByStartTsResponse:
    """MvccGetByStartTs: everything of the first key in the region that the transaction touched;
    walks the region.
    """
    key = key_of_transaction(reader, region.start_key, region.end_key, request.start_ts)
    if key is None:
        return kvrpcpb.MvccGetByStartTsResponse()
    return kvrpcpb.MvccGetByStartTsResponse(key=key, info=_mvcc_info(reader, key))


def _mvcc_info(reader: Reader, key: bytes) -> kvrpcpb.MvccInfo:
    history = key_history(reader, key)
    info = kvrpcpb.MvccInfo()
    if history.lock is not None:
        info.lock.CopyFrom(_mvcc_lock(history.lock))
    for commit_ts, write in history.writes:
        info.writes.add(
            type=kvrpcpb.Op.ValueType(OPS[write.kind]),
            start_ts=write.start_ts,
            commit_ts=commit_ts,
            short_value=write.short_value or b"",
            has_overlapped_rollback=write.overlapped_rollback,
        )
    for start_ts, value in history.values:
        info.values.add(start_ts=start_ts, value=value)
    return info


def _mvcc_lock(lock: Lock) -> kvrpcpb.MvccLock:
    return kvrpcpb.MvccLock(
        type=kvrpcpb.Op.ValueType(OPS[lock.kind]),
        start_ts=lock.start_ts,
        primary=lock.primary,
        short_value=lock.short_value or b"",
        ttl=lock.ttl_ms,
        for_update_ts=lock.for_update_ts,
        txn_size=lock.txn_size,
        use_async_commit=lock.async_commit,
        secondaries=lock.secondaries,
    )


def _snapshot(reader: Reader, request: Any) -> Snapshot:
    context = request.context
    return Snapshot(
        reader,
        request.version,
        resolved=frozenset(context.resolved_locks),
        committed=frozenset(context.committed_locks),
        ignore_locks=context.isolation_level == kvrpcpb.RC,
    )


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
            # A key that was locked in spite of a newer version has its value in any case: the
            # client decided by an older one, and has to look again.
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
