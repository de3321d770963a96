"""Percolator's decisions about locks: how a transaction's owner commits it or rolls it back, and
how others check its status, end it, and resolve its locks.

Pure: they read and write a `Draft`, nothing else.

Invariants, for every key:
1. at most one lock; a lock of transaction S excludes every write of others until it is committed or
   rolled back;
2. a transaction is committed, rolled back, or open; the first of the two outcomes that is recorded
   stays;
3. commit_ts > start_ts, and commit_ts >= the lock's min_commit_ts.

A lock lives while the physical time of `current_ts` is at most that of its start_ts plus its TTL:
time is the TSO's, never this machine's.

Every rollback record is kept until GC ("protected" in TiKV's words), so a late prewrite never
revives a transaction. Sources: the Percolator paper (Peng and Dabek, OSDI 2010); TiKV's semantics
as its clients rely on them (kvrpcpb.proto).
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from storage.codec import encode_bytes
from storage.model.ts import MAX_TS, physical_ms
from storage.mvcc.engine import COMMIT, STEP_KEYS, Change, Draft, Unfinished, Versions
from storage.mvcc.engine import ROLLBACK as ROLLED_BACK
from storage.mvcc.errors import (
    CommittedError,
    CommitTsExpiredError,
    InvalidTxnError,
    KeyIsLockedError,
    PrimaryMismatchError,
    TxnLockNotFoundError,
    TxnNotFoundError,
)
from storage.mvcc.record import (
    LOCK_COLUMN,
    PESSIMISTIC,
    PUT,
    ROLLBACK,
    Lock,
    Write,
    column_range,
    decode_lock,
    user_key,
    write_key,
)


def outcome(versions: Versions, encoded: bytes, start_ts: int) -> tuple[int, int] | None:
    """(kind, commit_ts) recorded for a transaction on a key; a ROLLBACK has commit_ts 0;
    None: nothing is.
    """
    for commit_ts, write in versions.writes(encoded):
        if commit_ts < start_ts:
            return None
        if write.start_ts == start_ts:
            return (ROLLBACK, 0) if write.kind == ROLLBACK else (write.kind, commit_ts)
        if commit_ts == start_ts and write.overlapped_rollback:
            return ROLLBACK, 0
    return None


def commit(draft: Draft, keys: Sequence[bytes], start_ts: int, commit_ts: int) -> None:
    """Make the transaction's locks on `keys` versions at `commit_ts`;
    keys that are already committed are left alone.

    Raises:
        InvalidTxnError: commit_ts <= start_ts.
        CommitTsExpiredError: a reader pushed min_commit_ts beyond commit_ts.
        TxnLockNotFoundError: the transaction was rolled back on a key, or never prewrote it.
    """
    if commit_ts <= start_ts:
        raise InvalidTxnError(
            f"commit_ts {commit_ts} is not after start_ts {start_ts}; take it from the TSO"
        )
    for key in keys:
        encoded = encode_bytes(key)
        lock = draft.lock(encoded)
        if lock is not None and lock.start_ts == start_ts:
            commit_lock(draft, key, encoded, lock, commit_ts)
            continue
        # A client that got no answer commits again: a key that is committed is no error then.
        recorded = outcome(draft, encoded, start_ts)
        if recorded is None or recorded[0] == ROLLBACK:
            raise TxnLockNotFoundError(key, start_ts, commit_ts)


def commit_lock(draft: Draft, key: bytes, encoded: bytes, lock: Lock, commit_ts: int) -> None:
    """Turn one lock into a version; a pessimistic lock that was left behind only goes,
    as nothing was written under it.

    Raises:
        CommitTsExpiredError: see `commit`.
    """
    if commit_ts < lock.min_commit_ts:
        # A reader was promised that nothing commits below min_commit_ts, and has read past this
        # lock.
        raise CommitTsExpiredError(key, lock.start_ts, commit_ts, lock.min_commit_ts)
    draft.delete_lock(encoded)
    if lock.kind == PESSIMISTIC:
        return
    write = Write(lock.kind, lock.start_ts, lock.short_value, txn_source=lock.txn_source)
    put_version(draft, encoded, commit_ts, write, computed=lock.async_commit)
    if lock.changes_data:
        draft.note(
            Change(
                COMMIT,
                key,
                encoded,
                lock.kind,
                lock.start_ts,
                commit_ts,
                txn_source=lock.txn_source,
            )
        )


def put_version(
    draft: Draft, encoded: bytes, commit_ts: int, write: Write, *, computed: bool
) -> None:
    """Record a commit; a `computed` commit_ts may equal the start_ts of a transaction that is
    recorded here as rolled back.
    """
    # A rollback is recorded at its start_ts. A TSO's commit_ts is nobody's start_ts, a computed
    # one may be, and would overwrite that record.
    rolled_back = computed and draft.get(write_key(encoded, commit_ts)) is not None
    draft.put_write(
        encoded, commit_ts, write._replace(overlapped_rollback=True) if rolled_back else write
    )


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
            # The prewrite may still be on its way; without this record it would lock the key after
            # the rollback was acknowledged.
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
        draft.note(
            Change(ROLLED_BACK, key, encoded, lock.kind, lock.start_ts, txn_source=lock.txn_source)
        )


def record_rollback(draft: Draft, encoded: bytes, start_ts: int) -> None:
    """Record that the transaction is rolled back on a key; a commit of another transaction at the
    same timestamp is kept.
    """
    for commit_ts, write in draft.writes(encoded, start_ts):
        if commit_ts == start_ts and write.kind != ROLLBACK:
            # Someone else's commit has this place: it carries the rollback as a flag, and stays a
            # commit.
            draft.put_write(encoded, start_ts, write._replace(overlapped_rollback=True))
            return
        break
    draft.put_write(encoded, start_ts, Write(ROLLBACK, start_ts))


class Action(enum.IntEnum):
    """The effect of a status check (numbers of kvrpcpb.Action)."""

    NO_ACTION = 0
    TTL_EXPIRE_ROLLBACK = 1
    LOCK_NOT_EXIST_ROLLBACK = 2
    MIN_COMMIT_TS_PUSHED = 3
    TTL_EXPIRE_PESSIMISTIC_ROLLBACK = 4
    LOCK_NOT_EXIST_DO_NOTHING = 5


@dataclass(frozen=True, slots=True)
class TxnStatus:
    """A live transaction has its `lock`, a committed one its `commit_ts`,
    a rolled back one neither.
    """

    action: Action = Action.NO_ACTION
    commit_ts: int = 0
    lock: Lock | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusCheck:
    """The parameters of CheckTxnStatus for the transaction `start_ts`, on its primary key."""

    primary: bytes
    start_ts: int
    caller_start_ts: int
    current_ts: int
    rollback_if_not_exist: bool = False
    resolving_pessimistic_lock: bool = False
    verify_is_primary: bool = False
    force_sync_commit: bool = False


def is_expired(lock: Lock, current_ts: int) -> bool:
    """Whether the lock's owner counts as dead at `current_ts`."""
    return physical_ms(lock.start_ts) + lock.ttl_ms < physical_ms(current_ts)


def check_txn_status(draft: Draft, check: StatusCheck) -> TxnStatus:
    """Return the status of a transaction, and roll it back if its TTL is over.

    The primary of an async commit does not decide alone, so its lock is shown whatever its age,
    unless `force_sync_commit` says that one of the secondaries is an ordinary lock.

    Raises:
        PrimaryMismatchError: the key is not the transaction's primary.
        TxnNotFoundError: the key has no record of it, and the caller does not want it rolled back.
    """
    encoded = encode_bytes(check.primary)
    lock = draft.lock(encoded)
    if lock is None or lock.start_ts != check.start_ts:
        return _status_without_lock(draft, check, encoded)
    if check.verify_is_primary and lock.primary != check.primary:
        if check.resolving_pessimistic_lock or lock.kind != PESSIMISTIC:
            raise PrimaryMismatchError(check.primary, lock)
        # a prewritten lock names its primary for good, so this one was left behind
        draft.delete_lock(encoded)
        return _status_without_lock(draft, check, encoded)
    # The commit_ts of an async commit is decided by all of its locks, so the TTL of this one alone
    # must not end it.
    if lock.async_commit and not check.force_sync_commit:
        return TxnStatus(lock=lock)
    if not is_expired(lock, check.current_ts):
        return _live_status(draft, check, encoded, lock)
    if lock.kind == PESSIMISTIC and check.resolving_pessimistic_lock:
        draft.delete_lock(encoded)
        return TxnStatus(Action.TTL_EXPIRE_PESSIMISTIC_ROLLBACK)
    rollback_lock(draft, check.primary, encoded, lock)
    return TxnStatus(Action.TTL_EXPIRE_ROLLBACK)


def _status_without_lock(draft: Draft, check: StatusCheck, encoded: bytes) -> TxnStatus:
    recorded = outcome(draft, encoded, check.start_ts)
    if recorded is not None:
        return TxnStatus(commit_ts=recorded[1])
    if check.resolving_pessimistic_lock and check.rollback_if_not_exist:
        return TxnStatus(Action.LOCK_NOT_EXIST_DO_NOTHING)
    if not check.rollback_if_not_exist:
        raise TxnNotFoundError(check.primary, check.start_ts)
    # Without the record, the transaction's late prewrite would succeed after others were told that
    # it is gone.
    record_rollback(draft, encoded, check.start_ts)
    return TxnStatus(Action.LOCK_NOT_EXIST_ROLLBACK)


def _live_status(draft: Draft, check: StatusCheck, encoded: bytes, lock: Lock) -> TxnStatus:
    """A reader may pass a lock whose min_commit_ts lies beyond its snapshot;
    push it there if it has one.
    """
    caller = check.caller_start_ts
    if lock.min_commit_ts and caller != MAX_TS and caller >= lock.min_commit_ts:
        # Up to the time of now rather than just past this reader: the next readers then need no
        # push of their own.
        lock = lock._replace(min_commit_ts=max(caller + 1, check.current_ts))
        draft.put_lock(encoded, lock)
    passable = caller == MAX_TS or (caller > 0 and lock.min_commit_ts > caller)
    return TxnStatus(Action.MIN_COMMIT_TS_PUSHED if passable else Action.NO_ACTION, lock=lock)


def cleanup(draft: Draft, key: bytes, start_ts: int, current_ts: int) -> int:
    """Roll back an expired transaction (any, when `current_ts` is 0) on `key`;
    returns its commit_ts if it committed.

    Raises:
        KeyIsLockedError: it is still alive.
    """
    encoded = encode_bytes(key)
    lock = draft.lock(encoded)
    if lock is not None and lock.start_ts == start_ts:
        if current_ts and not is_expired(lock, current_ts):
            raise KeyIsLockedError(key, lock)
        rollback_lock(draft, key, encoded, lock)
        return 0
    recorded = outcome(draft, encoded, start_ts)
    if recorded is None:
        record_rollback(draft, encoded, start_ts)
        return 0
    return recorded[1]


def heartbeat(draft: Draft, primary: bytes, start_ts: int, ttl_ms: int) -> int:
    """Prolong the primary lock to at least `ttl_ms` after start_ts; returns its TTL.

    Raises:
        TxnNotFoundError: the lock is gone.
    """
    encoded = encode_bytes(primary)
    lock = draft.lock(encoded)
    if lock is None or lock.start_ts != start_ts:
        raise TxnNotFoundError(primary, start_ts)
    if ttl_ms > lock.ttl_ms:
        lock = lock._replace(ttl_ms=ttl_ms)
        draft.put_lock(encoded, lock)
    return lock.ttl_ms


def resolve_keys(draft: Draft, keys: Sequence[bytes], start_ts: int, commit_ts: int) -> None:
    """End a small transaction on known keys: commit at `commit_ts`, or roll back when it is 0.

    Raises:
        TxnLockNotFoundError: a commit of what was rolled back, or never prewritten.
        CommittedError: a rollback of what is committed.
    """
    if commit_ts:
        commit(draft, keys, start_ts, commit_ts)
    else:
        rollback(draft, keys, start_ts)


def resolve_range(
    draft: Draft, lower: bytes, upper: bytes, outcomes: Mapping[int, int]
) -> Unfinished | None:
    """End each lock in the encoded range whose transaction is in `outcomes` (start_ts -> commit_ts
    or 0).

    Raises:
        CommitTsExpiredError: a lock's min_commit_ts is above the commit_ts given for it.
    """
    locks = list(islice(draft.scan(*column_range(LOCK_COLUMN, lower, upper)), STEP_KEYS))
    for key, data in locks:
        encoded, lock = key[1:], decode_lock(data)
        commit_ts = outcomes.get(lock.start_ts)
        if commit_ts:
            commit_lock(draft, user_key(encoded), encoded, lock, commit_ts)
        elif commit_ts == 0:
            rollback_lock(draft, user_key(encoded), encoded, lock)
    if len(locks) < STEP_KEYS:
        return None
    return Unfinished(
        partial(resolve_range, lower=locks[-1][0][1:] + b"\0", upper=upper, outcomes=outcomes)
    )


@dataclass(frozen=True, slots=True)
class SecondariesStatus:
    """All `locks` are there, or the transaction ended: at `commit_ts`,
    or rolled back when that is 0.
    """

    locks: Sequence[tuple[bytes, Lock]]
    commit_ts: int = 0


def check_secondaries(draft: Draft, keys: Sequence[bytes], start_ts: int) -> SecondariesStatus:
    """The status of an async-commit transaction by its secondary keys: all locks if all are there.
    One missing lock decides: the transaction is committed, or rolled back here and now.
    """
    locks: list[tuple[bytes, Lock]] = []
    for key in keys:
        encoded = encode_bytes(key)
        lock = draft.lock(encoded)
        if lock is not None and lock.start_ts == start_ts and lock.kind != PESSIMISTIC:
            locks.append((key, lock))
            continue
        if lock is not None and lock.start_ts == start_ts:
            # A pessimistic lock holds no value: this key was not prewritten, so the transaction
            # cannot have committed.
            rollback_lock(draft, key, encoded, lock)
            return SecondariesStatus(())
        recorded = outcome(draft, encoded, start_ts)
        if recorded is not None and recorded[0] != ROLLBACK:
            return SecondariesStatus((), recorded[1])
        if recorded is None:
            # From now on this key's prewrite fails, which makes the answer final.
            record_rollback(draft, encoded, start_ts)
        return SecondariesStatus(())
    return SecondariesStatus(tuple(locks))
