"""Schema changes of a log, all the way: metadata, sorter, sink and readers are the real ones."""

import asyncio
from dataclasses import replace

import pytest

from server.capture import checkpoint_saver
from server.capture.catalog import FeedCatalog
from server.capture.errors import ParameterError, StartTsInFutureError, TableIneligibleError
from server.capture.flight import OwnerFeeds
from server.capture.service import changefeed_message
from server.changefeed.info import State
from sink.errors import RangeCrossesDdlError
from sink.flight.feeds import Poll
from sorter.errors import RangeCleanedError
from storage.model.errors import NotFoundError
from storage.tidb.field_type import Type
from storage.tidb.schema import Column, TableInfo
from tests.unit.server.capture.conftest import new
from tests.unit.server.capture.scripted_log import ScriptedLog, table_of
from tests.unit.server.capture.test_owner import until

ACCOUNTS = table_of(1, "accounts", "balance")
WIDER = table_of(1, "accounts", "balance", "credit")
ORDERS = table_of(2, "orders", "amount")
TMP = table_of(3, "tmp_x", "v")
KEYLESS = TableInfo(7, "keyless", (Column(name="v", type=Type.LONGLONG, id=1),))
RULES = ("bank.*", "!bank.tmp_*")


@pytest.fixture
def log(upstream):
    upstream.log = ScriptedLog(ACCOUNTS, TMP)
    return upstream.log


async def started(capture, **members):
    owner = await capture.start()
    feed = await owner.create(
        new("feed", source_uri="log://", start_ts=1000, rules=RULES, **members)
    )
    await until(lambda: feed.processor.sink)
    return owner, feed, OwnerFeeds(owner)


async def rows(feeds, table, start_ts, end_ts):
    _, batches = await asyncio.to_thread(feeds.read, "feed", table, start_ts, end_ts)
    found = [row for batch in batches for row in batch.to_pylist()]
    return [
        {name: value for name, value in row.items() if not name.startswith("_")} for row in found
    ]


async def latest(feeds, start_ts, wait_s=10.0):
    return await asyncio.to_thread(feeds.latest, "feed", None, start_ts, None, None, Poll(wait_s))


async def test_tables_are_those_that_the_filter_takes_and_no_safepoint_is_set_for_a_log(
    capture, upstream, log
):
    _, feed, _ = await started(capture)
    assert [table.name for table in feed.tables] == ["bank.accounts"]
    assert feed.info.rules == RULES
    assert upstream.safepoints == {"gc_worker": 0}


async def test_a_cut_ends_at_a_ddl_and_each_side_has_its_schema(capture, log):
    _, _, feeds = await started(capture)
    log.rows(1010, ACCOUNTS, {"id": 1, "balance": 5})
    log.ddl(1020, "ALTER TABLE accounts ADD credit BIGINT", WIDER)
    log.rows(1030, WIDER, {"id": 2, "balance": 6, "credit": 7})
    log.resolve(1040)
    assert await latest(feeds, 1000) == 1020
    assert await latest(feeds, 1020) == 1040
    assert await rows(feeds, "bank.accounts", 1000, 1020) == [{"id": 1, "balance": 5}]
    assert await rows(feeds, "bank.accounts", 1020, 1040) == [{"id": 2, "balance": 6, "credit": 7}]
    with pytest.raises(RangeCrossesDdlError):
        await rows(feeds, "bank.accounts", 1000, 1040)


async def test_a_log_that_is_read_again_over_the_end_of_a_table_goes_on(capture, log):
    _, _, feeds = await started(capture)
    log.rows(1010, ACCOUNTS, {"id": 1, "balance": 5})
    log.ddl(1020, "CREATE TABLE orders", ORDERS)
    log.ddl(1030, "DROP TABLE accounts", dropped=("bank.accounts",))
    log.rows(1035, ORDERS, {"id": 2, "amount": 10})
    log.resolve(1040)
    assert await latest(feeds, 1000) == 1020
    assert await asyncio.to_thread(feeds.ack, "feed", None, 1020) == 1020
    await capture.stop()
    owner = await capture.start()
    feeds = OwnerFeeds(owner)
    await until(lambda: owner.feeds["feed"].processor.sink)
    assert await latest(feeds, 1020) == 1030
    assert await latest(feeds, 1030) == 1040


async def test_cuts_wait_while_a_table_is_read_again_and_a_target_ts_in_there_fails_by_name(
    capture, log
):
    _, feed, feeds = await started(capture, target_ts=1030)
    feed.catalog.holds.begin(1020, 1, "MODIFY: NULL becomes a value")
    log.rows(1010, ACCOUNTS, {"id": 1, "balance": 5})
    log.ddl(1020, "MODIFY", ACCOUNTS, truncated=("bank.accounts",))
    log.rows(1025, ACCOUNTS, {"id": 1, "balance": 6})
    log.resolve(1040)
    assert await latest(feeds, 1000) == 1020
    assert await latest(feeds, 1020, 0.1) == 1020
    (told,) = changefeed_message(feed).rereads.tables
    assert (told.table, told.since_ts, told.reason) == (
        "bank.accounts",
        1020,
        "MODIFY: NULL becomes a value",
    )
    assert feed.info.state is State.NORMAL, "the reader has not everything before the DDL"
    await asyncio.to_thread(feeds.ack, "feed", None, 1020)
    await until(lambda: feed.info.state is State.FAILED)
    assert (feed.info.error.code, feed.processor.checkpoint_ts) == ("ErrTargetInReread", 1020)


async def test_a_table_that_a_source_tells_anew_is_shown_until_all_of_it_is_sorted(capture, log):
    _, feed, feeds = await started(capture)
    log.ddl(1020, "MODIFY", ACCOUNTS, tidemark_reread={"ts": 1020, "emptied": False})
    assert await latest(feeds, 1000) == 1020
    (told,) = changefeed_message(feed).rereads.tables
    assert (told.table, told.since_ts) == ("bank.accounts", 1020)
    log.rows(1030, ACCOUNTS, {"id": 1, "balance": 5})
    log.resolve(1040)
    assert await latest(feeds, 1020) == 1040
    assert not changefeed_message(feed).HasField("rereads")


async def test_a_reader_that_has_yet_to_take_a_ddl_is_told_the_tables_before_it_however_late_it_comes(
    capture, log, monkeypatch
):
    """A lake acknowledges the cut that ends at a DDL, then alters its tables: 100 s later,
    in another life, too.
    """
    monkeypatch.setattr(checkpoint_saver, "_COLLECT_EVERY_S", 0.0)
    collected, forget = [], FeedCatalog.forget
    monkeypatch.setattr(
        FeedCatalog,
        "forget",
        lambda *arguments: (forget(*arguments), collected.append(arguments[1])),
    )
    _, feed, feeds = await started(capture)
    log.rows(1010, ACCOUNTS, {"id": 1, "balance": 5})
    log.ddl(1020, "ALTER", WIDER)
    log.rows(1030, WIDER, {"id": 2, "balance": 6, "credit": 7})
    log.resolve(1040)
    await until(lambda: feed.processor.resolved_ts == 1040)
    await asyncio.to_thread(feeds.ack, "feed", None, 1020)
    await until(lambda: collected[-1:] == [1020])
    for restarted in (False, True):
        if restarted:
            await capture.stop()
            collected.clear()
            owner = await capture.start()
            feed, feeds = owner.feed("feed"), OwnerFeeds(owner)
            await until(lambda: collected[-1:] == [1020])
        before, at = feeds.describe("feed", 1019), feeds.describe("feed", 1020)
        assert [len(table.schema) for table in (*before.tables, *at.tables)] == [6, 7]
        assert [ddl.ts for ddl in at.ddls] == [1020]
        assert await latest(feeds, 1020) == 1040
        assert await rows(feeds, "bank.accounts", 1020, 1040) == [
            {"id": 2, "balance": 6, "credit": 7}
        ]
    await asyncio.to_thread(feeds.ack, "feed", None, 1040)
    await until(lambda: collected[-1:] == [1040])
    with pytest.raises(RangeCleanedError):
        feeds.describe("feed", 1019)


async def test_tables_come_and_go_by_ddl_and_those_left_out_stay_out(capture, log):
    _, feed, feeds = await started(capture)
    log.rows(1010, ACCOUNTS, {"id": 1, "balance": 5})
    log.ddl(1020, "CREATE TABLE orders", ORDERS)
    log.rows(1021, ORDERS, {"id": 1, "amount": 9})
    log.ddl(1022, "CREATE TABLE tmp_y", table_of(4, "tmp_y", "v"))
    log.ddl(1030, "DROP TABLE accounts", dropped=("bank.accounts",))
    log.rows(1035, ORDERS, {"id": 2, "amount": 10})
    log.resolve(1040)
    assert await latest(feeds, 1000) == 1020
    assert await latest(feeds, 1020) == 1030
    assert await latest(feeds, 1030) == 1040
    assert await rows(feeds, "bank.accounts", 1000, 1020) == [{"id": 1, "balance": 5}]
    assert await rows(feeds, "bank.orders", 1030, 1040) == [{"id": 2, "amount": 10}]
    assert [table.name for table in feed.tables] == ["bank.orders"]
    for ts in (1020, 1030, 1040):
        await asyncio.to_thread(feeds.ack, "feed", None, ts)
    assert feed.processor.checkpoint_ts == 1040
    log.resolve(1050)
    await until(lambda: feed.processor.resolved_ts == 1050)
    assert await asyncio.to_thread(feeds.ack, "feed", None, 1050) == 1050


async def test_a_truncated_table_goes_on_under_another_span(capture, log):
    _, feed, feeds = await started(capture)
    log.rows(1010, ACCOUNTS, {"id": 1, "balance": 5})
    emptied = table_of(9, "accounts", "balance")
    log.ddl(1020, "TRUNCATE TABLE accounts", emptied, truncated=("bank.accounts",))
    log.rows(1030, emptied, {"id": 1, "balance": 6})
    log.resolve(1040)
    assert await latest(feeds, 1000) == 1020
    await until(lambda: feed.processor.resolved_ts == 1040)
    assert await rows(feeds, "bank.accounts", 1000, 1020) == [{"id": 1, "balance": 5}]
    assert await rows(feeds, "bank.accounts", 1020, 1040) == [{"id": 1, "balance": 6}]


async def test_a_new_owner_reads_the_schemas_of_each_ts_from_the_metadata(capture, log):
    _, feed, feeds = await started(capture)
    log.rows(1010, ACCOUNTS, {"id": 1, "balance": 5})
    log.ddl(1020, "ALTER", WIDER)
    log.rows(1030, WIDER, {"id": 2, "balance": 6, "credit": 7})
    log.ddl(1035, "RENAME", table_of(1, "savings", "balance", "credit"), dropped=("bank.accounts",))
    log.rows(
        1036, table_of(1, "savings", "balance", "credit"), {"id": 3, "balance": 7, "credit": 8}
    )
    log.resolve(1040)
    await until(lambda: feed.processor.resolved_ts == 1040)
    await asyncio.to_thread(feeds.ack, "feed", None, 1010)
    await until(lambda: feed.checkpoint_ts == 1010)
    before = [
        await rows(feeds, "bank.accounts", 1010, 1020),
        await rows(feeds, "bank.savings", 1035, 1040),
    ]
    await capture.stop()

    owner = await capture.start()
    feeds = OwnerFeeds(owner)
    assert [table.name for table in owner.feed("feed").catalog.at(1010)] == ["bank.accounts"]
    assert await latest(feeds, 1010) == 1020
    assert await latest(feeds, 1035) == 1040
    assert [
        await rows(feeds, "bank.accounts", 1010, 1020),
        await rows(feeds, "bank.savings", 1035, 1040),
    ] == before
    assert await rows(feeds, "bank.accounts", 1020, 1035) == [{"id": 2, "balance": 6, "credit": 7}]


async def test_a_table_that_becomes_ineligible_fails_the_changefeed_by_name(capture, log):
    _, feed, feeds = await started(capture)
    keyless = TableInfo(1, "accounts", (Column(name="v", type=Type.LONGLONG, id=1),))
    log.ddl(1020, "ALTER TABLE accounts DROP PRIMARY KEY", keyless)
    await until(lambda: feed.info.state == "warning")
    assert await latest(feeds, 1000) == 1019
    await asyncio.to_thread(feeds.ack, "feed", None, 1019)
    await until(lambda: feed.info.state == "failed")
    assert feed.info.error.code == "ErrTableIneligible"
    assert "bank.accounts has neither a primary key" in feed.info.error.message


async def test_tables_that_cannot_be_replicated_are_refused_by_name_or_ignored_where_that_is_asked_for(
    capture, log
):
    log.tables.append(KEYLESS)
    owner = await capture.start()
    with pytest.raises(TableIneligibleError, match=r"bank\.keyless.*--ignore-ineligible-table"):
        await owner.create(new("feed", source_uri="log://", rules=RULES))
    feed = await owner.create(new("feed", source_uri="log://", rules=RULES, ignore_ineligible=True))
    assert feed.info.ignored == ("bank.keyless",)
    with pytest.raises(
        ParameterError, match=r"the filter takes none of the source's tables of (\d{4}-|\d)"
    ):
        await owner.create(new("other", source_uri="log://", rules=("nothing.*",)))


async def test_resumed_elsewhere_it_has_the_tables_of_that_time(capture, log):
    owner, _, _ = await started(capture)
    await owner.pause("feed")
    log.tables = [ORDERS]
    feed = await owner.resume("feed", 900)
    assert [table.name for table in feed.tables] == ["bank.orders"]
    await capture.stop()
    owner = await capture.start()
    assert [
        (table.name, owner.feed("feed").checkpoint_ts) for table in owner.feed("feed").tables
    ] == [("bank.orders", 900)]


async def test_schema_changes_behind_the_checkpoint_leave_the_metadata(capture, log, monkeypatch):
    monkeypatch.setattr(checkpoint_saver, "_COLLECT_EVERY_S", 0.0)
    _, feed, feeds = await started(capture)
    log.ddl(1020, "CREATE TABLE orders", ORDERS)
    log.ddl(1030, "DROP TABLE accounts", dropped=("bank.accounts",))
    log.ddl(1040, "ALTER TABLE orders ADD v BIGINT", table_of(2, "orders", "amount", "v"))
    log.resolve(1050)
    await until(lambda: feed.processor.resolved_ts == 1050)
    for ts in (1020, 1030, 1040, 1050):
        await asyncio.to_thread(feeds.ack, "feed", None, ts)

    async def kept():
        return [
            (each.commit_ts, [t.name for t in each.tables])
            for each in await capture.records.schemas.load("feed")
        ]

    for _ in range(6000):
        if await kept() == [(1040, ["bank.orders"])]:
            break
        await asyncio.sleep(0.01)
    assert await kept() == [(1040, ["bank.orders"])]
    assert [table.name for table in feed.tables] == ["bank.orders"]
    await capture.stop()
    owner = await capture.start()
    assert await latest(OwnerFeeds(owner), 1050, wait_s=0.05) == 1050
    assert [version.from_ts for version in owner.feed("feed").catalog.versions.at(1050)] == [1040]


async def test_a_refused_ddl_stops_the_feed_when_its_turn_comes_with_everything_before_it_delivered(
    capture, log
):
    """The reader is far behind when the log meets the DDL,
    and the last stretch before it is short and idle.
    """
    owner, feed, feeds = await started(capture)
    log.rows(1010, ACCOUNTS, {"id": 1, "balance": 5})
    log.rows(1500, ACCOUNTS, {"id": 2, "balance": 6})
    log.ddl(2000, "ALTER TABLE accounts DROP PRIMARY KEY", replace(KEYLESS, id=1, name="accounts"))
    log.rows(2010, ACCOUNTS, {"id": 3, "balance": 7})
    log.resolve(2020)
    await until(lambda: feed.info.state == "warning")
    assert feed.info.error.code == "ErrTableIneligible"
    for end_ts in (1500, 1999):
        start_ts = feed.processor.checkpoint_ts
        assert await asyncio.to_thread(
            feeds.latest, "feed", None, start_ts, 1 if end_ts == 1500 else None, None, Poll(9.0)
        )
        await asyncio.to_thread(feeds.ack, "feed", None, end_ts)
    await until(lambda: feed.info.state == "failed" and feed.info_saved)
    assert (feed.processor.checkpoint_ts, feed.info.error.code) == (1999, "ErrTableIneligible")
    assert "--overwrite-checkpoint-ts" in feed.info.error.message
    await until(lambda: feed.checkpoint_ts == 1999)

    log.now_ts = 3000
    await owner.resume("feed")  # it has not been mended: the same again, at the same place
    await until(lambda: feed.info.state == "failed" and feed.info_saved)
    assert feed.checkpoint_ts == 1999


async def test_the_advised_way_out_of_a_refused_ddl_works(capture, log):
    """Undo the DDL, then resume with --overwrite-checkpoint-ts;
    or another changefeed that leaves the table out.
    """
    owner, feed, feeds = await started(capture)
    log.ddl(2000, "ALTER TABLE accounts DROP PRIMARY KEY", replace(KEYLESS, id=1, name="accounts"))
    await until(lambda: feed.info.state == "warning")
    await asyncio.to_thread(feeds.latest, "feed", None, 1000, None, None, Poll(9.0))
    await asyncio.to_thread(feeds.ack, "feed", None, 1999)
    await until(lambda: feed.info.state == "failed" and feed.info_saved)
    log.ddl(2010, "ALTER TABLE accounts ADD PRIMARY KEY (id)", ACCOUNTS)
    log.now_ts = 3000
    await owner.resume("feed", 2010)
    await until(lambda: feed.processor.sink)
    log.rows(2020, ACCOUNTS, {"id": 4, "balance": 8})
    log.resolve(2030)
    await until(lambda: feed.processor.resolved_ts == 2030)
    assert await rows(feeds, "bank.accounts", 2010, 2030) == [{"id": 4, "balance": 8}]
    assert feed.info.state == "normal"


async def test_a_log_whose_times_are_ahead_of_the_clock_resumes_where_it_stands(capture, log):
    owner, feed, feeds = await started(capture)
    log.resolve(1050)
    await until(lambda: feed.processor.resolved_ts == 1050)
    await asyncio.to_thread(feeds.ack, "feed", None, 1050)
    await until(lambda: feed.checkpoint_ts == 1050)
    await owner.pause("feed")
    assert log.now_ts < 1050
    with pytest.raises(StartTsInFutureError):
        await owner.resume("feed", 1060)
    log.begins_at = 900
    with pytest.raises(NotFoundError):
        await owner.resume("feed", 899)
    with pytest.raises(NotFoundError):
        await owner.create(new("late", source_uri="log://", rules=RULES, start_ts=899))
    feed = await owner.resume("feed")
    assert feed.checkpoint_ts == 1050


async def test_a_ddl_that_brings_a_column_called_like_one_of_ours_stops_by_name(capture, log):
    _, feed, _ = await started(capture)
    log.ddl(
        1020, "ALTER TABLE accounts ADD _seq BIGINT", table_of(1, "accounts", "balance", "_Seq")
    )
    await until(lambda: feed.info.error is not None)
    assert "_Seq" in feed.info.error.message
    assert "bank.accounts=*,_Seq->upstream_Seq" in feed.info.error.message
