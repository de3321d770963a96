"""What becomes of other people's transactions."""

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.codec import encode_bytes
from storage.model.ts import MAX_TS, compose
from storage.mvcc import errors, percolator, pessimistic
from storage.mvcc.engine import Draft, Engine
from storage.mvcc.percolator import Action, StatusCheck
from storage.mvcc.pessimistic import PessimisticLock
from storage.mvcc.prewrite import Mutation, Op, Prewrite, Prewritten, prewrite
from storage.mvcc.snapshot import Snapshot, scan_locks
from tests.memory_kv import MemoryKV

START = compose(1000)
ALIVE, EXPIRED = compose(4000), compose(4001)


def engine_with_lock(min_commit_ts: int = 0, *keys: bytes) -> Engine:
    engine = Engine(MemoryKV())
    txn = Prewrite(
        mutations=[Mutation(Op.PUT, key, b"new") for key in keys or (b"p",)],
        primary=b"p",
        start_ts=START,
        ttl_ms=3000,
        min_commit_ts=min_commit_ts,
    )
    assert engine.apply([partial(prewrite, txn=txn)]).results == [Prewritten()]
    return engine


def check(engine: Engine, **asked: int | bool | bytes) -> percolator.TxnStatus | errors.MvccError:
    question: dict[str, Any] = {
        "primary": b"p",
        "start_ts": START,
        "caller_start_ts": 0,
        "current_ts": ALIVE,
    } | asked
    request = StatusCheck(**question)
    found: percolator.TxnStatus | errors.MvccError = engine.apply(
        [partial(percolator.check_txn_status, check=request)]
    ).results[0]
    return found


def test_a_live_transaction_shows_its_lock() -> None:
    found = check(engine_with_lock())
    assert isinstance(found, percolator.TxnStatus)
    assert found.lock is not None
    assert (found.action, found.lock.ttl_ms) == (Action.NO_ACTION, 3000)


def test_an_expired_transaction_is_rolled_back_for_good() -> None:
    engine = engine_with_lock()
    assert check(engine, current_ts=EXPIRED) == percolator.TxnStatus(Action.TTL_EXPIRE_ROLLBACK)
    assert check(engine) == percolator.TxnStatus()
    late = partial(percolator.commit, keys=[b"p"], start_ts=START, commit_ts=EXPIRED)
    assert isinstance(engine.apply([late]).results[0], errors.TxnLockNotFoundError)


def test_a_heartbeat_keeps_it_alive() -> None:
    engine = engine_with_lock()
    beat = partial(percolator.heartbeat, primary=b"p", start_ts=START, ttl_ms=9000)
    assert engine.apply([beat]).results == [9000]
    found = check(engine, current_ts=EXPIRED)
    assert isinstance(found, percolator.TxnStatus)
    assert found.lock is not None


def test_a_committed_transaction_tells_its_commit_ts() -> None:
    engine = engine_with_lock()
    engine.apply([partial(percolator.commit, keys=[b"p"], start_ts=START, commit_ts=START + 7)])
    assert check(engine) == percolator.TxnStatus(commit_ts=START + 7)


def test_an_unknown_transaction_is_an_error_or_rolled_back_as_asked() -> None:
    engine = Engine(MemoryKV())
    assert isinstance(check(engine), errors.TxnNotFoundError)
    undone = check(engine, rollback_if_not_exist=True)
    assert undone == percolator.TxnStatus(Action.LOCK_NOT_EXIST_ROLLBACK)
    pessimistic_check = check(
        engine, start_ts=START + 1, rollback_if_not_exist=True, resolving_pessimistic_lock=True
    )
    assert pessimistic_check == percolator.TxnStatus(Action.LOCK_NOT_EXIST_DO_NOTHING)


def test_a_reader_pushes_min_commit_ts_past_itself_and_then_reads() -> None:
    engine = engine_with_lock(min_commit_ts=START + 1)
    reader_ts = START + 50
    with pytest.raises(errors.KeyIsLockedError):
        Snapshot(engine.kv, reader_ts).get(b"p")
    pushed = check(engine, caller_start_ts=reader_ts, current_ts=reader_ts + 5)
    assert isinstance(pushed, percolator.TxnStatus)
    assert pushed.action is Action.MIN_COMMIT_TS_PUSHED
    assert Snapshot(engine.kv, reader_ts).get(b"p") is None
    early = partial(percolator.commit, keys=[b"p"], start_ts=START, commit_ts=reader_ts)
    assert isinstance(engine.apply([early]).results[0], errors.CommitTsExpiredError)


def test_an_autocommit_reader_passes_without_a_push() -> None:
    found = check(engine_with_lock(), caller_start_ts=MAX_TS)
    assert isinstance(found, percolator.TxnStatus)
    assert found.action is Action.MIN_COMMIT_TS_PUSHED


def test_a_secondary_is_no_primary() -> None:
    engine = engine_with_lock(0, b"p", b"s")
    assert isinstance(
        check(engine, primary=b"s", verify_is_primary=True), errors.PrimaryMismatchError
    )


def test_an_expired_pessimistic_lock_goes_without_a_record() -> None:
    engine = Engine(MemoryKV())
    request = PessimisticLock(
        mutations=[Mutation(Op.PESSIMISTIC_LOCK, b"p")],
        primary=b"p",
        start_ts=START,
        ttl_ms=3000,
        for_update_ts=START,
    )
    engine.apply([partial(pessimistic.pessimistic_lock, request=request)])
    found = check(engine, current_ts=EXPIRED, resolving_pessimistic_lock=True)
    assert found == percolator.TxnStatus(Action.TTL_EXPIRE_PESSIMISTIC_ROLLBACK)
    assert percolator.outcome(Draft(engine.kv), encode_bytes(b"p"), START) is None


def test_cleanup_rolls_back_unless_alive_and_tells_a_commit() -> None:
    engine = engine_with_lock(0, b"p", b"s")
    alive = partial(percolator.cleanup, key=b"p", start_ts=START, current_ts=ALIVE)
    assert isinstance(engine.apply([alive]).results[0], errors.KeyIsLockedError)
    engine.apply([partial(percolator.commit, keys=[b"s"], start_ts=START, commit_ts=START + 3)])
    told = [
        partial(percolator.cleanup, key=key, start_ts=START, current_ts=0)
        for key in (b"p", b"s", b"unknown")
    ]
    assert engine.apply(told).results == [0, START + 3, 0]


def test_check_secondaries_decides_by_one_missing_lock() -> None:
    engine = engine_with_lock(0, b"p", b"s")
    ask = partial(percolator.check_secondaries, start_ts=START)
    both = engine.apply([partial(ask, keys=[b"p", b"s"])]).results[0]
    assert [key for key, _ in both.locks] == [b"p", b"s"]
    missing = engine.apply([partial(ask, keys=[b"s", b"never"])]).results[0]
    assert missing == percolator.SecondariesStatus(())
    engine.apply([partial(percolator.commit, keys=[b"p"], start_ts=START, commit_ts=START + 3)])
    assert engine.apply([partial(ask, keys=[b"p"])]).results[0].commit_ts == START + 3


@given(
    st.dictionaries(st.binary(min_size=1, max_size=3), st.integers(1, 5), max_size=12),
    st.dictionaries(st.integers(1, 5), st.sampled_from([0, 100])),
    st.binary(max_size=2),
    st.binary(max_size=2),
)
def test_resolve_range_ends_exactly_the_named_transactions_inside(
    owners: dict[bytes, int], outcomes: dict[int, int], lower: bytes, upper: bytes
) -> None:
    engine = Engine(MemoryKV())
    for key, start_ts in owners.items():
        txn = Prewrite(
            mutations=[Mutation(Op.PUT, key, b"v")], primary=key, start_ts=start_ts, ttl_ms=1
        )
        engine.apply([partial(prewrite, txn=txn)])
    bounds = encode_bytes(lower), encode_bytes(upper) if upper else b""
    engine.apply(
        [partial(percolator.resolve_range, lower=bounds[0], upper=bounds[1], outcomes=outcomes)]
    )
    ended = {
        k for k, s in owners.items() if s in outcomes and lower <= k and (not upper or k < upper)
    }
    left = {key for key, _ in scan_locks(engine.kv, b"", b"", MAX_TS, 0)}
    assert left == set(owners) - ended
    for key in ended:
        assert Snapshot(engine.kv, 100).get(key) == (b"v" if outcomes[owners[key]] else None)
