"""Captures of one cluster, each with its lease, over real metadata."""

import asyncio
from functools import partial

from server.capture.feed import FeedFactory
from server.capture.local import LocalProcessor
from server.capture.membership import Membership
from server.capture.owner import Owner
from server.capture.records import Records
from server.changefeed import keys


def member(meta, upstream, name):
    records = Records(meta)
    factory = FeedFactory(records, lambda *_: None, partial(LocalProcessor, None))
    return Membership(meta, name, Owner(factory, upstream), records)


async def test_captures_that_start_at_a_time_all_know_who_owns_the_changefeeds(meta, upstream):
    members = [member(meta, upstream, name) for name in ("one", "two", "three")]
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(each.run("a:1", "a:2")) for each in members]
        for each in members:
            await each.settled.wait()
        for task in running:
            task.cancel()


async def test_a_capture_that_comes_back_as_another_is_elected_knows_it(meta, upstream):
    """It gives the key of its earlier process back, and another one that waits takes it."""
    earlier, other = await meta.grant_lease(60), await meta.grant_lease(60)
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks, earlier, other:
        await meta.campaign(keys.OWNER, b"back", earlier.id)
        returning = member(meta, upstream, "back")
        # the election is won by the other one: this capture's own campaign begins after it
        returning._own = partial(_never, returning)
        running = tasks.create_task(returning.run("a:1", "a:2"))
        await meta.campaign(keys.OWNER, b"other", other.id)
        await returning.settled.wait()
        running.cancel()


async def _never(_membership, _lease):
    await asyncio.Event().wait()
