"""Every error of a transaction has its field in kvrpcpb.KeyError."""

import pytest

from server.store.key_error import key_error, key_errors
from storage.mvcc import errors
from storage.mvcc.errors import ConflictReason, MvccError
from storage.mvcc.record import PESSIMISTIC, PUT, Lock

LOCK = Lock(PUT, b"p", 5, 3000, 6, 7, 2)

CASES: list[tuple[MvccError, str]] = [
    (errors.KeyIsLockedError(b"k", LOCK), "locked"),
    (errors.WriteConflictError(b"k", b"p", 5, 6, 7, ConflictReason.OPTIMISTIC), "conflict"),
    (errors.AlreadyExistsError(b"k"), "already_exist"),
    (errors.AssertionFailedError(b"k", 5, 1, (2, 3)), "assertion_failed"),
    (errors.TxnNotFoundError(b"k", 5), "txn_not_found"),
    (errors.TxnLockNotFoundError(b"k", 5, 6), "txn_lock_not_found"),
    (errors.CommitTsExpiredError(b"k", 5, 6, 7), "commit_ts_expired"),
    (errors.PrimaryMismatchError(b"k", LOCK), "primary_mismatch"),
]


@pytest.mark.parametrize(("err", "field"), CASES, ids=[field for _, field in CASES])
def test_an_error_fills_its_own_field(err: MvccError, field: str) -> None:
    assert key_error(err).HasField(field)


@pytest.mark.parametrize(
    "err",
    [
        errors.InvalidTxnError("no"),
        errors.CommittedError(b"k", 5, 6),
        errors.PessimisticLockLostError(b"k", 5),
    ],
)
def test_what_has_no_field_is_an_abort_with_its_code(err: MvccError) -> None:
    assert key_error(err).abort.startswith(f"[TM:{err.code}]")


def test_a_lost_lock_is_retryable_for_old_clients() -> None:
    assert key_error(errors.TxnLockNotFoundError(b"k", 5, 6)).retryable


def test_a_lock_is_shown_whole() -> None:
    locked = key_error(errors.KeyIsLockedError(b"k", LOCK._replace(kind=PESSIMISTIC))).locked
    assert (locked.primary_lock, locked.lock_version, locked.key, locked.lock_ttl) == (
        b"p",
        5,
        b"k",
        3000,
    )
    assert (locked.lock_for_update_ts, locked.min_commit_ts, locked.txn_size, locked.lock_type) == (
        6,
        7,
        2,
        5,
    )


def test_all_locks_of_a_command_are_told() -> None:
    both = errors.KeyErrorsError([errors.KeyIsLockedError(key, LOCK) for key in (b"a", b"b")])
    assert [error.locked.key for error in key_errors(both)] == [b"a", b"b"]
