"""Percolator's refusals as errors: kvrpcpb.KeyError in, one TidemarkError out.

Source: kvproto kvrpcpb.proto.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from kvproto import kvrpcpb_pb2 as kvrpcpb

from storage.model.errors import ConflictError, NotFoundError, TidemarkError, UnavailableError


class LockedError(UnavailableError):
    """Other transactions' locks are in the way: resolve or outwait them, then try again."""

    code = "ErrKeyIsLocked"

    def __init__(self, locks: Sequence[kvrpcpb.LockInfo]) -> None:
        first = locks[0]
        super().__init__(
            f"{len(locks)} keys are locked, the first is {first.key.hex()} "
            f"by the transaction {first.lock_version} with primary {first.primary_lock.hex()}"
        )
        self.locks = tuple(locks)


class WriteConflictError(ConflictError):
    """Another transaction committed the key after this one started:
    start again with a new start_ts.
    """

    code = "ErrWriteConflict"

    def __init__(self, message: str, conflict_commit_ts: int = 0) -> None:
        super().__init__(message)
        self.conflict_commit_ts = conflict_commit_ts


class AlreadyExistError(ConflictError):
    """An insert found its key present."""

    code = "ErrKeyAlreadyExists"


class DeadlockError(ConflictError):
    """Waiting for the lock would wait for ourselves: roll back and start again."""

    code = "ErrDeadlock"


class CommitTsExpiredError(ConflictError):
    """A reader pushed min_commit_ts past our commit_ts: commit again with a newer one."""

    code = "ErrCommitTsExpired"


class TxnNotFoundError(NotFoundError):
    """The transaction has neither lock nor record on its primary key."""

    code = "ErrTxnNotFound"


class PrimaryMismatchError(ConflictError):
    """The key asked about the transaction is not its primary: the lock that named it is stale."""

    code = "ErrPrimaryMismatch"


class TxnAbortedError(ConflictError):
    """The transaction was rolled back, by itself or by a client that found its locks expired."""

    code = "ErrTxnAborted"


def key_error(error: kvrpcpb.KeyError) -> TidemarkError:
    """The error that `error` stands for."""
    if error.HasField("locked"):
        return LockedError([error.locked])
    if error.HasField("conflict"):
        return _conflict(error.conflict)
    if error.HasField("already_exist"):
        return AlreadyExistError(f"the key {error.already_exist.key.hex()} exists already")
    if error.HasField("deadlock"):
        return DeadlockError(
            f"waiting for the transaction {error.deadlock.lock_ts} would be a deadlock"
        )
    if error.HasField("commit_ts_expired"):
        expired = error.commit_ts_expired
        return CommitTsExpiredError(
            f"commit_ts {expired.attempted_commit_ts} is below {expired.min_commit_ts}"
        )
    if error.HasField("txn_not_found"):
        missing = error.txn_not_found
        return TxnNotFoundError(
            f"no transaction {missing.start_ts} on the primary {missing.primary_key.hex()}"
        )
    if error.HasField("primary_mismatch"):
        right = error.primary_mismatch.lock_info
        return PrimaryMismatchError(
            f"the primary of {right.lock_version} is {right.primary_lock.hex()}"
        )
    return TxnAbortedError(
        error.abort or error.retryable or f"the store refused: {str(error).strip()}"
    )


def check(answer: Any) -> None:
    """Raise for the error of an answer of one key, if it has one."""
    if answer.HasField("error"):
        raise key_error(answer.error)


def raise_for(errors: Iterable[kvrpcpb.KeyError]) -> None:
    """Raise for the errors of one operation: errors that waiting cannot cure come first, else all
    locks in one error.
    """
    locks: list[kvrpcpb.LockInfo] = []
    for error in errors:
        if not error.HasField("locked"):
            raise key_error(error)
        locks.append(error.locked)
    if locks:
        raise LockedError(locks)


def _conflict(conflict: kvrpcpb.WriteConflict) -> WriteConflictError:
    return WriteConflictError(
        f"the key {conflict.key.hex()} was committed at {conflict.conflict_commit_ts} by the "
        f"transaction {conflict.conflict_ts}, after {conflict.start_ts} began",
        conflict.conflict_commit_ts,
    )
