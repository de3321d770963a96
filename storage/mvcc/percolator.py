"""Percolator's decisions on what is locked: commit, rollback.

Pure: they read and write a `Draft`, nothing else.

Invariants, for every key:
1. at most one lock; a lock of transaction S excludes every write of others until it is committed or
   rolled back;
2. a transaction is committed, rolled back, or open; the first of the two outcomes that is recorded
   stays;
3. commit_ts > start_ts, and commit_ts >= the lock's min_commit_ts.

Every rollback record is kept until GC ("protected" in TiKV's words), so a late prewrite never
revives a transaction. Sources: the Percolator paper (Peng and Dabek, OSDI 2010); TiKV's semantics
as its clients rely on them (kvrpcpb.proto).
"""

from collections.abc import Sequence

from storage.codec import encode_bytes
from storage.mvcc.draft import COMMIT, Change, Draft, Versions
from storage.mvcc.draft import ROLLBACK as ROLLED_BACK
from storage.mvcc.errors import (
    CommittedError,
    CommitTsExpiredError,
    InvalidTxnError,
    TxnLockNotFoundError,
)
from storage.mvcc.layout import write_key
from storage.mvcc.record import PESSIMISTIC, PUT, ROLLBACK, Lock, Write


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
    """Record a commit; a `computed` commit_ts may be the start_ts of somebody who is on record here
    as rolled back.
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
    """Record that the transaction is rolled back on a key,
    beside a commit of another one at the same timestamp.
    """
    for commit_ts, write in draft.writes(encoded, start_ts):
        if commit_ts == start_ts and write.kind != ROLLBACK:
            # Someone else's commit has this place: it carries the rollback as a flag, and stays a
            # commit.
            draft.put_write(encoded, start_ts, write._replace(overlapped_rollback=True))
            return
        break
    draft.put_write(encoded, start_ts, Write(ROLLBACK, start_ts))
