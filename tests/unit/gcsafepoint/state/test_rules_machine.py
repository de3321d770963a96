"""Both families of calls, both compatibilities, two keyspaces,
restarts with jumping clocks, against plain dicts.

The model finds minima by looking at everything. Beside it, `promised` keeps what each barrier was
promised in time that somebody led: whatever the clocks do, no txn safe point passes a barrier
before that is over.
"""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gcsafepoint.state.compat import ClassicCalls, Compat, Pd9Calls, ServiceUpdate, old_calls
from gcsafepoint.state.errors import SafePointRequestError
from gcsafepoint.state.records import (
    GcKeys,
    Outage,
    parse_global_barriers,
    parse_scope,
    write_operations,
)
from gcsafepoint.state.rules import GC_WORKER, NATIVE_BR, NEVER_S, ServiceSafePoint
from gcsafepoint.state.states import NULL_KEYSPACE, GcStates, Keyspace
from storage.meta.meta import KeyValue, Put

KEYS = GcKeys(b"/pd/7/gc/")
LEVEL = Keyspace(7, "seven", level_gc=True)
SCOPES = st.sampled_from([NULL_KEYSPACE, LEVEL.id])
IDS = st.sampled_from(["br", "ticdc-a", "ticdc-b", "zz"])
POINTS = st.integers(0, 40)
TTLS = st.sampled_from([1, 2, 5, NEVER_S])
REFUSED = "refused"
T = TypeVar("T")


@dataclass
class Model:
    """One keyspace; barriers as (timestamp, expired_at)."""

    barriers: dict[str, tuple[int, int]] = field(default_factory=dict)
    running: dict[str, int] = field(default_factory=dict)
    worker: int = 0
    recorded: bool = False
    txn: int = 0
    gc: int = 0


class GcMachine(RuleBasedStateMachine):
    @initialize(compat=st.sampled_from(Compat))
    def start(self, compat: Compat) -> None:
        self.old_calls = old_calls(compat)
        self.states = GcStates(
            keyspaces=[LEVEL], of_keyspaces={LEVEL.id: parse_scope([], KEYS.scope(7), Outage())}
        )
        self.models = {NULL_KEYSPACE: Model(), LEVEL.id: Model()}
        self.everywhere: dict[str, tuple[int, int]] = {}
        self.promised: dict[tuple[int | None, str], tuple[int, float]] = {}
        self.stored: dict[bytes, KeyValue] = {}
        self.revisions = itertools.count(1)
        self.reading: KeyValue | None = None
        self.now_s = 1_000_000.0
        self.led_s = 0.0
        self.highest: dict[int, tuple[int, int]] = {}

    # --- time

    @rule(seconds=st.integers(0, 4) | st.floats(0, 4, allow_nan=False))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.led_s += seconds

    @rule(jump_s=st.floats(-500, 500, allow_nan=False))
    def lead_again_with_another_clock(self, jump_s: float) -> None:
        self.now_s += jump_s
        outage = Outage.since(self.reading, self.now_s)
        pairs = list(self.stored.values())
        self.states = GcStates(
            parse_scope(pairs, KEYS.null, outage),
            parse_global_barriers(pairs, KEYS, outage),
            [LEVEL],
            {LEVEL.id: parse_scope(pairs, KEYS.scope(LEVEL.id), outage)},
        )
        self.states.mark_all()
        for barriers in (self.everywhere, *(model.barriers for model in self.models.values())):
            for barrier_id, (point, expired_at) in barriers.items():
                barriers[barrier_id] = (point, put_off(expired_at, outage.seconds))
        for scope, model in self.models.items():
            self.states.of_user(scope).min_start_ts = model.running

    # --- TiDB servers

    @rule(scope=SCOPES, owner=st.sampled_from(["tidb-1", "tidb-2"]), start_ts=st.none() | POINTS)
    def tidb_writes_its_oldest_transaction(
        self, scope: int, owner: str, start_ts: int | None
    ) -> None:
        running = self.models[scope].running
        running.pop(owner, None)
        if start_ts is not None:
            running[owner] = start_ts
        self.states.of_user(scope).min_start_ts = running

    # --- old calls

    @rule(
        scope=SCOPES,
        service_id=IDS | st.just(NATIVE_BR),
        ttl_s=TTLS | st.sampled_from([0, -3]),
        point=POINTS,
    )
    def update_service(self, scope: int, service_id: str, ttl_s: int, point: int) -> None:
        model = self.models[scope]
        everywhere = service_id == NATIVE_BR and scope == NULL_KEYSPACE
        floor = max(other.txn for other in self.models.values()) if everywhere else model.txn
        if isinstance(self.old_calls, ClassicCalls):
            self.drop(model)
            model.recorded = True
            floor = max(floor, min([model.worker, *self.needed(model)]))
        told = self.old_calls.update_service(
            self.states, ServiceUpdate(service_id, ttl_s, point, scope), self.now_s
        )
        barriers = self.everywhere if everywhere else model.barriers
        if ttl_s <= 0:
            self.forget(barriers, service_id, None if everywhere else scope)
        elif point >= floor:
            self.promise(barriers, service_id, None if everywhere else scope, point, ttl_s)
        else:
            assert told.safe_point > point
        if isinstance(self.old_calls, Pd9Calls):
            assert told == ServiceSafePoint(GC_WORKER, NEVER_S, floor)
        elif ttl_s <= 0 or point >= floor:
            assert told.safe_point == min([model.worker, *self.needed(model)])

    @rule(scope=SCOPES, point=POINTS)
    def update_gc_worker(self, scope: int, point: int) -> None:
        model = self.models[scope]
        if isinstance(self.old_calls, Pd9Calls):
            expected = self.advanced(model, point)
            told = self.answer(
                lambda: Pd9Calls().update_service(
                    self.states, ServiceUpdate(GC_WORKER, NEVER_S, point, scope), self.now_s
                )
            )
            assert expected == REFUSED == told or (
                isinstance(told, ServiceSafePoint) and told.safe_point == expected
            )
            return
        self.drop(model)
        model.recorded = True
        if point >= min([model.worker, *self.needed(model)]):
            model.worker = max(model.worker, point)
            model.txn = max(model.txn, min([model.worker, *self.needed(model), *running(model)]))
        told = ClassicCalls().update_service(
            self.states, ServiceUpdate(GC_WORKER, NEVER_S, point, scope), self.now_s
        )
        assert (
            told.safe_point == min([model.worker, *self.needed(model)])
            or told.safe_point == model.txn
        )
        assert told.safe_point >= model.txn

    @rule(scope=SCOPES, point=POINTS)
    def update_gc_safe_point(self, scope: int, point: int) -> None:
        model = self.models[scope]
        state = self.states.of_manager(scope)
        if isinstance(self.old_calls, Pd9Calls):
            told = self.answer(lambda: Pd9Calls().update_gc_safe_point(state, point, self.now_s))
            assert told == (REFUSED if point > model.txn else max(model.gc, point))
            model.gc = max(model.gc, point) if point <= model.txn else model.gc
            return
        self.drop(model)
        model.gc = max(model.gc, min([point, *self.needed(model), *running(model)]))
        model.txn = max(model.txn, model.gc)
        model.worker = max(model.worker, model.txn)
        assert ClassicCalls().update_gc_safe_point(state, point, self.now_s) == model.gc

    # --- newer calls

    @rule(scope=SCOPES, to=POINTS)
    def advance_txn_safe_point(self, scope: int, to: int) -> None:
        old = self.models[scope].txn
        expected = self.advanced(self.models[scope], to)
        told = self.answer(
            lambda: self.states.of_manager(scope).advance_txn_safe_point(to, self.now_s)
        )
        if isinstance(told, str):
            assert expected == REFUSED
        else:
            assert (told.old, told.new) == (old, expected)
            assert told.new == to or told.blocker is not None

    @rule(scope=SCOPES, to=POINTS)
    def advance_gc_safe_point(self, scope: int, to: int) -> None:
        model = self.models[scope]
        told = self.answer(lambda: self.states.of_manager(scope).advance_gc_safe_point(to))
        if model.gc <= to <= model.txn:
            assert told == model.gc
            model.gc = to
        else:
            assert told == REFUSED

    @rule(scope=SCOPES, barrier_id=IDS, point=POINTS, ttl_s=TTLS)
    def set_barrier(self, scope: int, barrier_id: str, point: int, ttl_s: int) -> None:
        model = self.models[scope]
        told = self.answer(
            lambda: self.states.of_user(scope).set_barrier(barrier_id, point, ttl_s, self.now_s)
        )
        assert (told == REFUSED) == (point < model.txn)
        if told != REFUSED:
            self.promise(model.barriers, barrier_id, scope, point, ttl_s)

    @rule(barrier_id=IDS, point=POINTS, ttl_s=TTLS)
    def set_global_barrier(self, barrier_id: str, point: int, ttl_s: int) -> None:
        told = self.answer(
            lambda: self.states.set_global_barrier(barrier_id, point, ttl_s, self.now_s)
        )
        assert (told == REFUSED) == (point < max(model.txn for model in self.models.values()))
        if told != REFUSED:
            self.promise(self.everywhere, barrier_id, None, point, ttl_s)

    @rule(scope=SCOPES, barrier_id=IDS)
    def delete_barrier(self, scope: int, barrier_id: str) -> None:
        had = barrier_id in self.models[scope].barriers
        assert (self.states.of_user(scope).delete_barrier(barrier_id) is not None) == had
        self.forget(self.models[scope].barriers, barrier_id, scope)

    @rule(barrier_id=IDS)
    @precondition(lambda self: self.everywhere)
    def delete_global_barrier(self, barrier_id: str) -> None:
        assert (self.states.delete_global_barrier(barrier_id) is not None) == (
            barrier_id in self.everywhere
        )
        self.forget(self.everywhere, barrier_id, None)

    # --- what always holds

    @invariant()
    def the_state_is_the_models(self) -> None:
        for scope, model in self.models.items():
            state = self.states.of_user(scope)
            assert {
                barrier.service_id: (barrier.safe_point, barrier.expired_at)
                for barrier in state.barriers
            } == (model.barriers)
            assert (state.txn_safe_point, state.gc_safe_point) == (model.txn, model.gc)
            assert state.gc_worker.safe_point == max(model.worker, model.txn)
            model.worker = max(model.worker, model.txn)
        found = {
            barrier.service_id: (barrier.safe_point, barrier.expired_at)
            for barrier in self.states.global_barriers
        }
        assert found == self.everywhere

    @invariant()
    def rule_1_nothing_passes_what_was_promised(self) -> None:
        for scope in self.models:
            state = self.states.of_user(scope)
            assert state.gc_safe_point <= state.txn_safe_point <= state.gc_worker.safe_point
            for (whose, _), (point, until_s) in self.promised.items():
                assert (
                    whose not in (None, scope)
                    or self.led_s > until_s
                    or state.txn_safe_point <= point
                )

    @invariant()
    def rule_2_nothing_goes_back(self) -> None:
        for scope in self.models:
            state = self.states.of_user(scope)
            now = (state.txn_safe_point, state.gc_safe_point)
            assert all(
                new >= old for new, old in zip(now, self.highest.get(scope, (0, 0)), strict=True)
            )
            self.highest[scope] = now

    @invariant()
    def what_changed_is_what_is_stored(self) -> None:
        ops = write_operations(self.states.take_changes(), KEYS)
        revision = next(self.revisions)
        points = {
            key
            for paths in map(KEYS.scope, self.models)
            for key in (paths.txn_safe_point, paths.gc_safe_point, paths.service(GC_WORKER))
        }
        for op in ops:
            before = self.stored.pop(op.key, None)
            if isinstance(op, Put):
                # What did not move is not written.
                assert op.key not in points or before is None or before.value != op.value
                self.stored[op.key] = KeyValue(op.key, op.value, revision, revision, 1)
        if ops:
            self.reading = KeyValue(KEYS.clock, b"%d" % int(self.now_s), 1, revision, 1)
        for scope, model in self.models.items():
            again = parse_scope(self.stored.values(), KEYS.scope(scope), Outage())
            assert again.has_gc_worker == model.recorded
            if model.recorded:
                record = json.loads(self.stored[KEYS.scope(scope).service(GC_WORKER)].value)
                assert record["safe_point"] == model.worker
            assert set(again.barriers) == set(self.states.of_user(scope).barriers)
            assert (again.txn_safe_point, again.gc_safe_point) == (model.txn, model.gc)

    # --- the model

    def needed(self, model: Model) -> list[int]:
        return [point for point, _ in (*model.barriers.values(), *self.everywhere.values())]

    def advanced(self, model: Model, target: int) -> int | str:
        if target < model.txn:
            return REFUSED
        self.drop(model)
        model.txn = max(model.txn, min([target, *self.needed(model), *running(model)]))
        return model.txn

    def drop(self, model: Model) -> None:
        for barriers in (model.barriers, self.everywhere):
            for barrier_id, (_, expired_at) in list(barriers.items()):
                if expired_at < self.now_s:
                    del barriers[barrier_id]

    def promise(
        self,
        barriers: dict[str, tuple[int, int]],
        barrier_id: str,
        scope: int | None,
        point: int,
        ttl_s: int,
    ) -> None:
        expired_at = NEVER_S if ttl_s == NEVER_S else math.ceil(self.now_s) + ttl_s
        barriers[barrier_id] = (point, expired_at)
        self.promised[(scope, barrier_id)] = (point, self.led_s + ttl_s)

    def forget(
        self, barriers: dict[str, tuple[int, int]], barrier_id: str, scope: int | None
    ) -> None:
        barriers.pop(barrier_id, None)
        self.promised.pop((scope, barrier_id), None)

    def answer(self, call: Callable[[], T]) -> T | str:
        try:
            return call()
        except SafePointRequestError:
            return REFUSED


def running(model: Model) -> list[int]:
    return [start_ts for start_ts in model.running.values() if start_ts]


def put_off(expired_at: int, seconds: int) -> int:
    return NEVER_S if expired_at == NEVER_S else max(1, expired_at + seconds)


TestGcMachine = GcMachine.TestCase
TestGcMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
