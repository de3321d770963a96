"""Back-off: grows, is capped, keeps at least half of its pause,
and never sleeps past the deadline.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.backoff import Backoff, Backoffer, GaveUpError
from storage.model.errors import UnavailableError


@given(st.integers(0, 10_000))
def test_every_pause_lies_between_half_its_step_and_the_cap(failures: int) -> None:
    backoff = Backoff(0.01, 1.0)
    backoff.failures = failures
    step = min(1.0, 0.01 * 2 ** min(failures, 32))
    assert step / 2 <= backoff.next_s() <= step


def test_a_success_begins_anew() -> None:
    backoff = Backoff(0.01, 1.0)
    assert [backoff.next_s() > 0.01 for _ in range(4)][2:] == [True, True]
    backoff.reset()
    assert backoff.next_s() <= 0.01


async def test_a_pause_that_would_pass_the_deadline_gives_up_at_once_and_names_the_cause() -> None:
    backoff = Backoffer(0.5)
    with pytest.raises(GaveUpError, match=r"after 1 attempts.*\[TM:ErrUnavailable\] no store"):
        await backoff.wait(UnavailableError("no store"), at_least_s=0.6)


async def test_an_exhausted_deadline_leaves_no_time() -> None:
    backoff = Backoffer(0.0)
    assert backoff.remaining_s == 0
    with pytest.raises(GaveUpError):
        await backoff.wait(UnavailableError("late"))
