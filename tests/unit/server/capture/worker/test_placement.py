"""Tables are placed evenly, each to one worker, and differently for each changefeed."""

from collections import Counter

from hypothesis import example, given
from hypothesis import strategies as st

from server.capture.worker.placement import TablePlacement, next_move
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


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=6),
    st.sets(st.integers(0, 5)),
    st.sets(st.integers(0, 300), max_size=8),
)
@example([0, 0, 27], set(), set())
def test_tables_move_until_the_numbers_are_even_and_none_is_where_it_must_not_stay(
    counts, leaving, fixed
):
    ids = iter(range(1, 1000))
    placement = TablePlacement([f"worker {n}" for n in range(len(counts))], "feed")
    for worker, count in zip(sorted(placement.workers), counts, strict=True):
        spans = [Span(next(ids), b"", b"") for _ in range(count)]
        for span in spans:
            placement.worker(span)
        placement.move(spans, worker)
    staying = [f"worker {n}" for n in range(len(counts)) if n not in leaving]
    moved: Counter[Span] = Counter()
    while move := next_move(placement.tables(), staying, lambda span: span.table_id not in fixed):
        assert 1 <= len(move.spans) <= 32
        assert move.target in staying
        assert {placement.worker(span) for span in move.spans} == {move.source}
        assert fixed.isdisjoint(span.table_id for span in move.spans)
        placement.move(move.spans, move.target)
        moved.update(move.spans)
    # Twice: where a worker leaves whose tables cannot all move, they go where they are too many.
    assert max(moved.values(), default=0) <= (2 if leaving else 1), "no table goes to and fro"
    after = {worker: len(spans) for worker, spans in placement.tables().items()}
    assert sum(after.values()) == sum(counts)
    if staying and not fixed:
        assert max(after[each] for each in staying) - min(after[each] for each in staying) <= 1
        assert not any(after[each] for each in after if each not in staying)


def test_a_worker_leaves_when_it_has_no_tables():
    placement = TablePlacement(["a"], "feed", [Span(1, b"", b"")])
    placement.join("b")
    assert not placement.leave("a")
    placement.move([Span(1, b"", b"")], "b")
    assert placement.leave("a")
    assert placement.workers == ("b",)
    placement.keep_only([])
    assert placement.tables() == {"b": ()}
    assert placement.worker(Span(2, b"", b"")) == "b"
