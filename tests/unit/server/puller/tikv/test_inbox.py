import asyncio

import pytest

from server.puller.tikv.feed import Inbox
from storage.queue import ByteBudget


async def test_items_come_out_in_order_and_not_more_than_the_take_limit_at_once():
    inbox = Inbox(limit_bytes=100, take_bytes=10)
    for number in range(4):
        await inbox.put(number, 5)
    assert await inbox.take() == [0, 1]
    assert await inbox.take() == [2, 3]


async def test_a_full_inbox_makes_the_producer_wait():
    inbox = Inbox(limit_bytes=10, take_bytes=10)
    await inbox.put("first", 8)
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(inbox.put("second", 8))
        await asyncio.sleep(0)
        assert not waiting.done()
        assert await inbox.take() == ["first"]
    assert await inbox.take() == ["second"]


async def test_an_item_larger_than_the_limit_still_passes():
    inbox = Inbox(limit_bytes=10, take_bytes=10)
    await inbox.put("huge", 1000)
    assert await inbox.take() == ["huge"]


async def test_a_closed_inbox_lets_waiting_producers_go():
    inbox = Inbox(limit_bytes=10, take_bytes=10)
    await inbox.put("first", 8)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(inbox.put("second", 8))
        await asyncio.sleep(0)
        inbox.close()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await inbox.take()


async def test_inboxes_share_a_budget_and_each_may_hold_one_item_whatever_the_others_hold():
    budget = ByteBudget(20)
    one, other = Inbox(100, 5, budget), Inbox(100, 5, budget)
    for number in range(4):
        await one.put(number, 5)
    await other.put("first", 5)
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(other.put("second", 5))
        await asyncio.sleep(0)
        assert budget.used_bytes == 25
        assert await one.take() == [0]
        await asyncio.sleep(0)
        assert not waiting.done(), "there is room for nothing more yet"
        assert await one.take() == [1]
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(other.put("third", 5))
        await asyncio.sleep(0)
        one.close()
    assert budget.used_bytes == 15
    other.close()
    assert budget.used_bytes == 0


async def test_what_comes_one_by_one_is_taken_together_and_nothing_waits_after_a_silence():
    inbox = Inbox(100 << 20, 10 << 20, gather_s=0.2)
    inbox.put_now("first")
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await inbox.take() == ["first"]
    assert loop.time() - began < 0.2
    inbox.put_now("second", 1)
    loop.call_later(0.01, inbox.put_now, "third", 1)
    assert await inbox.take() == ["second", "third"]


async def test_much_is_taken_at_once():
    inbox = Inbox(100 << 20, 10 << 20, gather_s=3600.0)
    inbox.put_now("first")
    await inbox.take()
    inbox.put_now("large", 1 << 20)
    async with asyncio.timeout(60):
        assert await inbox.take() == ["large"]
