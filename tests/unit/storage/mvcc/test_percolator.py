"""The decisions against the model: every step's answer,
and after it every read at every timestamp.
"""

from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.codec import encode_bytes
from storage.mvcc import errors, percolator, pessimistic
from storage.mvcc.engine import Command, Draft, Engine
from storage.mvcc.errors import MvccError
from storage.mvcc.pessimistic import PessimisticLock
from storage.mvcc.prewrite import Assertion, Mutation, Op, Prewrite, Prewritten, prewrite
from storage.mvcc.snapshot import Snapshot
from tests.memory_kv import MemoryKV
from tests.unit.storage.mvcc.percolator_model import Model

KEYS = [b"a", b"b", b"c"]
OPS = {"put": Op.PUT, "delete": Op.DELETE, "lock": Op.LOCK}
NAMES = {
    errors.KeyErrorsError: "locked",
    errors.KeyIsLockedError: "locked",
    errors.WriteConflictError: "conflict",
    errors.PessimisticLockRolledBackError: "conflict",
    errors.PessimisticLockLostError: "lost",
    errors.TxnLockNotFoundError: "gone",
    errors.CommittedError: "committed",
}


def run(engine: Engine, command: Command) -> Any:
    return engine.apply([command]).results[0]


def name(result: Any) -> str:
    return NAMES[type(result)] if isinstance(result, MvccError) else "ok"


def put(key: bytes, value: bytes, start_ts: int, **more: Any) -> Command:
    txn = Prewrite(
        mutations=[Mutation(Op.PUT, key, value)],
        primary=key,
        start_ts=start_ts,
        ttl_ms=3000,
        **more,
    )
    return partial(prewrite, txn=txn)


def commit(keys: list[bytes], start_ts: int, commit_ts: int) -> Command:
    return partial(percolator.commit, keys=keys, start_ts=start_ts, commit_ts=commit_ts)


def read(engine: Engine, key: bytes, ts: int) -> bytes | str | None:
    try:
        return Snapshot(engine.kv, ts).get(key)
    except errors.KeyIsLockedError:
        return "locked"


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "prewrite", "amend", "commit", "rollback", "lock", "unlock"]),
        st.integers(0, 4),
        st.dictionaries(
            st.sampled_from(KEYS),
            st.tuples(st.sampled_from(sorted(OPS)), st.sampled_from([b"", b"x", b"y" * 300])),
            min_size=1,
            max_size=3,
        ),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_every_history_answers_and_reads_as_the_model_does(steps: list[Any]) -> None:
    engine, model = Engine(MemoryKV()), Model()
    clock, starts = 1, [1]
    for action, index, mutations in steps:
        start_ts, keys = starts[index % len(starts)], sorted(mutations)
        if action == "begin":
            # a start_ts may equal somebody's commit_ts, never somebody's start_ts
            clock += clock in starts
            starts.append(clock)
            continue
        clock += 1
        command, expected = _step(
            model, action, start_ts, clock, {key: mutations[key] for key in keys}
        )
        assert name(run(engine, command)) == expected, (action, start_ts, keys)
        for key in KEYS:
            for ts in range(clock + 2):
                assert read(engine, key, ts) == model.get(key, ts), (key, ts)


def _step(
    model: Model, action: str, start_ts: int, clock: int, mutations: dict[bytes, tuple[str, bytes]]
) -> tuple[Command, str]:
    keys = list(mutations)
    sent = [Mutation(OPS[op], key, value) for key, (op, value) in mutations.items()]
    match action:
        case "prewrite" | "amend":
            for_update_ts = clock if action == "amend" else 0
            txn = Prewrite(
                mutations=sent,
                primary=keys[0],
                start_ts=start_ts,
                ttl_ms=3000,
                for_update_ts=for_update_ts,
                actions=[1] * 9 if for_update_ts else (),
            )
            return partial(prewrite, txn=txn), model.prewrite(mutations, start_ts, for_update_ts)
        case "commit":
            return commit(keys, start_ts, clock), model.commit(keys, start_ts, clock)
        case "rollback":
            return partial(percolator.rollback, keys=keys, start_ts=start_ts), model.rollback(
                keys, start_ts
            )
        case "lock":
            request = PessimisticLock(
                mutations=sent, primary=keys[0], start_ts=start_ts, ttl_ms=3000, for_update_ts=clock
            )
            return partial(pessimistic.pessimistic_lock, request=request), model.lock(
                keys, start_ts, clock
            )
        case _:
            unlock = partial(
                pessimistic.pessimistic_rollback,
                keys=keys,
                start_ts=start_ts,
                for_update_ts=clock - 2,
            )
            return unlock, model.unlock(keys, start_ts, clock - 2)


def test_a_group_sees_its_own_writes_and_a_failed_command_leaves_nothing() -> None:
    engine = Engine(MemoryKV())
    both = Prewrite(
        mutations=[Mutation(Op.PUT, b"b", b"2"), Mutation(Op.PUT, b"a", b"2")],
        primary=b"b",
        start_ts=5,
        ttl_ms=1,
    )
    results = engine.apply(
        [put(b"a", b"1", 1), partial(prewrite, txn=both), commit([b"a"], 1, 2), put(b"a", b"3", 3)]
    ).results
    assert [name(result) for result in results] == ["ok", "locked", "ok", "ok"]
    assert read(engine, b"b", 9) is None
    assert read(engine, b"a", 2) == b"1"


def test_commit_refuses_a_commit_ts_at_or_before_start_ts() -> None:
    engine = Engine(MemoryKV())
    run(engine, put(b"a", b"1", 5))
    assert isinstance(run(engine, commit([b"a"], 5, 5)), errors.InvalidTxnError)


def test_commit_below_a_pushed_min_commit_ts_is_expired() -> None:
    engine = Engine(MemoryKV())
    run(engine, put(b"a", b"1", 5, min_commit_ts=9))
    refused = run(engine, commit([b"a"], 5, 8))
    assert isinstance(refused, errors.CommitTsExpiredError)
    assert refused.min_commit_ts == 9
    assert run(engine, commit([b"a"], 5, 9)) is None


@pytest.mark.parametrize("op", [Op.INSERT, Op.CHECK_NOT_EXISTS])
def test_a_key_that_must_be_new_may_not_exist(op: Op) -> None:
    engine = Engine(MemoryKV())
    txn = Prewrite(mutations=[Mutation(op, b"a", b"1")], primary=b"a", start_ts=5, ttl_ms=1)
    assert run(engine, partial(prewrite, txn=txn)) == Prewritten()
    assert (read(engine, b"a", 9) == "locked") == (op is Op.INSERT)
    run(engine, partial(percolator.rollback, keys=[b"a"], start_ts=5))
    run(engine, put(b"a", b"0", 6))
    run(engine, commit([b"a"], 6, 7))
    later = Prewrite(mutations=[Mutation(op, b"a", b"1")], primary=b"a", start_ts=8, ttl_ms=1)
    assert isinstance(run(engine, partial(prewrite, txn=later)), errors.AlreadyExistsError)


def test_assertions_are_checked_when_asked_for() -> None:
    engine = Engine(MemoryKV())
    wrong = [Mutation(Op.PUT, b"a", b"1", Assertion.EXIST)]
    asked = Prewrite(mutations=wrong, primary=b"a", start_ts=5, ttl_ms=1, check_assertions=True)
    unasked = Prewrite(mutations=wrong, primary=b"a", start_ts=5, ttl_ms=1)
    assert isinstance(run(engine, partial(prewrite, txn=asked)), errors.AssertionFailedError)
    assert run(engine, partial(prewrite, txn=unasked)) == Prewritten()


@pytest.mark.parametrize(("action", "passes"), [(0, True), (2, False)])
def test_a_pessimistic_transaction_vouches_for_keys_it_does_not_lock(
    action: int, passes: bool
) -> None:
    engine = Engine(MemoryKV())
    run(engine, put(b"index", b"1", 6))
    run(engine, commit([b"index"], 6, 9))
    sent = put(b"index", b"2", 5, for_update_ts=8, actions=[action, 1, 1])
    assert (run(engine, sent) == Prewritten()) == passes


def test_a_late_prewrite_of_a_finished_transaction_locks_nothing() -> None:
    engine = Engine(MemoryKV())
    run(engine, put(b"a", b"1", 5))
    run(engine, commit([b"a"], 5, 6))
    assert run(engine, put(b"a", b"2", 5, for_update_ts=99, actions=[0])) == Prewritten(
        min_commit_ts=6
    )
    run(engine, put(b"a", b"1", 7))
    run(engine, partial(percolator.rollback, keys=[b"a"], start_ts=7))
    late = put(b"a", b"2", 7, for_update_ts=99, actions=[0])
    assert isinstance(run(engine, late), errors.WriteConflictError)
    assert Draft(engine.kv).lock(encode_bytes(b"a")) is None


def test_an_unknown_op_is_refused() -> None:
    txn = Prewrite(mutations=[Mutation(7, b"a")], primary=b"a", start_ts=5, ttl_ms=1)
    assert isinstance(run(Engine(MemoryKV()), partial(prewrite, txn=txn)), errors.InvalidTxnError)


def test_a_lock_request_tells_the_newest_values() -> None:
    engine = Engine(MemoryKV())
    run(engine, put(b"a", b"1", 1))
    run(engine, commit([b"a"], 1, 2))
    request = PessimisticLock(
        mutations=[Mutation(Op.PESSIMISTIC_LOCK, b"a"), Mutation(Op.PESSIMISTIC_LOCK, b"b")],
        primary=b"a",
        start_ts=3,
        ttl_ms=1,
        for_update_ts=4,
        return_values=True,
        only_if_exists=True,
    )
    assert run(engine, partial(pessimistic.pessimistic_lock, request=request)) == [
        (b"1", 0),
        (None, 0),
    ]
    assert Draft(engine.kv).lock(encode_bytes(b"b")) is None
    assert read(engine, b"a", 9) == b"1"
