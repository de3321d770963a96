"""How far a round may go, and who keeps it from going further."""

from hypothesis import given
from hypothesis import strategies as st

from gcsafepoint.worker.round import (
    SafePointBound,
    limited_by_service,
    round_is_due,
    target_safe_point,
)
from storage.model.ts import MAX_TS, compose, physical_ms

timestamps = st.integers(1, MAX_TS)


@given(timestamps, st.integers(1, 2**45), st.none() | st.tuples(timestamps, st.just("tidb-0")))
def test_nothing_younger_than_life_time_or_needed_by_a_running_transaction_goes(
    now_ts: int, life_time_ms: int, running: tuple[int, str] | None
) -> None:
    wanted = target_safe_point(now_ts, life_time_ms, running)
    assert wanted.ts == 0 or physical_ms(wanted.ts) <= physical_ms(now_ts) - life_time_ms
    assert running is None or wanted.ts <= running[0]
    assert bool(wanted.blocker) == (wanted.ts < compose(max(0, physical_ms(now_ts) - life_time_ms)))


@given(timestamps, timestamps)
def test_the_smallest_service_decides_and_is_named(asked: int, service_min: int) -> None:
    bound = limited_by_service(SafePointBound(asked, "a transaction"), service_min, "feed")
    assert bound.ts == min(asked, service_min)
    assert bound.blocker == ("the service feed" if service_min < asked else "a transaction")


def test_the_first_round_is_due_at_once_and_the_next_after_the_interval() -> None:
    assert round_is_due(5, None, 600_000)
    assert not round_is_due(600_004, 5, 600_000)
    assert round_is_due(600_005, 5, 600_000)
