"""Schema changes of a log, all the way: metadata, sorter, sink and readers are the real ones."""

import asyncio

import pytest

from server.capture import keeper
from server.capture.errors import ParameterError, TableIneligibleError
from server.capture.flight import OwnerFeeds
from sink.errors import RangeCrossesDdlError
from storage.tidb.column import Column
from storage.tidb.mysql import Type
from storage.tidb.schema import TableInfo
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
    feed = await owner.create(new("feed", source_uri="log://", start_ts=1000, rules=RULES, **members))
    await until(lambda: feed.processor.sink)
    return owner, feed, OwnerFeeds(owner)


async def rows(feeds, table, start_ts, end_ts):
    _, batches = await asyncio.to_thread(feeds.read, "feed", table, start_ts, end_ts)
    found = [row for batch in batches for row in batch.to_pylist()]
    return [{name: value for name, value in row.items() if not name.startswith("_")} for row in found]


async def latest(feeds, start_ts, wait_s=10.0):
    return await asyncio.to_thread(feeds.latest, "feed", None, start_ts, None, None, wait_s)


async def test_tables_are_those_that_the_filter_takes_and_no_safepoint_is_set_for_a_log(capture, upstream, log):
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
    _, _, feeds = await started(capture)
    log.rows(1010, ACCOUNTS, {"id": 1, "balance": 5})
    emptied = table_of(9, "accounts", "balance")
    log.ddl(1020, "TRUNCATE TABLE accounts", emptied, truncated=("bank.accounts",))
    log.rows(1030, emptied, {"id": 1, "balance": 6})
    log.resolve(1040)
    assert await latest(feeds, 1000) == 1020
    assert await rows(feeds, "bank.accounts", 1000, 1020) == [{"id": 1, "balance": 5}]
    assert await rows(feeds, "bank.accounts", 1020, 1040) == [{"id": 1, "balance": 6}]


async def test_a_new_owner_reads_the_schemas_of_each_ts_from_the_metadata(capture, log):
    _, feed, feeds = await started(capture)
    log.rows(1010, ACCOUNTS, {"id": 1, "balance": 5})
    log.ddl(1020, "ALTER", WIDER)
    log.rows(1030, WIDER, {"id": 2, "balance": 6, "credit": 7})
    log.ddl(1035, "RENAME", table_of(1, "savings", "balance", "credit"), dropped=("bank.accounts",))
    log.rows(1036, table_of(1, "savings", "balance", "credit"), {"id": 3, "balance": 7, "credit": 8})
    log.resolve(1040)
    await until(lambda: feed.processor.resolved_ts == 1040)
    await asyncio.to_thread(feeds.ack, "feed", None, 1010)
    await until(lambda: feed.checkpoint_ts == 1010)
    before = [await rows(feeds, "bank.accounts", 1010, 1020), await rows(feeds, "bank.savings", 1035, 1040)]
    await capture.stop()

    owner = await capture.start()
    feeds = OwnerFeeds(owner)
    assert [table.name for table in owner.feed("feed").catalog.at(1010)] == ["bank.accounts"]
    assert await latest(feeds, 1010) == 1020
    assert await latest(feeds, 1035) == 1040
    assert [await rows(feeds, "bank.accounts", 1010, 1020), await rows(feeds, "bank.savings", 1035, 1040)] == before
    assert await rows(feeds, "bank.accounts", 1020, 1035) == [{"id": 2, "balance": 6, "credit": 7}]


async def test_a_table_that_becomes_ineligible_fails_the_changefeed_by_name(capture, log):
    _, feed, _ = await started(capture)
    keyless = TableInfo(1, "accounts", (Column(name="v", type=Type.LONGLONG, id=1),))
    log.ddl(1020, "ALTER TABLE accounts DROP PRIMARY KEY", keyless)
    await until(lambda: feed.info.state == "failed")
    assert feed.info.error.code == "ErrTableIneligible"
    assert "bank.accounts has neither a primary key" in feed.info.error.message


async def test_tables_that_cannot_be_replicated_are_refused_by_name_or_ignored_where_that_is_asked_for(capture, log):
    log.tables.append(KEYLESS)
    owner = await capture.start()
    with pytest.raises(TableIneligibleError, match=r"bank\.keyless.*--ignore-ineligible-table"):
        await owner.create(new("feed", source_uri="log://", rules=RULES))
    feed = await owner.create(new("feed", source_uri="log://", rules=RULES, ignore_ineligible=True))
    assert feed.info.ignored == ("bank.keyless",)
    with pytest.raises(ParameterError, match="the filter takes none"):
        await owner.create(new("other", source_uri="log://", rules=("nothing.*",)))


async def test_resumed_elsewhere_it_has_the_tables_of_that_time(capture, log):
    owner, _, _ = await started(capture)
    await owner.pause("feed")
    log.tables = [ORDERS]
    feed = await owner.resume("feed", 900)
    assert [table.name for table in feed.tables] == ["bank.orders"]
    await capture.stop()
    owner = await capture.start()
    assert [(table.name, owner.feed("feed").checkpoint_ts) for table in owner.feed("feed").tables] == [
        ("bank.orders", 900)
    ]


async def test_schema_changes_behind_the_checkpoint_leave_the_metadata(capture, log, monkeypatch):
    monkeypatch.setattr(keeper, "_COLLECT_EVERY_S", 0.0)
    _, feed, feeds = await started(capture)
    log.ddl(1020, "CREATE TABLE orders", ORDERS)
    log.ddl(1030, "DROP TABLE accounts", dropped=("bank.accounts",))
    log.ddl(1040, "ALTER TABLE orders ADD v BIGINT", table_of(2, "orders", "amount", "v"))
    log.resolve(1050)
    await until(lambda: feed.processor.resolved_ts == 1050)
    for ts in (1020, 1030, 1040, 1050):
        await asyncio.to_thread(feeds.ack, "feed", None, ts)

    async def kept():
        return [(each.commit_ts, [t.name for t in each.tables]) for each in await capture.records.schemas.load("feed")]

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
