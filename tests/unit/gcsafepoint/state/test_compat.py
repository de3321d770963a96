"""The old calls in their classic meaning, rules 8 to 11 (gcsafepoint/state/compat.py),
case by case.
"""

import pytest

from gcsafepoint.state.compat import ClassicCalls, Compat, Pd9Calls, ServiceUpdate, old_calls
from gcsafepoint.state.errors import SafePointRequestError
from gcsafepoint.state.rules import GC_WORKER, NATIVE_BR, NEVER_S, GcState, ServiceSafePoint
from gcsafepoint.state.states import GcStates

NOW_S = 1000


def service(service_id: str, safe_point: int, expired_at: int = 2000) -> ServiceSafePoint:
    return ServiceSafePoint(service_id, expired_at, safe_point)


def states_of(*services: ServiceSafePoint, txn_safe_point: int = 0) -> GcStates:
    return GcStates(GcState(services, txn_safe_point))


def update(
    states: GcStates, service_id: str, ttl_s: int, safe_point: int, now_s: float = NOW_S
) -> ServiceSafePoint:
    return ClassicCalls().update_service(
        states, ServiceUpdate(service_id, ttl_s, safe_point), now_s
    )


def test_rule_8_the_first_service_is_answered_gc_worker_at_0() -> None:
    states = states_of()
    assert update(states, "ticdc-a", 60, 100) == ServiceSafePoint(GC_WORKER, NEVER_S, 0)
    assert states.null.barriers.get("ticdc-a") == service("ticdc-a", 100, 1060)


def test_rule_8_below_the_minimum_nothing_is_stored_and_the_answer_says_so() -> None:
    states = states_of(service("a", 50), txn_safe_point=50)
    update(states, GC_WORKER, NEVER_S, 80)
    assert update(states, "late", 60, 20).safe_point == 50
    assert update(states, "a", 60, 30) == service("a", 50)
    assert states.null.barriers.get("late") is None


def test_rule_8_the_minimum_itself_is_accepted() -> None:
    states = states_of(service("a", 50), service(GC_WORKER, 80, NEVER_S))
    update(states, "b", 60, 50)
    assert states.null.barriers.get("b") == service("b", 50, 1060)


def test_rule_8_global_barriers_are_peers() -> None:
    states = states_of(service("a", 50), service(GC_WORKER, 80, NEVER_S))
    states.set_global_barrier("backup", 40, 60, NOW_S)
    assert update(states, "b", 60, 45) == service("backup", 40, 1060)
    assert update(states, "c", 60, 39) == service("backup", 40, 1060)
    assert states.null.barriers.get("c") is None


def test_rule_8_native_br_holds_every_keyspace_back() -> None:
    states = states_of(service(GC_WORKER, 30, NEVER_S))
    assert update(states, NATIVE_BR, 60, 40).service_id == GC_WORKER
    assert states.global_barriers.get(NATIVE_BR) == service(NATIVE_BR, 40, 1060)
    assert update(states, NATIVE_BR, 60, 20).safe_point == 30
    update(states, NATIVE_BR, 0, 0)
    assert not len(states.global_barriers)


@pytest.mark.parametrize("safe_point", [20, 30])
def test_rule_8_what_an_operator_left_below_the_txn_safe_point_lets_nobody_in_there(
    safe_point: int,
) -> None:
    states = states_of(service("edited", 20), txn_safe_point=50)
    assert update(states, "late", 60, safe_point) == ServiceSafePoint(GC_WORKER, NEVER_S, 50)
    assert states.null.barriers.get("late") is None


def test_rule_9_a_service_blocks_through_the_last_second_of_its_ttl() -> None:
    states = states_of(service("a", 50, 1010), service(GC_WORKER, 80, NEVER_S))
    assert update(states, "b", 60, 90, 1010).service_id == "a"
    assert update(states, "b", 60, 90, 1010.001).service_id == GC_WORKER


def test_rule_9_a_huge_ttl_never_ends() -> None:
    states = states_of()
    for ttl_s in (NEVER_S, NEVER_S - 1, 9_223_372_037):
        update(states, f"s{ttl_s}", ttl_s, 5)
    assert {barrier.expired_at for barrier in states.null.barriers} == {NEVER_S}
    update(states, "a", 9_223_372_036, 5)
    assert states.null.barriers.get("a") == service("a", 5, 9_223_373_036)


@pytest.mark.parametrize("compat", Compat)
@pytest.mark.parametrize("ttl_s", [0, -5, -(1 << 63)])
def test_rule_9_a_ttl_of_0_or_less_removes_even_what_is_not_there(
    compat: Compat, ttl_s: int
) -> None:
    states = states_of(service("a", 50))
    for service_id in ("a", "unknown"):
        old_calls(compat).update_service(states, ServiceUpdate(service_id, ttl_s, 0), NOW_S)
    assert not len(states.null.barriers)


@pytest.mark.parametrize(
    ("service_id", "ttl_s", "text"),
    [
        ("", 60, r"\[PD:common:ErrInvalidArgument\]invalid argument for barrierID: $"),
        ("", 0, r"\[PD:common:ErrInvalidArgument\]invalid argument for barrierID: $"),
        (GC_WORKER, 1, "TTL of gc_worker's service safe point must be infinity"),
        (GC_WORKER, 60, "TTL of gc_worker's service safe point must be infinity"),
        (GC_WORKER, 0, "cannot remove service safe point of gc_worker"),
    ],
)
def test_rule_10_what_cannot_be_is_refused_in_pds_words_and_leaves_no_trace(
    service_id: str, ttl_s: int, text: str
) -> None:
    states = states_of(service("expired", 5, NOW_S - 1))
    with pytest.raises(SafePointRequestError, match=text):
        update(states, service_id, ttl_s, 10)
    assert states.null.pending == 0


def test_rule_10_gc_worker_moves_the_txn_safe_point_up_to_the_lowest_service() -> None:
    states = states_of(service("b", 50))
    assert update(states, GC_WORKER, NEVER_S, 80).service_id == "b"
    assert (states.null.txn_safe_point, states.null.gc_worker.safe_point) == (50, 80)


def test_rule_10_gc_worker_is_told_which_tidb_server_blocks_it() -> None:
    states = states_of()
    states.null.min_start_ts = {"tidb-1:10080": 60, "tidb-2:10080": 0}
    assert update(states, GC_WORKER, NEVER_S, 80) == ServiceSafePoint(
        "tidb_min_start_ts_tidb-1:10080", NEVER_S, 60
    )
    assert states.null.txn_safe_point == 60


def test_rule_10_gc_workers_same_safe_point_moves_on_once_the_transaction_is_over() -> None:
    states = states_of()
    states.null.min_start_ts = {"tidb-1:10080": 60}
    update(states, GC_WORKER, NEVER_S, 80)
    states.null.min_start_ts = {}
    assert update(states, GC_WORKER, NEVER_S, 80) == ServiceSafePoint(GC_WORKER, NEVER_S, 80)
    assert states.null.txn_safe_point == 80


def test_rule_10_gc_worker_is_told_what_an_operator_left_below_the_txn_safe_point() -> None:
    states = states_of(service("edited", 40), txn_safe_point=50)
    states.null.min_start_ts = {"tidb-1:10080": 30}
    assert update(states, GC_WORKER, NEVER_S, 80) == service("edited", 40)


def test_rule_11_the_gc_safe_point_stops_at_the_lowest_service_and_takes_the_txn_safe_point_along() -> (
    None
):
    null = states_of(service("b", 50)).null
    assert ClassicCalls().update_gc_safe_point(null, 1000, NOW_S) == 50
    assert ClassicCalls().update_gc_safe_point(null, 0, NOW_S) == 50
    assert (null.txn_safe_point, null.gc_worker.safe_point) == (50, 50)


def test_rule_11_the_gc_safe_point_stops_at_global_barriers_and_running_transactions() -> None:
    states = states_of()
    states.set_global_barrier("backup", 70, 60, NOW_S)
    states.null.min_start_ts = {"tidb-1": 60}
    assert ClassicCalls().update_gc_safe_point(states.null, 1000, NOW_S) == 60
    states.null.min_start_ts = {}
    assert ClassicCalls().update_gc_safe_point(states.null, 1000, NOW_S) == 70


@pytest.mark.parametrize("ttl_s", [0, 60])
def test_pd_9_gc_worker_has_no_end(ttl_s: int) -> None:
    with pytest.raises(SafePointRequestError, match="must be infinity"):
        Pd9Calls().update_service(states_of(), ServiceUpdate(GC_WORKER, ttl_s, 10), NOW_S)


@pytest.mark.parametrize(
    ("barrier_ts", "answer"), [(60, "b"), (80, GC_WORKER), (40, "b"), (90, GC_WORKER)]
)
def test_pd_9_gc_worker_is_told_what_keeps_the_txn_safe_point_below_its_own(
    barrier_ts: int, answer: str
) -> None:
    states = states_of(service("b", barrier_ts), txn_safe_point=50)
    told = Pd9Calls().update_service(states, ServiceUpdate(GC_WORKER, NEVER_S, 80), NOW_S)
    moved_to = min(80, max(50, barrier_ts))
    assert told == ServiceSafePoint(answer, NEVER_S, moved_to)

    # What blocks no more than t has moved already does not block.
    again = Pd9Calls().update_service(states, ServiceUpdate(GC_WORKER, NEVER_S, moved_to), NOW_S)
    assert again == ServiceSafePoint(GC_WORKER, NEVER_S, moved_to)
