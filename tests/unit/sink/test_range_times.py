"""Notes of when ranges were pulled, sorted and staged."""

from hypothesis import given
from hypothesis import strategies as st

from sink.range_times import _NOTES_MAX, _TABLES_MAX, RangeTime, RangeTimes
from storage.model.span import Span

TABLE, OTHER = Span(1, b"a", b"b"), Span(2, b"b", b"c")


def pulled(first_ts, last_ts, came_ns=100, rows=1):
    return RangeTime(first_ts, last_ts, came_ns - 50, came_ns, rows)


def test_a_range_gets_what_lies_in_it_and_no_other_tables():
    times = RangeTimes()
    times.note_pulled(TABLE, pulled(10, 20), 110)
    times.note_pulled(TABLE, pulled(21, 30, came_ns=200, rows=2), 210)
    times.note_pulled(OTHER, pulled(10, 30), 110)
    assert times.of_range(TABLE, 20, 30) == {"pull": RangeTime(21, 30, 150, 200, 2)}
    assert times.of_range(TABLE, 9, 30) == {"pull": RangeTime(10, 30, 50, 200, 3, count=2)}
    assert times.of_range(TABLE, 30, 40) == {}
    assert times.of_range(Span(3, b"c", b"d"), 0, 100) == {}


def test_rows_are_sorted_once_their_table_is_resolved():
    times = RangeTimes()
    times.note_pulled(TABLE, pulled(10, 20), 110)
    times.note_pulled(TABLE, pulled(15, 40), 120)
    times.note_resolved(TABLE, 19, 300)
    assert set(times.of_range(TABLE, 0, 100)) == {"pull"}
    times.note_resolved(TABLE, 20, 400)
    times.note_resolved(OTHER, 100, 450)
    assert times.of_range(TABLE, 0, 100)["sort"] == RangeTime(10, 20, 100, 400, 1)
    times.note_resolved(TABLE, 50, 500)
    assert times.of_range(TABLE, 0, 100)["sort"] == RangeTime(10, 40, 100, 500, 2, count=2)


def test_staging_is_shown_by_itself():
    times = RangeTimes()
    times.note_staged(TABLE, RangeTime(10, 20, 1, 2, 5))
    assert times.of_range(TABLE, 10, 15) == {"stage": RangeTime(10, 20, 1, 2, 5)}


@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 50)), max_size=300))
def test_many_notes_are_joined_and_none_is_lost(batches):
    times = RangeTimes()
    for number, (first_ts, length) in enumerate(batches):
        times.note_pulled(TABLE, pulled(first_ts, first_ts + length, came_ns=100 + number), 999)
    [*kept] = times.of_range(TABLE, 0, 2000).values()
    assert sum(each.rows for each in kept) == len(batches)
    assert len(times._tables[TABLE].pulled if batches else ()) <= _NOTES_MAX
    if batches:
        [whole] = kept
        assert whole.first_ts == min(first_ts for first_ts, _ in batches)
        assert whole.end_ns == 99 + len(batches)


def test_of_many_tables_the_last_ones_are_kept():
    times = RangeTimes()
    for number in range(_TABLES_MAX + 10):
        times.note_pulled(Span(number, b"a", b"b"), pulled(1, 1), 110)
    assert not times.of_range(Span(9, b"a", b"b"), 0, 1)
    assert times.of_range(Span(10, b"a", b"b"), 0, 1)
    assert len(times._tables) == _TABLES_MAX
