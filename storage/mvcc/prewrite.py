"""Percolator's first phase: lock every key with its new value; with async commit and 1PC also the commit. Pure.

First all keys are checked (`prewrite_check`), and nothing is written; then it is decided how the transaction goes on;
then all is written.

- Ordinary (2PC): locks. The client takes a commit_ts from the oracle when all are there.
- Async commit: locks that carry a min_commit_ts above every read so far (`read_fence`). The transaction is committed
  when the last one is on disk, at the largest min_commit_ts of all; the primary names the others.
- 1PC: all keys of the transaction are in this request: versions at such a min_commit_ts at once, and no lock.

Either of the last two falls back to 2PC, told by a 0 in the answer, when its timestamp would pass `max_commit_ts`, or
when an earlier attempt left other locks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from storage.mvcc.change import COMMITTED, PREWRITE, Change
from storage.mvcc.draft import Draft
from storage.mvcc.errors import InvalidTxnError
from storage.mvcc.mutation import Op
from storage.mvcc.percolator import put_version
from storage.mvcc.prewrite_check import Checked, CommittedBeforeError, Prewrite, check_all
from storage.mvcc.record import DELETE, LOCK, PUT, SHORT_VALUE_MAX_BYTES, Lock, Write

_LOCK_KINDS: dict[int, int] = {Op.PUT: PUT, Op.INSERT: PUT, Op.DELETE: DELETE, Op.LOCK: LOCK}


@dataclass(frozen=True, slots=True)
class Prewritten:
    """How the transaction goes on: 1PC committed it; async commit needs `min_commit_ts`; 2PC has neither."""

    min_commit_ts: int = 0
    one_pc_commit_ts: int = 0


def prewrite(draft: Draft, txn: Prewrite) -> Prewritten:
    """Lock all keys of `txn` with their new values, or none of them; a repeated request gets its first answer again.

    Raises:
        KeyErrorsError: some keys are locked by others.
        WriteConflictError: a version newer than start_ts exists, or `txn` was rolled back.
        AlreadyExistsError, AssertionFailedError: a belief about existence does not hold.
        PessimisticLockLostError: a key that had to be locked pessimistically is not.
        InvalidTxnError: no transaction looks like this.
    """
    _check_sense(txn)
    try:
        checked = check_all(draft, txn)
    except CommittedBeforeError as err:
        return Prewritten(*((0, err.commit_ts) if txn.one_pc else (err.commit_ts, 0)))
    if txn.one_pc or txn.async_commit:
        return _prewrite_computed(draft, txn, checked)
    _lock_all(draft, txn, checked, txn.min_commit_ts, async_commit=False)
    return Prewritten()


def _check_sense(txn: Prewrite) -> None:
    if not txn.start_ts:
        raise InvalidTxnError("a prewrite with start_ts 0 belongs to no transaction; take start_ts from the TSO")
    keys: set[bytes] = set()
    for mutation in txn.mutations:
        if mutation.op not in _LOCK_KINDS and mutation.op != Op.CHECK_NOT_EXISTS:
            raise InvalidTxnError(f"a prewrite cannot have a mutation with op {mutation.op}")
        if mutation.key in keys:
            raise InvalidTxnError(f"a prewrite names key {mutation.key.hex()} twice; send its last mutation only")
        keys.add(mutation.key)


def _prewrite_computed(draft: Draft, txn: Prewrite, checked: Sequence[Checked]) -> Prewritten:
    """Async commit or 1PC, if nothing stands against it.

    Whoever resolves an async commit computes its commit_ts from the locks alone. So the answer is the largest
    min_commit_ts of exactly these locks, those of an earlier attempt included, and nothing larger.
    """
    earlier = [item.held for item in checked if item.held is not None and item.is_prewritten]
    new = [item for item in checked if not item.is_prewritten and item.mutation.op != Op.CHECK_NOT_EXISTS]
    possible = _is_whole(txn) and not earlier if txn.one_pc else all(lock.async_commit for lock in earlier)
    at_least = max(txn.start_ts + 1, txn.for_update_ts + 1, txn.min_commit_ts)
    answer = max((lock.min_commit_ts for lock in earlier), default=at_least)
    if new or txn.one_pc:
        floors = [item.held.min_commit_ts if item.held else item.newest_ts + 1 for item in new]
        min_commit_ts = draft.fence.reserve([item.mutation.key for item in new], max([at_least, *floors]))
        answer = max(answer, min_commit_ts)
        possible = possible and not 0 < txn.max_commit_ts < min_commit_ts
    if not possible:
        _lock_all(draft, txn, checked, txn.min_commit_ts, async_commit=False)
        return Prewritten()
    if txn.one_pc:
        _commit_all(draft, txn, checked, answer)
        return Prewritten(one_pc_commit_ts=answer)
    _lock_all(draft, txn, new, answer, async_commit=True)
    return Prewritten(min_commit_ts=answer)


def _is_whole(txn: Prewrite) -> bool:
    """Whether the request has every key that is known of its transaction."""
    keys = {mutation.key for mutation in txn.mutations}
    return txn.primary in keys and keys.issuperset(txn.secondaries)


def _stored_value(draft: Draft, item: Checked, start_ts: int) -> tuple[int, bytes, bytes | None]:
    """The record kind, the value, and what of it belongs into the record; a longer value is put aside."""
    kind = _LOCK_KINDS[item.mutation.op]
    if kind != PUT:
        return kind, b"", None
    value = item.mutation.value
    if len(value) <= SHORT_VALUE_MAX_BYTES:
        return kind, value, value
    draft.put_value(item.encoded, start_ts, value)
    return kind, value, None


def _old_value(draft: Draft, encoded: bytes) -> bytes:
    return (draft.value(encoded) or b"") if draft.old_values else b""


def _lock_all(
    draft: Draft, txn: Prewrite, checked: Sequence[Checked], min_commit_ts: int, *, async_commit: bool
) -> None:
    for item in checked:
        if item.mutation.op == Op.CHECK_NOT_EXISTS or item.is_prewritten:
            continue
        kind, value, short = _stored_value(draft, item, txn.start_ts)
        key, held = item.mutation.key, item.held
        lock = Lock(
            kind,
            txn.primary,
            txn.start_ts,
            max(txn.ttl_ms, held.ttl_ms) if held else txn.ttl_ms,
            txn.for_update_ts,
            max(min_commit_ts, held.min_commit_ts) if held else min_commit_ts,
            txn.txn_size,
            short,
            async_commit,
            tuple(txn.secondaries) if async_commit and key == txn.primary else (),
            txn.txn_source,
        )
        draft.put_lock(item.encoded, lock)
        if kind != LOCK:
            old_value = _old_value(draft, item.encoded)
            draft.note(Change(PREWRITE, key, item.encoded, kind, txn.start_ts, 0, value, old_value, txn.txn_source))


def _commit_all(draft: Draft, txn: Prewrite, checked: Sequence[Checked], commit_ts: int) -> None:
    for item in checked:
        if item.mutation.op == Op.CHECK_NOT_EXISTS:
            continue
        old_value = _old_value(draft, item.encoded)
        kind, value, short = _stored_value(draft, item, txn.start_ts)
        write = Write(kind, txn.start_ts, short, txn_source=txn.txn_source)
        put_version(draft, item.encoded, commit_ts, write, computed=True)
        if item.held is not None:
            draft.delete_lock(item.encoded)
        if kind != LOCK:
            key = item.mutation.key
            change = Change(COMMITTED, key, item.encoded, kind, txn.start_ts, commit_ts, value, old_value)
            draft.note(change._replace(txn_source=txn.txn_source))
