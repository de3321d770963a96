"""Waits: the oldest is woken first, and a circle is found exactly when there is one."""

from hypothesis import given
from hypothesis import strategies as st

from storage.mvcc.pessimistic import Edge, LockQueue, Waiter

TXNS = st.integers(1, 6)
STEPS = st.lists(st.tuples(TXNS, st.sampled_from([b"a", b"b", b"c", b"d"])), max_size=12)


def reaches(edges: set[tuple[int, int]], begin: int, end: int) -> bool:
    seen, ahead = {begin}, {begin}
    while ahead:
        ahead = {to for at, to in edges if at in ahead} - seen
        seen |= ahead
    return end in seen


@given(
    st.dictionaries(st.sampled_from([b"a", b"b", b"c", b"d"]), TXNS, min_size=4, max_size=4), STEPS
)
def test_a_wait_that_would_close_a_circle_is_told_with_its_way(
    holders: dict[bytes, int], steps: list[tuple[int, bytes]]
) -> None:
    queue, edges = LockQueue(), set[tuple[int, int]]()
    for start_ts, key in steps:
        holder = holders[key]
        cycle = queue.cycle(start_ts, holder, key)
        assert bool(cycle) == reaches(edges, holder, start_ts)
        if not cycle:
            queue.add(Waiter(start_ts, key), holder)
            edges.add((start_ts, holder))
            continue
        assert cycle[-1] == Edge(start_ts, holder, key)
        assert (cycle[0].start_ts, [edge.holder for edge in cycle[:-1]]) == (
            holder,
            [edge.start_ts for edge in cycle[1:]],
        )
        assert all((edge.start_ts, edge.holder) in edges for edge in cycle[:-1])


@given(st.lists(TXNS, min_size=1), st.data())
def test_waiters_leave_oldest_first_and_leave_nothing_behind(
    starts: list[int], data: st.DataObject
) -> None:
    queue = LockQueue()
    waiters = [Waiter(start_ts, b"k") for start_ts in starts]
    for waiter in waiters:
        queue.add(waiter, 99)
    gone = data.draw(st.sets(st.sampled_from(range(len(waiters)))))
    for index in gone:
        queue.remove(waiters[index])
    left = [waiter for index, waiter in enumerate(waiters) if index not in gone]
    popped = []
    while (waiter := queue.pop(b"k")) is not None:
        popped.append(waiter)
    assert popped == sorted(left, key=lambda waiter: waiter.start_ts)
    assert len(queue) == 0
    assert queue.cycle(99, starts[0], b"other") == []


def test_waiters_wait_for_the_owner_of_now() -> None:
    queue = LockQueue()
    queue.add(Waiter(2, b"k"), 1)
    queue.hold(b"k", 3)
    assert queue.cycle(1, 2, b"other") == []
    assert queue.cycle(3, 2, b"other") == [Edge(2, 3, b"k"), Edge(3, 2, b"other")]
