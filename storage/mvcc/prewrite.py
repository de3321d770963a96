"""Percolator's first phase: lock every key with its new value; with async commit and 1PC also the
commit. Pure.

`prewrite` works in three steps:

1. `check_all` checks every key and writes nothing. A key must not be locked by another transaction,
   must not have changed since the transaction read it, and must meet the client's assertion that it
   exists or does not. A lock of the transaction itself is accepted, as the request may be repeated.
2. The way to commit is chosen: 2PC, async commit or 1PC.
3. The locks, or with 1PC the versions, are written.

The ways to commit:

- Ordinary (2PC): locks. The client takes a commit_ts from the oracle when all are there.
- Async commit: locks that carry a min_commit_ts above every read so far (`read_fence`). The
  transaction is committed when the last one is on disk, at the largest min_commit_ts of all; the
  primary names the others.
- 1PC: all keys of the transaction are in this request: versions at such a min_commit_ts at once,
  and no lock.

Either of the last two falls back to 2PC when its timestamp would pass `max_commit_ts`, or when an
earlier attempt left other locks; a 0 in the answer says so.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from storage.codec import encode_bytes
from storage.model.ts import MAX_TS
from storage.mvcc.engine import COMMITTED, PREWRITE, Change, Draft
from storage.mvcc.errors import (
    AlreadyExistsError,
    AssertionFailedError,
    ConflictReason,
    InvalidTxnError,
    KeyErrorsError,
    KeyIsLockedError,
    PessimisticLockLostError,
    WriteConflictError,
)
from storage.mvcc.percolator import put_version
from storage.mvcc.record import (
    DELETE,
    LOCK,
    PESSIMISTIC,
    PUT,
    ROLLBACK,
    SHORT_VALUE_MAX_BYTES,
    Lock,
    Write,
)

_SKIP_CHECK, _MUST_BE_LOCKED = 0, 1


class Op(enum.IntEnum):
    """The effect of a mutation on its key (numbers of kvrpcpb.Op)."""

    PUT = 0
    DELETE = 1
    LOCK = 2
    ROLLBACK = 3
    INSERT = 4
    PESSIMISTIC_LOCK = 5
    CHECK_NOT_EXISTS = 6


class Assertion(enum.IntEnum):
    """The client's assertion about a key (numbers of kvrpcpb.Assertion)."""

    NONE = 0
    EXIST = 1
    NOT_EXIST = 2


class Mutation(NamedTuple):
    """One key of a transaction; `key` is the raw user key."""

    op: int
    key: bytes
    value: bytes = b""
    assertion: int = Assertion.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Prewrite:
    """One prewrite; `for_update_ts` > 0 means a pessimistic transaction.

    `actions` (kvrpcpb PessimisticAction) belong to the mutations of the same index: 0, do not check
    whether the key changed; 1, the key must still have its pessimistic lock; 2, no change after
    for_update_ts. Clients send more actions than mutations: the rest is ignored. `locked_at` has,
    by index, the for_update_ts that a pessimistic lock must have. `secondaries` are all keys of the
    transaction but the primary; `max_commit_ts` 0 sets no limit.
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
    skip_newer_check: bool = False
    locked_at: Mapping[int, int] = field(default_factory=dict)
    async_commit: bool = False
    one_pc: bool = False
    secondaries: Sequence[bytes] = ()
    max_commit_ts: int = 0
    txn_source: int = 0


class Checked(NamedTuple):
    """A mutation that may be written; `lock` is the transaction's own lock,
    `newest_ts` the newest commit_ts seen.
    """

    mutation: Mutation
    encoded: bytes
    lock: Lock | None = None
    newest_ts: int = 0

    @property
    def is_prewritten(self) -> bool:
        """Whether an earlier attempt has prewritten this one already."""
        return self.lock is not None and self.lock.kind != PESSIMISTIC


class CommittedBeforeError(Exception):
    """This is a late copy of a prewrite whose transaction is committed by now."""

    def __init__(self, commit_ts: int) -> None:
        super().__init__(commit_ts)
        self.commit_ts = commit_ts


def check_all(draft: Draft, txn: Prewrite) -> list[Checked]:
    """Check every mutation; returns them if all of them may be written. Writes nothing.

    Raises:
        CommittedBeforeError: the transaction is committed already.
        MvccError: see `storage.mvcc.prewrite.prewrite`.
    """
    checked: list[Checked] = []
    locked: list[KeyIsLockedError] = []
    for index, mutation in enumerate(txn.mutations):
        try:
            checked.append(_check_key(draft, txn, mutation, index))
        except KeyIsLockedError as err:
            # All locks in the way are collected: the client resolves them together, in one round
            # trip.
            locked.append(err)
    if locked:
        raise KeyErrorsError(locked)
    return checked


def _check_key(draft: Draft, txn: Prewrite, mutation: Mutation, index: int) -> Checked:
    action = txn.actions[index] if index < len(txn.actions) else _SKIP_CHECK
    must_own = txn.for_update_ts > 0 and action == _MUST_BE_LOCKED
    encoded = encode_bytes(mutation.key)
    lock = draft.lock(encoded)
    if lock is not None and lock.start_ts != txn.start_ts:
        if must_own:
            # Waiting would not help: the pessimistic lock that excluded this writer is gone, so
            # its reads may be outdated.
            raise PessimisticLockLostError(mutation.key, txn.start_ts)
        raise KeyIsLockedError(mutation.key, lock)
    newest_ts = 0
    if lock is None:
        newest_ts = _check_newest(
            draft, txn, mutation.key, encoded, _newest_allowed(txn, action), must_own=must_own
        )
    elif lock.kind != PESSIMISTIC:
        # A repeated prewrite: the client did not get the first answer, and must get the same one.
        return Checked(mutation, encoded, lock)
    elif txn.locked_at and txn.locked_at.get(index, lock.for_update_ts) != lock.for_update_ts:
        raise PessimisticLockLostError(mutation.key, txn.start_ts)
    _check_existence(draft, txn, mutation, encoded)
    return Checked(mutation, encoded, lock, newest_ts)


def _newest_allowed(txn: Prewrite, action: int) -> int:
    """The largest commit_ts of others that is no conflict on a key without a lock."""
    if not txn.for_update_ts:
        return MAX_TS if txn.skip_newer_check else txn.start_ts
    return MAX_TS if action == _SKIP_CHECK else txn.for_update_ts


def _check_newest(
    draft: Draft, txn: Prewrite, key: bytes, encoded: bytes, newest_allowed: int, *, must_own: bool
) -> int:
    """Check that the key did not change after `newest_allowed`, and that the transaction has not
    ended on it; returns the newest commit_ts found, 0 if the key has none.

    `must_own`: the key should have a pessimistic lock, and has none. It may be locked again only if
    the key has no record at or after start_ts. Otherwise rollback records of others are passed
    over: they change no data.
    """
    newest_ts = 0
    for commit_ts, write in draft.writes(encoded):
        if commit_ts < txn.start_ts:
            return newest_ts or commit_ts
        if write.kind != ROLLBACK and write.start_ts == txn.start_ts:
            # A late copy of the request: it must not lock the key again after the commit has
            # removed the lock.
            raise CommittedBeforeError(commit_ts)
        if must_own:
            raise PessimisticLockLostError(key, txn.start_ts)
        if commit_ts == txn.start_ts and (write.kind == ROLLBACK or write.overlapped_rollback):
            reason = ConflictReason.SELF_ROLLED_BACK
        elif write.kind != ROLLBACK and commit_ts > newest_allowed:
            reason = ConflictReason.OPTIMISTIC
        else:
            newest_ts = max(newest_ts, commit_ts)
            continue
        raise WriteConflictError(key, txn.primary, txn.start_ts, write.start_ts, commit_ts, reason)
    return newest_ts


def _check_existence(draft: Draft, txn: Prewrite, mutation: Mutation, encoded: bytes) -> None:
    must_be_new = mutation.op in (Op.INSERT, Op.CHECK_NOT_EXISTS)
    assertion = mutation.assertion if txn.check_assertions else Assertion.NONE
    if not must_be_new and assertion == Assertion.NONE:
        return
    if must_be_new:
        # The answer tells what this transaction has read, so no computed commit_ts may come below
        # it.
        draft.fence.read(max(txn.start_ts, txn.for_update_ts))
    newest = draft.data_write(encoded)
    exists = newest is not None and newest[1].kind == PUT
    if must_be_new and exists:
        raise AlreadyExistsError(mutation.key)
    failed = not exists if assertion == Assertion.EXIST else exists
    if assertion != Assertion.NONE and failed:
        existing = (newest[1].start_ts, newest[0]) if newest else (0, 0)
        raise AssertionFailedError(mutation.key, txn.start_ts, assertion, existing)


_LOCK_KINDS: dict[int, int] = {Op.PUT: PUT, Op.INSERT: PUT, Op.DELETE: DELETE, Op.LOCK: LOCK}


@dataclass(frozen=True, slots=True)
class Prewritten:
    """The way a prewritten transaction goes on: 1PC committed it; async commit needs
    `min_commit_ts`; 2PC has neither.
    """

    min_commit_ts: int = 0
    one_pc_commit_ts: int = 0


def prewrite(draft: Draft, txn: Prewrite) -> Prewritten:
    """Lock all keys of `txn` with their new values, or none of them;
    a repeated request gets its first answer again.

    Raises:
        KeyErrorsError: some keys are locked by others.
        WriteConflictError: a version newer than start_ts exists, or `txn` was rolled back.
        AlreadyExistsError, AssertionFailedError: the key exists, or does not, against what the
            client asserted.
        PessimisticLockLostError: a key that had to be locked pessimistically is not.
        InvalidTxnError: start_ts is 0, an op is unknown, or a key comes twice.
    """
    _check_request(txn)
    try:
        checked = check_all(draft, txn)
    except CommittedBeforeError as err:
        return Prewritten(*((0, err.commit_ts) if txn.one_pc else (err.commit_ts, 0)))
    if txn.one_pc or txn.async_commit:
        return _prewrite_computed(draft, txn, checked)
    _lock_all(draft, txn, checked, txn.min_commit_ts, async_commit=False)
    return Prewritten()


def _check_request(txn: Prewrite) -> None:
    if not txn.start_ts:
        raise InvalidTxnError(
            "a prewrite with start_ts 0 belongs to no transaction; take start_ts from the TSO"
        )
    keys: set[bytes] = set()
    for mutation in txn.mutations:
        if mutation.op not in _LOCK_KINDS and mutation.op != Op.CHECK_NOT_EXISTS:
            raise InvalidTxnError(f"a prewrite cannot have a mutation with op {mutation.op}")
        if mutation.key in keys:
            raise InvalidTxnError(
                f"a prewrite names key {mutation.key.hex()} twice; send its last mutation only"
            )
        keys.add(mutation.key)


def _prewrite_computed(draft: Draft, txn: Prewrite, checked: Sequence[Checked]) -> Prewritten:
    """Prewrite with async commit or 1PC, or fall back to 2PC.

    A client that resolves an async commit computes its commit_ts from the locks alone. So the
    answer is the largest min_commit_ts of exactly these locks, those of an earlier attempt
    included, and nothing larger.
    """
    earlier = [item.lock for item in checked if item.lock is not None and item.is_prewritten]
    new = [
        item
        for item in checked
        if not item.is_prewritten and item.mutation.op != Op.CHECK_NOT_EXISTS
    ]
    possible = _may_compute(txn, earlier)
    at_least = max(txn.start_ts + 1, txn.for_update_ts + 1, txn.min_commit_ts)
    answer = max((lock.min_commit_ts for lock in earlier), default=at_least)
    if new or txn.one_pc:
        # At or above the min_commit_ts of a pessimistic lock, and above every existing version.
        floors = [item.lock.min_commit_ts if item.lock else item.newest_ts + 1 for item in new]
        min_commit_ts = draft.fence.reserve(
            [item.mutation.key for item in new], max([at_least, *floors])
        )
        answer = max(answer, min_commit_ts)
        # Beyond max_commit_ts the client's schema may be outdated; with 2PC it checks its schema
        # once more.
        possible = possible and not 0 < txn.max_commit_ts < min_commit_ts

    if not possible:
        _lock_all(draft, txn, checked, txn.min_commit_ts, async_commit=False)
        return Prewritten()
    if txn.one_pc:
        _commit_all(draft, txn, checked, answer)
        return Prewritten(one_pc_commit_ts=answer)
    _lock_all(draft, txn, new, answer, async_commit=True)
    return Prewritten(min_commit_ts=answer)


def _may_compute(txn: Prewrite, earlier: Sequence[Lock]) -> bool:
    """Whether locks of an earlier attempt allow a commit_ts to be computed here."""
    if txn.one_pc:
        # With locks of an earlier attempt, or with keys in other requests, this request alone
        # cannot commit the whole transaction.
        return _is_whole(txn) and not earlier
    return all(lock.async_commit for lock in earlier)


def _is_whole(txn: Prewrite) -> bool:
    """Whether the request contains every key of its transaction."""
    keys = {mutation.key for mutation in txn.mutations}
    return txn.primary in keys and keys.issuperset(txn.secondaries)


def _stored_value(draft: Draft, item: Checked, start_ts: int) -> tuple[int, bytes, bytes | None]:
    """The record kind, the value, and the value to store inside of the record: None for one that
    is too long, which is stored in the value column here.
    """
    kind = _LOCK_KINDS[item.mutation.op]
    if kind != PUT:
        return kind, b"", None
    value = item.mutation.value
    if len(value) <= SHORT_VALUE_MAX_BYTES:
        return kind, value, value
    # A long value is written once, at the prewrite; the commit then moves only its small record.
    draft.put_value(item.encoded, start_ts, value)
    return kind, value, None


def _old_value(draft: Draft, encoded: bytes) -> bytes:
    return (draft.value(encoded) or b"") if draft.old_values else b""


def _lock_all(
    draft: Draft,
    txn: Prewrite,
    checked: Sequence[Checked],
    min_commit_ts: int,
    *,
    async_commit: bool,
) -> None:
    for item in checked:
        if item.mutation.op == Op.CHECK_NOT_EXISTS or item.is_prewritten:
            continue
        kind, value, short = _stored_value(draft, item, txn.start_ts)
        key, current = item.mutation.key, item.lock
        # A pessimistic lock may have got a longer life by heartbeats, and a later min_commit_ts by
        # readers: neither is taken back. Whoever resolves an async commit finds the other keys in
        # the primary's lock, and only there.
        lock = Lock(
            kind,
            txn.primary,
            txn.start_ts,
            max(txn.ttl_ms, current.ttl_ms) if current else txn.ttl_ms,
            txn.for_update_ts,
            max(min_commit_ts, current.min_commit_ts) if current else min_commit_ts,
            txn.txn_size,
            short,
            async_commit,
            tuple(txn.secondaries) if async_commit and key == txn.primary else (),
            txn.txn_source,
        )
        draft.put_lock(item.encoded, lock)
        if kind != LOCK:
            old_value = _old_value(draft, item.encoded)
            draft.note(
                Change(
                    PREWRITE,
                    key,
                    item.encoded,
                    kind,
                    txn.start_ts,
                    0,
                    value,
                    old_value,
                    txn.txn_source,
                )
            )


def _commit_all(draft: Draft, txn: Prewrite, checked: Sequence[Checked], commit_ts: int) -> None:
    for item in checked:
        if item.mutation.op == Op.CHECK_NOT_EXISTS:
            continue
        old_value = _old_value(draft, item.encoded)
        kind, value, short = _stored_value(draft, item, txn.start_ts)
        write = Write(kind, txn.start_ts, short, txn_source=txn.txn_source)
        # Of a key without a lock the newest record is known, and commit_ts is above it.
        put_version(draft, item.encoded, commit_ts, write, computed=item.lock is not None)
        if item.lock is not None:
            draft.delete_lock(item.encoded)
        if kind != LOCK:
            draft.note(
                Change(
                    COMMITTED,
                    item.mutation.key,
                    item.encoded,
                    kind,
                    txn.start_ts,
                    commit_ts,
                    value,
                    old_value,
                    txn.txn_source,
                )
            )
