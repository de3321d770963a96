"""Percolator's first phase, its first half: whether all keys of a prewrite may be locked. Pure; nothing is written.

A key may not be locked by another transaction, nor have changed since the transaction read it, nor exist or be missing
against what the client believes. One that the transaction itself has locked before is as it should be.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from storage.codec import encode_bytes
from storage.model.ts import MAX_TS
from storage.mvcc.draft import Draft
from storage.mvcc.errors import (
    AlreadyExistsError,
    AssertionFailedError,
    ConflictReason,
    KeyErrorsError,
    KeyIsLockedError,
    PessimisticLockLostError,
    WriteConflictError,
)
from storage.mvcc.mutation import Assertion, Mutation, Op
from storage.mvcc.record import PESSIMISTIC, PUT, ROLLBACK, Lock

_SKIP_CHECK, _MUST_BE_LOCKED = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Prewrite:
    """One prewrite; `for_update_ts` > 0 means a pessimistic transaction.

    `actions` (kvrpcpb PessimisticAction) belong to the mutations of the same index: 0, the client vouches that nobody
    changed the key; 1, it holds the pessimistic lock; 2, check against for_update_ts. Clients send more of them than
    mutations: the rest is ignored. `locked_at` names by index the for_update_ts that a pessimistic lock must have.
    `secondaries` are the keys of the whole transaction but the primary; `max_commit_ts` 0 sets no limit.
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
    """A mutation that may be written; `held` is the transaction's own lock, `newest_ts` the newest commit_ts seen."""

    mutation: Mutation
    encoded: bytes
    held: Lock | None = None
    newest_ts: int = 0

    @property
    def is_prewritten(self) -> bool:
        """Whether an earlier attempt did this one already."""
        return self.held is not None and self.held.kind != PESSIMISTIC


class CommittedBeforeError(Exception):
    """This is a late copy of a prewrite whose transaction is committed by now."""

    def __init__(self, commit_ts: int) -> None:
        super().__init__(commit_ts)
        self.commit_ts = commit_ts


def check_all(draft: Draft, txn: Prewrite) -> list[Checked]:
    """All mutations, if all of them may be written.

    Raises:
        CommittedBeforeError: as named.
        MvccError: see `storage.mvcc.prewrite.prewrite`.
    """
    checked: list[Checked] = []
    locked: list[KeyIsLockedError] = []
    for index, mutation in enumerate(txn.mutations):
        try:
            checked.append(_check_key(draft, txn, mutation, index))
        except KeyIsLockedError as err:
            locked.append(err)
    if locked:
        raise KeyErrorsError(locked)
    return checked


def _check_key(draft: Draft, txn: Prewrite, mutation: Mutation, index: int) -> Checked:
    action = txn.actions[index] if index < len(txn.actions) else _SKIP_CHECK
    must_own = txn.for_update_ts > 0 and action == _MUST_BE_LOCKED
    encoded = encode_bytes(mutation.key)
    held = draft.lock(encoded)
    if held is not None and held.start_ts != txn.start_ts:
        if must_own:
            raise PessimisticLockLostError(mutation.key, txn.start_ts)
        raise KeyIsLockedError(mutation.key, held)
    newest_ts = 0
    if held is None:
        newest_ts = _check_newest(draft, txn, mutation.key, encoded, _newest_allowed(txn, action), must_own=must_own)
    elif held.kind != PESSIMISTIC:
        return Checked(mutation, encoded, held)
    elif txn.locked_at and txn.locked_at.get(index, held.for_update_ts) != held.for_update_ts:
        raise PessimisticLockLostError(mutation.key, txn.start_ts)
    _check_beliefs(draft, txn, mutation, encoded)
    return Checked(mutation, encoded, held, newest_ts)


def _newest_allowed(txn: Prewrite, action: int) -> int:
    if not txn.for_update_ts:
        return MAX_TS if txn.skip_newer_check else txn.start_ts
    return MAX_TS if action == _SKIP_CHECK else txn.for_update_ts


def _check_newest(
    draft: Draft, txn: Prewrite, key: bytes, encoded: bytes, newest_allowed: int, *, must_own: bool
) -> int:
    """Refuse when the key changed after `newest_allowed`, or when the transaction itself is already over on it.

    A pessimistic lock that had to be held but is gone (`must_own`) may only be put back if nothing happened to the key
    since the start. Rollback records of others are passed over otherwise: they change nothing. Returns the newest
    commit_ts found.
    """
    newest_ts = 0
    for commit_ts, write in draft.writes(encoded):
        if commit_ts < txn.start_ts:
            return newest_ts or commit_ts
        if write.kind != ROLLBACK and write.start_ts == txn.start_ts:
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


def _check_beliefs(draft: Draft, txn: Prewrite, mutation: Mutation, encoded: bytes) -> None:
    must_be_new = mutation.op in (Op.INSERT, Op.CHECK_NOT_EXISTS)
    asserted = mutation.assertion if txn.check_assertions else Assertion.NONE
    if not must_be_new and asserted == Assertion.NONE:
        return
    if must_be_new:
        draft.fence.read(max(txn.start_ts, txn.for_update_ts))
    found = draft.data_write(encoded)
    exists = found is not None and found[1].kind == PUT
    if must_be_new and exists:
        raise AlreadyExistsError(mutation.key)
    if (asserted == Assertion.EXIST and not exists) or (asserted == Assertion.NOT_EXIST and exists):
        existing = (found[1].start_ts, found[0]) if found else (0, 0)
        raise AssertionFailedError(mutation.key, txn.start_ts, asserted, existing)
