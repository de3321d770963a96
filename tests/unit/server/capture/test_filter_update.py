"""A changefeed gets another filter: tables come and go at one ts, once everything up to there is
acknowledged, whoever dies in between.
"""

import asyncio
import dataclasses
from contextlib import suppress
from functools import partial

import pytest

from server.capture.errors import ChangefeedNotRunningError, ChangefeedStateError, ParameterError
from server.capture.flight import OwnerFeeds
from server.capture.records import ChangefeedRecord
from server.capture.update import ChangefeedUpdate
from server.changefeed.event_filter import EventFilter
from server.changefeed.info import FilterUpdate
from server.changefeed.records import SchemaRecords
from server.changefeed.table import SourceTable
from server.dump.job import DumpRecords, Job
from sink.flight.feeds import Poll
from storage.model.errors import TidemarkError, UnavailableError
from tests.unit.server.capture.conftest import new
from tests.unit.server.capture.scripted_log import ScriptedLog, table_of
from tests.unit.server.capture.test_lifecycle_crashes import Steps, Unanswered, is_settled, told
from tests.unit.server.capture.test_owner import until

ACCOUNTS, CARDS, TMP = table_of(1, "accounts"), table_of(2, "cards"), table_of(3, "tmp")
NEW = ChangefeedUpdate(rules=("bank.*", "!bank.accounts"))


@pytest.fixture
def log(upstream):
    upstream.log = ScriptedLog(ACCOUNTS, CARDS, TMP)
    return upstream.log


async def created(owner, **members):
    rules = ["bank.accounts", "bank.tmp"]
    return await owner.create(new(source_uri="log://", start_ts=1000, rules=rules, **members))


async def updated(owner, update=NEW):
    await owner.update("feed", update)
    return owner.feed("feed")


async def acknowledged(owner, ts):
    """Everything up to `ts`, or to where the changefeed stops, is at the target."""
    feed = owner.feed("feed")
    await until(
        lambda: (
            feed.processor.sink and feed.processor.resolved_ts >= min(ts, feed.info.stop_ts or ts)
        )
    )
    await asyncio.to_thread(OwnerFeeds(owner).ack, "feed", None, ts)


def names(feed):
    return [table.name for table in feed.tables]


def changes(feed):
    return [
        (each.commit_ts, [t.name for t in each.tables], list(each.dropped))
        for each in feed.catalog.history
    ]


async def test_tables_come_and_go_at_the_present_of_the_update(capture, log, meta):
    owner = await capture.start()
    await created(owner)
    log.now_ts = 1200
    feed = await updated(owner)
    assert (names(feed), feed.info.stop_ts) == (["bank.tmp"], 1200), "what both filters take"
    await until(lambda: feed.processor.sink)
    with pytest.raises(ChangefeedNotRunningError, match=r"leaves bank\.accounts out"):
        OwnerFeeds(owner).latest("feed", "bank.accounts", 1000, None, None, Poll(0.0))
    log.rows(1100, ACCOUNTS, {"id": 1})
    log.rows(1300, CARDS, {"id": 2})
    log.resolve(1400)
    await acknowledged(owner, 1400)
    await until(lambda: feed.info.filter_update is None)
    assert names(feed) == ["bank.tmp", "bank.cards"]
    assert changes(feed)[-1] == (1200, ["bank.cards"], ["bank.accounts"])
    assert (await DumpRecords(meta, "feed").job()).tables == ("bank.cards",)

    described = OwnerFeeds(owner).describe("feed", 1200)
    assert [table.table for table in described.tables] == ["bank.tmp", "bank.cards"]
    assert [ddl.dropped for ddl in described.ddls] == [("bank.accounts",)]
    assert [table.table for table in OwnerFeeds(owner).describe("feed", 1199).tables] == [
        "bank.accounts",
        "bank.tmp",
    ]
    await until(lambda: feed.processor.resolved_ts == 1400)
    slices = await asyncio.to_thread(OwnerFeeds(owner).plan, "feed", None, 1200, 1400)
    assert [(each.table, each.rows) for each in slices] == [("bank.cards", 1)]


async def test_a_ddl_above_it_that_is_known_already_has_another_ts_chosen(capture, log):
    owner = await capture.start()
    await created(owner)
    log.now_ts = 1200
    feed = await updated(owner, ChangefeedUpdate(rules=("bank.accounts", "bank.tmp", "bank.cards")))
    log.ddl(1300, "ALTER TABLE accounts …", table_of(1, "accounts", "balance"))
    log.resolve(1400)
    log.now_ts = 1450
    await until(lambda: feed.catalog.history.last_ts == 1300)
    await acknowledged(owner, 1200)
    await until(lambda: feed.info.filter_update.ts == 1450)
    log.resolve(1500)
    await acknowledged(owner, 1300)
    await acknowledged(owner, 1450)
    await until(lambda: feed.info.filter_update is None)
    assert changes(feed)[1:] == [(1300, ["bank.accounts"], []), (1450, ["bank.cards"], [])]


async def test_what_a_filter_left_out_that_never_came_in_force_comes_again(capture, log, meta):
    """Its rows were not delivered meanwhile."""
    owner = await capture.start()
    feed = await created(owner)
    await DumpRecords(meta, "feed").put_job(None, Job("some", tables=("bank.tmp",)))
    log.now_ts = 1100
    await updated(owner, ChangefeedUpdate(rules=("bank.tmp",)))
    log.rows(1050, ACCOUNTS, {"id": 1})
    log.resolve(1060)
    await acknowledged(owner, 1060)
    log.now_ts = 1200
    await updated(owner, ChangefeedUpdate(rules=("bank.*",)))
    assert names(feed) == ["bank.tmp"]
    log.resolve(1400)
    await acknowledged(owner, 1400)
    await until(lambda: feed.info.filter_update is None)
    assert changes(feed)[1:] == [(1200, ["bank.accounts", "bank.cards"], [])]
    assert list(feed.catalog.history)[-1].truncated == ("bank.accounts",)
    tables = ("bank.tmp", "bank.accounts", "bank.cards")
    assert (await DumpRecords(meta, "feed").job()) == Job("some", tables=tables)
    assert [each.commit_ts for each in await capture.records.schemas.load("feed")] == [1000, 1200]


async def test_to_go_on_elsewhere_is_to_go_on_with_the_new_filter(capture, log):
    owner = await capture.start()
    await created(owner)
    log.now_ts = 1200
    feed = await updated(owner)
    await owner.pause("feed")
    log.now_ts = 1500
    await owner.resume("feed", 1500)
    assert (sorted(names(feed)), feed.info.filter_update, feed.info.stop_ts) == (
        ["bank.cards", "bank.tmp"],
        None,
        0,
    )


def schemas(owner, ts, name="bank.accounts"):
    described = OwnerFeeds(owner).describe("feed", ts).tables
    [table] = [each for each in described if each.table == name]
    return {field.name: str(field.type) for field in table.schema if not field.name.startswith("_")}


async def in_force(owner, log, feed):
    log.resolve(1400)
    await acknowledged(owner, 1400)
    await until(lambda: feed.info.filter_update is None)
    return list(feed.catalog.history)[-1]


async def test_a_table_with_other_masks_begins_anew_at_the_present_of_the_update(
    capture, log, meta
):
    log.tables[0] = wide = table_of(1, "accounts", "v")
    owner = await capture.start()
    await created(owner)
    log.now_ts = 1200
    masks = ("bank.accounts=v:mask.with.4.chars",)
    feed = await updated(owner, ChangefeedUpdate(masks=masks))
    assert names(feed) == ["bank.accounts", "bank.tmp"], "as before, until then"
    assert (feed.info.masks, feed.info.coming_terms.masks) == ((), masks)
    log.rows(1100, wide, {"id": 1, "v": 5})
    change = await in_force(owner, log, feed)
    assert [each.name for each in change.tables] == ["bank.accounts"]
    assert (change.truncated, change.dropped) == (("bank.accounts",), ())
    assert (await DumpRecords(meta, "feed").job()).tables == ("bank.accounts",)
    await capture.stop()
    owner = await capture.start()
    feed = owner.feed("feed")
    assert (feed.info.masks, feed.info.coming_terms, feed.info.rules[0]) == (
        masks, None, "bank.accounts")  # fmt: skip
    assert schemas(owner, 1199) == {"id": "int64", "v": "int64"}
    assert schemas(owner, 1200) == {"id": "int64", "v": "string"}


async def test_event_filters_are_about_changes_from_the_present_of_the_update_on(
    capture, log, meta
):
    owner = await capture.start()
    await created(owner)
    log.now_ts = 1200
    inserts = EventFilter(("bank.accounts",), ignore_event=("insert",))
    feed = await updated(owner, ChangefeedUpdate(event_filters=(inserts,)))
    change = await in_force(owner, log, feed)
    assert (len(change.tables), change.truncated) == (1, ()), "its rows stay as they are"
    assert await DumpRecords(meta, "feed").job() is None
    ignored = [feed.catalog.history.at(ts)["bank.accounts"][1].ignored for ts in (1199, 1200)]
    assert [each is None for each in ignored] == [True, False]
    log.now_ts = 1500
    await updated(owner, ChangefeedUpdate(event_filters=()))
    log.resolve(1500)
    await acknowledged(owner, 1500)
    await until(lambda: feed.info.filter_update is None)
    assert feed.info.event_filters == ()
    assert all(each.record.ignored is None for each in feed.tables)


async def test_without_dumps_a_table_goes_on_if_rows_at_the_target_fit(capture, log, meta):
    log.tables[0] = table_of(1, "accounts", "v", "w")
    owner = await capture.start()
    await created(owner, columns=["bank.accounts=id,v"])
    log.now_ts = 1200
    masks = ("bank.accounts=v:mask.with.4.chars",)
    with pytest.raises(ParameterError, match=r"bank\.accounts: v would be .* leave out --no-dump"):
        await owner.update("feed", ChangefeedUpdate(masks=masks, dumps=False))
    feed = owner.feed("feed")
    assert (feed.info.coming_terms, feed.info.filter_update) == (None, None)
    await updated(owner, ChangefeedUpdate(columns=("bank.accounts=id,w",), dumps=False))
    inserts = EventFilter(("bank.tmp",), ignore_event=("insert",))
    ignoring = ChangefeedUpdate(event_filters=(inserts,), dumps=False)
    with pytest.raises(ChangefeedStateError, match="Try again in a while"):
        await updated(owner, ignoring)
    log.now_ts = 1250
    # The next one is for both, where the first is not in force yet.
    await updated(owner, ignoring)
    change = await in_force(owner, log, feed)
    assert sorted(each.name for each in change.tables) == ["bank.accounts", "bank.tmp"]
    assert (change.truncated, await DumpRecords(meta, "feed").job()) == ((), None)
    assert (feed.info.columns, feed.info.event_filters) == (("bank.accounts=id,w",), (inserts,))
    assert (schemas(owner, 1249).keys(), schemas(owner, 1250).keys()) == (
        {"id", "v"}, {"id", "w"})  # fmt: skip


async def test_a_mask_that_follows_a_column_is_kept_when_other_terms_change(capture, log):
    log.tables[0] = table_of(1, "accounts", "v")
    owner = await capture.start()
    masks = ("bank.accounts=v:mask.with.4.chars",)
    await created(owner, masks=masks)
    log.tables[0] = table_of(1, "accounts", "w")
    log.ddl(1100, "ALTER TABLE accounts RENAME COLUMN v TO w", log.tables[0])
    log.resolve(1150)
    feed = owner.feed("feed")
    await until(lambda: feed.catalog.history.last_ts == 1100)
    log.now_ts = 1200
    await updated(owner, ChangefeedUpdate(columns=("bank.accounts=*",)))
    await acknowledged(owner, 1100)
    change = await in_force(owner, log, feed)
    assert all(each.masked == {"w": "mask.with.4.chars"} for each in change.tables)
    assert schemas(owner, 1200) == {"id": "int64", "w": "string"}


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
async def test_no_crash_loses_a_table(capture, log, upstream, meta, monkeypatch, is_done):
    steps = Steps(upstream, meta, monkeypatch)
    for step in range(1, 40):
        log.now_ts = 1000
        log.events.clear()
        owner = await capture.start()
        await created(owner)
        log.now_ts = 1200
        steps.count, steps.hangs_at, steps.is_done, steps.counting = 0, step, is_done, True
        steps.hanging.clear()
        changing = asyncio.get_running_loop().create_task(changed(owner, log))
        hanging = asyncio.get_running_loop().create_task(steps.hanging.wait())
        await asyncio.wait([changing, hanging], return_when=asyncio.FIRST_COMPLETED)
        steps.counting, hung = False, steps.hanging.is_set()
        for task in (changing, hanging):
            task.cancel()
            with suppress(asyncio.CancelledError, TidemarkError):
                await task
        await capture.stop()

        owner = await capture.start()
        feed = owner.feed("feed")
        if feed.info.rules != NEW.rules:
            assert feed.info.filter_update is None, "all or nothing"
            assert names(feed) == ["bank.accounts", "bank.tmp"]
            await updated(owner)
        log.resolve(1400)
        await acknowledged(owner, 1400)
        await until(lambda feed=feed: feed.info.filter_update is None)
        assert names(feed) == ["bank.tmp", "bank.cards"]
        assert changes(feed)[-1][0] in (1200, 1210)
        assert changes(feed)[-1][1:] == (["bank.cards"], ["bank.accounts"])
        assert (await DumpRecords(meta, "feed").job()).tables == ("bank.cards",)
        await owner.remove("feed")
        await capture.stop()
        if not hung:
            assert step > 1
            return
    raise AssertionError("it has no end")


async def test_an_update_that_breaks_off_behind_its_record_leaves_memory_as_the_record_is(
    capture, log, meta, monkeypatch
):
    """The owner writes what it has in memory: the former ts would name tables that are gone."""
    owner = await capture.start()
    await created(owner)
    log.now_ts = 1200
    feed = await updated(owner)
    delete_tables = SchemaRecords.delete_tables

    async def without_answer(self, *arguments):
        await delete_tables(self, *arguments)
        raise UnavailableError("etcd is away")

    monkeypatch.setattr(SchemaRecords, "delete_tables", without_answer)
    log.now_ts = 1210
    with pytest.raises(UnavailableError):
        await updated(owner)
    monkeypatch.undo()
    # Whatever else is to be written of it, as a warning is.
    feed.info_saved = False
    await until(lambda: feed.info_saved)
    record = await capture.records.load_one("feed")
    assert record.info.filter_update.ts == feed.info.filter_update.ts == 1210
    log.resolve(1400)
    await acknowledged(owner, 1400)
    await until(lambda: feed.info.filter_update is None)
    assert names(feed) == ["bank.tmp", "bank.cards"]
    assert changes(feed)[-1] == (1210, ["bank.cards"], ["bank.accounts"])


async def changed(owner, log):
    await updated(owner)
    log.now_ts = 1210
    feed = await updated(owner)  # once more, as after an answer that was lost
    log.resolve(1400)
    await acknowledged(owner, 1400)
    await until(lambda: feed.info.filter_update is None)


@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
async def test_an_update_without_an_answer_is_in_force_in_both_places_or_in_none(
    capture, log, meta, monkeypatch, is_done
):
    """Nothing runs by what is not known, and within a second it is as the metadata has it."""
    unanswered = Unanswered(meta, monkeypatch)
    for step in range(1, 20):
        log.now_ts = 1000
        log.events.clear()
        owner = await capture.start()
        before = told(await created(owner))
        log.now_ts = 1200
        log.resolve(1100)
        await until(lambda owner=owner: owner.feed("feed").processor.resolved_ts == 1100)
        unanswered.count, unanswered.lost_at, unanswered.is_done = 0, step, is_done
        error = None
        try:
            await updated(owner)
        except UnavailableError as err:
            error = err
        is_over, unanswered.lost_at = unanswered.lost_at > 0, 0
        assert (error is None) == is_over
        await until(partial(is_settled, owner))
        feed = owner.feed("feed")
        pending, is_updated = feed.info.filter_update, feed.info.rules == NEW.rules
        assert is_updated == (pending is not None and pending.ts == 1200)
        if is_updated:
            assert (names(feed), feed.info.stop_ts) == (["bank.tmp"], 1200)
        else:
            assert not is_over
            assert told(feed) == before
        in_memory = told(feed)
        await until(lambda feed=feed: feed.processor.sink is not None)
        await capture.stop()
        owner = await capture.start()
        feed = owner.feed("feed")
        assert told(feed) == in_memory
        # The update is made again, or goes on: it ends in the same way.
        if not is_updated:
            await updated(owner)
        log.resolve(1400)
        await acknowledged(owner, 1400)
        await until(lambda feed=feed: feed.info.filter_update is None)
        assert changes(feed)[-1] == (1200, ["bank.cards"], ["bank.accounts"])
        await owner.remove("feed")
        await capture.stop()
        if is_over:
            assert step > 1
            return
    raise AssertionError("it has no end")


async def test_no_reader_is_beyond_the_ts_that_is_chosen(capture, log):
    owner = await capture.start()
    feed = await created(owner)
    log.resolve(1300)
    await until(lambda: feed.processor.resolved_ts == 1300)
    log.now_ts = 1300
    with pytest.raises(ChangefeedStateError, match="ahead of the clock"):
        await updated(owner)
    assert (feed.info.filter_update, names(feed)) == (None, ["bank.accounts", "bank.tmp"])
    await until(lambda: feed.processor.resolved_ts == 1300)
    log.now_ts = 1302
    await updated(owner)
    assert feed.info.stop_ts == 1302


async def test_a_table_that_comes_where_there_was_none_is_read_from_before_it(capture, log):
    """Without tables the checkpoint goes on by itself: a reader may be behind a restart then."""
    owner = await capture.start()
    feed = await created(owner)
    log.ddl(1100, "DROP TABLE accounts, tmp", dropped=("bank.accounts", "bank.tmp"))
    log.resolve(1200)
    await acknowledged(owner, 1100)
    again = table_of(9, "accounts", "balance")
    log.ddl(1300, "CREATE TABLE accounts …", again)
    log.rows(1350, again, {"id": 1, "balance": 2})
    log.resolve(1400)
    await until(lambda: feed.processor.resolved_ts == 1400)
    await until(lambda: feed.checkpoint_ts == 1300)
    await capture.stop()

    owner = await capture.start()
    feed, feeds = owner.feed("feed"), OwnerFeeds(owner)
    await until(lambda: feed.processor.resolved_ts == 1400)
    at_ts = 1100
    for end_ts, rows in ((1300, 0), (1400, 1)):
        assert (
            await asyncio.to_thread(feeds.latest, "feed", None, at_ts, None, None, Poll(1.0))
            == end_ts
        )
        slices = await asyncio.to_thread(feeds.plan, "feed", None, at_ts, end_ts)
        assert sum(each.rows for each in slices) == rows
        await asyncio.to_thread(feeds.ack, "feed", None, end_ts)
        at_ts = end_ts


async def test_a_table_without_a_key_that_comes_lets_nothing_be_dumped(
    capture, log, meta, monkeypatch
):
    """A dump that names no table is one of all tables."""
    monkeypatch.setattr(SourceTable, "has_key", property(lambda self: self.name != "bank.cards"))
    owner = await capture.start()
    await created(owner)
    log.now_ts = 1200
    feed = await updated(owner)
    log.resolve(1400)
    await acknowledged(owner, 1400)
    await until(lambda: feed.info.filter_update is None)
    assert names(feed) == ["bank.tmp", "bank.cards"]
    assert await DumpRecords(meta, "feed").job() is None


async def test_rules_that_cannot_be_read_stop_their_own_changefeed_only(capture, log):
    owner = await capture.start()
    feed = await created(owner)
    update = FilterUpdate((("[",),), 1200)
    info = dataclasses.replace(feed.info, rules=("[",), filter_update=update)
    read = await owner.loaded(ChangefeedRecord(info, 1000))
    assert read.info.error.code == "ErrFilterRuleInvalid"
