"""Durability and isolation of whole histories: crashes, concurrent transfers, lost updates."""

import random
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.kv import WriteBatch
from storage.model.errors import UnavailableError
from storage.mvcc import percolator
from storage.mvcc.engine import Command, Engine
from storage.mvcc.errors import KeyIsLockedError, MvccError
from storage.mvcc.prewrite import Mutation, Op, Prewrite, prewrite
from storage.mvcc.snapshot import Snapshot
from tests.memory_kv import MemoryKV

ACCOUNTS = [b"a", b"b", b"c", b"d"]


class ForgetfulKV(MemoryKV):
    """A store whose unsynced writes are lost by `crash`."""

    def __init__(self) -> None:
        super().__init__()
        self.synced = MemoryKV()
        self.fail_next = False

    def write(self, batch: WriteBatch, *, sync: bool) -> None:
        if self.fail_next:
            raise UnavailableError("the disk is full")
        super().write(batch, sync=sync)
        if sync:
            self.synced = MemoryKV(dict(self.scan(b"")))

    def crash(self) -> MemoryKV:
        return self.synced


class Transfer:
    """One optimistic transaction that moves money, a step at a time."""

    def __init__(self, start_ts: int, source: bytes, target: bytes) -> None:
        self.start_ts, self.keys = start_ts, [source, target]
        self.balances: list[int] = []
        self.state = "read"

    def next(self, kv: Any, clock: int) -> Command | None:
        """The next command; None when this step was a read."""
        if self.state == "read":
            try:
                self.balances = [
                    int(Snapshot(kv, self.start_ts).get(key) or b"0") for key in self.keys
                ]
            except KeyIsLockedError:
                self.state = "over"
            else:
                self.state = "prewrite"
            return None
        if self.state == "prewrite":
            amounts = self.balances[0] - 1, self.balances[1] + 1
            mutations = [
                Mutation(Op.PUT, key, b"%d" % n) for key, n in zip(self.keys, amounts, strict=True)
            ]
            txn = Prewrite(
                mutations=mutations, primary=self.keys[0], start_ts=self.start_ts, ttl_ms=1
            )
            return partial(prewrite, txn=txn)
        if self.state == "rollback":
            return partial(percolator.rollback, keys=self.keys, start_ts=self.start_ts)
        return partial(percolator.commit, keys=self.keys, start_ts=self.start_ts, commit_ts=clock)

    def done(self, result: Any) -> None:
        failed = isinstance(result, MvccError)
        after = {
            "prewrite": "rollback" if failed else "commit",
            "commit": "committed",
            "rollback": "over",
        }
        assert not failed or self.state == "prewrite", result
        self.state = after[self.state]


def opened_bank() -> tuple[Engine, ForgetfulKV]:
    kv = ForgetfulKV()
    engine = Engine(kv)
    mutations = [Mutation(Op.PUT, key, b"100") for key in ACCOUNTS]
    txn = Prewrite(mutations=mutations, primary=ACCOUNTS[0], start_ts=1, ttl_ms=1)
    engine.apply([partial(prewrite, txn=txn)])
    engine.apply([partial(percolator.commit, keys=ACCOUNTS, start_ts=1, commit_ts=2)])
    return engine, kv


def play(engine: Engine, rng: random.Random, steps: int) -> tuple[list[Transfer], int]:
    """Transfers in random interleaving, random group sizes."""
    clock, alive, everything = 10, list[Transfer](), list[Transfer]()
    for _ in range(steps):
        group: list[tuple[Transfer, Command]] = []
        for _ in range(rng.randint(1, 4)):
            clock += 1
            if len(alive) < 5:
                alive.append(Transfer(clock, *rng.sample(ACCOUNTS, 2)))
                everything.append(alive[-1])
                continue
            busy = [member for member, _ in group]
            idle = [txn for txn in alive if txn not in busy and txn.state != "over"]
            if not idle:
                continue
            txn = rng.choice(idle)
            command = txn.next(engine.kv, clock)
            if command is not None:
                group.append((txn, command))
        for (txn, _), result in zip(
            group, engine.apply([command for _, command in group]).results, strict=True
        ):
            txn.done(result)
        alive = [txn for txn in alive if txn.state not in ("over", "committed")]
    return everything, clock


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 120))
def test_the_bank_never_loses_money_nor_an_update(seed: int, steps: int) -> None:
    engine, kv = opened_bank()
    transfers, clock = play(engine, random.Random(seed), steps)
    for ts in range(2, clock + 1):
        snapshot = Snapshot(kv, ts, ignore_locks=True)
        assert sum(int(snapshot.get(key) or b"0") for key in ACCOUNTS) == 400
    committed = [txn for txn in transfers if txn.state == "committed"]
    final = Snapshot(kv, clock + 1, ignore_locks=True)
    for key in ACCOUNTS:
        moved = sum(txn.keys[1] == key for txn in committed) - sum(
            txn.keys[0] == key for txn in committed
        )
        assert int(final.get(key) or b"") == 100 + moved, "an update was lost"


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 60))
def test_a_crash_keeps_whatever_was_answered(seed: int, steps: int) -> None:
    engine, kv = opened_bank()
    play(engine, random.Random(seed), steps)
    assert dict(kv.crash().scan(b"")) == dict(kv.scan(b""))


def test_a_failing_disk_answers_nobody() -> None:
    engine, kv = opened_bank()
    kv.fail_next = True
    command = partial(percolator.rollback, keys=[b"a"], start_ts=5)
    with pytest.raises(UnavailableError):
        engine.apply([command])
