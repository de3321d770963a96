"""Lag by stage: the parts are never negative, and together they are the whole."""

from hypothesis import given
from hypothesis import strategies as st

from server.capture.metrics import STAGES, lags_s

SECOND = 1000 << 18


def test_each_stage_counts_from_the_one_before():
    found = lags_s(10.0, 9 * SECOND, 7 * SECOND, 6 * SECOND, 2 * SECOND)
    assert found == {"puller": 1.0, "sorter": 2.0, "sink": 1.0, "reader": 4.0}


def test_what_is_not_told_counts_with_the_next():
    assert lags_s(10.0, 0, 0, 6 * SECOND, 2 * SECOND) == {"sink": 4.0, "reader": 4.0}


@given(st.lists(st.integers(0, 20 * SECOND), min_size=4, max_size=4))
def test_the_parts_are_the_whole_up_to_the_slowest(positions):
    found = lags_s(10.0, *positions)
    assert set(found) == {stage for stage, ts in zip(STAGES, positions, strict=True) if ts}
    assert all(lag >= 0 for lag in found.values())
    slowest = min((ts for ts in positions if ts), default=None)
    if slowest is not None:
        assert abs(sum(found.values()) - max(0.0, 10.0 - (slowest >> 18) / 1000)) < 1e-6
