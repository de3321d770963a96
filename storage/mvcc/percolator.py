"""Percolator's decisions: prewrite, commit, rollback. Pure: they read and write a `Draft`, nothing else.

Invariants, for every key:
1. at most one lock; a lock of transaction S excludes every write of others until it is committed or rolled back;
2. a transaction is committed, rolled back, or open; the first of the two outcomes that is recorded stays;
3. commit_ts > start_ts, and commit_ts >= the lock's min_commit_ts.

Sources: the Percolator paper (Peng and Dabek, OSDI 2010); TiKV's semantics as its clients rely on them (kvrpcpb.proto).
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from storage.codec import encode_bytes
from storage.model.ts import MAX_TS
from storage.mvcc.change import COMMIT, PREWRITE, Change
from storage.mvcc.change import ROLLBACK as ROLLED_BACK
from storage.mvcc.draft import Draft, Versions
from storage.mvcc.errors import (
    AlreadyExistsError,
    AssertionFailedError,
    CommittedError,
    CommitTsExpiredError,
    ConflictReason,
    InvalidTxnError,
    KeyErrorsError,
    KeyIsLockedError,
    PessimisticLockLostError,
    TxnLockNotFoundError,
    WriteConflictError,
)
from storage.mvcc.record import DELETE, LOCK, PESSIMISTIC, PUT, ROLLBACK, SHORT_VALUE_MAX_BYTES, Lock, Write


class Op(enum.IntEnum):
    """What a mutation does to its key (numbers of kvrpcpb.Op)."""

    PUT = 0
    DELETE = 1
    LOCK = 2
    ROLLBACK = 3
    INSERT = 4
    PESSIMISTIC_LOCK = 5
    CHECK_NOT_EXISTS = 6


class Assertion(enum.IntEnum):
    """What the client believes about a key (numbers of kvrpcpb.Assertion)."""

    NONE = 0
    EXIST = 1
    NOT_EXIST = 2


_LOCK_KINDS: dict[int, int] = {Op.PUT: PUT, Op.INSERT: PUT, Op.DELETE: DELETE, Op.LOCK: LOCK}
_SKIP_CHECK, _MUST_BE_LOCKED = 0, 1


class Mutation(NamedTuple):
    """One key of a transaction; `key` is the raw user key."""

    op: int
    key: bytes
    value: bytes = b""
    assertion: int = Assertion.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Prewrite:
    """One prewrite; `for_update_ts` > 0 means a pessimistic transaction.

    `actions` (kvrpcpb PessimisticAction) belong to the mutations of the same index: 0, the client vouches that nobody
    changed the key; 1, it holds the pessimistic lock; 2, check against for_update_ts. Clients send more of them than
    mutations: the rest is ignored.
    """

    mutations: Sequence[Mutation]
    primary: bytes
    start_ts: int
    ttl_ms: int
    txn_size: int = 0
    min_commit_ts: int = 0
    for_update_ts: int = 0
    actions: Sequence[int] = ()
    check_assertions: bool = False


def prewrite(draft: Draft, txn: Prewrite) -> None:
    """Lock all keys of `txn` with their new values, or none of them.

    Raises:
        KeyErrorsError: some keys are locked by others.
        WriteConflictError: a version newer than start_ts exists, or `txn` was rolled back.
        AlreadyExistsError, AssertionFailedError: a belief about existence does not hold.
        PessimisticLockLostError: a key that had to be locked pessimistically is not.
    """
    locked: list[KeyIsLockedError] = []
    for index, mutation in enumerate(txn.mutations):
        action = txn.actions[index] if index < len(txn.actions) else _SKIP_CHECK
        try:
            _prewrite_key(draft, txn, mutation, action)
        except KeyIsLockedError as err:
            locked.append(err)
    if locked:
        raise KeyErrorsError(locked)


def _prewrite_key(draft: Draft, txn: Prewrite, mutation: Mutation, action: int) -> None:
    must_own = txn.for_update_ts > 0 and action == _MUST_BE_LOCKED
    encoded = encode_bytes(mutation.key)
    held = draft.lock(encoded)
    if held is not None and held.start_ts != txn.start_ts:
        if must_own:
            raise PessimisticLockLostError(mutation.key, txn.start_ts)
        raise KeyIsLockedError(mutation.key, held)
    if held is not None and held.kind != PESSIMISTIC:
        return  # a retry of what was already done
    if held is None and must_own:
        _check_amendable(draft, txn, mutation, encoded)
    elif held is None:
        _check_newest(draft, txn, mutation.key, encoded, _newest_allowed(txn, action))
    _check_beliefs(draft, txn, mutation, encoded)
    if mutation.op != Op.CHECK_NOT_EXISTS:
        _lock(draft, txn, mutation, encoded, held)


def _newest_allowed(txn: Prewrite, action: int) -> int:
    if not txn.for_update_ts:
        return txn.start_ts
    return MAX_TS if action == _SKIP_CHECK else txn.for_update_ts


def _check_newest(draft: Draft, txn: Prewrite, key: bytes, encoded: bytes, newest_ts: int) -> None:
    """Refuse when the key changed after `newest_ts`, or when the transaction itself is already over on it.

    Rollback records of others are passed over: they change nothing.
    """
    for commit_ts, write in draft.writes(encoded):
        if commit_ts < txn.start_ts:
            return
        if commit_ts == txn.start_ts and (write.kind == ROLLBACK or write.overlapped_rollback):
            reason = ConflictReason.SELF_ROLLED_BACK
        elif write.kind != ROLLBACK and (commit_ts > newest_ts or write.start_ts == txn.start_ts):
            reason = ConflictReason.OPTIMISTIC
        else:
            continue
        raise WriteConflictError(key, txn.primary, txn.start_ts, write.start_ts, commit_ts, reason)


def _check_amendable(draft: Draft, txn: Prewrite, mutation: Mutation, encoded: bytes) -> None:
    """A lost pessimistic lock may be put back only when nothing happened to the key since the start."""
    for commit_ts, _ in draft.writes(encoded):
        if commit_ts >= txn.start_ts:
            raise PessimisticLockLostError(mutation.key, txn.start_ts)
        return


def _check_beliefs(draft: Draft, txn: Prewrite, mutation: Mutation, encoded: bytes) -> None:
    must_be_new = mutation.op in (Op.INSERT, Op.CHECK_NOT_EXISTS)
    asserted = mutation.assertion if txn.check_assertions else Assertion.NONE
    if not must_be_new and asserted == Assertion.NONE:
        return
    found = draft.data_write(encoded)
    exists = found is not None and found[1].kind == PUT
    if must_be_new and exists:
        raise AlreadyExistsError(mutation.key)
    if (asserted == Assertion.EXIST and not exists) or (asserted == Assertion.NOT_EXIST and exists):
        existing = (found[1].start_ts, found[0]) if found else (0, 0)
        raise AssertionFailedError(mutation.key, txn.start_ts, asserted, existing)


def _lock(draft: Draft, txn: Prewrite, mutation: Mutation, encoded: bytes, held: Lock | None) -> None:
    kind = _LOCK_KINDS.get(mutation.op)
    if kind is None:
        raise InvalidTxnError(f"a prewrite cannot have a mutation with op {mutation.op}")
    value = mutation.value if kind == PUT else b""
    short = value if kind == PUT and len(value) <= SHORT_VALUE_MAX_BYTES else None
    if kind == PUT and short is None:
        draft.put_value(encoded, txn.start_ts, value)
    ttl_ms, min_commit_ts = txn.ttl_ms, txn.min_commit_ts
    if held is not None:
        ttl_ms, min_commit_ts = max(ttl_ms, held.ttl_ms), max(min_commit_ts, held.min_commit_ts)
    lock = Lock(kind, txn.primary, txn.start_ts, ttl_ms, txn.for_update_ts, min_commit_ts, txn.txn_size, short)
    draft.put_lock(encoded, lock)
    if kind != LOCK:
        old_value = (draft.value(encoded) or b"") if draft.old_values else b""
        draft.note(Change(PREWRITE, mutation.key, encoded, kind, txn.start_ts, 0, value, old_value))


def outcome(versions: Versions, encoded: bytes, start_ts: int) -> tuple[int, int] | None:
    """(kind, commit_ts) recorded for a transaction on a key; a ROLLBACK has commit_ts 0; None: nothing is."""
    for commit_ts, write in versions.writes(encoded):
        if commit_ts < start_ts:
            return None
        if write.start_ts == start_ts:
            return (ROLLBACK, 0) if write.kind == ROLLBACK else (write.kind, commit_ts)
        if commit_ts == start_ts and write.overlapped_rollback:
            return ROLLBACK, 0
    return None


def commit(draft: Draft, keys: Sequence[bytes], start_ts: int, commit_ts: int) -> None:
    """Make the transaction's locks on `keys` versions at `commit_ts`; keys that are already committed are left alone.

    Raises:
        InvalidTxnError: commit_ts <= start_ts.
        CommitTsExpiredError: a reader pushed min_commit_ts beyond commit_ts.
        TxnLockNotFoundError: the transaction was rolled back on a key, or never prewrote it.
    """
    if commit_ts <= start_ts:
        raise InvalidTxnError(f"commit_ts {commit_ts} is not after start_ts {start_ts}; take it from the TSO")
    for key in keys:
        encoded = encode_bytes(key)
        lock = draft.lock(encoded)
        if lock is not None and lock.start_ts == start_ts:
            commit_lock(draft, key, encoded, lock, commit_ts)
            continue
        recorded = outcome(draft, encoded, start_ts)
        if recorded is None or recorded[0] == ROLLBACK:
            raise TxnLockNotFoundError(key, start_ts, commit_ts)


def commit_lock(draft: Draft, key: bytes, encoded: bytes, lock: Lock, commit_ts: int) -> None:
    """Turn one lock into a version.

    Raises:
        CommitTsExpiredError: see `commit`.
    """
    if commit_ts < lock.min_commit_ts:
        raise CommitTsExpiredError(key, lock.start_ts, commit_ts, lock.min_commit_ts)
    kind = LOCK if lock.kind == PESSIMISTIC else lock.kind
    draft.put_write(encoded, commit_ts, Write(kind, lock.start_ts, lock.short_value))
    draft.delete_lock(encoded)
    if lock.changes_data:
        draft.note(Change(COMMIT, key, encoded, kind, lock.start_ts, commit_ts))


def rollback(draft: Draft, keys: Sequence[bytes], start_ts: int) -> None:
    """Undo the transaction on `keys` and record it, so that a late prewrite cannot bring it back.

    Raises:
        CommittedError: it is committed on one of them.
    """
    for key in keys:
        encoded = encode_bytes(key)
        lock = draft.lock(encoded)
        if lock is not None and lock.start_ts == start_ts:
            rollback_lock(draft, key, encoded, lock)
            continue
        recorded = outcome(draft, encoded, start_ts)
        if recorded is None:
            record_rollback(draft, encoded, start_ts)
        elif recorded[0] != ROLLBACK:
            raise CommittedError(key, start_ts, recorded[1])


def rollback_lock(draft: Draft, key: bytes, encoded: bytes, lock: Lock) -> None:
    """Remove one lock and its value, and record the rollback."""
    if lock.kind == PUT and lock.short_value is None:
        draft.delete_value(encoded, lock.start_ts)
    draft.delete_lock(encoded)
    record_rollback(draft, encoded, lock.start_ts)
    if lock.changes_data:
        draft.note(Change(ROLLED_BACK, key, encoded, lock.kind, lock.start_ts))


def record_rollback(draft: Draft, encoded: bytes, start_ts: int) -> None:
    """Record that the transaction is rolled back on a key, beside a commit of another one at the same timestamp."""
    for commit_ts, write in draft.writes(encoded, start_ts):
        if commit_ts == start_ts and write.kind != ROLLBACK:
            draft.put_write(encoded, start_ts, write._replace(overlapped_rollback=True))
            return
        break
    draft.put_write(encoded, start_ts, Write(ROLLBACK, start_ts))
