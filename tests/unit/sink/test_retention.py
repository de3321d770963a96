"""What is kept of acknowledged history: compared with a list of all rows that were ever written."""

from hypothesis import given
from hypothesis import strategies as st

from sink import retention
from sink.retention import STRETCHES_MAX, RetainedHistory, Retention
from storage.model.ts import compose

SECOND = compose(1000)
START = 100 * SECOND


def history(*stretches):
    kept = RetainedHistory(START)
    for seconds, size in stretches:
        kept.acknowledged(START + seconds * SECOND, size)
    return kept


def floor_s(kept, settings, *, now_s, held_s=1000):
    ts = kept.due_floor(settings, START + now_s * SECOND, START + held_s * SECOND)
    assert kept.give_up(ts) == ts
    return (ts - START) / SECOND


def test_without_retention_all_that_is_acknowledged_goes():
    kept = history((5, 10), (9, 10))
    assert floor_s(kept, Retention(), now_s=9) == 9
    assert kept.size_bytes == 0


def test_a_reader_holds_whatever_time_and_size_say():
    for settings in (Retention(), Retention(age_s=1), Retention(size_bytes=1)):
        kept = history((5, 10), (9, 10))
        assert floor_s(kept, settings, now_s=500, held_s=5) == 5
        assert kept.size_bytes == 10


def test_by_time_the_present_of_the_source_counts():
    kept = history((5, 10), (9, 10), (30, 10))
    assert floor_s(kept, Retention(age_s=10), now_s=9) == 0
    assert floor_s(kept, Retention(age_s=10), now_s=17) == 7
    assert kept.size_bytes == 20
    assert floor_s(kept, Retention(age_s=10), now_s=10) == 7, "never back"
    assert floor_s(kept, Retention(age_s=10), now_s=500) == 30, "no more than is acknowledged"


def test_by_size_the_oldest_goes_until_the_rest_fits():
    kept = history((5, 10), (9, 10), (30, 10))
    assert floor_s(kept, Retention(size_bytes=30), now_s=30) == 0
    assert floor_s(kept, Retention(size_bytes=29), now_s=30) == 5
    assert floor_s(kept, Retention(size_bytes=10), now_s=30) == 9
    assert floor_s(kept, Retention(size_bytes=9), now_s=30) == 30


def test_of_time_and_size_the_one_counts_that_leaves_out_more():
    both = Retention(age_s=10, size_bytes=20)
    assert floor_s(history((5, 10), (9, 10), (30, 10)), both, now_s=30) == 20
    assert floor_s(history((5, 10), (9, 10), (30, 10)), both, now_s=10) == 5


def test_stretches_without_rows_cost_nothing():
    kept = history((1, 10), *((seconds, 0) for seconds in range(2, 50)), (50, 10))
    assert len(kept._stretches) == 2
    assert floor_s(kept, Retention(size_bytes=10), now_s=50) == 49


def test_many_stretches_are_joined_and_none_is_lost():
    count = 3 * STRETCHES_MAX
    kept = history(*((1 + n, 7) for n in range(count)))
    assert len(kept._stretches) <= STRETCHES_MAX
    assert kept.size_bytes == 7 * count
    newest = floor_s(kept, Retention(size_bytes=7 * 100), now_s=count, held_s=count)
    assert newest == count - 100, "the newest ones are told apart"


SETTINGS = st.builds(Retention, st.integers(0, 60), st.integers(0, 200))
STEPS = st.lists(
    st.tuples(
        st.integers(0, 30),  # seconds until the next acknowledgement
        st.lists(st.tuples(st.integers(1, 30), st.integers(1, 60)), max_size=4),  # rows: when, size
        st.integers(0, 40),  # how far a reader is behind that
        st.integers(0, 20),  # how far the source is ahead of it
        SETTINGS,
    ),
    max_size=40,
)


@given(STEPS, st.integers(1, 4).map(lambda quarter: 4 * quarter))
def test_the_floor_leaves_out_what_the_settings_say_and_nothing_else(steps, most):
    """Against the rows themselves."""
    retention.STRETCHES_MAX, before = most, retention.STRETCHES_MAX
    try:
        check(steps, is_joined=len(steps) > most)
    finally:
        retention.STRETCHES_MAX = before


def check(steps, *, is_joined):
    kept, rows, acked, floor = RetainedHistory(START), [], START, START
    ends = [START]
    for by, new, behind, ahead, settings in steps:
        until = acked + by * SECOND
        fresh = [(min(acked + after * SECOND, until), size) for after, size in new if by]
        rows += fresh
        kept.acknowledged(until, sum(size for _, size in fresh))
        acked = max(acked, until)
        ends.append(acked)
        held = max(START, acked - behind * SECOND)
        now = acked + ahead * SECOND
        before, floor = floor, kept.give_up(kept.due_floor(settings, now, held))

        assert before <= floor <= max(before, min(acked, held))
        if floor == before:
            continue
        by_age = now - settings.age_s * SECOND
        above = sum(size for ts, size in rows if ts > floor)
        if not settings:
            assert floor == min(acked, held)
        elif settings.age_s and floor <= by_age:
            pass  # all that is gone is too old
        else:
            # Then the size asked for it: one stretch more would not have fitted. Stretches are
            # known to us only where none were joined.
            assert settings.size_bytes
            newest_gone = max((ts for ts, _ in rows if ts <= floor), default=START)
            last_end = max((end for end in ends if end < newest_gone), default=START)
            older = sum(size for ts, size in rows if ts > last_end)
            assert older > settings.size_bytes or is_joined or last_end < before
        # What could have gone, and did not, was held, is young, or fits.
        if settings and floor < min(acked, held):
            assert not settings.age_s or floor >= by_age
            assert not settings.size_bytes or above <= settings.size_bytes
