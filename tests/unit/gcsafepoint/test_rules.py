"""The safepoint rules by number (gcsafepoint/rules.py), against a model that keeps all services in one plain dict."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gcsafepoint.rules import GC_WORKER, NEVER_S, SafePointRequestError, SafePoints, ServiceSafePoint

SERVICES = st.sampled_from(["br", "ticdc-default-a", "ticdc-default-b", "zz"])
POINTS = st.integers(0, 40)
TTLS = st.sampled_from([-1, 0, 1, 5, NEVER_S])


class SafePointMachine(RuleBasedStateMachine):
    """`live` is what services were promised: until when, and from which timestamp their history stays."""

    @initialize()
    def start(self) -> None:
        self.points = SafePoints()
        self.live: dict[str, ServiceSafePoint] = {}
        self.now_s = 1000
        self.gc_worker = 0
        self.highest = (0, 0, 0)

    @rule(seconds=st.integers(0, 7))
    def pass_time(self, seconds: int) -> None:
        self.now_s += seconds

    @rule(service_id=SERVICES, ttl_s=TTLS, safe_point=POINTS)
    def update_service(self, service_id: str, ttl_s: int, safe_point: int) -> None:
        self.forget_expired()
        least = min([self.gc_worker, *(service.safe_point for service in self.live.values())])
        if ttl_s <= 0:
            self.live.pop(service_id, None)
        elif safe_point >= least:
            expired_at = min(NEVER_S, self.now_s + ttl_s)
            self.live[service_id] = ServiceSafePoint(service_id, expired_at, safe_point)
        answer = self.points.update_service(service_id, ttl_s, safe_point, self.now_s)
        assert answer == self.expected_minimum()
        if ttl_s > 0 and answer.safe_point > safe_point:
            assert self.points.services.get(service_id) == self.live.get(service_id)
        self.highest = (self.highest[0], self.highest[1], max(self.highest[2], answer.safe_point))

    @rule(safe_point=POINTS)
    def update_gc_worker(self, safe_point: int) -> None:
        self.forget_expired()
        least = min([self.gc_worker, *(service.safe_point for service in self.live.values())])
        if safe_point >= least:
            self.gc_worker = max(safe_point, self.points.txn_safe_point)
        assert self.points.update_service(GC_WORKER, NEVER_S, safe_point, self.now_s) == self.expected_minimum()

    @rule(safe_point=POINTS)
    def update_gc_safe_point(self, safe_point: int) -> None:
        self.forget_expired()
        before = self.points.gc_safe_point
        held = self.points.update_gc_safe_point(safe_point, self.now_s)
        assert held == self.points.gc_safe_point
        assert before <= held <= max(before, safe_point)
        self.gc_worker = max(self.gc_worker, self.points.txn_safe_point)

    @invariant()
    def rule_1_nothing_a_live_service_needs_is_collected(self) -> None:
        points = self.points
        assert points.gc_safe_point <= points.txn_safe_point <= points.gc_worker.safe_point
        for service in self.live.values():
            assert service.expired_at < self.now_s or points.txn_safe_point <= service.safe_point

    @invariant()
    def rule_2_nothing_goes_back(self) -> None:
        now = (self.points.gc_safe_point, self.points.txn_safe_point, self.points.minimum().safe_point)
        assert all(new >= old for new, old in zip(now, self.highest, strict=True))
        self.highest = now

    @invariant()
    def the_changes_make_a_copy_whole(self) -> None:
        if not hasattr(self, "copy"):
            self.copy: dict[str, ServiceSafePoint] = {}
            self.numbers = [0, 0]
        changes = self.points.take_changes()
        for service_id, service in changes.services.items():
            self.copy.pop(service_id, None)
            if service is not None:
                self.copy[service_id] = service
        for at, number in enumerate((changes.txn_safe_point, changes.gc_safe_point)):
            self.numbers[at] = self.numbers[at] if number is None else number
        again = SafePoints(self.copy.values(), *self.numbers)
        assert again.minimum() == self.points.minimum()
        assert again.services == self.points.services
        assert (again.txn_safe_point, again.gc_safe_point) == (
            self.points.txn_safe_point,
            self.points.gc_safe_point,
        )
        assert again.gc_worker == self.points.gc_worker

    def forget_expired(self) -> None:
        self.live = {name: service for name, service in self.live.items() if service.expired_at >= self.now_s}

    def expected_minimum(self) -> ServiceSafePoint:
        worker = ServiceSafePoint(GC_WORKER, NEVER_S, self.gc_worker)
        return min([worker, *self.live.values()], key=lambda service: (service.safe_point, service.service_id))


TestSafePointMachine = SafePointMachine.TestCase
TestSafePointMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_rule_3_the_first_service_is_answered_gc_worker_at_0() -> None:
    points = SafePoints()
    assert points.update_service("ticdc-a", 60, 100, 1000) == ServiceSafePoint(GC_WORKER, NEVER_S, 0)
    assert points.services["ticdc-a"] == ServiceSafePoint("ticdc-a", 1060, 100)


def test_rule_3_below_the_minimum_nothing_is_stored_and_the_answer_says_so() -> None:
    points = SafePoints([ServiceSafePoint("a", 2000, 50)], txn_safe_point=50)
    points.update_service(GC_WORKER, NEVER_S, 80, 1000)
    assert points.update_service("late", 60, 20, 1000).safe_point == 50
    assert points.update_service("a", 60, 30, 1000) == ServiceSafePoint("a", 2000, 50)
    assert "late" not in points.services


def test_rule_3_the_minimum_itself_is_accepted() -> None:
    points = SafePoints([ServiceSafePoint("a", 2000, 50), ServiceSafePoint(GC_WORKER, NEVER_S, 80)])
    points.update_service("b", 60, 50, 1000)
    assert points.services["b"].safe_point == 50


def test_rule_4_a_service_blocks_through_the_last_second_of_its_ttl() -> None:
    points = SafePoints([ServiceSafePoint("a", 1010, 50), ServiceSafePoint(GC_WORKER, NEVER_S, 80)])
    assert points.update_service("b", 60, 90, 1010).service_id == "a"
    assert points.update_service("b", 60, 90, 1011).service_id == GC_WORKER


def test_rule_4_a_huge_ttl_never_ends() -> None:
    points = SafePoints()
    points.update_service("a", NEVER_S, 5, 1000)
    points.update_service("b", NEVER_S - 1, 5, 1000)
    assert {service.expired_at for service in points.services.values()} == {NEVER_S}


def test_rule_4_a_ttl_of_0_removes_even_what_is_not_there() -> None:
    points = SafePoints([ServiceSafePoint("a", 2000, 50)])
    points.update_service("a", 0, 0, 1000)
    points.update_service("unknown", -5, 0, 1000)
    assert not points.services


@pytest.mark.parametrize(
    ("service_id", "ttl_s", "text"),
    [
        ("", 60, r"\[PD:common:ErrInvalidArgument\]invalid argument for barrierID: "),
        (GC_WORKER, 60, "TTL of gc_worker's service safe point must be infinity"),
        (GC_WORKER, 0, "cannot remove service safe point of gc_worker"),
    ],
)
def test_rule_5_what_cannot_be_is_refused_in_pds_words(service_id: str, ttl_s: int, text: str) -> None:
    with pytest.raises(SafePointRequestError, match=text):
        SafePoints().update_service(service_id, ttl_s, 10, 1000)


def test_rule_5_gc_worker_moves_the_txn_safe_point_up_to_the_lowest_service() -> None:
    points = SafePoints([ServiceSafePoint("b", 2000, 50)])
    assert points.update_service(GC_WORKER, NEVER_S, 80, 1000).service_id == "b"
    assert points.txn_safe_point == 50


def test_rule_6_the_gc_safe_point_stops_at_the_lowest_service() -> None:
    points = SafePoints([ServiceSafePoint("b", 2000, 50)])
    assert points.update_gc_safe_point(1000, 1000) == 50
    assert points.update_gc_safe_point(0, 1000) == 50
    assert (points.txn_safe_point, points.gc_worker.safe_point) == (50, 50)


def test_ten_thousand_renewals_of_one_service_leave_no_garbage() -> None:
    points = SafePoints()
    for number in range(10_000):
        points.update_service("a", 60, number, 1000)
    assert len(points._by_safe_point) < 200
