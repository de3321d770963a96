"""Errors of `storage.mvcc` as `kvrpcpb.KeyError`, in one place."""

from kvproto import kvrpcpb_pb2 as kvrpcpb

from storage.mvcc import errors
from storage.mvcc.errors import MvccError
from storage.mvcc.mutation import Op
from storage.mvcc.record import DELETE, LOCK, PESSIMISTIC, PUT, ROLLBACK, Lock

OPS = {PUT: Op.PUT, DELETE: Op.DELETE, LOCK: Op.LOCK, ROLLBACK: Op.ROLLBACK, PESSIMISTIC: Op.PESSIMISTIC_LOCK}


def lock_info(key: bytes, lock: Lock) -> kvrpcpb.LockInfo:
    """A lock as a client sees it."""
    return kvrpcpb.LockInfo(
        primary_lock=lock.primary,
        lock_version=lock.start_ts,
        key=key,
        lock_ttl=lock.ttl_ms,
        txn_size=lock.txn_size,
        lock_type=kvrpcpb.Op.ValueType(OPS[lock.kind]),
        lock_for_update_ts=lock.for_update_ts,
        min_commit_ts=lock.min_commit_ts,
        use_async_commit=lock.async_commit,
        secondaries=lock.secondaries,
    )


def key_errors(err: MvccError) -> list[kvrpcpb.KeyError]:
    """All that a failed command has to tell."""
    if isinstance(err, errors.KeyErrorsError):
        return [key_error(part) for part in err.errors]
    return [key_error(err)]


def key_error(err: MvccError) -> kvrpcpb.KeyError:
    """One error as the protocol has it; what it has no field for is an abort with our text."""
    match err:
        case errors.KeyIsLockedError():
            return kvrpcpb.KeyError(locked=lock_info(err.key, err.lock))
        case errors.WriteConflictError():
            return kvrpcpb.KeyError(conflict=_conflict(err))
        case errors.AlreadyExistsError():
            return kvrpcpb.KeyError(already_exist=kvrpcpb.AlreadyExist(key=err.key))
        case errors.AssertionFailedError():
            return kvrpcpb.KeyError(assertion_failed=_assertion(err))
        case errors.TxnNotFoundError():
            missing = kvrpcpb.TxnNotFound(start_ts=err.start_ts, primary_key=err.primary)
            return kvrpcpb.KeyError(txn_not_found=missing)
        case errors.TxnLockNotFoundError():
            gone = kvrpcpb.TxnLockNotFound(key=err.key)
            return kvrpcpb.KeyError(retryable=err.message, txn_lock_not_found=gone)
        case errors.CommitTsExpiredError():
            return kvrpcpb.KeyError(commit_ts_expired=_expired(err))
        case errors.PrimaryMismatchError():
            mismatch = kvrpcpb.PrimaryMismatch(lock_info=lock_info(err.key, err.lock))
            return kvrpcpb.KeyError(primary_mismatch=mismatch)
        case errors.KeyErrorsError():
            return key_error(err.errors[0])
        case _:
            return kvrpcpb.KeyError(abort=str(err))


def _conflict(err: errors.WriteConflictError) -> kvrpcpb.WriteConflict:
    return kvrpcpb.WriteConflict(
        start_ts=err.start_ts,
        conflict_ts=err.conflict_start_ts,
        key=err.key,
        primary=err.primary,
        conflict_commit_ts=err.conflict_commit_ts,
        reason=int(err.reason),
    )


def _assertion(err: errors.AssertionFailedError) -> kvrpcpb.AssertionFailed:
    return kvrpcpb.AssertionFailed(
        start_ts=err.start_ts,
        key=err.key,
        assertion=kvrpcpb.Assertion.ValueType(err.assertion),
        existing_start_ts=err.existing_start_ts,
        existing_commit_ts=err.existing_commit_ts,
    )


def _expired(err: errors.CommitTsExpiredError) -> kvrpcpb.CommitTsExpired:
    return kvrpcpb.CommitTsExpired(
        start_ts=err.start_ts, attempted_commit_ts=err.commit_ts, key=err.key, min_commit_ts=err.min_commit_ts
    )
