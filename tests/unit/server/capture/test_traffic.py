"""What a table changes is counted in its upstream's time, whenever and in whatever order it is
pulled.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.capture.traffic import NO_TRAFFIC, TableTraffic, Traffic, weights
from storage.model.span import Span
from storage.model.ts import compose

ONE, OTHER = Span(1, b"a", b"b"), Span(2, b"b", b"c")
BEGAN_MS = 1_700_000_000_000


def at(seconds):
    return compose(BEGAN_MS + int(seconds * 1000))


def added(traffic, span, seconds, row_bytes=100):
    commits = np.array([at(each) for each in seconds], np.uint64)
    traffic.add(span, commits, row_bytes * len(commits))


@pytest.mark.parametrize("lasted_s", [20, 60, 600])
def test_a_steady_table_has_its_rate_however_long_it_is_known(lasted_s):
    traffic = TableTraffic()
    for second in range(lasted_s):
        added(traffic, ONE, [second + part / 10 for part in range(10)])
    rows, size = traffic.of(ONE, at(lasted_s))
    assert rows == pytest.approx(10, rel=0.05)
    assert size == pytest.approx(1000, rel=0.05)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=60), st.randoms(use_true_random=False))
def test_rows_count_the_same_in_whatever_order_and_batches_they_come(seconds, random):
    whole, parts = TableTraffic(), TableTraffic()
    added(whole, ONE, seconds)
    shuffled = random.sample(seconds, len(seconds))
    while shuffled:
        count = random.randint(1, len(shuffled))
        added(parts, ONE, shuffled[:count])
        shuffled = shuffled[count:]
    assert parts.of(ONE, at(310)) == pytest.approx(whole.of(ONE, at(310)))


def test_a_table_that_is_read_again_fast_has_no_more_traffic_than_before():
    slow, fast = TableTraffic(), TableTraffic()
    seconds = [part / 4 for part in range(2000)]
    for second in seconds:
        added(slow, ONE, [second])
    added(fast, ONE, seconds)
    assert fast.of(ONE, at(500)) == pytest.approx(slow.of(ONE, at(500)))


def test_a_table_that_rests_loses_its_traffic_and_one_that_is_gone_has_none():
    traffic = TableTraffic()
    added(traffic, ONE, range(60))
    busy, later = traffic.of(ONE, at(60)), traffic.of(ONE, at(360))
    assert later.rows_per_s < busy.rows_per_s / 50
    assert traffic.of(OTHER, at(60)) == NO_TRAFFIC
    assert traffic.spans() == (ONE,)
    traffic.remove(ONE)
    assert traffic.of(ONE, at(60)) == NO_TRAFFIC
    assert traffic.spans() == ()


def test_one_row_makes_no_rate():
    traffic = TableTraffic()
    added(traffic, ONE, [5])
    assert traffic.of(ONE, at(5)).rows_per_s < 0.2
    traffic.add(OTHER, np.array([], np.uint64), 0)
    assert traffic.spans() == (ONE,)


def test_tables_weigh_half_by_their_number_and_half_by_their_bytes():
    told = weights(10, {ONE: Traffic(1, 3 << 20), OTHER: Traffic(1, 1 << 20)})
    assert told == {ONE: pytest.approx(8.5), OTHER: pytest.approx(3.5)}
    assert sum(told.values()) + 8 == pytest.approx(20)
    assert weights(10, {}) == {}
