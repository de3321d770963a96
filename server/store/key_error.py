"""Errors of `storage.mvcc` as `kvrpcpb.KeyError`, in one place."""

from collections.abc import Callable
from typing import Any

from kvproto import kvrpcpb_pb2 as kvrpcpb

from storage.mvcc import errors
from storage.mvcc.errors import MvccError
from storage.mvcc.fingerprint import fingerprint64
from storage.mvcc.pessimistic import DeadlockError
from storage.mvcc.prewrite import Op
from storage.mvcc.record import DELETE, LOCK, PESSIMISTIC, PUT, ROLLBACK, Lock

OPS = {
    PUT: Op.PUT,
    DELETE: Op.DELETE,
    LOCK: Op.LOCK,
    ROLLBACK: Op.ROLLBACK,
    PESSIMISTIC: Op.PESSIMISTIC_LOCK,
}


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
    """Encode an error; errors without a field of the protocol become an abort with our text."""
    if isinstance(err, errors.KeyErrorsError):
        return key_error(err.errors[0])
    field = _FIELDS.get(type(err))
    if field is None:
        return kvrpcpb.KeyError(abort=str(err))
    name, message = field
    made = kvrpcpb.KeyError(**{name: message(err)})
    if isinstance(err, errors.TxnLockNotFoundError):
        made.retryable = err.message  # what clients before this field know
    return made


def _locked(err: errors.KeyIsLockedError | errors.PrimaryMismatchError) -> kvrpcpb.LockInfo:
    return lock_info(err.key, err.lock)


def _conflict(err: errors.WriteConflictError) -> kvrpcpb.WriteConflict:
    return kvrpcpb.WriteConflict(
        start_ts=err.start_ts,
        conflict_ts=err.conflict_start_ts,
        key=err.key,
        primary=err.primary,
        conflict_commit_ts=err.conflict_commit_ts,
        reason=int(err.reason),
    )


def _deadlock(err: DeadlockError) -> kvrpcpb.Deadlock:
    """The edge that would close the circle is ours; the one before it waits for a key of ours."""
    closing, waits_for_us = err.edges[-1], err.edges[-2] if len(err.edges) > 1 else err.edges[-1]
    return kvrpcpb.Deadlock(
        lock_ts=closing.holder,
        lock_key=closing.key,
        deadlock_key=waits_for_us.key,
        deadlock_key_hash=fingerprint64(waits_for_us.key),
        wait_chain=[
            kvrpcpb.WaitForEntry(
                txn=edge.start_ts,
                wait_for_txn=edge.holder,
                key=edge.key,
                key_hash=fingerprint64(edge.key),
            )
            for edge in err.edges
        ],
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
        start_ts=err.start_ts,
        attempted_commit_ts=err.commit_ts,
        key=err.key,
        min_commit_ts=err.min_commit_ts,
    )


_FIELDS: dict[type[MvccError], tuple[str, Callable[[Any], Any]]] = {
    errors.KeyIsLockedError: ("locked", _locked),
    errors.WriteConflictError: ("conflict", _conflict),
    errors.AlreadyExistsError: ("already_exist", lambda err: kvrpcpb.AlreadyExist(key=err.key)),
    DeadlockError: ("deadlock", _deadlock),
    errors.CommitTsExpiredError: ("commit_ts_expired", _expired),
    errors.TxnNotFoundError: (
        "txn_not_found",
        lambda err: kvrpcpb.TxnNotFound(start_ts=err.start_ts, primary_key=err.primary),
    ),
    errors.AssertionFailedError: ("assertion_failed", _assertion),
    errors.PrimaryMismatchError: (
        "primary_mismatch",
        lambda err: kvrpcpb.PrimaryMismatch(lock_info=_locked(err)),
    ),
    errors.TxnLockNotFoundError: (
        "txn_lock_not_found",
        lambda err: kvrpcpb.TxnLockNotFound(key=err.key),
    ),
}
"""The field of kvrpcpb.KeyError for each error, and what makes its message."""
