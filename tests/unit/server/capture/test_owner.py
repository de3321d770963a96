"""The life of changefeeds on their owner: real sorter, sink and metadata, an upstream in memory."""

import asyncio
import threading
from dataclasses import replace

import pytest
from tidemarkpb.v1 import changefeed_pb2 as pb

from server.capture import local as local_module
from server.capture.creation import NewChangefeed
from server.capture.errors import (
    ChangefeedExistsError,
    ChangefeedIdInvalidError,
    ChangefeedNotExistsError,
    ChangefeedNotRunningError,
    ChangefeedStateError,
    NotOwnerError,
    ParameterError,
    SourceUriError,
    StartTsBeforeGcError,
    StartTsInFutureError,
    TableIneligibleError,
    TargetTsError,
)
from server.capture.flight import OwnerFeeds
from server.capture.local import LocalProcessor
from server.capture.service import _request_key, changefeed_message
from server.capture.source.tidb import TidbSource
from server.capture.update import ChangefeedUpdate
from server.changefeed import keys
from server.changefeed.info import State
from server.changefeed.salt import Salt, SaltFileError
from server.rpc.pd import PdUnavailableError
from sink.flight.feeds import Poll
from sorter.engine import Sorter
from storage.defect import DefectError
from storage.model.errors import UnavailableError
from storage.model.ts import compose
from storage.tidb.document import TableInfoError
from storage.tidb.field_type import Type
from storage.tidb.schema import Column, TableInfo
from tests.unit.server.capture.conftest import new

URI = "delta:///lake"
SAFEPOINT = "ticdc-default-feed"


async def until(condition):
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError


async def rows(feeds, start_ts, end_ts):
    _, batches = await asyncio.to_thread(feeds.read, "feed", "bank.accounts", start_ts, end_ts)
    return [row for batch in batches for row in batch.to_pylist()]


async def test_rows_after_the_start_are_handed_out_and_acknowledged(capture, upstream):
    owner = await capture.start()
    feeds = OwnerFeeds(owner)
    upstream.commit(900, 1, 5)
    feed = await owner.create(new("feed", URI, 1000, 0, [capture.table]))
    await until(lambda: upstream.subscriptions)
    upstream.commit(1010, 1, 7)
    upstream.commit(1020, 2, 8)
    upstream.resolve(1030)
    assert await asyncio.to_thread(feeds.latest, "feed", None, 1000, None, None, Poll(10.0)) == 1030
    assert [
        (row["_commit_ts"], row["id"], row["balance"]) for row in await rows(feeds, 1000, 1030)
    ] == [
        (1010, 1, 7),
        (1020, 2, 8),
    ]
    assert (
        await asyncio.to_thread(feeds.latest, "feed", "bank.accounts", 1000, 1, None, Poll(0.0))
        == 1019
    )
    [part] = await asyncio.to_thread(feeds.plan, "feed", None, 1000, 1030)
    assert (part.table, part.rows) == ("bank.accounts", 2)
    assert await asyncio.to_thread(feeds.ack, "feed", None, 1020) == 1020
    await until(lambda: feed.checkpoint_ts == 1020)
    assert {each.info.id: each.checkpoint_ts for each in await capture.records.load()} == {
        "feed": 1020
    }
    await until(lambda: upstream.safepoints[SAFEPOINT] == 1019)


async def test_while_nothing_changes_readers_are_moved_on_every_few_seconds_only(capture, upstream):
    owner = await capture.start()
    feeds = OwnerFeeds(owner)
    await owner.create(new("feed", URI, 1000, 0, [capture.table]))
    await until(lambda: upstream.subscriptions)
    second = compose(1000)
    upstream.resolve(1000 + 2 * second)
    assert await asyncio.to_thread(feeds.latest, "feed", None, 1000, None, None, Poll(0.05)) == 1000
    upstream.resolve(1000 + 3 * second)
    # A reader whose cuts cost more says how seldom it wants one without rows.
    patient = Poll(0.05, idle_ms=3001)
    assert await asyncio.to_thread(feeds.latest, "feed", None, 1000, None, None, patient) == 1000
    assert (
        await asyncio.to_thread(feeds.latest, "feed", None, 1000, None, None, Poll(0.05))
        == 1000 + 3 * second
    )


async def test_a_new_owner_goes_on_at_the_checkpoint_and_gives_the_same_rows(capture, upstream):
    owner = await capture.start()
    await owner.create(new("feed", URI, 1000, 0, [capture.table]))
    await until(lambda: upstream.subscriptions)
    for ts in (1010, 1020, 1030):
        upstream.commit(ts, ts, ts)
    upstream.resolve(1040)
    feeds = OwnerFeeds(owner)
    before = await rows(feeds, 1010, 1040)
    await asyncio.to_thread(feeds.ack, "feed", None, 1010)
    await capture.stop()
    with pytest.raises(NotOwnerError):
        owner.feed("feed")

    owner = await capture.start()
    feeds = OwnerFeeds(owner)
    assert owner.feed("feed").checkpoint_ts == 1010
    await until(lambda: owner.feed("feed").processor.sink)
    assert await rows(feeds, 1010, 1040) == before


async def test_a_paused_changefeed_holds_gc_back_and_goes_on_where_it_was(capture, upstream):
    owner = await capture.start()
    await owner.create(new("feed", URI, 1000, 0, [capture.table]))
    await until(lambda: upstream.subscriptions)
    assert (await owner.pause("feed")).info.state == "stopped"
    assert not upstream.subscriptions
    assert upstream.safepoints[SAFEPOINT] == 999
    with pytest.raises(ChangefeedNotRunningError, match="stopped"):
        OwnerFeeds(owner).latest("feed", None, 1000, None, None, Poll(0.0))
    assert OwnerFeeds(owner).describe("feed").checkpoint_ts == 1000
    upstream.commit(1010, 1, 1)
    upstream.resolved_ts = 1020
    feed = await owner.resume("feed")
    await until(lambda: feed.processor.resolved_ts == 1020)
    assert len(await rows(OwnerFeeds(owner), 1000, 1020)) == 1
    with pytest.raises(ChangefeedStateError):
        await owner.resume("feed")


async def test_who_does_not_run_is_not_renewed_so_that_its_safepoint_ends(capture, upstream):
    owner = await capture.start()
    for name in ("feed", "other"):
        await owner.create(new(name, URI, 1000, 0, [capture.table]))
    await owner.pause("feed")
    await capture.stop()
    upstream.safepoints = {"gc_worker": 0}
    await capture.start()
    await until(lambda: "ticdc-default-other" in upstream.safepoints)
    assert SAFEPOINT not in upstream.safepoints


async def test_a_resume_may_overwrite_the_checkpoint(capture, upstream):
    owner = await capture.start()
    await owner.create(new("feed", URI, 1000, 0, [capture.table]))
    await owner.pause("feed")
    upstream.now_ts = 2000
    feed = await owner.resume("feed", 1500)
    assert feed.checkpoint_ts == 1500
    assert [each.checkpoint_ts for each in await capture.records.load()] == [1500]
    await until(lambda: upstream.subscriptions)
    assert upstream.subscriptions[0].matcher.start_ts == 1500


async def test_a_removed_changefeed_is_forgotten_and_lets_gc_go_on(capture, upstream, tmp_path):
    owner = await capture.start()
    await owner.create(new("feed", URI, 1000, 0, [capture.table]))
    await until(lambda: upstream.subscriptions)
    await owner.remove("feed")
    assert await capture.records.load() == []
    assert upstream.safepoints == {"gc_worker": 0}
    assert not (tmp_path / "sorter" / "feed").exists()
    with pytest.raises(ChangefeedNotExistsError):
        owner.feed("feed")


async def test_a_changefeed_that_is_removed_while_its_sorter_opens_leaves_no_files(
    capture, tmp_path, monkeypatch
):
    opening, may_open = threading.Event(), threading.Event()

    def slow(*arguments):
        opening.set()
        may_open.wait()
        return Sorter(*arguments)

    monkeypatch.setattr(local_module, "Sorter", slow)
    owner = await capture.start()
    feed = await owner.create(new("feed", URI, 1000, 0, [capture.table]))
    await asyncio.to_thread(opening.wait)
    async with asyncio.TaskGroup() as tasks:
        removing = tasks.create_task(owner.remove("feed"))
        await until(lambda: feed.info.state is State.REMOVED)
        done, _ = await asyncio.wait([removing], timeout=0.1)
        assert not done
        may_open.set()
    assert not (tmp_path / "sorter" / "feed").exists()


async def test_no_history_is_unprotected_while_a_changefeed_is_made(capture, upstream):
    owner = await capture.start()
    seen = []
    update = upstream.update_service_gc_safe_point

    async def recorded(service_id, ttl_s, safe_point):
        seen.append((service_id, ttl_s, safe_point))
        return await update(service_id, ttl_s, safe_point)

    upstream.update_service_gc_safe_point = recorded
    feed = await owner.create(new("feed", URI, 0, 0, [capture.table]))
    start_ts = feed.info.start_ts
    assert start_ts == 1001
    assert seen[:3] == [
        ("ticdc-default-creating_feed.1002", 3600, start_ts - 1),
        (SAFEPOINT, 86400, start_ts - 1),
        ("ticdc-default-creating_feed.1002", 0, 0),
    ]


async def test_a_late_removal_takes_no_safepoint_of_the_next_creation_or_resume(capture, upstream):
    update, late = upstream.update_service_gc_safe_point, []

    async def checked(service_id, ttl_s, safe_point):
        if ttl_s and "creating" in service_id:
            for each in late:  # its answer was lost, and it is carried out only now
                await update(each, 0, 0)
            answer = await update(service_id, ttl_s, safe_point)
            assert upstream.safepoints[service_id] == safe_point
            for each in late:
                await update(each, 0, 0)
            assert upstream.safepoints[service_id] == safe_point
            return answer
        if not ttl_s:
            late.append(service_id)
        return await update(service_id, ttl_s, safe_point)

    upstream.update_service_gc_safe_point = checked
    owner = await capture.start()
    keyless = TableInfo(7, "keyless", (Column(name="v", type=Type.LONGLONG, id=1),))
    for _ in range(2):
        with pytest.raises(TableIneligibleError):
            await owner.create(new("feed", URI, 1000, 0, [("bank", keyless.to_json())]))
    for _ in range(2):
        await owner.create(new("feed", URI, 1000, 0, [capture.table]))
        for _ in range(2):
            await owner.pause("feed")
            await owner.resume("feed")
        await owner.remove("feed")
    assert len([each for each in late if "creating" in each]) >= 8
    assert upstream.safepoints == {"gc_worker": 0}


@pytest.mark.parametrize(("gc_worker", "gc_ts"), [(1000, 0), (500, 1001)])
async def test_a_start_before_gc_is_refused_and_leaves_nothing(capture, upstream, gc_worker, gc_ts):
    upstream.safepoints["gc_worker"], upstream.gc_ts = gc_worker, gc_ts
    owner = await capture.start()
    with pytest.raises(StartTsBeforeGcError):
        await owner.create(new("feed", URI, 1000, 0, [capture.table]))
    assert await capture.records.load() == []
    assert upstream.safepoints == {"gc_worker": gc_worker}


async def test_a_creation_that_fails_says_why_though_its_safepoint_cannot_be_deleted(
    capture, upstream, monkeypatch
):
    owner, update = await capture.start(), upstream.update_service_gc_safe_point

    async def no_deletion(service_id, ttl_s, safe_point):
        if ttl_s <= 0:
            raise PdUnavailableError("no answer")
        return await update(service_id, ttl_s, safe_point)

    async def refuse(*_):
        raise TableIneligibleError("no key")

    monkeypatch.setattr(upstream, "update_service_gc_safe_point", no_deletion)
    monkeypatch.setattr(NewChangefeed, "selection", refuse)
    for attempt in (owner.create, owner.check):
        with pytest.raises(TableIneligibleError):
            await attempt(new("feed", URI, 1000, 0, [capture.table]))
    upstream.gc_ts = 5000
    with pytest.raises(StartTsBeforeGcError):
        await owner.create(new("feed", URI, 1000, 0, [capture.table]))


async def test_lost_history_fails_the_changefeed(capture, upstream):
    owner = await capture.start()
    feed = await owner.create(new("feed", URI, 1000, 0, [capture.table]))
    await until(lambda: upstream.subscriptions)
    await capture.stop()
    upstream.safepoints = {"gc_worker": 2000}
    owner = await capture.start()
    feed = owner.feed("feed")
    await until(lambda: feed.info.state == "failed" and feed.info_saved)
    [saved] = [each.info for each in await capture.records.load()]
    assert saved.error.code == "ErrSnapshotLostByGC"


async def test_a_passing_error_is_a_warning_and_the_changefeed_recovers(capture, upstream):
    owner = await capture.start()
    feed = await owner.create(new("feed", URI, 1000, 0, [capture.table]))
    await until(lambda: upstream.subscriptions)
    upstream.fail(UnavailableError("no luck"))
    await until(lambda: feed.info.state == "warning")
    assert feed.info.error.message == "no luck"
    await until(lambda: upstream.subscriptions)
    upstream.resolve(1010)
    await until(lambda: feed.info.state == "normal")


async def test_nothing_beyond_the_target_is_handed_out(capture, upstream):
    owner = await capture.start()
    feed = await owner.create(new("feed", URI, 1000, 1015, [capture.table]))
    await until(lambda: upstream.subscriptions)
    upstream.commit(1010, 1, 1)
    upstream.commit(1020, 1, 2)
    upstream.resolve(1030)
    await until(lambda: feed.processor.resolved_ts == 1015)


async def test_parameters_that_cannot_be_used_are_refused(capture, upstream):
    owner = await capture.start()
    name, accounts = capture.table
    keyless = TableInfo(7, "keyless", (Column(name="v", type=Type.LONGLONG, id=1),))
    for error, arguments in (
        (ChangefeedIdInvalidError, ("a/b", URI, 0, 0, [capture.table])),
        (StartTsInFutureError, ("feed", URI, 99_999, 0, [capture.table])),
        (TargetTsError, ("feed", URI, 1000, 1000, [capture.table])),
        (ParameterError, ("feed", URI, 0, 0, [])),
        (ParameterError, ("feed", URI, 0, 0, [capture.table, capture.table])),
        (TableInfoError, ("feed", URI, 0, 0, [(name, "{")])),
        (TableInfoError, ("feed", URI, 0, 0, [(name, "[" * 100_000)])),
        (
            TableInfoError,
            ("feed", URI, 0, 0, [(name, accounts.replace('"offset":0', '"offset":9'))]),
        ),
        (TableIneligibleError, ("feed", URI, 0, 0, [(name, keyless.to_json())])),
    ):
        with pytest.raises(error):
            await owner.create(new(*arguments))
    await owner.create(new("feed", URI, 0, 0, [(name, accounts)]))
    with pytest.raises(ChangefeedExistsError):
        await owner.create(new("feed", URI, 0, 0, [(name, accounts)]))


async def test_a_deposed_owner_writes_nothing(capture, upstream, meta):
    owner = await capture.start()
    await owner.create(new("feed", URI, 1000, 0, [capture.table]))
    await meta.delete(b"/tidemark/default/owner")
    with pytest.raises(NotOwnerError):
        await owner.create(new("other", URI, 1000, 0, [capture.table]))
    with pytest.raises(NotOwnerError):
        await owner.remove("feed")
    assert [each.info.id for each in await capture.records.load()] == ["feed"]


async def test_a_change_is_carried_out_when_whoever_asked_goes_away(capture, upstream):
    owner = await capture.start()
    asked, answer = asyncio.Event(), asyncio.Event()
    take = upstream.tso

    async def slow_tso(count=1):
        asked.set()
        await answer.wait()
        return await take(count)

    upstream.tso = slow_tso
    change = owner.carry_out(owner.create(new("feed", URI, 0, 0, [capture.table])))
    asking = asyncio.get_running_loop().create_task(change)
    await asked.wait()
    asking.cancel()
    answer.set()
    await until(lambda: "feed" in owner.feeds and upstream.subscriptions)
    assert [each.info.id for each in await capture.records.load()] == ["feed"]


async def test_a_change_that_fails_tells_why_and_stops_nothing(capture, upstream):
    owner = await capture.start()
    await owner.carry_out(owner.create(new("feed", URI, 0, 0, [capture.table])))
    with pytest.raises(ChangefeedExistsError):
        await owner.carry_out(owner.create(new("feed", URI, 0, 0, [capture.table])))
    await until(lambda: upstream.subscriptions)
    assert owner.is_active


async def test_who_is_not_the_owner_changes_nothing(capture, upstream):
    owner = await capture.start()
    await capture.stop()
    with pytest.raises(NotOwnerError):
        await owner.carry_out(owner.remove("feed"))


async def test_a_changefeed_that_this_version_cannot_read_stops_no_other_and_loses_nothing(
    capture, upstream, meta
):
    owner = await capture.start()
    for name in ("feed", "other"):
        await owner.create(new(name, URI, 1000, 0, [capture.table]))
    await capture.stop()
    [info] = [each.info for each in await capture.records.load() if each.info.id == "feed"]
    from_the_future = replace(info, source_uri="oracle://host")
    await meta.put(b"/tidemark/default/changefeed/info/feed", from_the_future.to_json())
    owner = await capture.start()
    feed = owner.feed("feed")
    assert (feed.info.state, feed.info.error.code) == ("failed", "ErrSourceURIInvalid")
    await until(lambda: owner.feed("other").processor.sink and feed.info_saved)
    with pytest.raises(SourceUriError):
        await owner.resume("feed")
    [saved] = [each.info for each in await capture.records.load() if each.info.id == "feed"]
    assert saved == replace(from_the_future, state=saved.state, error=saved.error)
    assert (await capture.records.schemas.load("feed"))[0].tables
    await owner.remove("feed")
    assert [each.info.id for each in await capture.records.load()] == ["other"]


async def test_a_new_changefeed_begins_without_what_one_of_its_name_left_behind(
    capture, upstream, meta
):
    """A puller may still write while its changefeed is being removed."""
    left = (b"source/feed/anchor", b"schema/feed/00000000000000000500", b"status/feed")
    for key in left:
        await meta.put(b"/tidemark/default/changefeed/" + key, b'{"checkpoint_ts": 7}')
    owner = await capture.start()
    feed = await owner.create(new("feed", URI, 1000, 0, [capture.table]))
    assert await meta.get(b"/tidemark/default/changefeed/source/feed/anchor") is None
    assert [change.commit_ts for change in await capture.records.schemas.load("feed")] == [1000]
    assert feed.checkpoint_ts == 1000


async def test_what_a_source_keeps_when_it_is_asked_for_the_present_stays(
    capture, upstream, meta, monkeypatch
):
    """A log's saved position for the start: without it commit_ts would be others after a restart,
    and rows be passed over.
    """
    key = b"/tidemark/default/changefeed/source/feed/anchor"
    present = TidbSource.now

    async def now(source):
        await meta.put(key, b"the start")
        return await present(source)

    monkeypatch.setattr(TidbSource, "now", now)
    owner = await capture.start()
    await owner.create(new("feed", URI, 0, 0, [capture.table]))
    assert (await meta.get(key)).value == b"the start"


async def test_an_exception_that_nobody_expected_ends_its_request_only(
    capture, upstream, monkeypatch
):
    owner = await capture.start()
    await owner.create(new("feed", URI, 1000, 0, [capture.table]))

    async def broken(*_):
        raise OverflowError("a number nobody thought of")

    with monkeypatch.context() as patched:
        patched.setattr(owner._records, "create", broken)
        with pytest.raises(DefectError, match=r"unexpected OverflowError.* id [0-9a-f]{8}"):
            await owner.carry_out(owner.create(new("other", URI, 1000, 0, [capture.table])))
    assert list(owner.feeds) == ["feed"]
    assert set(upstream.safepoints) == {"gc_worker", SAFEPOINT}, (
        "nothing of the failed creation is left"
    )
    await owner.carry_out(owner.create(new("other", URI, 1000, 0, [capture.table])))
    await owner.carry_out(owner.pause("feed"))


async def test_an_exception_that_nobody_expected_fails_its_changefeed_only(
    capture, upstream, monkeypatch
):
    owner = await capture.start()
    feed = await owner.create(new("feed", URI, 1000, 0, [capture.table]))
    other = await owner.create(new("other", URI, 1000, 0, [capture.table]))
    await until(lambda: len(upstream.subscriptions) == 2)
    await owner.pause("feed")

    async def broken():
        raise IndexError("no such offset")

    monkeypatch.setattr(LocalProcessor, "run", lambda _: broken())
    await owner.resume("feed")
    await until(lambda: feed.info.state == "failed" and feed.info_saved)
    assert feed.info.error.code == "ErrInternal"
    assert "unexpected" in feed.info.error.message
    assert other.info.state == "normal"


async def test_schema_records_that_cannot_be_read_stop_their_changefeed_only(
    capture, upstream, meta
):
    owner = await capture.start()
    for name in ("feed", "other"):
        await owner.create(new(name, URI, 1000, 0, [capture.table]))
    await capture.stop()
    await meta.put(keys.schema_change("feed", 1000), b"{", 0)
    owner = await capture.start()
    assert owner.feed("feed").info.error.code == "ErrCorrupt"
    await until(lambda: owner.feed("other").processor.sink)


async def test_a_changefeed_that_reaches_its_target_is_finished_and_lets_gc_go_on(
    capture, upstream, tmp_path
):
    """The last stretch is idle: no row comes after 1010,
    and the target is less than an idle cut away.
    """
    owner = await capture.start()
    feeds = OwnerFeeds(owner)
    feed = await owner.create(new("feed", URI, 1000, 1015, [capture.table]))
    await until(lambda: upstream.subscriptions)
    upstream.commit(1010, 1, 1)
    upstream.commit(1020, 1, 2)
    upstream.resolve(1012)
    end_ts = await asyncio.to_thread(feeds.latest, "feed", None, 1000, None, None, Poll(10.0))
    assert end_ts == 1012
    await asyncio.to_thread(feeds.ack, "feed", None, 1012)
    upstream.resolve(1030)
    assert await asyncio.to_thread(feeds.latest, "feed", None, 1012, None, None, Poll(10.0)) == 1015
    assert await rows(feeds, 1012, 1015) == []
    assert (
        await asyncio.to_thread(feeds.latest, "feed", "bank.accounts", 1012, None, None, Poll(10.0))
        == 1015
    )
    assert feed.info.state == "normal"
    assert await asyncio.to_thread(feeds.ack, "feed", None, 1015) == 1015
    await until(lambda: feed.released)
    assert (feed.info.state, feed.checkpoint_ts, changefeed_message(feed).state) == (
        "finished",
        1015,
        pb.CHANGEFEED_STATE_FINISHED,
    )
    assert set(upstream.safepoints) == {"gc_worker"}
    assert not upstream.subscriptions
    described = feeds.describe("feed")
    assert (described.state, described.checkpoint_ts, described.target_ts) == (
        "finished",
        1015,
        1015,
    )

    for change in (owner.resume("feed"), owner.resume("feed", 1005), owner.pause("feed")):
        with pytest.raises(ChangefeedStateError, match=r"is finished.*--start-ts 1015"):
            await change
    await capture.stop()
    owner = await capture.start()
    feed = owner.feed("feed")
    await until(lambda: feed.released)
    assert (feed.info.state, feed.checkpoint_ts, feed.task) == ("finished", 1015, None)
    assert set(upstream.safepoints) == {"gc_worker"}
    upstream.now_ts = 2000
    await owner.create(new("next", URI, 1015, 0, [capture.table]))  # as the refusal advises
    await owner.remove("feed")
    assert [each.info.id for each in await capture.records.load()] == ["next"]


async def test_another_target_is_for_a_paused_changefeed_and_lies_in_the_future(capture, upstream):
    owner = await capture.start()
    feeds, upstream.now_ts = OwnerFeeds(owner), 1100
    feed = await owner.create(new("feed", URI, 1000, 1015, [capture.table]))

    async def latest(since_ts):
        return await asyncio.to_thread(feeds.latest, "feed", None, since_ts, None, None, Poll(10.0))

    async def goes_on_with(target_ts, resolved_ts):
        """Paused and resumed with another target."""
        await owner.pause("feed")
        await until(lambda: not upstream.subscriptions)
        await owner.update("feed", ChangefeedUpdate(target_ts=target_ts))
        await owner.resume("feed")
        await until(lambda: upstream.subscriptions)
        upstream.commit(resolved_ts - 1, 1, resolved_ts)
        upstream.resolve(resolved_ts)

    async def refused(target_ts, error, why):
        with pytest.raises(error, match=why):
            await owner.update("feed", ChangefeedUpdate(target_ts=target_ts))
        assert feed.info.target_ts == 1015

    await refused(1200, ChangefeedStateError, "pause it before")
    await owner.pause("feed")
    for past in (1, 1014, 1016, 1100):
        await refused(past, TargetTsError, "is not after the present")
    await owner.update("feed", ChangefeedUpdate(target_ts=1200))
    # It is durable, and all that changed.
    assert [each.info for each in await capture.records.load()] == [feed.info]
    assert (feed.info.target_ts, feed.info.state, feed.checkpoint_ts) == (1200, "stopped", 1000)
    await owner.resume("feed")
    await until(lambda: upstream.subscriptions)
    upstream.resolve(1300)
    assert await latest(1000) == feeds.describe("feed").target_ts == 1200

    await goes_on_with(0, 1400)
    assert await latest(1200) == 1400
    await goes_on_with(1500, 1600)
    assert await latest(1400) == 1500
    await asyncio.to_thread(feeds.ack, "feed", None, 1500)
    await until(lambda: feed.released)
    with pytest.raises(ChangefeedStateError, match="is finished"):
        await owner.update("feed", ChangefeedUpdate(target_ts=0))


async def test_an_update_may_have_big_tables_split_or_whole_from_then_on(capture):
    owner = await capture.start()
    feed = await owner.create(new("feed", URI, 1000, 0, [capture.table]))
    for threshold in (7, 0):
        processor = feed.processor
        await owner.update("feed", ChangefeedUpdate(region_threshold=threshold))
        assert (feed.info.region_threshold, feed.processor is processor) == (threshold, False)
        await owner.update("feed", ChangefeedUpdate(reader_ttl_s=60))
        assert feed.info.region_threshold == threshold
    await capture.stop()
    assert (await capture.start()).feed("feed").info.region_threshold == 0


async def test_names_that_the_sink_cannot_hold_are_refused_at_create_and_at_update(capture):
    owner = await capture.start()
    table = TableInfo.build(102, "odd", [Column.bigint("id"), Column.bigint("n" * 64)])
    tables, sink_uri = [("bank", table.to_json())], "postgresql://me@host/lake"
    with pytest.raises(
        TableIneligibleError, match=r"n{64} has more than 63 bytes.*--columns 'bank\.odd=\*,n{64}->"
    ):
        await owner.create(new("feed", sink_uri, tables=tables))
    columns = [f"bank.odd=*,{'n' * 64}->upstream_n"]
    mapped = await owner.create(new("mapped", sink_uri, tables=tables, columns=columns))
    await owner.update("mapped", ChangefeedUpdate(sink_uri="postgresql://other@host/lake"))
    assert mapped.info.sink_uri == "postgresql://other@host/lake"
    earlier = await owner.create(new("earlier", "delta:///lake/earlier", tables=tables))
    earlier.info = replace(
        earlier.info, sink_uri=sink_uri
    )  # as captures made it that did not look at names
    with pytest.raises(TableIneligibleError, match="more than 63 bytes"):
        await owner.update("earlier", ChangefeedUpdate(sink_uri="postgresql://other@host/lake"))


async def test_the_salt_is_read_once_a_creation_and_off_the_event_loop(
    capture, tmp_path, monkeypatch
):
    owner, read, reads = await capture.start(), Salt.read, []

    def noted(path):
        reads.append(threading.current_thread() is threading.main_thread())
        return read(path)

    monkeypatch.setattr(Salt, "read", noted)
    salt = tmp_path / "salt"
    salt.write_text("nobody can guess this one")
    masked = {"masks": ["bank.*=balance:mask.hash.SHA-256"], "salt_file": str(salt)}
    feed = await owner.create(replace(new("feed", URI, 0, 0, [capture.table]), **masked))
    assert reads == [False]
    assert (feed.info.salt_file, feed.info.salt_check) == (str(salt), read(str(salt)).check)
    await owner.check(replace(new("other", URI, 0, 0, [capture.table]), **masked))
    assert reads == [False, False]
    salt.unlink()
    with pytest.raises(SaltFileError):
        await owner.create(replace(new("third", URI, 0, 0, [capture.table]), **masked))


async def test_a_check_says_what_would_be_made_and_leaves_nothing(capture, upstream):
    owner = await capture.start()
    keyless = TableInfo(7, "log", (Column(name="v", type=Type.LONGLONG, id=1),))
    tables = [capture.table, ("bank", keyless.to_json())]
    before = await capture.records.ids(), dict(upstream.safepoints)
    checked = await owner.check(new("feed", URI, 1000, 0, tables))
    assert [table.name for table in checked.tables] == ["bank.accounts"]
    assert list(checked.refused) == ["bank.log"]
    assert (await capture.records.ids(), dict(upstream.safepoints)) == before
    assert owner.feeds == {}
    await owner.create(new("feed", URI, 1000, 0, [capture.table]))
    with pytest.raises(ChangefeedExistsError):
        await owner.check(new("feed", URI, 1000, 0, [capture.table]))


async def test_a_check_refuses_what_creation_refuses(capture, upstream):
    owner = await capture.start()
    upstream.gc_ts = 1100
    upstream.safepoints["gc_worker"] = 1100
    with pytest.raises(StartTsBeforeGcError):
        await owner.check(new("feed", URI, 1000, 0, [capture.table]))
    with pytest.raises(StartTsInFutureError):
        await owner.check(new("feed", URI, 1 << 60, 0, [capture.table]))
    assert not [service for service in upstream.safepoints if "creating" in service]


def test_a_request_is_known_by_its_id_and_by_all_that_it_says():
    def key(method="ResumeChangefeed", **members):
        given = {"id": "feed", "request_id": "1", "overwrite_checkpoint_ts": 7, **members}
        return _request_key(method, pb.ResumeChangefeedRequest(**given))

    assert key() == key()
    others = {key("PauseChangefeed"), key(id="other"), key(request_id="2")}
    assert len({key(), key(overwrite_checkpoint_ts=8), *others}) == 5
    unnamed = pb.RemoveChangefeedRequest(id="feed")
    first = _request_key("RemoveChangefeed", unnamed)
    assert _request_key("RemoveChangefeed", unnamed) == first, "it is passed on with an id"
    assert _request_key("RemoveChangefeed", pb.RemoveChangefeedRequest(id="feed")) != first
    with pytest.raises(ParameterError, match="128"):
        key(request_id="x" * 129)
