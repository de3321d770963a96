"""GC: what a snapshot at or after the safepoint reads never changes,
and what nobody can read goes.
"""

from functools import partial
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from storage.codec import encode_bytes
from storage.kv import WriteBatch
from storage.mvcc import gc, percolator
from storage.mvcc.engine import Command, Engine, Versions
from storage.mvcc.gc import RangeGC, VersionCounts
from storage.mvcc.prewrite import Mutation, Op, Prewrite, prewrite
from storage.mvcc.record import PUT
from storage.mvcc.snapshot import Snapshot, key_history
from tests.memory_kv import MemoryKV
from tests.unit.storage.mvcc.histories import TXNS, History, played

KEYS = (b"a", b"ab", b"abcdefgh", b"b")


def delete(kv: MemoryKV, keys: list[bytes]) -> None:
    batch = WriteBatch()
    for key in keys:
        batch.delete(key)
    kv.write(batch, sync=True)


def collect(kv: MemoryKV, safe_point: int, most_batches: int = 1 << 30) -> RangeGC:
    """GC of everything; `most_batches`: killed after so many."""
    work = RangeGC(kv.snapshot(), b"", b"", safe_point)
    for keys in list(work.batches())[:most_batches]:
        delete(kv, keys)
    return work


def recounted(kv: MemoryKV) -> VersionCounts:
    counts = VersionCounts()
    for key in (*KEYS, b"", b"abcdefghi"):
        writes = list(Versions(kv).writes(encode_bytes(key)))
        counts.rows += bool(writes)
        for commit_ts, write in writes:
            counts.add(write.kind, commit_ts)
    return counts


@given(TXNS.map(played), st.lists(st.integers(0, 160), min_size=1, max_size=3))
def test_reads_at_or_after_the_safepoint_stay_as_they_were(
    history: History, safe_points: list[int]
) -> None:
    kv = history.engine.kv
    assert isinstance(kv, MemoryKV)
    for safe_point in safe_points:
        collect(kv, safe_point)
    for ts in range(max(safe_points), history.end_ts + 10):
        snapshot = Snapshot(kv, ts, ignore_locks=True)
        for key in history.versions:
            assert snapshot.get(key) == history.value(key, ts)


@given(TXNS.map(played), st.integers(0, 160))
def test_one_version_at_most_is_left_before_the_safepoint(
    history: History, safe_point: int
) -> None:
    kv = history.engine.kv
    assert isinstance(kv, MemoryKV)
    assert collect(kv, safe_point).left == recounted(kv)
    for key in history.versions:
        state = key_history(kv, key)
        old = [write for commit_ts, write in state.writes if commit_ts <= safe_point]
        assert len(old) == (history.value(key, safe_point) is not None)
        kept = {write.start_ts for _, write in state.writes} | (
            {state.lock.start_ts} if state.lock else set()
        )
        assert {start_ts for start_ts, _ in state.values} <= kept


def test_a_key_with_many_versions_goes_in_small_batches_and_what_hid_them_goes_last() -> None:
    kv, engine = MemoryKV(), None
    engine = Engine(kv)
    for number in range(2000):
        op = Op.DELETE if number == 1999 else Op.PUT
        txn = Prewrite(
            mutations=[Mutation(op, b"k", b"v" * 300)],
            primary=b"k",
            start_ts=10 * number + 1,
            ttl_ms=1,
        )
        engine.apply([partial(prewrite, txn=txn)])
        engine.apply(
            [
                partial(
                    percolator.commit,
                    keys=[b"k"],
                    start_ts=txn.start_ts,
                    commit_ts=txn.start_ts + 1,
                )
            ]
        )
    batches = list(RangeGC(kv.snapshot(), b"", b"", 1 << 60).batches())
    assert len(batches) > 1
    assert max(sum(map(len, batch)) for batch in batches) < 2 * gc.BATCH_BYTES
    for batch in batches:
        assert Snapshot(kv, 1 << 60).get(b"k") is None
        delete(kv, batch)
    assert not list(kv.scan(b""))


class GcMachine(RuleBasedStateMachine):
    """A store with transactions in every state, collected at any time,
    cut off in the middle or not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kv = MemoryKV()
        self.engine = Engine(self.kv)
        self.clock = 0
        self.safe_point = 0
        self.open: dict[bytes, tuple[int, int, bytes]] = {}
        self.model: dict[bytes, list[tuple[int, bytes | None]]] = {key: [] for key in KEYS}

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def apply(self, command: Command) -> Any:
        (result,) = self.engine.apply([command]).results
        self.engine.fence.release()
        assert not isinstance(result, Exception), result
        return result

    @rule(
        key=st.sampled_from(KEYS),
        op=st.sampled_from([Op.PUT, Op.DELETE, Op.LOCK]),
        long=st.booleans(),
    )
    def prewrite(self, key: bytes, op: Op, long: bool) -> None:
        if key in self.open:
            return
        start_ts = self.tick()
        value = b"%d" % start_ts * (200 if long else 1) if op == Op.PUT else b""
        self.open[key] = (start_ts, op, value)
        txn = Prewrite(
            mutations=[Mutation(op, key, value)], primary=key, start_ts=start_ts, ttl_ms=1
        )
        self.apply(partial(prewrite, txn=txn))

    @rule(key=st.sampled_from(KEYS), op=st.sampled_from([Op.PUT, Op.DELETE]))
    def commit_at_once(self, key: bytes, op: Op) -> None:
        """1PC: its commit_ts may be the start_ts of the next transaction,
        whose rollback then shares its record.
        """
        if key in self.open:
            return
        start_ts = self.tick()
        txn = Prewrite(
            mutations=[Mutation(op, key, b"1pc")],
            primary=key,
            start_ts=start_ts,
            ttl_ms=1,
            one_pc=True,
        )
        commit_ts = self.apply(partial(prewrite, txn=txn)).one_pc_commit_ts
        assert commit_ts > start_ts
        self.model[key].append((commit_ts, b"1pc" if op == Op.PUT else None))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), rolled_back=st.booleans())
    def end(self, data: st.DataObject, rolled_back: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.open)))
        start_ts, op, value = self.open.pop(key)
        if rolled_back:
            self.apply(partial(percolator.rollback, keys=[key], start_ts=start_ts))
            return
        commit_ts = self.tick()
        self.apply(partial(percolator.commit, keys=[key], start_ts=start_ts, commit_ts=commit_ts))
        if op != Op.LOCK:
            self.model[key].append((commit_ts, value if op == Op.PUT else None))

    @rule(data=st.data(), most_batches=st.sampled_from([0, 1, 1 << 30]))
    def gc(self, data: st.DataObject, most_batches: int) -> None:
        self.safe_point = data.draw(st.integers(self.safe_point, self.clock))
        small, gc.BATCH_BYTES = gc.BATCH_BYTES, 40
        try:
            work = collect(self.kv, self.safe_point, most_batches)
        finally:
            gc.BATCH_BYTES = small
        if most_batches > 1:
            assert work.left == recounted(self.kv)

    @invariant()
    def every_read_from_the_safepoint_on_is_what_it_was(self) -> None:
        for ts in range(self.safe_point, self.clock + 2):
            snapshot = Snapshot(self.kv, ts, ignore_locks=True)
            for key, versions in self.model.items():
                seen = [value for commit_ts, value in versions if commit_ts <= ts]
                assert snapshot.get(key) == (seen[-1] if seen else None), (key, ts)

    @invariant()
    def every_lock_is_untouched(self) -> None:
        for key in KEYS:
            lock = Versions(self.kv).lock(encode_bytes(key))
            assert (lock.start_ts if lock else None) == (
                self.open[key][0] if key in self.open else None
            )
            if lock is not None and lock.kind == PUT:
                assert Versions(self.kv).written_value(encode_bytes(key), lock) == self.open[key][2]


TestGcMachine = GcMachine.TestCase
TestGcMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
