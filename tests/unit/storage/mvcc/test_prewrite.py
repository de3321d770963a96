"""Async commit and 1PC: what they answer, what they leave, when they fall back."""

from functools import partial
from typing import Any

import pytest

from storage.codec import encode_bytes
from storage.mvcc import errors, percolator, pessimistic
from storage.mvcc.engine import COMMITTED, PREWRITE, Command, Draft, Engine
from storage.mvcc.pessimistic import PessimisticLock
from storage.mvcc.prewrite import Mutation, Op, Prewrite, Prewritten, prewrite
from storage.mvcc.read_fence import ReadFence
from storage.mvcc.record import PUT, ROLLBACK, Lock
from storage.mvcc.snapshot import Snapshot
from tests.memory_kv import MemoryKV


def engine_at(max_ts: int) -> Engine:
    return Engine(MemoryKV(), ReadFence(max_ts))


def run(engine: Engine, command: Command) -> Any:
    (result,) = engine.apply([command]).results
    engine.fence.release()
    return result


def put(*keys: bytes, start_ts: int = 5, **more: Any) -> Command:
    mutations = [Mutation(Op.PUT, key, b"v" * 300) for key in keys]
    fields = {"mutations": mutations, "primary": keys[0], "start_ts": start_ts, "ttl_ms": 1} | more
    return partial(prewrite, txn=Prewrite(**fields))


def lock_of(engine: Engine, key: bytes) -> Lock | None:
    return Draft(engine.kv).lock(encode_bytes(key))


def test_async_commit_locks_above_every_read_and_names_its_secondaries() -> None:
    engine = engine_at(20)
    assert run(engine, put(b"p", b"s", async_commit=True, secondaries=[b"s", b"t"])) == Prewritten(
        min_commit_ts=21
    )
    primary, secondary = lock_of(engine, b"p"), lock_of(engine, b"s")
    assert primary is not None
    assert secondary is not None
    assert (primary.async_commit, primary.min_commit_ts, primary.secondaries) == (
        True,
        21,
        (b"s", b"t"),
    )
    assert (secondary.async_commit, secondary.min_commit_ts, secondary.secondaries) == (
        True,
        21,
        (),
    )


@pytest.mark.parametrize(
    ("more", "expected"), [({}, 6), ({"min_commit_ts": 9}, 9), ({"for_update_ts": 11}, 12)]
)
def test_min_commit_ts_is_above_all_timestamps_of_the_transaction(
    more: dict[str, int], expected: int
) -> None:
    assert run(engine_at(0), put(b"p", async_commit=True, **more)) == Prewritten(
        min_commit_ts=expected
    )


def test_a_repeated_async_prewrite_answers_what_a_resolver_would_compute_from_the_locks() -> None:
    engine = engine_at(20)
    first = run(engine, put(b"p", async_commit=True, secondaries=[b"s"]))
    engine.fence.read(50)
    assert run(engine, put(b"p", async_commit=True, secondaries=[b"s"])) == first
    assert run(engine, put(b"p", b"s", async_commit=True, secondaries=[b"s"])) == Prewritten(
        min_commit_ts=51
    )
    assert run(engine, put(b"p", b"s", async_commit=True, secondaries=[b"s"])) == Prewritten(
        min_commit_ts=51
    )


def test_one_pc_writes_versions_and_no_locks_and_tells_feeds_a_committed_row() -> None:
    engine = engine_at(20)
    engine.old_values = True
    run(engine, put(b"p", start_ts=1, one_pc=True))
    group = engine.apply([put(b"p", b"s", start_ts=30, one_pc=True, secondaries=[b"s"])])
    assert group.results == [Prewritten(one_pc_commit_ts=31)]
    assert lock_of(engine, b"p") is None
    assert Snapshot(engine.kv, 31).get(b"s") == b"v" * 300
    assert Snapshot(engine.kv, 30).get(b"s") is None
    told = [
        (change.event, change.key, change.commit_ts, len(change.old_value))
        for change in group.changes
    ]
    assert told == [(COMMITTED, b"p", 31, 300), (COMMITTED, b"s", 31, 0)]


def test_one_pc_takes_over_pessimistic_locks_and_frees_who_waits_for_them() -> None:
    engine = engine_at(0)
    request = PessimisticLock(
        mutations=[Mutation(Op.PESSIMISTIC_LOCK, b"p")],
        primary=b"p",
        start_ts=5,
        ttl_ms=1,
        for_update_ts=8,
    )
    run(engine, partial(pessimistic.pessimistic_lock, request=request))
    group = engine.apply([put(b"p", for_update_ts=8, actions=[1], one_pc=True)])
    assert group.results == [Prewritten(one_pc_commit_ts=9)]
    assert list(group.unlocked) == [encode_bytes(b"p")]
    assert lock_of(engine, b"p") is None


@pytest.mark.parametrize(
    "more",
    [
        {"async_commit": True, "max_commit_ts": 20},
        {"one_pc": True, "max_commit_ts": 20},
        {"one_pc": True, "secondaries": [b"elsewhere"]},
        {"one_pc": True, "primary": b"elsewhere"},
        {"one_pc": True, "async_commit": True, "max_commit_ts": 20},
    ],
)
def test_what_cannot_be_computed_falls_back_to_ordinary_locks(more: dict[str, Any]) -> None:
    engine = engine_at(20)
    group = engine.apply([put(b"p", min_commit_ts=7, **more)])
    assert group.results == [Prewritten()]
    assert [change.event for change in group.changes] == [PREWRITE]
    lock = lock_of(engine, b"p")
    assert lock is not None
    assert (lock.async_commit, lock.min_commit_ts, lock.secondaries) == (False, 7, ())


def test_a_transaction_with_an_ordinary_lock_cannot_become_async_nor_one_pc() -> None:
    for more in ({"async_commit": True}, {"one_pc": True}):
        engine = engine_at(20)
        run(engine, put(b"p"))
        assert run(engine, put(b"p", b"s", **more)) == Prewritten()
        secondary = lock_of(engine, b"s")
        assert secondary is not None
        assert not secondary.async_commit


@pytest.mark.parametrize("more", [{"async_commit": True}, {"one_pc": True}, {}])
def test_a_late_copy_of_a_committed_prewrite_gets_the_commit_ts(more: dict[str, bool]) -> None:
    engine = engine_at(20)
    first = run(engine, put(b"p", b"s", **more))
    commit_ts = max(first.min_commit_ts, first.one_pc_commit_ts, 21)
    if not first.one_pc_commit_ts:
        run(engine, partial(percolator.commit, keys=[b"p", b"s"], start_ts=5, commit_ts=commit_ts))
    again = run(engine, put(b"p", b"s", **more))
    assert again == (Prewritten(0, commit_ts) if "one_pc" in more else Prewritten(commit_ts))
    assert lock_of(engine, b"p") is None


def test_a_computed_commit_never_hides_a_rollback_at_the_same_timestamp() -> None:
    engine = engine_at(20)
    assert run(engine, put(b"async", async_commit=True)).min_commit_ts == 21
    request = PessimisticLock(
        mutations=[Mutation(Op.PESSIMISTIC_LOCK, b"one")],
        primary=b"one",
        start_ts=6,
        ttl_ms=1,
        for_update_ts=6,
    )
    run(engine, partial(pessimistic.pessimistic_lock, request=request))
    run(engine, partial(percolator.rollback, keys=[b"async", b"one"], start_ts=21))
    run(engine, partial(percolator.commit, keys=[b"async"], start_ts=5, commit_ts=21))
    assert (
        run(
            engine, put(b"one", start_ts=6, for_update_ts=6, actions=[1], one_pc=True)
        ).one_pc_commit_ts
        == 21
    )
    for key in (b"async", b"one"):
        assert Snapshot(engine.kv, 21).get(key) is not None
        late = run(engine, put(key, start_ts=21))
        assert isinstance(late, errors.WriteConflictError)
        assert late.reason is errors.ConflictReason.SELF_ROLLED_BACK


def test_a_computed_commit_lies_above_versions_the_client_did_not_want_checked() -> None:
    engine = engine_at(0)
    run(engine, put(b"p", start_ts=3))
    run(engine, partial(percolator.commit, keys=[b"p"], start_ts=3, commit_ts=30))
    assert run(engine, put(b"p", for_update_ts=8, actions=[0], one_pc=True)) == Prewritten(
        one_pc_commit_ts=31
    )


def test_one_pc_lies_above_a_rollback_record_and_leaves_it() -> None:
    engine = engine_at(0)
    rollback = partial(percolator.rollback, keys=[b"p"], start_ts=20)
    group = engine.apply([rollback, put(b"p", one_pc=True)])
    assert group.results[1] == Prewritten(one_pc_commit_ts=21)
    outcomes = [percolator.outcome(Draft(engine.kv), encode_bytes(b"p"), ts) for ts in (5, 20)]
    assert outcomes == [(PUT, 21), (ROLLBACK, 0)]


def test_existence_is_read_as_of_the_transaction() -> None:
    engine = engine_at(0)
    txn = Prewrite(
        mutations=[Mutation(Op.CHECK_NOT_EXISTS, b"k")], primary=b"p", start_ts=40, ttl_ms=1
    )
    assert run(engine, partial(prewrite, txn=txn)) == Prewritten()
    assert run(engine, put(b"k", one_pc=True)) == Prewritten(one_pc_commit_ts=41)


def test_the_primary_of_an_async_commit_is_shown_whatever_its_age_until_forced() -> None:
    engine = engine_at(20)
    run(engine, put(b"p", async_commit=True, secondaries=[b"s"]))
    asked = {"primary": b"p", "start_ts": 5, "caller_start_ts": 90, "current_ts": 1 << 40}
    found = run(engine, partial(percolator.check_txn_status, check=percolator.StatusCheck(**asked)))
    assert (found.action, found.lock) == (percolator.Action.NO_ACTION, lock_of(engine, b"p"))
    forced = percolator.StatusCheck(**asked, force_sync_commit=True)
    assert (
        run(engine, partial(percolator.check_txn_status, check=forced)).action
        is percolator.Action.TTL_EXPIRE_ROLLBACK
    )


@pytest.mark.parametrize(
    "txn",
    [
        Prewrite(mutations=[Mutation(Op.PUT, b"a")], primary=b"a", start_ts=0, ttl_ms=1),
        Prewrite(
            mutations=[Mutation(Op.PUT, b"a"), Mutation(Op.DELETE, b"a")],
            primary=b"a",
            start_ts=5,
            ttl_ms=1,
        ),
        Prewrite(mutations=[Mutation(Op.ROLLBACK, b"a")], primary=b"a", start_ts=5, ttl_ms=1),
        Prewrite(mutations=[Mutation(99, b"a")], primary=b"a", start_ts=5, ttl_ms=1),
    ],
)
def test_what_no_transaction_looks_like_is_refused(txn: Prewrite) -> None:
    engine = engine_at(0)
    assert isinstance(run(engine, partial(prewrite, txn=txn)), errors.InvalidTxnError)
    assert list(engine.kv.scan(b"")) == []


def test_a_lock_taken_at_another_for_update_ts_is_not_the_one_meant() -> None:
    engine = engine_at(0)
    request = PessimisticLock(
        mutations=[Mutation(Op.PESSIMISTIC_LOCK, b"p")],
        primary=b"p",
        start_ts=5,
        ttl_ms=1,
        for_update_ts=8,
    )
    run(engine, partial(pessimistic.pessimistic_lock, request=request))
    lost = run(engine, put(b"p", for_update_ts=9, actions=[1], locked_at={0: 7}))
    assert isinstance(lost, errors.PessimisticLockLostError)
    assert run(engine, put(b"p", for_update_ts=9, actions=[1], locked_at={0: 8})) == Prewritten()
