"""A table's mounts over time: those that may still be asked for stay, however many there are."""

import sys

from hypothesis import given
from hypothesis import strategies as st

from sink.mounts import Mounting, Mounts
from storage.model.ts import MAX_TS

START = 10
times = st.integers(START, START + 40)


def mounting(since_ts):
    return Mounting(lambda _: since_ts)


def in_force(mounts, ts):
    """The time since which what is in force above `ts` has been so."""
    return mounts.above(ts).mount._mount(None)


@given(st.lists(times, max_size=8), times)
def test_what_is_in_force_and_what_is_next_stay_known_above_what_was_forgotten(
    changes, forgotten_ts
):
    mounts, since = Mounts(7, START, mounting(START)), [START]
    for ts in changes:
        assert mounts.change(ts, mounting(ts)) == (ts > since[-1])
        since += [ts] if ts > since[-1] else []
    mounts.drop_below(forgotten_ts)
    for ts in range(forgotten_ts, START + 42):
        assert in_force(mounts, ts) == max(it for it in since if it <= ts)
        assert mounts.next_change(ts) == min((it for it in since if it > ts), default=MAX_TS)


def test_a_table_that_is_altered_more_often_than_calls_nest_is_forgotten_all_the_same():
    mounts, count = Mounts(7, 0, mounting(0)), 2 * sys.getrecursionlimit()
    for ts in range(1, count):
        mounts.change(ts, mounting(ts))
    mounts.drop_below(1)
    assert in_force(mounts, 1) == 1
    assert (mounts.next_change(1), in_force(mounts, count)) == (2, count - 1)
