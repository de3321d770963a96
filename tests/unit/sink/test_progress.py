"""The progress heap: the slowest table first, one entry a table, nobody starves."""

from hypothesis import given
from hypothesis import strategies as st

from sink.progress import Progress, ProgressHeap
from storage.model.event import Position
from storage.model.span import Span

SPANS = [Span(i, b"", b"") for i in range(4)]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["admit", "remove", "pop", "push", "park", "wake"]),
            st.integers(0, 3),
            st.integers(0, 9),
        )
    )
)
def test_pop_gives_the_slowest_waiting_table(history: list[tuple[str, int, int]]) -> None:
    heap = ProgressHeap()
    waiting: dict[Span, Progress] = {}
    parked: dict[Span, Progress] = {}
    working: dict[Span, Progress] = {}
    for version, (operation, number, ts) in enumerate(history):
        span = SPANS[number]
        if operation == "admit":
            waiting[span] = Progress(Position(ts, 0), span, version)
            parked.pop(span, None)
            working.pop(span, None)
            heap.admit(waiting[span])
        elif operation == "remove":
            for place in (waiting, parked, working):
                place.pop(span, None)
            heap.remove(span)
        elif operation == "pop":
            expected = min(waiting.values(), default=None)
            assert heap.pop() == expected
            if expected is not None:
                working[expected.span] = waiting.pop(expected.span)
        elif operation in ("push", "park") and span in working:
            old = working.pop(span)
            progress = Progress(Position(old.next_lower.commit_ts + ts, 0), span, old.version)
            (waiting if operation == "push" else parked)[span] = progress
            (heap.push if operation == "push" else heap.park)(progress)
        elif operation == "wake":
            assert heap.wake(span) is (span in parked)
            if span in parked:
                waiting[span] = parked.pop(span)
    for span in SPANS:
        heap.wake(span)
    rest = sorted([*waiting.values(), *parked.values()])
    assert [heap.pop() for _ in rest] == rest
    assert heap.pop() is None


@given(st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=1, max_size=60))
def test_no_table_starves(turns: list[tuple[int, bool]]) -> None:
    """However far tasks get, and whether tables are parked between:
    the next turn is always one of the slowest's.
    """
    heap = ProgressHeap()
    at = dict.fromkeys(SPANS, 0)
    for version, span in enumerate(SPANS):
        heap.admit(Progress(Position(0, 0), span, version))
    for step, parked in turns:
        progress = heap.pop()
        assert progress is not None
        span = progress.span
        assert at[span] == min(at.values())
        at[span] += step
        (heap.park if parked else heap.push)(
            Progress(Position(at[span], 0), span, progress.version)
        )
        heap.wake(span)


def test_an_entry_of_an_earlier_incarnation_is_dropped() -> None:
    heap = ProgressHeap()
    heap.admit(Progress(Position(1, 0), SPANS[0], 1))
    old = heap.pop()
    heap.remove(SPANS[0])
    heap.admit(Progress(Position(9, 0), SPANS[0], 2))
    assert old is not None
    heap.push(old)
    heap.park(old)
    popped = heap.pop()
    assert popped is not None
    assert popped.version == 2
    assert heap.pop() is None
