"""Captures of one cluster, each with its lease, over real metadata."""

import asyncio
import json
from dataclasses import replace
from functools import partial

import pytest

from server.capture.errors import CaptureUnknownError, LastCaptureError, NotOwnerError
from server.capture.feed import FeedFactory
from server.capture.fence import Fence
from server.capture.local import LocalProcessor
from server.capture.maintainers import Maintainers
from server.capture.membership import Membership
from server.capture.owner import Owner
from server.capture.records import Records
from server.changefeed import keys
from server.changefeed.captures import CaptureRecord
from storage.meta.meta import Put


def member(meta, upstream, name):
    fence, decided = Fence(), asyncio.Event()
    factory = FeedFactory(Records(meta, fence), lambda *_: None, partial(LocalProcessor, None))
    maintainers = Maintainers(meta, name, Owner(factory, upstream), lambda *_: None, decided)
    return Membership(meta, name, maintainers, fence)


async def test_captures_that_start_at_a_time_all_know_who_owns_the_changefeeds(meta, upstream):
    members = [member(meta, upstream, name) for name in ("one", "two", "three")]
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(each.run("a:1", "a:2")) for each in members]
        for each in members:
            await each.settled.wait()
        for task in running:
            task.cancel()


async def test_a_capture_that_comes_back_as_another_is_elected_knows_it(meta, upstream):
    """It gives the key of its earlier process back, and another one that waits takes it."""
    earlier, other = await meta.grant_lease(60), await meta.grant_lease(60)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks, earlier, other:
        await meta.campaign(keys.OWNER, b"back", earlier.id)
        returning = member(meta, upstream, "back")
        # the election is won by the other one: this capture's own campaign begins after it
        returning._serve_as_owner = partial(_never, returning)
        running = tasks.create_task(returning.run("a:1", "a:2"))
        await meta.campaign(keys.OWNER, b"other", other.id)
        await returning.settled.wait()
        running.cancel()


async def owner_of(meta):
    pair = await meta.get(keys.OWNER)
    return pair.value.decode() if pair else ""


async def until(ask, wanted):
    while await ask() != wanted:  # noqa: ASYNC110 - the metadata is asked
        await asyncio.sleep(0.02)


async def test_an_owner_that_resigns_or_is_drained_lets_another_one_be_elected(meta, upstream):
    one, two = (member(meta, upstream, name) for name in ("one", "two"))
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(one.run("a:1", "a:2"))]
        await one.settled.wait()
        with pytest.raises(LastCaptureError, match="start another one first"):
            await one.drain("one")
        one.resign()
        await until(partial(owner_of, meta), "")
        await until(partial(owner_of, meta), "one")
        running.append(tasks.create_task(two.run("b:1", "b:2")))
        await two.settled.wait()
        await two.drain("one")
        await until(partial(owner_of, meta), "two")
        assert {each.record.id: each.is_draining for each in await two.members()} == {
            "one": True,
            "two": False,
        }
        assert [each.id for each in await two.sharing()] == ["two"]
        with pytest.raises(LastCaptureError):
            await one.drain("two")
        with pytest.raises(CaptureUnknownError, match="capture list"):
            await one.drain("three")
        two.resign()
        await until(partial(owner_of, meta), "")
        await until(partial(owner_of, meta), "two")
        await two.drain("one", cancel=True)
        two.resign()
        await until(partial(owner_of, meta), "one")
        for task in running:
            task.cancel()


async def test_a_capture_that_starts_again_meanwhile_is_not_said_to_be_drained(
    meta, upstream, monkeypatch
):
    one, two = (member(meta, upstream, name) for name in ("one", "two"))
    txn = meta.txn

    async def late(compares, ops, *more):
        if keys.draining("two") in {op.key for op in ops}:
            pair = await meta.get(keys.capture("two"))
            await txn((), [Put(pair.key, pair.value, pair.lease)])
        return await txn(compares, ops, *more)

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(each.run("a:1", "a:2")) for each in (one, two)]
        await one.settled.wait()
        await two.settled.wait()
        monkeypatch.setattr(meta, "txn", late)
        with pytest.raises(NotOwnerError, match="started again"):
            await one.drain("two")
        assert not any(each.is_draining for each in await one.members())
        for task in running:
            task.cancel()


def test_the_record_of_a_capture_that_names_no_version_is_not_of_this_one():
    record = CaptureRecord("one", "a:1", "a:2")
    document = {"id": "one", "address": "a:1", "flight_address": "a:2", "later": 1}
    assert CaptureRecord.from_json(record.to_json()) == record
    assert CaptureRecord.from_json(json.dumps(document).encode()) == replace(record, version="")


async def test_a_capture_that_is_started_again_is_drained_no_more(meta, upstream):
    one, two = (member(meta, upstream, name) for name in ("one", "two"))
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(each.run("a:1", "a:2")) for each in (one, two)]
        await two.settled.wait()
        await one.drain("two")
        running[1].cancel()
        await asyncio.wait([running[1]])
        again = member(meta, upstream, "two")
        running.append(tasks.create_task(again.run("a:1", "a:2")))
        await again.settled.wait()
        assert not any(each.is_draining for each in await again.members())
        for task in running:
            task.cancel()


async def _never(_membership, _lease):
    await asyncio.Event().wait()


async def test_a_record_of_a_later_version_is_read_and_one_that_cannot_be_is_left_out(
    meta, upstream
):
    records = {
        "new": b'{"id":"new","address":"a:1","flight_address":"a:2","version":"99","rack":"r1"}',
        "none": b"[]",
        "half": b'{"id":"half"}',
        "bad": b"\xff",
    }
    for name, value in records.items():
        await meta.put(keys.capture(name), value)
    [found] = await member(meta, upstream, "one").members()
    assert (found.record.id, found.record.address, found.record.version) == ("new", "a:1", "99")


async def test_a_capture_has_the_logs_that_it_runs_and_those_that_come_or_go(meta, upstream):
    one = member(meta, upstream, "one")
    for changefeed, placed, running in (
        ("runs", "one", "one"),
        ("comes", "one", ""),
        ("goes", "two", "one"),
        ("else", "two", "two"),
    ):
        await meta.put(keys.placement(changefeed), placed.encode())
        if running:
            await meta.put(keys.maintainer(changefeed), running.encode())
    assert await one.maintained_by("one") == ["comes", "goes", "runs"]
    assert await one.maintained_by("two") == ["else", "goes"]
