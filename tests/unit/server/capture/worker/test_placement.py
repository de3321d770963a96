"""Tables are placed evenly, each to one worker, and differently for each changefeed."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from server.capture.worker.processor import TablePlacement
from storage.model.span import Span

SPANS = st.lists(st.integers(1, 200).map(lambda key: Span(key, b"%d" % key, b"")), max_size=40)


@given(st.integers(1, 9), SPANS, SPANS)
def test_no_worker_has_two_tables_more_than_another_and_none_moves(count, known, later):
    workers = [f"worker {number}" for number in range(count)]
    placement = TablePlacement(workers, "feed", known)
    first = {span: placement.worker(span) for span in known}
    placed = {span: placement.worker(span) for span in (*known, *later)}
    tables = Counter(placed.values())
    assert {span: placed[span] for span in known} == first
    assert sum(tables.values()) == len({*known, *later})
    assert max(tables.values(), default=0) - min(tables[each] for each in workers) <= 1


def test_changefeeds_of_one_table_are_spread():
    spans, workers = [Span(1, b"", b"")], range(4)
    places = Counter(
        TablePlacement(workers, f"feed-{each}", spans).worker(spans[0]) for each in range(400)
    )
    assert set(places) == set(workers)
    assert min(places.values()) > 50
