"""A byte rate: what is taken in any time never passes the rate by more than a burst,
and waits are no longer.
"""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from server.store.paced_scan import ByteRate

TAKES = st.lists(st.tuples(st.floats(0, 5), st.integers(1, 50_000)), max_size=30)


@given(TAKES, st.integers(100, 100_000))
def test_what_is_used_by_any_time_is_within_the_rate(
    takes: list[tuple[float, int]], rate: int
) -> None:
    limiter, now, used = ByteRate(rate), 0.0, 0
    for pause, size in takes:
        now += pause
        now += limiter.take(size, now)  # the caller waits
        assert used <= rate * (now + 0.1) * 1.000001, "what was taken before this is paid for"
        used += size


@given(st.lists(st.integers(1, 50_000), min_size=2, max_size=30), st.integers(100, 100_000))
def test_a_busy_taker_gets_the_whole_rate(sizes: list[int], rate: int) -> None:
    limiter, now = ByteRate(rate), 10.0
    for size in sizes:
        now += limiter.take(size, now)
    assert now - 10.0 <= sum(sizes[:-1]) / rate + 1e-6


def test_no_limit_is_no_wait_and_a_new_limit_counts_at_once() -> None:
    limiter = ByteRate()
    assert limiter.take(1 << 40, 1.0) == 0.0
    limiter.limit(100)
    limiter.take(1000, 2.0)
    assert limiter.take(1, 2.0) > 9
    limiter.limit(0)
    assert limiter.take(1, 2.0) == 0.0


async def test_a_wait_under_an_old_rate_ends_with_the_next_one() -> None:
    limiter = ByteRate(1)
    await limiter.throttle(1 << 30)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(limiter.throttle(1))
        await asyncio.sleep(0)
        assert not waiting.done()
        limiter.limit(0)
