"""Threads take turns more often while a round reads chunks, and as before when none does."""

import sys

import pytest

from server.dump.mysql.switches import SWITCH_S, Switches


def test_the_interval_is_given_back_by_the_last_of_overlapping_rounds() -> None:
    before, switches = sys.getswitchinterval(), Switches()
    assert before > SWITCH_S
    one, other = switches.often(), switches.often()
    one.__enter__()
    other.__enter__()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    one.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    other.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(before)


def test_a_round_that_fails_gives_it_back_too() -> None:
    before = sys.getswitchinterval()
    with pytest.raises(ValueError, match="round"), Switches().often():
        raise ValueError("round")
    assert sys.getswitchinterval() == pytest.approx(before)
