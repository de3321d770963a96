"""A table whose rows were damaged here is pulled again, alone; the changefeed goes on."""

import asyncio
import contextlib
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest

from server.capture.errors import ChangefeedNotRunningError
from server.capture.flight import OwnerFeeds
from server.capture.pulling import Gate, SorterRows
from server.capture.run import Repairs
from sorter.errors import BlockCorruptError, TableDamagedError, TableNotFoundError
from storage.model.errors import ClosedError, TidemarkError
from storage.model.span import Span
from tests.unit.server.capture.conftest import new
from tests.unit.server.capture.scripted_log import ScriptedLog, table_of
from tests.unit.server.capture.test_owner import rows, until

SPAN = Span(1, b"a", b"b")
DAMAGE = BlockCorruptError("a block is damaged", 101, 1001, 1040)


async def test_a_damaged_table_is_pulled_again_from_its_checkpoint_and_gives_the_same_rows(
    capture, upstream
):
    owner = await capture.start()
    feed = await owner.create(new("feed", start_ts=1000, tables=[capture.table]))
    feeds = OwnerFeeds(owner)
    await until(lambda: upstream.subscriptions)
    for ts in (1010, 1020, 1030):
        upstream.commit(ts, ts, ts)
    upstream.resolve(1040)
    await until(lambda: feed.processor.resolved_ts == 1040)
    await asyncio.to_thread(feeds.ack, "feed", None, 1010)
    before, sink = await rows(feeds, 1010, 1040), feed.processor.sink
    span = feed.tables[0].span

    sink._tables.one(span).lose(DAMAGE)
    with pytest.raises(TableDamagedError):
        await rows(feeds, 1010, 1040)
    await until(lambda: feed.info.state == "warning")
    assert feed.info.error.code == "ErrSorterBlockCorrupt"
    await until(lambda: feed.info.state == "normal")
    assert feed.processor.sink is sink, "the changefeed was not started again"
    assert await rows(feeds, 1010, 1040) == before
    assert await asyncio.to_thread(feeds.ack, "feed", None, 1040) == 1040


async def with_one_row(capture, upstream):
    """Owner and feed of a changefeed that is complete to 1040, with one row; what readers ask."""
    owner = await capture.start()
    feed = await owner.create(new("feed", start_ts=1000, tables=[capture.table]))
    await until(lambda: upstream.subscriptions)
    upstream.commit(1010, 1010, 1010)
    upstream.resolve(1040)
    await until(lambda: feed.processor.resolved_ts == 1040)
    return owner, feed, OwnerFeeds(owner)


async def test_nobody_plans_all_tables_without_the_one_that_is_pulled_again(capture, upstream):
    _, feed, feeds = await with_one_row(capture, upstream)
    sink, span, told = feed.processor.sink, feed.tables[0].span, []
    follow = sink.follow

    def ask_first(*args, **kind):
        try:
            told.append(feeds.plan("feed", None, 1000, 1040))
        except ChangefeedNotRunningError as err:
            told.append(err)
        follow(*args, **kind)

    sink.follow = ask_first
    sink._tables.one(span).lose(DAMAGE)
    await until(lambda: told)
    assert isinstance(told[0], ChangefeedNotRunningError)
    await until(lambda: feed.info.state == "normal")
    [part] = await asyncio.to_thread(feeds.plan, "feed", None, 1000, 1040)
    assert part.rows == 1


async def test_nobody_plans_all_tables_while_the_changefeed_stops(capture, upstream):
    owner, feed, feeds = await with_one_row(capture, upstream)
    sink = feed.processor.sink
    plan_tables = sink.plan_tables
    asked, stopped = threading.Event(), threading.Event()

    def stop_first(*args):
        asked.set()
        assert stopped.wait(30)
        return plan_tables(*args)

    sink.plan_tables = stop_first
    async with asyncio.TaskGroup() as tasks:
        planning = tasks.create_task(
            asyncio.to_thread(outcome_of, lambda: feeds.plan("feed", None, 1000, 1040))
        )
        await asyncio.to_thread(asked.wait, 30)
        await owner.pause("feed")
        stopped.set()
    assert isinstance(planning.result(), ChangefeedNotRunningError)


def outcome_of(call):
    try:
        return call()
    except TidemarkError as err:
        return err


async def test_a_byte_that_changes_on_disk_costs_one_table_a_second_look(
    capture, upstream, tmp_path
):
    owner = await capture.start()
    feed = await owner.create(new("feed", start_ts=1000, tables=[capture.table]))
    feeds = OwnerFeeds(owner)
    await until(lambda: upstream.subscriptions)
    upstream.commit_all(range(1001, 13_001))
    upstream.resolve(20_000)
    await until(lambda: feed.processor.resolved_ts == 20_000)
    await until(lambda: feed.processor.stats().sorter_disk_bytes)
    before = await rows(feeds, 1000, 20_000)

    async def damage_until_seen():
        for (
            place
        ) in itertools.count():  # files that are merged meanwhile take their damage with them
            damage(tmp_path / "sorter" / "feed", place)
            feed.processor.sink._tables.one(
                feed.tables[0].span
            ).restart()  # what was staged in memory is whole
            assert await rows(feeds, 1000, 20_000) == before

    with pytest.raises(TableDamagedError):
        await damage_until_seen()
    await until(lambda: feed.info.state == "warning")
    await until(lambda: feed.info.state == "normal")
    assert await rows(feeds, 1000, 20_000) == before


def damage(directory, place):
    """Change one byte in the middle of each file that holds rows, another one for each `place`."""
    for path in directory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and path.stat().st_size > 100_000 and "LOG" not in path.name:
                with path.open("r+b") as file:
                    file.seek(path.stat().st_size // 2 + place)
                    byte = file.read(1)
                    file.seek(-1, 1)
                    file.write(bytes([byte[0] ^ 1]))


async def test_a_log_is_read_again_as_a_whole(capture, upstream):
    accounts = table_of(1, "accounts", "balance")
    upstream.log = log = ScriptedLog(accounts)
    owner = await capture.start()
    feed = await owner.create(new("feed", source_uri="log://", start_ts=1000, rules=["bank.*"]))
    log.rows(1010, accounts, {"id": 1, "balance": 5})
    log.resolve(1020)
    await until(lambda: feed.processor.resolved_ts == 1020)
    sink = feed.processor.sink
    sink._tables.one(feed.tables[0].span).lose(DAMAGE)
    await until(lambda: feed.processor.sink not in (None, sink))
    await until(lambda: feed.info.state == "normal" and feed.processor.resolved_ts == 1020)
    assert len(await rows(OwnerFeeds(owner), 1000, 1020)) == 1


class Positions:
    def __init__(self):
        self.ts = {SPAN: 5}

    def resolved_ts(self, span=None):
        if span not in self.ts:
            raise TableNotFoundError("gone")
        return self.ts[span]


def test_a_table_damaged_again_before_it_came_back_ends_the_run():
    repairs, positions = Repairs(), Positions()
    repairs.begin(SPAN, DAMAGE, 10)
    repairs.look(positions)
    assert (list(repairs.spans), repairs.error) == ([SPAN], DAMAGE)
    with pytest.raises(BlockCorruptError):
        repairs.begin(SPAN, DAMAGE, 10)
    positions.ts[SPAN] = 10
    repairs.look(positions)
    assert (list(repairs.spans), repairs.error) == ([], None)
    repairs.begin(SPAN, DAMAGE, 10)
    del positions.ts[SPAN]
    repairs.look(positions)
    assert not repairs.spans


class SlowSorter:
    """Its `resolve` waits until it is told."""

    def __init__(self):
        self.entered, self.go = threading.Event(), threading.Event()
        self.resolved, self.gone = [], False

    def resolve(self, span, ts):
        self.entered.set()
        assert self.go.wait(60)
        if self.gone:
            raise TableNotFoundError("removed")
        self.resolved.append(ts)

    def add(self, span, batch):
        raise TableNotFoundError("removed")


def test_a_late_call_of_an_ended_puller_promises_nothing_for_the_table_that_is_added_anew():
    sorter = SlowSorter()
    with ThreadPoolExecutor(2) as executor:
        gate = Gate(SorterRows(sorter, executor))
        late = executor.submit(gate.resolve, SPAN, 10)
        assert sorter.entered.wait(60)
        gate.close()
        sorter.gone = True
        sorter.go.set()
        gate.drain()
        late.result(10)
        with pytest.raises(ClosedError):
            gate.resolve(SPAN, 11)
    assert sorter.resolved == []


def test_rows_of_a_table_that_was_let_go_are_not_ours_but_those_of_an_unknown_one_are_a_defect():
    rows_in = SorterRows(SlowSorter(), None)
    batch = pa.record_batch({"a": [1]})
    with pytest.raises(TableNotFoundError):
        rows_in.add(SPAN, batch)
    rows_in.ended[SPAN] = 10
    rows_in.add(SPAN, batch)
