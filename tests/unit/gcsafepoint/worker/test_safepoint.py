"""How far a round may go."""

from hypothesis import given
from hypothesis import strategies as st

from gcsafepoint.worker import safepoint
from storage.model.ts import MAX_TS, compose, physical_ms

timestamps = st.integers(1, MAX_TS)


@given(timestamps, st.integers(1, 2**45), st.none() | timestamps)
def test_nothing_younger_than_life_time_or_seen_by_a_running_transaction_goes(
    now_ts: int, life_time_ms: int, running_ts: int | None
) -> None:
    wanted = safepoint.wanted(now_ts, life_time_ms, running_ts)
    assert wanted == 0 or physical_ms(wanted) <= physical_ms(now_ts) - life_time_ms
    assert running_ts is None or wanted < running_ts


@given(timestamps, timestamps)
def test_the_smallest_service_decides(asked: int, service_min: int) -> None:
    assert safepoint.granted(asked, service_min) == min(asked, service_min)


def test_a_longer_life_time_gives_no_new_safepoint() -> None:
    last = safepoint.wanted(compose(1_000_000), 1000, None)
    assert not safepoint.is_new(safepoint.wanted(compose(1_000_500), 2000, None), last)
    assert safepoint.is_new(safepoint.wanted(compose(1_000_500), 1000, None), last)


def test_the_first_round_is_due_at_once_and_the_next_after_the_interval() -> None:
    assert safepoint.is_due(5, None, 600_000)
    assert not safepoint.is_due(600_004, 5, 600_000)
    assert safepoint.is_due(600_005, 5, 600_000)
