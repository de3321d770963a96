"""Decisions on pessimistic locks: take them, give them back. Pure: they read and write a `Draft`."""

from collections.abc import Sequence
from dataclasses import dataclass

from storage.codec import encode_bytes
from storage.mvcc.draft import Draft
from storage.mvcc.errors import (
    AlreadyExistsError,
    CommittedError,
    ConflictReason,
    KeyIsLockedError,
    PessimisticLockLostError,
    WriteConflictError,
)
from storage.mvcc.mutation import Assertion, Mutation
from storage.mvcc.record import PESSIMISTIC, ROLLBACK, Lock


@dataclass(frozen=True, slots=True, kw_only=True)
class PessimisticLock:
    """One request for pessimistic locks; `for_update_ts` is the snapshot the statement read."""

    mutations: Sequence[Mutation]
    primary: bytes
    start_ts: int
    ttl_ms: int
    for_update_ts: int
    min_commit_ts: int = 0
    return_values: bool = False
    only_if_exists: bool = False


def pessimistic_lock(draft: Draft, request: PessimisticLock) -> list[bytes | None]:
    """Lock all keys, or none; returns their values of now, aligned with the mutations (None: no value).

    Raises:
        KeyIsLockedError: another transaction holds a key.
        WriteConflictError: a key changed after for_update_ts, or the transaction was rolled back on it.
        AlreadyExistsError: a key asserted as absent has a value.
        PessimisticLockLostError: the transaction already prewrote a key.
        CommittedError: it is already over, this is a late request.
    """
    return [_lock_key(draft, request, mutation) for mutation in request.mutations]


def _lock_key(draft: Draft, request: PessimisticLock, mutation: Mutation) -> bytes | None:
    encoded = encode_bytes(mutation.key)
    held = draft.lock(encoded)
    if held is not None and held.start_ts != request.start_ts:
        raise KeyIsLockedError(mutation.key, held)
    if held is not None and held.kind != PESSIMISTIC:
        raise PessimisticLockLostError(mutation.key, request.start_ts)
    if held is None:
        _check_newest(draft, request, mutation.key, encoded)
    needs_value = request.return_values or request.only_if_exists or mutation.assertion == Assertion.NOT_EXIST
    value = draft.value(encoded) if needs_value else None
    if mutation.assertion == Assertion.NOT_EXIST and value is not None:
        raise AlreadyExistsError(mutation.key)
    if request.only_if_exists and value is None:
        return None
    draft.put_lock(encoded, _new_lock(request, held))
    return value


def _check_newest(draft: Draft, request: PessimisticLock, key: bytes, encoded: bytes) -> None:
    for commit_ts, write in draft.writes(encoded):
        if commit_ts < request.start_ts:
            return
        if write.start_ts == request.start_ts and write.kind != ROLLBACK:
            raise CommittedError(key, request.start_ts, commit_ts)
        if commit_ts == request.start_ts and (write.kind == ROLLBACK or write.overlapped_rollback):
            reason = ConflictReason.SELF_ROLLED_BACK
        elif commit_ts > request.for_update_ts and write.kind != ROLLBACK:
            reason = ConflictReason.PESSIMISTIC_RETRY
        else:
            continue
        raise WriteConflictError(key, request.primary, request.start_ts, write.start_ts, commit_ts, reason)


def _new_lock(request: PessimisticLock, held: Lock | None) -> Lock:
    for_update_ts, ttl_ms, min_commit_ts = request.for_update_ts, request.ttl_ms, request.min_commit_ts
    if held is not None:
        for_update_ts = max(for_update_ts, held.for_update_ts)
        ttl_ms, min_commit_ts = max(ttl_ms, held.ttl_ms), max(min_commit_ts, held.min_commit_ts)
    return Lock(PESSIMISTIC, request.primary, request.start_ts, ttl_ms, for_update_ts, min_commit_ts)


def pessimistic_rollback(draft: Draft, keys: Sequence[bytes], start_ts: int, for_update_ts: int) -> None:
    """Give back pessimistic locks taken up to `for_update_ts`; other locks and missing ones are left alone."""
    for key in keys:
        encoded = encode_bytes(key)
        lock = draft.lock(encoded)
        if (
            lock is not None
            and lock.kind == PESSIMISTIC
            and lock.start_ts == start_ts
            and lock.for_update_ts <= for_update_ts
        ):
            draft.delete_lock(encoded)
