"""Whoever owns the changefeeds dies at any step of a creation, pause, resume, removal or end.

A step is a call to the coordinator or a transaction of the metadata; it is done or not when the
owner dies, and GC goes as far as it may before the next owner comes. No changefeed may lose history
then, and no safepoint may be left over.
"""

import asyncio
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest

from gcsafepoint.explain.names import feed_of
from server.capture.errors import (
    ChangefeedExistsError,
    ChangefeedNotExistsError,
    ChangefeedStateError,
    ChangeInterruptedError,
)
from server.capture.flight import OwnerFeeds
from server.capture.update import ChangefeedUpdate
from server.changefeed.info import State
from sink.flight.feeds import FAILED, Report
from sink.retention import Retention
from storage.meta.client import EtcdMeta
from storage.meta.errors import MetaUnavailableError
from storage.model.errors import TidemarkError, UnavailableError
from tests.unit.server.capture.conftest import new
from tests.unit.server.capture.test_owner import until

URI = "delta:///lake"
CREATING = "ticdc-default-creating_feed"


class Steps:
    """Counts what goes out, and lets the owner hang at one step for ever,
    before or after it is done.
    """

    def __init__(self, upstream, meta, monkeypatch):
        self.hangs_at, self.is_done = 0, False
        self.count = 0
        self.hanging = asyncio.Event()
        self.counting = False
        upstream.meta = EtcdMeta(meta._api)  # what the coordinator writes is no step of the owner's
        for owner, name in ((upstream, "update_service_gc_safe_point"), (meta, "txn")):
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, call):
        async def counted(*arguments):
            if not self.counting:
                return await call(*arguments)
            self.count += 1
            at = self.count == self.hangs_at
            if at and not self.is_done:
                await self._hang()
            answer = await call(*arguments)
            if at:
                await self._hang()
            return answer

        return counted

    async def _hang(self):
        self.hanging.set()
        await asyncio.Event().wait()


async def create(owner, request=""):
    await owner.create(new("feed", URI, 1000, 0, [owner.table], request=request))


async def pause(owner, request=""):
    await owner.pause("feed", request)


async def resume(owner, request=""):
    await owner.resume("feed", request=request)


async def resume_elsewhere(owner, request=""):
    await owner.resume("feed", 1100, request=request)


async def resume_back(owner):
    await owner.resume("feed", 900)


async def resume_failed_job(owner, request=""):
    await owner.resume("feed", request=request)


async def resume_failed_job_elsewhere(owner):
    await owner.resume("feed", 1100)


async def remove(owner, request=""):
    await owner.remove("feed", request)


async def finish(owner):
    feed = owner.feed("feed")
    feeds = OwnerFeeds(owner)
    await asyncio.to_thread(feeds.ack, "feed", None, 1500)
    await until(lambda: feed.released)


async def prepared(owner, change, upstream):
    """What has to be there before the change."""
    if change is create:
        return
    feed = await owner.create(
        new("feed", URI, 1000, 1500 if change is finish else 0, [owner.table])
    )
    await until(lambda: feed.safepoint_time)
    if change is finish:
        await until(lambda: upstream.subscriptions)
        upstream.resolve(1600)
        await until(lambda: feed.processor.resolved_ts == 1500)
    if change in (resume_failed_job, resume_failed_job_elsewhere):
        OwnerFeeds(owner).report("feed", Report(FAILED, 0, "ErrTargetRefused", "no"))
        await until(lambda: feed.job_saved)
    if change is resume_failed_job_elsewhere:
        feed.info = feed.info.moved_to(
            State.FAILED
        )  # as after the day for which such a changefeed holds GC back
        await feed.stop()
    if change in (resume, resume_elsewhere, resume_back):
        await owner.pause("feed")
    if change is remove_reader:
        await owner.add_reader("feed", "bi")


CHANGES = [
    create, pause, resume, resume_elsewhere, resume_failed_job, resume_failed_job_elsewhere, remove, finish
]  # fmt: skip


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("change", CHANGES)
async def test_no_crash_leaves_a_safepoint_or_takes_one_away(
    capture, upstream, meta, monkeypatch, change, is_done
):
    steps = Steps(upstream, meta, monkeypatch)
    upstream.now_ts = 2000
    for step in range(1, 40):
        owner = await capture.start()
        owner.table = capture.table
        await prepared(owner, change, upstream)
        steps.count, steps.hangs_at, steps.is_done, steps.counting = 0, step, is_done, True
        steps.hanging.clear()
        changing = asyncio.get_running_loop().create_task(change(owner))
        hanging = asyncio.get_running_loop().create_task(steps.hanging.wait())
        await asyncio.wait([changing, hanging], return_when=asyncio.FIRST_COMPLETED)
        steps.counting = False
        hung = steps.hanging.is_set()
        for task in (changing, hanging):
            task.cancel()
            with suppress(asyncio.CancelledError, TidemarkError):
                await task
        await capture.stop()

        others = [ts for service, ts in upstream.safepoints.items() if service != "gc_worker"]
        upstream.safepoints["gc_worker"] = max(
            upstream.safepoints["gc_worker"], min([*others, 1900])
        )
        owner = await capture.start()
        await check(owner, upstream)
        if "feed" in owner.feeds:
            await owner.remove("feed")
        assert set(upstream.safepoints) == {"gc_worker"}
        upstream.safepoints["gc_worker"] = 0
        await capture.stop()
        if not hung:
            assert step > 1
            return
    raise AssertionError("it has no end")


class Unanswered:
    """Lets one transaction of the metadata have no answer, before or after it is done."""

    def __init__(self, meta, monkeypatch):
        self.count, self.lost_at, self.is_done = 0, 0, False
        txn = meta.txn

        async def counted(*arguments):
            self.count += bool(self.lost_at)
            if self.count != self.lost_at or not self.lost_at:
                return await txn(*arguments)
            self.lost_at = 0
            if self.is_done:
                await txn(*arguments)
            raise MetaUnavailableError("no answer")

        monkeypatch.setattr(meta, "txn", counted)


async def update_retention(owner, request=""):
    await owner.update("feed", ChangefeedUpdate(retention=Retention(3600), request=request))


async def retain_nothing(owner):
    await owner.update("feed", ChangefeedUpdate(retention=Retention()))


async def add_reader(owner):
    await owner.add_reader("feed", "bi")


async def remove_reader(owner, request=""):
    await owner.remove_reader("feed", "bi", request)


async def fail_job(owner):
    OwnerFeeds(owner).report("feed", Report(FAILED, 0, "ErrTargetRefused", "no"))
    await until(lambda: owner.feed("feed").job_saved)


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "change", [create, pause, resume, resume_elsewhere, resume_back, remove, update_retention]
)
async def test_what_is_in_memory_is_what_the_metadata_has_after_a_change_without_an_answer(
    capture, upstream, meta, monkeypatch, change, is_done
):
    unanswered = Unanswered(meta, monkeypatch)
    upstream.now_ts = 2000
    for step in range(1, 40):
        owner = await capture.start()
        owner.table = capture.table
        await prepared(owner, change, upstream)
        unanswered.count, unanswered.lost_at, unanswered.is_done = 0, step, is_done
        error = None
        try:
            await change(owner)
        except UnavailableError as err:
            error = err
        is_over, unanswered.lost_at = unanswered.lost_at > 0, 0
        if error is not None:
            # A loop of the owner's saver: nobody has to ask.
            await until(partial(is_settled, owner))
        feeds = {feed.id: told(feed) for feed in owner.feeds.values()}
        # What it has changes nothing in the next moments either.
        for feed in owner.feeds.values():
            if feed.info.state.is_running:
                await until(lambda feed=feed: feed.processor.sink is not None)
        assert feeds == {feed.id: told(feed) for feed in owner.feeds.values()}
        await capture.stop()
        owner = await capture.start()
        assert {feed.id: told(feed) for feed in owner.feeds.values()} == feeds
        if "feed" in owner.feeds:
            await owner.remove("feed")
        await capture.stop()
        if is_over:
            assert step > 1
            return
    raise AssertionError("it has no end")


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
async def test_a_creation_says_whether_it_may_be_made_and_may_be_repeated(
    capture, meta, monkeypatch, is_done
):
    unanswered = Unanswered(meta, monkeypatch)
    interrupted = 0
    for step in range(1, 40):
        owner = await capture.start()
        request = new("feed", URI, 1000, 0, [capture.table], request=f"first {step}")
        unanswered.count, unanswered.lost_at, unanswered.is_done = 0, step, is_done
        error = None
        try:
            await owner.create(request)
        except UnavailableError as err:
            error = err
        is_over, unanswered.lost_at = unanswered.lost_at > 0, 0
        may_be_made = isinstance(error, ChangeInterruptedError)
        interrupted += may_be_made
        if error is not None:
            assert may_be_made or await capture.records.load_one("feed") is None
        feed = await owner.create(request)
        assert feed is owner.feeds["feed"]
        with pytest.raises(ChangefeedExistsError):
            await owner.create(replace(request, request="second"))
        await owner.remove("feed")
        with pytest.raises(ChangefeedNotExistsError, match="removed since"):
            await owner.create(request)
        await capture.stop()
        if is_over:
            assert interrupted
            return
    raise AssertionError("it has no end")


@pytest.mark.parametrize(
    ("change", "undo"),
    [
        (pause, resume),
        (resume, pause),
        (resume_elsewhere, pause),
        (resume_failed_job, fail_job),
        (update_retention, retain_nothing),
        (remove_reader, add_reader),
        (remove, create),
    ],
)
async def test_a_change_that_got_no_answer_is_made_once_by_whoever_is_asked_again(
    capture, upstream, meta, monkeypatch, change, undo
):
    upstream.meta = EtcdMeta(meta._api)  # what the coordinator writes has its answer
    unanswered = Unanswered(meta, monkeypatch)
    upstream.now_ts = 2000
    for step in range(1, 40):
        owner = await capture.start()
        owner.table = capture.table
        await prepared(owner, change, upstream)
        unanswered.count, unanswered.lost_at, unanswered.is_done = 0, step, True
        with suppress(ChangeInterruptedError):
            await change(owner, str(step))
        is_over, unanswered.lost_at = unanswered.lost_at > 0, 0
        if step % 2:
            # The next owner is asked; else the same one, as soon as it knows what is in force.
            await capture.stop()
            owner = await capture.start()
            owner.table = capture.table
        await change(owner, str(step))
        made = {feed.id: outcome(feed) for feed in owner.feeds.values()}
        await undo(owner)
        undone = {feed.id: outcome(feed) for feed in owner.feeds.values()}
        assert undone != made
        await change(owner, str(step))
        assert {feed.id: outcome(feed) for feed in owner.feeds.values()} == undone
        await owner.remove("feed")
        await capture.stop()
        if is_over:
            assert step > 1
            return
    raise AssertionError("it has no end")


async def test_what_an_earlier_version_was_asked_for_is_refused_when_a_later_one_is_asked_again(
    capture,
):
    """It leaves no trace of requests."""
    owner = await capture.start()
    owner.table = capture.table
    await create(owner)
    with pytest.raises(ChangefeedExistsError):
        await create(owner, "1")
    await pause(owner)
    await pause(owner, "2")
    await resume(owner)
    with pytest.raises(ChangefeedStateError):
        await resume(owner, "3")
    await remove(owner)
    with pytest.raises(ChangefeedNotExistsError):
        await remove(owner, "4")


def outcome(feed):
    """What the changes change."""
    return told(feed), bool(feed.job), {each.name for each in feed.readers.states(0)}


def is_settled(owner):
    feeds = owner.feeds.values()
    return not owner._unknown_outcomes and all(
        each.info_saved and not each.is_ending for each in feeds
    )


def told(feed):
    """What both must say, but for states that come and go while it runs."""
    info, changes = feed.info, feed.catalog.history
    state = State.NORMAL if info.state.is_running else info.state
    return (
        replace(info, state=state, error=None),
        feed.checkpoint_ts,
        [(each.commit_ts, each.tables) for each in changes],
    )


async def check(owner, upstream):
    """After the next owner's first round: who runs is protected, and nothing else is."""
    await until(lambda: not any(each.startswith(CREATING) for each in upstream.safepoints))
    await until(lambda: not any(feed.is_ending for feed in owner.feeds.values()))
    feed = owner.feeds.get("feed")
    own = [each for each in upstream.safepoints if feed_of(each) == "feed"]
    if feed is None:
        assert not own
        return
    assert feed.info.state != "failed", (
        feed.info.error
    )  # a warning: the dead owner's sorter is still being closed
    if feed.info.state.is_running:
        await until(lambda: feed.safepoint_time)
        assert own == [feed.info.gc_service]
        assert upstream.safepoints[feed.info.gc_service] == feed.checkpoint_ts - 1
    elif feed.info.state == "finished":
        assert feed.checkpoint_ts == 1500
        assert not own
    else:
        assert upstream.safepoints[feed.info.gc_service] == feed.checkpoint_ts - 1, (
            "a paused one is kept for a day"
        )


async def test_a_changefeed_whose_id_looks_like_a_creation_keeps_its_safepoint(capture, upstream):
    owner = await capture.start()
    twin = await owner.create(new("creating-feed", URI, 1000, 0, [capture.table]))
    await owner.create(new("feed", URI, 1000, 0, [capture.table]))
    assert upstream.safepoints["ticdc-default-creating-feed"] == 999
    await owner.remove("feed")
    assert upstream.safepoints["ticdc-default-creating-feed"] == 999
    assert twin.info.state == "normal"


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_late_removal_takes_no_safepoint_of_the_changefeed_that_is_made_anew(
    capture, upstream, meta, monkeypatch, restarts
):
    update, deleted = upstream.update_service_gc_safe_point, []

    async def noted(service_id, ttl_s, safe_point):
        if ttl_s == 0:
            deleted.append(service_id)
        return await update(service_id, ttl_s, safe_point)

    monkeypatch.setattr(upstream, "update_service_gc_safe_point", noted)
    owner, services = await capture.start(), []
    for _ in range(3):
        feed = await owner.create(new("feed", URI, 1000, 0, [capture.table]))
        services.append(feed.info.gc_service)
        for late in set(deleted):  # its answer was lost, and it is carried out only now
            await update(late, 0, 0)
        assert upstream.safepoints[feed.info.gc_service] == feed.checkpoint_ts - 1
        if restarts:
            await capture.stop()
            owner = await capture.start()
        await owner.remove("feed")
        assert set(upstream.safepoints) == {"gc_worker"}
    assert services == ["ticdc-default-feed", "ticdc-default-feed.1", "ticdc-default-feed.2"]
    released = await meta.get(b"/tidemark/default/released/feed")
    assert released.lease, "it goes by itself"


async def test_one_whose_record_cannot_be_read_is_removed_with_whatever_service_it_has(
    capture, upstream, meta
):
    owner = await capture.start()
    for _ in range(2):
        await owner.create(new("feed", URI, 1000, 0, [capture.table]))
        await owner.remove("feed")
    feed = await owner.create(new("feed", URI, 1000, 0, [capture.table]))
    await until(lambda: feed.safepoint_time)
    await capture.stop()
    await meta.put(b"/tidemark/default/changefeed/info/feed", b"garbage")
    upstream.safepoints["gc_worker"] = 500
    owner = await capture.start()
    await until(lambda: owner.feed("feed").safepoint_time)
    assert upstream.safepoints.keys() == {"gc_worker", "ticdc-default-feed.2"}
    await owner.remove("feed")
    assert set(upstream.safepoints) == {"gc_worker"}
    feed = await owner.create(new("feed", URI, 1000, 0, [capture.table]))
    assert feed.info.gc_service == "ticdc-default-feed.3"


async def test_what_older_captures_left_is_swept_and_what_is_not_ours_stays(capture, upstream):
    left = {
        "ticdc-default-creating-gone": 5,
        "ticdc-default-creating_gone": 5,
        "ticdc-default-creating_gone.450000000000000001": 5,
    }
    foreign = {
        "ticdc-default-7123456789012345678": 5,
        "ticdc-default-7123-creating-default_x": 5,
        "br-1": 5,
    }
    owner = await capture.start()
    for _ in range(2):
        await owner.create(new("creating-kept", URI, 1000, 0, [capture.table]))
        await owner.remove("creating-kept")
    await owner.create(new("creating-kept", URI, 1000, 0, [capture.table]))
    await capture.stop()
    for service, safe_point in (left | foreign).items():
        await upstream.update_service_gc_safe_point(service, 60, safe_point)
    await capture.start()
    await until(lambda: not left.keys() & upstream.safepoints.keys())
    assert foreign.items() <= upstream.safepoints.items()
    assert "ticdc-default-creating-kept.2" in upstream.safepoints
