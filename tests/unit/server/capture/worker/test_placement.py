"""Tables are placed evenly, each to one worker, and differently for each changefeed."""

import itertools
import time
from collections import Counter

from hypothesis import example, given, settings
from hypothesis import strategies as st

from server.capture.traffic import Traffic, weights
from server.capture.worker.placement import (
    NO_WEIGHTS,
    Balance,
    TablePlacement,
    is_uneven,
    next_move,
)
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


WEIGHTS = st.integers(1, 400).map(lambda tenths: tenths / 10)


@settings(max_examples=300)
@given(
    st.lists(st.lists(WEIGHTS, max_size=12), min_size=1, max_size=6),
    st.sets(st.integers(0, 60), max_size=6),
    st.sampled_from([0.0, 0.1, 0.3]),
)
@example([[30.0], [1.0] * 9, []], set(), 0.0)
@example([[9.0, 2.0], [8.0], [7.5]], set(), 0.0)
def test_tables_move_by_weight_until_no_move_makes_workers_more_even(dealt, fixed, slack):
    numbers = itertools.count(1)
    tables, weights = {}, {}
    for worker, of_worker in enumerate(dealt):
        spans = [Span(next(numbers), b"", b"") for _ in of_worker]
        tables[worker] = spans
        weights |= {
            span: weight
            for span, weight in zip(spans, (max(each, 1.0) for each in of_worker), strict=True)
            if weight > 1
        }
    balance = Balance(weights, slack)

    moved = Counter()

    def can_move(span):
        return span.table_id not in fixed and span not in moved

    def totals():
        return {worker: balance.of(spans) for worker, spans in tables.items()}

    before = totals()
    while move := next_move(tables, tables, can_move, balance):
        assert 1 <= len(move.spans) <= 32
        assert all(map(can_move, move.spans))
        tables[move.source] = [span for span in tables[move.source] if span not in move.spans]
        tables[move.target] = [*tables[move.target], *move.spans]
        moved.update(move.spans)  # as the mover does: no table goes to and fro
        after = totals()
        assert max(after.values()) <= max(before.values()) + 1e-6, "the worst is no worse"
        assert sum(each**2 for each in after.values()) < sum(each**2 for each in before.values())
        before = after
    lightest = min(before.values())
    even = sum(before.values()) / len(before)
    for worker, spans in tables.items():
        gap = before[worker] - lightest
        for span in filter(can_move, spans):
            left = abs(gap - 2 * weights.get(span, 1.0))
            assert gap <= slack * even or left >= gap * (1 - slack) - 1e-6


def test_one_hot_table_gets_a_worker_of_its_own():
    spans = [Span(number, b"", b"") for number in range(1, 11)]
    hot = Traffic(1000, 10 << 20)
    weight = weights(len(spans), {spans[0]: hot, spans[1]: Traffic(1, 100)})
    balance = Balance(weight, 0.25)
    tables = {"a": spans[:5], "b": spans[5:]}
    assert is_uneven(tables, balance)
    move = next_move(tables, tables, lambda _: True, balance)
    assert ({*move.spans}, move.source, move.target) == ({*spans[1:5]}, "a", "b")
    tables = {"a": spans[:1], "b": spans[1:]}
    assert next_move(tables, tables, lambda _: True, balance) is None
    assert not is_uneven(tables, balance)


def test_little_traffic_is_no_reason_to_move():
    spans = [Span(number, b"", b"") for number in range(1, 5)]
    assert weights(4, {spans[0]: Traffic(5, 2000)}) == {}
    assert not is_uneven({"a": spans[:2], "b": spans[2:]}, NO_WEIGHTS)


def test_many_tables_are_divided_in_time():
    spans = [Span(number, b"", b"") for number in range(100_000)]
    weight = weights(len(spans), {span: Traffic(1, 1 << 20) for span in spans[:1000]})
    tables = {0: spans, **{worker: [] for worker in range(1, 10)}}
    began = time.process_time()
    next_move(tables, tables, lambda _: True, Balance(weight))
    assert time.process_time() - began < 2
