"""Each refusal of Percolator is one error with its own code."""

import pytest
from kvproto import kvrpcpb_pb2 as kvrpcpb

from server.rpc.key_error import LockedError, key_error, raise_for
from storage.model.errors import Kind, TidemarkError

LOCKED = kvrpcpb.KeyError(locked=kvrpcpb.LockInfo(key=b"k", primary_lock=b"p", lock_version=5))


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (LOCKED, "ErrKeyIsLocked", Kind.UNAVAILABLE),
        (
            kvrpcpb.KeyError(conflict=kvrpcpb.WriteConflict(start_ts=1)),
            "ErrWriteConflict",
            Kind.CONFLICT,
        ),
        (
            kvrpcpb.KeyError(already_exist=kvrpcpb.AlreadyExist()),
            "ErrKeyAlreadyExists",
            Kind.CONFLICT,
        ),
        (kvrpcpb.KeyError(deadlock=kvrpcpb.Deadlock(lock_ts=2)), "ErrDeadlock", Kind.CONFLICT),
        (
            kvrpcpb.KeyError(commit_ts_expired=kvrpcpb.CommitTsExpired()),
            "ErrCommitTsExpired",
            Kind.CONFLICT,
        ),
        (kvrpcpb.KeyError(txn_not_found=kvrpcpb.TxnNotFound()), "ErrTxnNotFound", Kind.NOT_FOUND),
        (kvrpcpb.KeyError(abort="gone"), "ErrTxnAborted", Kind.CONFLICT),
        (kvrpcpb.KeyError(retryable="again"), "ErrTxnAborted", Kind.CONFLICT),
        (
            kvrpcpb.KeyError(txn_lock_not_found=kvrpcpb.TxnLockNotFound()),
            "ErrTxnAborted",
            Kind.CONFLICT,
        ),
    ],
)
def test_every_key_error_is_known(error: kvrpcpb.KeyError, code: str, kind: Kind) -> None:
    err = key_error(error)
    assert (err.code, err.kind) == (code, kind)
    assert err.message


def test_no_errors_raise_nothing() -> None:
    raise_for([])


def test_locks_are_gathered_and_anything_worse_comes_first() -> None:
    with pytest.raises(LockedError) as caught:
        raise_for([LOCKED, LOCKED])
    assert len(caught.value.locks) == 2
    with pytest.raises(TidemarkError, match="gone"):
        raise_for([LOCKED, kvrpcpb.KeyError(abort="gone")])
