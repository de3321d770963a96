"""The queue before a group commit: order, limits of a group, and the sums of what waits."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from storage.queue import GroupQueue

ENTRIES = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 5)), max_size=40)


@given(ENTRIES, st.integers(1, 12), st.integers(1, 120))
def test_groups_are_what_was_put_in_order_and_end_at_the_first_limit(
    entries, group_items, group_bytes
):
    queue = GroupQueue(group_items, group_bytes)
    for number, (size, items) in enumerate(entries):
        queue.put(number, size, items)
    taken = []
    while group := queue.take():
        before_last = [entries[number] for number in group[:-1]]
        assert sum(size for size, _ in before_last) < group_bytes
        assert sum(items for _, items in before_last) < group_items
        taken += group
        left = entries[len(taken) :]
        assert (len(queue), queue.waiting_bytes) == (len(left), sum(size for size, _ in left))
        assert queue.waiting_items == sum(items for _, items in left)
    assert taken == list(range(len(entries)))


async def test_who_waits_wakes_once_for_what_was_put_since():
    queue = GroupQueue(10, 100)
    queue.put("a", 1)
    queue.put("b", 1)
    await queue.wait()
    assert queue.take() == ["a", "b"]
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(queue.wait())
        await asyncio.sleep(0)
        assert not waiting.done()
        queue.wake()
    assert queue.take() == []


def test_what_is_refused_leaves_nothing():
    queue = GroupQueue(10, 100)
    for name in "abc":
        queue.put(name, 7, 2)
    assert queue.take_all() == ["a", "b", "c"]
    assert (len(queue), queue.waiting_bytes, queue.waiting_items) == (0, 0, 0)
