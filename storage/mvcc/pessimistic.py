"""Decisions on pessimistic locks: take them, give them back.

Pure: they read and write a `Draft`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple

from storage.codec import encode_bytes
from storage.mvcc.draft import Draft
from storage.mvcc.engine import STEP_KEYS, Unfinished
from storage.mvcc.errors import (
    AlreadyExistsError,
    CommittedError,
    ConflictReason,
    InvalidTxnError,
    KeyIsLockedError,
    PessimisticLockLostError,
    PessimisticLockRolledBackError,
    WriteConflictError,
)
from storage.mvcc.layout import LOCK, column_range
from storage.mvcc.prewrite import Assertion, Mutation
from storage.mvcc.record import PESSIMISTIC, ROLLBACK, Lock, decode_lock


@dataclass(frozen=True, slots=True, kw_only=True)
class PessimisticLock:
    """One request for pessimistic locks; `for_update_ts` is the snapshot the statement read.

    With `force`, a key that changed after it is locked nevertheless, and the client is told at what
    commit_ts.
    """

    mutations: Sequence[Mutation]
    primary: bytes
    start_ts: int
    ttl_ms: int
    for_update_ts: int
    min_commit_ts: int = 0
    return_values: bool = False
    only_if_exists: bool = False
    force: bool = False


class LockedKey(NamedTuple):
    """What a locked key holds now, None if it is absent or nobody asked; `conflict_ts`:
    when it changed, or 0.
    """

    value: bytes | None
    conflict_ts: int = 0


def pessimistic_lock(draft: Draft, request: PessimisticLock) -> list[LockedKey]:
    """Lock all keys, or none; returns what they hold, aligned with the mutations.

    Raises:
        KeyIsLockedError: another transaction holds a key.
        WriteConflictError: a key changed after for_update_ts.
        AlreadyExistsError: a key asserted as absent has a value.
        PessimisticLockLostError: the transaction already prewrote a key.
        PessimisticLockRolledBackError, CommittedError: it is already over, this is a late request.
        InvalidTxnError: for_update_ts < start_ts, or start_ts is 0.
    """
    if not 0 < request.start_ts <= request.for_update_ts:
        raise InvalidTxnError(
            f"for_update_ts {request.for_update_ts} is not at or after start_ts "
            f"{request.start_ts}; take both from the TSO"
        )
    return [_lock_key(draft, request, mutation) for mutation in request.mutations]


def _lock_key(draft: Draft, request: PessimisticLock, mutation: Mutation) -> LockedKey:
    encoded = encode_bytes(mutation.key)
    lock = draft.lock(encoded)
    if lock is not None and lock.start_ts != request.start_ts:
        raise KeyIsLockedError(mutation.key, lock)
    if lock is not None and lock.kind != PESSIMISTIC:
        raise PessimisticLockLostError(mutation.key, request.start_ts)
    conflict_ts = 0 if lock is not None else _check_newest(draft, request, mutation.key, encoded)
    must_be_new = mutation.assertion == Assertion.NOT_EXIST
    value = None
    if request.return_values or request.only_if_exists or must_be_new or conflict_ts:
        # a key that is absent may stay without a lock
        draft.fence.read(request.for_update_ts)
        value = draft.value(encoded)
    if must_be_new and value is not None:
        raise AlreadyExistsError(mutation.key)
    if not request.only_if_exists or value is not None:
        draft.put_lock(encoded, _new_lock(request, lock, conflict_ts))
    return LockedKey(value, conflict_ts)


def _check_newest(draft: Draft, request: PessimisticLock, key: bytes, encoded: bytes) -> int:
    """The commit_ts of a change after for_update_ts if the request puts up with one, else 0."""
    conflict_ts = 0
    for commit_ts, write in draft.writes(encoded):
        if commit_ts < request.start_ts:
            break
        if write.start_ts == request.start_ts and write.kind != ROLLBACK:
            raise CommittedError(key, request.start_ts, commit_ts)
        if commit_ts == request.start_ts and (write.kind == ROLLBACK or write.overlapped_rollback):
            raise PessimisticLockRolledBackError(key, request.start_ts)
        if commit_ts > request.for_update_ts and write.kind != ROLLBACK:
            conflict_ts = conflict_ts or commit_ts
            if not request.force:
                reason = ConflictReason.PESSIMISTIC_RETRY
                raise WriteConflictError(
                    key, request.primary, request.start_ts, write.start_ts, commit_ts, reason
                )
    return conflict_ts


def _new_lock(request: PessimisticLock, current: Lock | None, conflict_ts: int) -> Lock:
    for_update_ts, ttl_ms, min_commit_ts = (
        request.for_update_ts,
        request.ttl_ms,
        request.min_commit_ts,
    )
    if current is not None:
        for_update_ts = max(for_update_ts, current.for_update_ts)
        ttl_ms, min_commit_ts = (
            max(ttl_ms, current.ttl_ms),
            max(min_commit_ts, current.min_commit_ts),
        )
    return Lock(
        PESSIMISTIC,
        request.primary,
        request.start_ts,
        ttl_ms,
        max(for_update_ts, conflict_ts),
        min_commit_ts,
    )


def pessimistic_rollback(
    draft: Draft, keys: Sequence[bytes], start_ts: int, for_update_ts: int
) -> None:
    """Give back pessimistic locks taken up to `for_update_ts`;
    other locks and missing ones are left alone.
    """
    for key in keys:
        encoded = encode_bytes(key)
        _give_back(draft, encoded, draft.lock(encoded), start_ts, for_update_ts)


def pessimistic_rollback_range(
    draft: Draft, lower: bytes, upper: bytes, start_ts: int, for_update_ts: int
) -> Unfinished | None:
    """Like `pessimistic_rollback`, for all keys of the encoded range `[lower, upper)`."""
    locks = list(islice(draft.scan(*column_range(LOCK, lower, upper)), STEP_KEYS))
    for key, data in locks:
        _give_back(draft, key[1:], decode_lock(data), start_ts, for_update_ts)
    if len(locks) < STEP_KEYS:
        return None
    more = partial(pessimistic_rollback_range, start_ts=start_ts, for_update_ts=for_update_ts)
    return Unfinished(partial(more, lower=locks[-1][0][1:] + b"\0", upper=upper))


def _give_back(
    draft: Draft, encoded: bytes, lock: Lock | None, start_ts: int, for_update_ts: int
) -> None:
    if lock is None or lock.kind != PESSIMISTIC or lock.start_ts != start_ts:
        return
    if lock.for_update_ts <= for_update_ts:
        draft.delete_lock(encoded)
