"""History that a changefeed keeps, and readers that begin in it: Flight, sink and sorter."""

from types import SimpleNamespace

import pytest

from server.capture.errors import ParameterError, TableMoveError
from server.capture.history import RetentionBounds
from server.capture.history_keeper import look_at
from server.capture.readers import LET_GO, LOST
from server.capture.service import check_history
from sink.retention import Retention
from sorter.errors import RangeCleanedError
from storage.model.ts import MAX_TS, compose
from tests.unit.server.capture.flight_feed import A_WIDE, START, A, B, Feed

DAY = Retention(age_s=86_400)


@pytest.fixture
def feed(tmp_path):
    kept = Feed(tmp_path, A, B, keeps=True)
    yield kept
    kept.close()


def look(feed, retention, held_ts=MAX_TS):
    feed.history.look(feed.sink, RetentionBounds(retention, held_ts, feed.versions, feed.holds))


def ack(feed, ts, **more):
    return feed.feeds.ack("feed", None, ts, **more)


def test_a_late_reader_takes_what_is_kept_over_schema_changes(feed):
    feed.put(A, 1010, 1, x=5)
    feed.ddl(1020, A_WIDE)
    feed.put(A_WIDE, 1030, 2, x=7, y=8)
    feed.put(B, 1035, 1, x=1)
    feed.resolve(1050)
    for ts in (1020, 1040, 1050):
        ack(feed, ts)
    look(feed, DAY)
    assert feed.feed.kept_ts == feed.feed.start_of_reader(0) == START
    assert feed.history.size_bytes > 0
    feed.readers.add("late", START, 1050)
    told = feed.feeds.describe("feed", reader="late")
    assert (told.checkpoint_ts, told.kept_ts) == (START, START)
    assert [len(table.schema) for table in told.tables] == [6, 6]
    assert feed.latest(START) == 1020
    assert feed.ids("s.a", START, 1020) == [(1010, 1)]
    assert ack(feed, 1020, reader="late") == 1050, "the checkpoint stays where it is"
    assert feed.latest(1020) == 1050
    assert feed.planned(1020, 1050) == [("s.a", 1020, 1050), ("s.b", 1020, 1050)]
    assert feed.ids("s.a", 1020, 1050) == [(1030, 2)]
    assert feed.feeds.describe("feed", reader="late").checkpoint_ts == 1020


def test_what_is_given_up_is_refused_with_the_first_timestamp_that_is_kept(feed):
    for ts in (1010, 1020, 1030):
        feed.put(A, ts, ts, x=1)
    feed.put(B, 1015, 1, x=1)
    feed.resolve(1040)
    for ts in (1010, 1020, 1030, 1040):
        ack(feed, ts)
        look(feed, Retention(size_bytes=1 << 20))
    whole = feed.history.size_bytes
    look(feed, Retention(size_bytes=whole - 1))
    assert feed.feed.kept_ts == 1010
    look(feed, Retention(size_bytes=1))
    kept_ts = feed.feed.kept_ts
    assert kept_ts == 1040
    for ask in (
        lambda: feed.latest(1020),
        lambda: feed.planned(1020, 1040),
        lambda: feed.rows("s.b", 1010, 1040),
        lambda: feed.feed.start_of_reader(1039),
    ):
        with pytest.raises(RangeCleanedError, match="feed keeps what was committed after 1040"):
            ask()
    assert feed.feed.start_of_reader(1040) == 1040
    with pytest.raises(ParameterError, match="cannot begin at 1041"):
        feed.feed.start_of_reader(1041)


def test_a_reader_that_holds_is_not_overtaken_by_time_or_size(feed):
    for ts in (1010, 1020, 1030):
        feed.put(A, ts, ts, x=1)
    feed.resolve(1040)
    for ts in (1010, 1020, 1030, 1040):
        ack(feed, ts)
    feed.readers.add("late", 1010, 1040)
    for retention in (Retention(), Retention(size_bytes=1)):
        look(feed, retention, feed.readers.held_ts())
        assert feed.feed.kept_ts == 1010
    assert feed.ids("s.a", 1010, 1040) == [(1020, 1020), (1030, 1030)]
    feed.readers.remove("late")
    look(feed, Retention(), feed.readers.held_ts())
    assert feed.feed.kept_ts == 1040


def test_time_is_that_of_the_source(tmp_path):
    kept = Feed(tmp_path, A, keeps=True)
    first, last = START + compose(10_000), START + compose(70_000)
    kept.put(A, first, 1, x=1)
    kept.put(A, last, 2, x=1)
    kept.resolve(last)
    for ts in (first, last):
        ack(kept, ts)
    look(kept, Retention(age_s=65))
    assert kept.feed.kept_ts == START + compose(5_000)
    kept.resolve(last + compose(10_000))
    look(kept, Retention(age_s=65))
    assert kept.feed.kept_ts == START + compose(15_000)
    with pytest.raises(RangeCleanedError):
        kept.rows("s.a", first - 1, last)
    assert kept.ids("s.a", START + compose(15_000), last) == [(last, 2)]
    kept.close()


def test_the_floor_is_not_within_a_stretch_where_tables_were_read_again(feed):
    feed.put(A, 1010, 1, x=5)
    feed.ddl(1020, A_WIDE)
    feed.holds.begin(1020, A.info.id)
    feed.put(A_WIDE, 1030, 1, x=7, y=8)
    feed.put(A_WIDE, 1035, 1, x=9, y=8)
    feed.resolve(1050)
    feed.holds.end(1040)
    for ts in (1020, 1045, 1050):
        ack(feed, ts)
    look(feed, Retention(), 1033)
    assert feed.feed.kept_ts == 1020
    assert feed.feed.start_of_reader(1033) == 1020
    feed.readers.add("late", 1020, 1050)
    assert feed.latest(1020, rows=1) == 1040
    look(feed, Retention(), 1040)
    assert feed.feed.kept_ts == 1040


def test_a_dropped_table_is_served_from_history(feed):
    feed.put(B, 1010, 1, x=1)
    feed.ddl(1020, dropped=("s.b",))
    feed.sorter.resolve(B.source.span, 1020)
    feed.put(A, 1030, 1, x=1)
    feed.sorter.resolve(A.source.span, 1040)
    for ts in (1020, 1030, 1040):
        ack(feed, ts)
    look(feed, DAY)
    assert feed.latest(START) == 1020
    assert feed.planned(START, 1020) == [("s.b", START, 1020)]
    assert feed.ids("s.b", START, 1020) == [(1010, 1)]
    look(feed, Retention())
    assert feed.feed.kept_ts == 1040
    assert feed.sink.stats().tables == 1


async def test_readers_that_are_silent_let_go_and_what_they_needed_goes(feed):
    for ts in (1010, 1020, 1030):
        feed.put(A, ts, ts, x=1)
    feed.resolve(1040)
    ack(feed, 1010)
    now = [0.0]
    feed.readers._clock = lambda: now[0]
    feed.readers._since_s = 0.0
    feed.readers.add("gone", 1010, 1010)
    feed.readers.add("alive", 1010, 1010)
    known = feed.feed
    known.info = SimpleNamespace(
        **feed.info.__dict__, retention=Retention(size_bytes=1), reader_limit_s=100
    )
    for ts in (1020, 1030, 1040):
        assert ack(feed, ts, reader="alive") == 1010
        await look_at([known])
    assert known.kept_ts <= 1010
    now[0] = 90.0
    ack(feed, 1040, reader="alive")
    now[0] = 101.0
    await look_at([known])
    [_, gone] = feed.readers.states(1010)
    assert (gone.name, gone.state) == ("gone", LET_GO)
    assert feed.sink.checkpoint_ts() == 1040, "what it held back, though nobody says it again"
    assert ack(feed, 1040, reader="alive") == 1040
    await look_at([known])
    await look_at([known])
    assert known.kept_ts == 1040
    assert feed.readers.states(known.kept_ts)[1].state == LOST
    assert feed.feeds.describe("feed", reader="gone").checkpoint_ts == 1010
    with pytest.raises(RangeCleanedError, match="1040"):
        feed.latest(1010)


async def test_a_changefeed_that_keeps_nothing_gives_up_as_it_always_did(tmp_path):
    plain = Feed(tmp_path, A)
    for ts in (1010, 1020, 1030):
        plain.put(A, ts, ts, x=1)
    plain.resolve(1040)
    plain.feed.info = SimpleNamespace(
        **plain.info.__dict__, retention=Retention(), reader_limit_s=100
    )
    for ts in (1010, 1020, 1030):
        ack(plain, ts)
        await look_at([plain.feed])
    assert plain.ids("s.a", 1020, 1030) == [(1030, 1030)]
    with pytest.raises(RangeCleanedError, match="table 1 keeps the rows above 1020"):
        plain.rows("s.a", 1010, 1030)
    assert plain.feeds.describe("feed").kept_ts == 0
    with pytest.raises(RangeCleanedError):
        plain.feed.start_of_reader(START - 1)
    plain.close()


def test_a_table_leaves_no_kept_history_behind_unless_it_is_told_to():
    processor = SimpleNamespace(checkpoint_ts=50, worker_of=lambda _span: "one")
    feed = SimpleNamespace(id="f", kept_ts=10, processor=processor)
    version = SimpleNamespace(span=None)
    with pytest.raises(TableMoveError, match=r"keeps history from 10 .*--give-up-history"):
        check_history(feed, version, "two")
    check_history(feed, version, "one")
    feed.kept_ts = 50
    check_history(feed, version, "two")
