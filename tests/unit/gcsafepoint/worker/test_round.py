"""The state machine of rounds, driven at random against a plain list of phases."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gcsafepoint.worker.round import GCRunningError, Phase, Result, Rounds


class RoundsMachine(RuleBasedStateMachine):
    """`phases` is what each running round must be in."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds = Rounds()
        self.phases: dict[int, Phase] = {}
        self.now_ms = 0
        self.newest_in_do_gc = 0

    @rule()
    def admit(self) -> None:
        self.now_ms += 1
        early = any(phase < Phase.DO_GC for phase in self.phases.values())
        if early:
            with pytest.raises(GCRunningError, match="there's already a gc job running, skipped"):
                self.rounds.admit(self.now_ms, self.now_ms)
        else:
            self.phases[self.rounds.admit(self.now_ms, self.now_ms).id] = Phase.PREPARE

    @precondition(lambda self: any(phase < Phase.DO_GC for phase in self.phases.values()))
    @rule()
    def go_on(self) -> None:
        number = next(number for number, phase in self.phases.items() if phase < Phase.DO_GC)
        self.phases[number] = Phase(self.phases[number] + 1)
        self.now_ms += 5
        self.rounds.enter(number, self.phases[number], self.now_ms)
        if self.phases[number] is Phase.DO_GC:
            self.newest_in_do_gc = number

    @precondition(lambda self: self.phases)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.phases)))
        del self.phases[number]
        ended = self.rounds.end(number, Result.DONE, self.now_ms)
        assert ended.phase is Phase.ENDED
        assert self.rounds.last == ended

    @precondition(lambda self: self.phases)
    @rule(data=st.data(), locks=st.integers(0, 9))
    def count(self, data: st.DataObject, locks: int) -> None:
        self.rounds.count(data.draw(st.sampled_from(sorted(self.phases))), resolved_locks=locks)

    @invariant()
    def at_most_one_is_before_do_gc(self) -> None:
        assert sum(phase < Phase.DO_GC for phase in self.phases.values()) <= 1

    @invariant()
    def the_newest_is_shown(self) -> None:
        newest = self.rounds.newest
        assert (newest.id if newest and self.phases else None) == max(self.phases, default=None)

    @invariant()
    def do_gc_gives_way_to_a_newer_one(self) -> None:
        for number in self.phases:
            assert self.rounds.superseded(number) == (self.newest_in_do_gc > number)


TestRounds = RoundsMachine.TestCase


def test_no_phase_can_be_left_out() -> None:
    rounds = Rounds()
    number = rounds.admit(1, 1).id
    with pytest.raises(AssertionError, match="from prepare to delete ranges"):
        rounds.enter(number, Phase.DELETE_RANGES, 2)


def test_the_safepoint_is_set_before_the_first_phase_on_data() -> None:
    rounds = Rounds()
    number = rounds.admit(1, 1).id
    rounds.set_safe_point(number, 7)
    rounds.enter(number, Phase.RESOLVE_LOCKS, 2)
    assert rounds.newest is not None
    assert rounds.newest.safe_point == 7
    with pytest.raises(AssertionError):
        rounds.set_safe_point(number, 8)


def test_a_phase_knows_how_long_the_others_took_and_how_long_it_will_still_take() -> None:
    rounds = Rounds("me")
    number = rounds.admit(1000, 1000).id
    rounds.enter(number, Phase.RESOLVE_LOCKS, 1010)
    rounds.set_total(number, 8)
    assert rounds[number].eta_ms(1500) is None
    rounds.count(number, regions=2, resolved_locks=7)
    assert rounds[number].eta_ms(1110) == 300
    rounds.enter(number, Phase.DELETE_RANGES, 1410)
    ended = rounds.end(number, Result.FAILED, 1420, "the store is away")
    assert ended.phase_ms == {"prepare": 10, "resolve locks": 400, "delete ranges": 10}
    assert (ended.worker, ended.started_ms, ended.ended_ms, ended.error) == (
        "me",
        1000,
        1420,
        "the store is away",
    )
    assert ended.eta_ms(2000) is None
