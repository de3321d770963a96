"""Clients, resolvers and readers take turns at random: one outcome a transaction,
reads that never change.

Every client may stop anywhere; resolvers do what ours does (`server.rpc.lock_resolver`), on the
pure decisions.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from storage.codec import encode_bytes
from storage.mvcc import percolator
from storage.mvcc.engine import Command, Draft, Engine
from storage.mvcc.errors import KeyIsLockedError, MvccError
from storage.mvcc.percolator import StatusCheck
from storage.mvcc.prewrite import Mutation, Op, Prewrite, Prewritten, prewrite
from storage.mvcc.read_fence import Touch
from storage.mvcc.record import ROLLBACK
from storage.mvcc.snapshot import Snapshot
from tests.memory_kv import MemoryKV

KEYS = [b"a", b"b", b"c"]
PICK = st.integers(0, 99)
NEVER = 1 << 60


@dataclass
class Txn:
    """What a client knows of its transaction; `acked` is the commit_ts its user was told."""

    start_ts: int
    keys: list[bytes]
    kind: str
    answers: list[Prewritten] = field(default_factory=list)
    requests: list[Prewrite] = field(default_factory=list)
    failed: bool = False
    rolled_back: bool = False
    acked: int = 0
    decided: set[int] = field(default_factory=set)

    @property
    def is_prewritten(self) -> bool:
        return not self.failed and len(self.answers) == (
            1 if self.kind == "1pc" else len(self.keys)
        )

    @property
    def computed(self) -> int:
        """The commit_ts of an async commit that did not fall back."""
        stamps = [answer.min_commit_ts for answer in self.answers]
        return max(stamps) if self.kind == "async" and all(stamps) else 0


class Percolator(RuleBasedStateMachine):
    """One store, one oracle."""

    @initialize()
    def start(self) -> None:
        self.engine = Engine(MemoryKV())
        self.clock = 0
        self.txns: list[Txn] = []
        self.reads: dict[tuple[bytes, int], bytes | None] = {}

    def tso(self) -> int:
        self.clock += 1
        return self.clock

    def run_command(self, command: Command) -> Any:
        (result,) = self.engine.apply([command]).results
        self.engine.fence.release()
        return result

    def pick(self, number: int) -> Txn | None:
        return self.txns[number % len(self.txns)] if self.txns else None

    @rule(
        keys=st.sets(st.sampled_from(KEYS), min_size=1),
        kind=st.sampled_from(["2pc", "async", "1pc"]),
    )
    def begin(self, keys: set[bytes], kind: str) -> None:
        self.txns.append(Txn(self.tso(), sorted(keys), kind))

    @rule(number=PICK, short_of_time=st.booleans())
    def prewrite_more(self, number: int, short_of_time: bool) -> None:
        txn = self.pick(number)
        if txn is None or txn.is_prewritten or txn.failed:
            return
        keys = txn.keys if txn.kind == "1pc" else [txn.keys[len(txn.answers)]]
        request = Prewrite(
            mutations=[Mutation(Op.PUT, key, b"%d" % txn.start_ts) for key in keys],
            primary=txn.keys[0],
            start_ts=txn.start_ts,
            ttl_ms=0,
            min_commit_ts=txn.start_ts + 1,
            async_commit=txn.kind == "async",
            one_pc=txn.kind == "1pc",
            secondaries=txn.keys[1:],
            max_commit_ts=txn.start_ts + 3 if short_of_time else 0,
        )
        txn.requests.append(request)
        answer = self.run_command(partial(prewrite, txn=request))
        if isinstance(answer, MvccError):
            txn.failed = True
            return
        txn.answers.append(answer)
        if txn.is_prewritten:
            txn.acked = answer.one_pc_commit_ts or txn.computed

    @rule(number=PICK, part=PICK)
    def repeat_a_prewrite(self, number: int, part: int) -> None:
        """A copy of a request comes late: it tells what the first one told, and revives nothing."""
        txn = self.pick(number)
        if txn is None or not txn.requests:
            return
        part %= len(txn.requests)
        answer = self.run_command(partial(prewrite, txn=txn.requests[part]))
        if part == len(txn.answers) or isinstance(answer, MvccError):
            return  # the first one failed, or the transaction was rolled back meanwhile
        known = txn.answers[part]
        committed = {Prewritten(txn.acked), Prewritten(0, txn.acked)}
        assert answer == known or answer in committed, "a repeated prewrite tells something else"

    @rule(number=PICK, part=PICK)
    def commit(self, number: int, part: int) -> None:
        """The primary first; the secondaries once that one is committed."""
        txn = self.pick(number)
        if txn is None or not txn.is_prewritten:
            return
        commit_ts = txn.acked or self.tso()
        key = txn.keys[part % len(txn.keys)] if txn.acked else txn.keys[0]
        done = self.run_command(
            partial(percolator.commit, keys=[key], start_ts=txn.start_ts, commit_ts=commit_ts)
        )
        if isinstance(done, MvccError):
            assert not txn.acked, f"what was acked cannot be committed: {done}"
        elif not txn.acked:
            recorded = percolator.outcome(Draft(self.engine.kv), encode_bytes(key), txn.start_ts)
            assert recorded is not None
            txn.acked = recorded[1]

    @rule(number=PICK)
    def roll_back(self, number: int) -> None:
        """A client gives up what it did not get through."""
        txn = self.pick(number)
        if txn is not None and txn.failed:
            done = self.run_command(
                partial(percolator.rollback, keys=txn.keys, start_ts=txn.start_ts)
            )
            txn.rolled_back = not isinstance(done, MvccError)

    @rule(number=PICK)
    def resolve(self, number: int) -> None:
        """Somebody takes the client for dead."""
        txn = self.pick(number)
        if txn is None:
            return
        check = StatusCheck(
            primary=txn.keys[0],
            start_ts=txn.start_ts,
            caller_start_ts=0,
            current_ts=NEVER,
            rollback_if_not_exist=True,
        )
        found = self.run_command(partial(percolator.check_txn_status, check=check))
        commit_ts = found.commit_ts
        if found.lock is not None:
            asked = partial(
                percolator.check_secondaries, keys=found.lock.secondaries, start_ts=txn.start_ts
            )
            secondaries = self.run_command(asked)
            locks = [found.lock, *(lock for _, lock in secondaries.locks)]
            if len(locks) <= len(found.lock.secondaries):
                commit_ts = secondaries.commit_ts
            elif all(lock.async_commit for lock in locks):
                commit_ts = max(lock.min_commit_ts for lock in locks)
            else:
                forced = partial(
                    percolator.check_txn_status, check=replace(check, force_sync_commit=True)
                )
                commit_ts = self.run_command(forced).commit_ts
        txn.decided.add(commit_ts)
        outcomes = {txn.start_ts: commit_ts}
        self.run_command(partial(percolator.resolve_range, lower=b"", upper=b"", outcomes=outcomes))

    @rule(number=PICK, ahead=st.integers(0, 3))
    def push(self, number: int, ahead: int) -> None:
        """A reader wants to pass."""
        txn = self.pick(number)
        if txn is None:
            return
        check = StatusCheck(
            primary=txn.keys[0], start_ts=txn.start_ts, caller_start_ts=self.clock, current_ts=0
        )
        self.run_command(partial(percolator.check_txn_status, check=check))
        self.clock += ahead

    @rule(key=st.sampled_from(KEYS), back=st.integers(0, 5))
    def read(self, key: bytes, back: int) -> None:
        ts = max(1, self.tso() - back)
        self.engine.fence.enter([Touch(ts, [key])])
        try:
            self.reads.setdefault((key, ts), Snapshot(self.engine.kv, ts).get(key))
        except KeyIsLockedError:
            """The reader would resolve it first."""

    @invariant()
    def reads_never_change(self) -> None:
        for (key, ts), value in getattr(self, "reads", {}).items():
            lock = Draft(self.engine.kv).lock(encode_bytes(key))
            in_the_way = lock is not None and lock.start_ts <= ts and lock.min_commit_ts <= ts
            assert not in_the_way or (lock is not None and not lock.async_commit), (
                "an async commit below a read"
            )
            if not in_the_way:
                assert Snapshot(self.engine.kv, ts).get(key) == value, (key, ts)

    @invariant()
    def a_transaction_has_one_outcome(self) -> None:
        for txn in getattr(self, "txns", []):
            recorded = [
                percolator.outcome(Draft(self.engine.kv), encode_bytes(key), txn.start_ts)
                for key in txn.keys
            ]
            commits = {found[1] for found in recorded if found is not None and found[0] != ROLLBACK}
            rollbacks = any(found is not None and found[0] == ROLLBACK for found in recorded)
            if txn.rolled_back:
                locks = [Draft(self.engine.kv).lock(encode_bytes(key)) for key in txn.keys]
                assert all(lock is None or lock.start_ts != txn.start_ts for lock in locks), (
                    "revived"
                )
            assert len(commits) <= 1, "two commit timestamps"
            assert not (commits and rollbacks), "torn"
            assert len(txn.decided) <= 1, "resolvers disagree"
            assert not txn.acked or not rollbacks, "acknowledged, then rolled back"
            assert not txn.acked or commits <= {txn.acked}, (
                "committed at another timestamp than was told"
            )
            assert not txn.acked or txn.decided <= {txn.acked}, "resolved otherwise than was told"


TestPercolator = Percolator.TestCase
TestPercolator.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
