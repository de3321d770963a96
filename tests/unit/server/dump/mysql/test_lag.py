"""How a dump gives way to the log: it backs off where rounds lag, comes back where they do not,
and never stops.
"""

from hypothesis import given
from hypothesis import strategies as st

from server.dump.mysql.pace import EASE_FIRST, EASE_MIN, QUIET_EVERY_S, QUIET_FIRST, LagGuard, Lags

LAGS = st.floats(0, 100)


def usual(lag_s: float) -> LagGuard:
    guard = LagGuard()
    for number in range(QUIET_FIRST):
        guard.quiet(lag_s, float(number))
    return guard


def test_what_is_usual_is_measured_first_and_then_from_time_to_time() -> None:
    guard = LagGuard()
    for number in range(QUIET_FIRST):
        assert guard.quiet_wanted(float(number))
        guard.quiet(0.01, float(number))
    now = float(QUIET_FIRST - 1)
    assert not guard.quiet_wanted(now + QUIET_EVERY_S / 2)
    assert guard.quiet_wanted(now + QUIET_EVERY_S)


def test_rounds_that_lag_make_it_slower_and_others_make_it_as_fast_as_can_be() -> None:
    guard = usual(0.01)
    for _ in range(100):
        guard.busy(0.012)
    assert guard.ease == 1
    assert (guard.parallel(4), guard.rows(1000), guard.rest_s(0.1)) == (4, 1000, 0)
    for _ in range(100):
        guard.busy(0.05)
    assert guard.ease == EASE_MIN
    assert guard.parallel(4) == 1
    assert guard.rows(1000) == 500
    assert 0.2 < guard.rest_s(0.1) < 0.31
    for _ in range(100):
        guard.busy(0.0)
    assert guard.ease == 1


def test_single_rounds_may_be_late_but_not_far_too_late() -> None:
    guard = usual(0.01)
    for _ in range(5):
        guard.busy(0.01)
    before = guard.ease
    guard.busy(0.1)
    assert guard.ease > before
    guard.busy(1.0)
    assert guard.ease < before


def test_a_machine_on_which_the_log_always_lags_is_no_reason_to_back_off() -> None:
    guard = usual(0.5)
    for _ in range(100):
        guard.busy(0.6)
    assert guard.ease == 1


@given(
    st.lists(st.tuples(st.booleans(), LAGS)),
    st.integers(1, 16),
    st.integers(1, 100_000),
    st.floats(0, 10),
)
def test_whatever_is_measured_it_goes_on_within_bounds(
    lags: list[tuple[bool, float]], most: int, rows: int, read_s: float
) -> None:
    guard = LagGuard()
    assert guard.ease == EASE_FIRST
    for number, (is_quiet, lag_s) in enumerate(lags):
        if is_quiet:
            guard.quiet(lag_s, float(number))
        else:
            guard.busy(lag_s)
        assert EASE_MIN <= guard.ease <= 1
        assert 1 <= guard.parallel(most) <= most
        assert 1 <= guard.rows(rows) <= rows
        assert 0 <= guard.rest_s(read_s) <= 3.01 * read_s


def test_a_lag_is_known_when_both_ends_are_in_whatever_order() -> None:
    lags = Lags()
    lags.arrived("of somebody else", 1.0)
    for each in ("a", "b", "c"):
        lags.expect(each)
    lags.written("a", 1.0)
    lags.arrived("b", 1.0)
    assert lags.taken() == {}
    lags.arrived("a", 1.5)
    lags.written("b", 1.5)
    lags.forget("c")
    lags.written("c", 1.0)
    lags.arrived("c", 2.0)
    assert lags.taken() == {"a": 0.5, "b": 0.0}, (
        "one that was seen before its commit was answered did not lag"
    )
    assert lags.taken() == {}
