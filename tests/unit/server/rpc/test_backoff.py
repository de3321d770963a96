"""Back-off: grows, is capped, keeps at least half of its pause, and never sleeps past the deadline."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.rpc.backoff import Backoff, GaveUpError, delay_s
from storage.model.errors import UnavailableError


@given(st.integers(0, 10_000), st.floats(0, 1))
def test_every_delay_lies_between_half_its_step_and_the_cap(attempt: int, jitter: float) -> None:
    step = min(1.0, 0.01 * 2 ** min(attempt, 32))
    assert step / 2 <= delay_s(attempt, jitter, base_s=0.01, cap_s=1.0) <= step


async def test_a_pause_that_would_pass_the_deadline_gives_up_at_once_and_names_the_cause() -> None:
    backoff = Backoff(0.5)
    with pytest.raises(GaveUpError, match=r"after 1 attempts.*\[TM:ErrUnavailable\] no store"):
        await backoff.wait(UnavailableError("no store"), at_least_s=0.6)


async def test_an_exhausted_deadline_leaves_no_time() -> None:
    backoff = Backoff(0.0)
    assert backoff.remaining_s == 0
    with pytest.raises(GaveUpError):
        await backoff.wait(UnavailableError("late"))
