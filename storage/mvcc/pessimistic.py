"""Pessimistic locks: decisions to take them and give them back, and the queue of those who wait.

Pure. The decisions read and write a `Draft`; `LockQueue` is in memory only.

Waiters of a key are woken one by one, oldest transaction first: the woken one tries again, and if
it does not take the lock, the next one is woken. The wait-for graph has an edge from every waiter
to the transaction that holds its key; it is the graph of one store, so a deadlock across stores
ends by the time-outs of its waits.
"""

from bisect import insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import NamedTuple

from storage.codec import encode_bytes
from storage.model.errors import ConflictError
from storage.mvcc.engine import STEP_KEYS, Draft, Unfinished
from storage.mvcc.errors import (
    AlreadyExistsError,
    CommittedError,
    ConflictReason,
    InvalidTxnError,
    KeyIsLockedError,
    MvccError,
    PessimisticLockLostError,
    PessimisticLockRolledBackError,
    WriteConflictError,
)
from storage.mvcc.prewrite import Assertion, Mutation
from storage.mvcc.record import LOCK_COLUMN, PESSIMISTIC, ROLLBACK, Lock, column_range, decode_lock


@dataclass(frozen=True, slots=True, kw_only=True)
class PessimisticLock:
    """One request for pessimistic locks; `for_update_ts` is the snapshot the statement read.

    With `force`, a key that changed after it is locked nevertheless, and the answer has the
    commit_ts of the change.
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
    """The value of a locked key, None if it is absent or was not requested; `conflict_ts`: when it
    changed, or 0.
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
        # This is a read at for_update_ts, and an absent key may stay without a lock: no computed
        # commit_ts may come below it.
        draft.fence.read(request.for_update_ts)
        value = draft.value(encoded)
    if must_be_new and value is not None:
        raise AlreadyExistsError(mutation.key)
    if not request.only_if_exists or value is not None:
        draft.put_lock(encoded, _new_lock(request, lock, conflict_ts))
    return LockedKey(value, conflict_ts)


def _check_newest(draft: Draft, request: PessimisticLock, key: bytes, encoded: bytes) -> int:
    """The newest commit_ts after for_update_ts, which only a request with `force` accepts; else
    0.
    """
    conflict_ts = 0
    for commit_ts, write in draft.writes(encoded):
        if commit_ts < request.start_ts:
            break
        # The network may deliver a lock request after the transaction has ended: it must not leave
        # a lock that nobody will ever give back.
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
    """The lock to write; a repeated request never lowers the values of an earlier one."""
    for_update_ts = max(request.for_update_ts, conflict_ts)
    ttl_ms, min_commit_ts = request.ttl_ms, request.min_commit_ts
    if current is not None:
        for_update_ts = max(for_update_ts, current.for_update_ts)
        ttl_ms = max(ttl_ms, current.ttl_ms)
        min_commit_ts = max(min_commit_ts, current.min_commit_ts)
    return Lock(
        PESSIMISTIC, request.primary, request.start_ts, ttl_ms, for_update_ts, min_commit_ts
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
    locks = list(islice(draft.scan(*column_range(LOCK_COLUMN, lower, upper)), STEP_KEYS))
    for key, data in locks:
        _give_back(draft, key[1:], decode_lock(data), start_ts, for_update_ts)
    if len(locks) < STEP_KEYS:
        return None
    rest = partial(pessimistic_rollback_range, start_ts=start_ts, for_update_ts=for_update_ts)
    return Unfinished(partial(rest, lower=locks[-1][0][1:] + b"\0", upper=upper))


def _give_back(
    draft: Draft, encoded: bytes, lock: Lock | None, start_ts: int, for_update_ts: int
) -> None:
    if lock is None or lock.kind != PESSIMISTIC or lock.start_ts != start_ts:
        return
    # One with a later for_update_ts was taken again by a later try, which still counts on it.
    if lock.for_update_ts <= for_update_ts:
        draft.delete_lock(encoded)


class Edge(NamedTuple):
    """`start_ts` waits for `holder`, which has locked the raw `key`."""

    start_ts: int
    holder: int
    key: bytes


class DeadlockError(MvccError, ConflictError):
    """Waiting for the lock would mean to wait for oneself;
    `edges` lead from its holder back to the waiter.
    """

    code = "ErrDeadlock"

    def __init__(self, edges: Sequence[Edge]) -> None:
        closing = edges[-1]
        super().__init__(
            f"transaction {closing.start_ts} must not wait for {closing.holder} on key "
            f"{closing.key.hex()}: "
            f"that one waits for it over {len(edges) - 1} locks; roll back and start it again"
        )
        self.edges = tuple(edges)


@dataclass(slots=True, eq=False)
class Waiter:
    """One wait of one transaction for one key; compared by identity (`eq=False`), since a
    transaction may wait for one key twice.
    """

    start_ts: int
    key: bytes


@dataclass(slots=True)
class _Queue:
    holder: int
    waiters: list[Waiter] = field(default_factory=list)


class LockQueue:
    """All waits of a store, by key."""

    def __init__(self) -> None:
        self._queues: dict[bytes, _Queue] = {}
        self._by_txn: dict[int, list[Waiter]] = defaultdict(list)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def cycle(self, start_ts: int, holder: int, key: bytes) -> list[Edge]:
        """The edges that lead from `holder` back to `start_ts`,
        then the one that would close them; [] if none do.
        """
        path = self._path(holder, start_ts)
        if not path and holder != start_ts:
            return []
        return [*path, Edge(start_ts, holder, key)]

    def add(self, waiter: Waiter, holder: int) -> None:
        """Wait for `holder`; ask `cycle` before."""
        queue = self._queues.setdefault(waiter.key, _Queue(holder))
        queue.holder = holder
        insort(queue.waiters, waiter, key=lambda other: other.start_ts)
        self._by_txn[waiter.start_ts].append(waiter)
        self._size += 1

    def remove(self, waiter: Waiter) -> None:
        """Wait no longer."""
        queue = self._queues[waiter.key]
        queue.waiters.remove(waiter)
        if not queue.waiters:
            del self._queues[waiter.key]
        waits = self._by_txn[waiter.start_ts]
        waits.remove(waiter)
        if not waits:
            del self._by_txn[waiter.start_ts]
        self._size -= 1

    def pop(self, key: bytes) -> Waiter | None:
        """Remove and return the next waiter of `key`: that of the oldest transaction."""
        queue = self._queues.get(key)
        if queue is None:
            return None
        waiter = queue.waiters[0]
        self.remove(waiter)
        return waiter

    def hold(self, key: bytes, holder: int) -> None:
        """The key has a new owner, for whom its waiters wait from now on."""
        queue = self._queues.get(key)
        if queue is not None:
            queue.holder = holder

    def _edges(self, start_ts: int) -> Iterator[Edge]:
        for waiter in self._by_txn.get(start_ts, ()):
            yield Edge(start_ts, self._queues[waiter.key].holder, waiter.key)

    def _path(self, begin: int, end: int) -> list[Edge]:
        """The edges from `begin` to `end`, [] if there is no way."""
        reached_by: dict[int, Edge] = {}
        ahead = [begin]
        while ahead:
            for edge in self._edges(ahead.pop()):
                if edge.holder in reached_by or edge.holder == begin:
                    continue
                reached_by[edge.holder] = edge
                if edge.holder == end:
                    return _walked(reached_by, begin, end)
                ahead.append(edge.holder)
        return []


def _walked(reached_by: dict[int, Edge], begin: int, end: int) -> list[Edge]:
    path = [reached_by[end]]
    while path[-1].start_ts != begin:
        path.append(reached_by[path[-1].start_ts])
    return path[::-1]
