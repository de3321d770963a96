"""Threads take turns more often while a round reads chunks, and as before when none does."""

import sys

import pytest

from server.dump.mysql.engine import SHORT_S, GilInterval


def test_the_interval_is_given_back_by_the_last_of_overlapping_rounds() -> None:
    before, interval = sys.getswitchinterval(), GilInterval()
    assert before > SHORT_S
    one, other = interval.shortened(), interval.shortened()
    one.__enter__()
    other.__enter__()
    assert sys.getswitchinterval() == pytest.approx(SHORT_S)
    one.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(SHORT_S)
    other.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(before)


def test_a_round_that_fails_gives_it_back_too() -> None:
    before = sys.getswitchinterval()
    with pytest.raises(ValueError, match="round"), GilInterval().shortened():
        raise ValueError("round")
    assert sys.getswitchinterval() == pytest.approx(before)
