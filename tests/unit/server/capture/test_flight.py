"""Tables that change under their readers: a ts has its schemas, cuts end at DDLs,
what ended is served to its end.
"""

import pytest

from server.capture import flight
from server.capture.readers import ReaderInvalidError, ReaderNotExistsError
from sink.errors import AckAboveResolvedError, RangeCrossesDdlError
from sink.flight.feeds import ChangefeedMovedBackError, TableNotExistsError
from sorter.errors import RangeCleanedError, TableNotFoundError
from storage.model.event import DELETE, INSERT, UPDATE
from tests.unit.server.capture.flight_feed import A_WIDE, START, A, B, Shape


def test_rows_up_to_a_ddl_have_the_old_schema_and_rows_above_it_the_new_one(opened):
    feed = opened(A, B)
    feed.put(A, 1010, 1, x=5)
    feed.put(B, 1015, 1, x=6)
    feed.ddl(1020, A_WIDE)
    feed.put(A_WIDE, 1030, 2, x=7, y=8)
    feed.resolve(1040)
    assert feed.latest(START) == feed.latest(START, "s.a") == 1020
    assert feed.latest(START, "s.b") == 1040
    assert feed.latest(START, rows=1) == 1014
    [row] = feed.rows("s.a", START, 1020)
    assert "y" not in row
    [row] = feed.rows("s.a", 1020, 1040)
    assert (row["x"], row["y"]) == (7, 8)
    for ask in (
        lambda: feed.rows("s.a", START, 1040),
        lambda: feed.planned(START, 1040),
        lambda: feed.planned(START, 1040, ["s.a"]),
    ):
        with pytest.raises(RangeCrossesDdlError, match="crosses the DDL at 1020"):
            ask()
    assert feed.planned(START, 1040, ["s.b"]) == [("s.b", START, 1040)]
    assert feed.ids("s.b", START, 1040) == [(1015, 1)]


def test_a_table_that_ended_before_the_changefeed_began_anew_is_not_left_out(opened):
    feed = opened(A, B)
    feed.put(A, 1010, 1, x=5)
    feed.put(B, 1015, 1, x=6)
    feed.ddl(1030, dropped=("s.b",))
    feed.resolve(1040)
    assert [table for table, *_ in feed.planned(1012, 1030)] == ["s.b"]
    # As after an error: the same versions, and a sink that has what is above the checkpoint.
    feed.sink.remove_table(B.source.span)
    feed.processor.start_ts = 1035
    for ask in (lambda: feed.planned(1012, 1030), lambda: feed.latest(1012)):
        with pytest.raises(RangeCleanedError):
            ask()
    assert feed.planned(1030, 1040) == []


def test_rows_count_as_delivered_once_when_their_cut_is_acknowledged(opened):
    feed = opened(A, B)
    feed.put(A, 1010, 1, x=5)
    feed.put(B, 1015, 1, x=6)
    feed.resolve(1040)
    feed.planned(START, 1012)
    feed.planned(START, 1020)
    feed.planned(START, 1020)  # a reader that was killed asks again
    assert (feed.delivery.rows, feed.delivery.last_ts) == (0, START)
    feed.feeds.ack("feed", None, 1020)
    assert (feed.delivery.rows, feed.delivery.last_ts) == (2, 1020)
    feed.planned(1020, 1040)
    feed.feeds.ack("feed", None, 1040)
    assert (feed.delivery.rows, feed.delivery.last_ts) == (2, 1020), "a cut without rows"


def test_describe_tells_the_schemas_of_a_ts_and_the_ddls_ahead(opened):
    feed = opened(A, B)
    feed.ddl(1020, A_WIDE)
    feed.ddl(1030, dropped=("s.b",))
    before, at = feed.feeds.describe("feed", START), feed.feeds.describe("feed", 1020)
    assert [(table.table, table.schema_ts, len(table.schema)) for table in before.tables] == [
        ("s.a", START, 6),
        ("s.b", START, 6),
    ]
    assert [(table.table, table.schema_ts, len(table.schema)) for table in at.tables] == [
        ("s.a", 1020, 7),
        ("s.b", START, 6),
    ]
    assert [(ddl.ts, ddl.tables, ddl.dropped) for ddl in at.ddls] == [
        (1020, ("s.a",), ()),
        (1030, (), ("s.b",)),
    ]
    assert [table.table for table in feed.feeds.describe("feed", 1030).tables] == ["s.a"]
    assert [ddl.ts for ddl in feed.feeds.describe("feed", 1021).ddls] == [1030]
    assert feed.feeds.describe("feed").tables == before.tables
    assert feed.feeds.describe("feed", 1019, known_ts=START).tables is None
    assert feed.feeds.describe("feed", 1020, known_ts=1019).tables == at.tables
    assert feed.feeds.describe("feed", 1025, known_ts=START - 1).tables == at.tables
    assert feed.feeds.describe("feed", START, known_ts=1025).tables == before.tables
    [table, _] = feed.feeds.describe("feed", START, before=True).tables
    assert table.schema.field("_before").type.num_fields == 2
    with pytest.raises(RangeCleanedError):
        feed.feeds.describe("feed", START - 1)


def test_a_dropped_table_is_served_to_its_end_and_holds_nobody_back_beyond(opened):
    feed = opened(A, B)
    feed.put(B, 1010, 1, x=1)
    feed.ddl(1020, dropped=("s.b",))
    feed.sorter.resolve(B.source.span, 1020)
    feed.put(A, 1030, 1, x=1)
    feed.sorter.resolve(A.source.span, 1040)
    assert feed.latest(START) == 1020
    assert feed.latest(1020) == 1040
    assert feed.latest(1020, "s.b") == 1020  # nothing new, and not old yet
    assert feed.planned(START, 1020) == [("s.b", START, 1020)]
    assert (
        feed.planned(1020, 1040)
        == feed.planned(1020, 1040, ["s.a", "s.b"])
        == [("s.a", 1020, 1040)]
    )
    with pytest.raises(TableNotExistsError, match="right above 1020"):
        feed.rows("s.b", 1020, 1040)
    assert feed.feeds.ack("feed", None, 1020) == 1020
    assert feed.ids("s.b", START, 1020) == [(1010, 1)]
    assert feed.feeds.ack("feed", None, 1040) == 1040
    with pytest.raises(TableNotFoundError):
        feed.sorter.resolved_ts(B.source.span)
    assert feed.sink.stats().tables == 1


def test_an_unacknowledged_end_holds_the_checkpoint(opened):
    feed = opened(A, B)
    feed.put(B, 1010, 1, x=1)
    feed.ddl(1020, dropped=("s.b",))
    feed.resolve(1040)
    assert feed.feeds.ack("feed", "s.a", 1040) == START
    assert feed.feeds.ack("feed", "s.b", 1015) == 1015
    assert feed.feeds.ack("feed", "s.b", 1020) == 1040
    assert feed.sink.stats().tables == 1


def test_a_new_table_begins_at_its_ddl(opened):
    feed = opened(A)
    feed.put(A, 1010, 1, x=1)
    feed.ddl(1020, B)
    feed.put(B, 1030, 1, x=1)
    feed.resolve(1040)
    assert feed.latest(START) == feed.latest(START, "s.b") == 1020
    assert feed.planned(START, 1020) == [("s.a", START, 1020)]
    assert feed.planned(START, 1020, ["s.b"]) == []
    assert feed.feeds.ack("feed", None, 1010) == 1010
    assert feed.latest(1010, rows=1) == 1020
    assert feed.planned(1020, 1040) == [("s.b", 1020, 1040)]
    assert feed.ids("s.b", 1020, 1040) == [(1030, 1)]
    assert feed.feeds.ack("feed", None, 1020) == 1020
    assert feed.feeds.ack("feed", None, 1030) == 1030
    assert feed.ids("s.b", 1020, 1030) == [(1030, 1)]


def test_a_truncated_table_goes_on_in_a_new_span_under_its_name(opened):
    feed = opened(A)
    again = Shape.of(9, "a", "x")
    feed.put(A, 1010, 1, x=1)
    feed.ddl(1020, again, truncated=("s.a",))
    feed.put(again, 1030, 2, x=1)
    feed.resolve(1040)
    assert (feed.latest(START, "s.a"), feed.latest(1020, "s.a")) == (1020, 1040)
    assert feed.ids("s.a", START, 1020) == [(1010, 1)]
    assert feed.ids("s.a", 1020, 1040) == [(1030, 2)]
    assert feed.feeds.ack("feed", "s.a", 1040) == 1040
    assert [table.table_id for table in feed.feeds.describe("feed", 1020).tables] == [9]


def test_a_renamed_table_goes_on_in_its_span_under_another_name(opened):
    feed = opened(A)
    renamed = Shape.of(1, "c", "x")
    feed.put(A, 1010, 1, x=1)
    feed.ddl(1020, renamed, dropped=("s.a",))
    feed.put(renamed, 1030, 2, x=1)
    feed.resolve(1040)
    assert feed.planned(START, 1020) == [("s.a", START, 1020)]
    assert feed.planned(1020, 1040) == [("s.c", 1020, 1040)]
    assert feed.ids("s.c", 1020, 1040) == [(1030, 2)]
    assert (
        feed.feeds.ack("feed", "s.c", 1040) == START
    )  # the rows of its old name are somebody else's
    assert feed.feeds.ack("feed", "s.a", 1040) == 1020
    assert feed.feeds.ack("feed", "s.c", 1040) == 1040


def test_a_name_that_is_given_again_is_another_table(opened):
    feed = opened(A, B)
    recovered = Shape.of(2, "b", "x")
    feed.put(B, 1010, 1, x=1)
    feed.ddl(1020, dropped=("s.b",))
    feed.resolve(1030)
    feed.ddl(1040, recovered)
    feed.put(recovered, 1050, 2, x=1)
    feed.resolve(1060)
    assert (feed.latest(START), feed.latest(1020), feed.latest(1040)) == (1020, 1040, 1060)
    assert feed.latest(1020, "s.b") == 1040
    assert feed.ids("s.b", START, 1020) == [(1010, 1)]
    assert feed.ids("s.b", 1040, 1060) == [(1050, 2)]
    assert feed.feeds.ack("feed", None, 1060) == 1060


def test_without_tables_the_whole_stands_where_the_last_one_ended(opened):
    feed = opened(A)
    feed.put(A, 1010, 1, x=1)
    feed.ddl(1020, dropped=("s.a",))
    feed.resolve(1020)
    assert feed.latest(START) == 1020
    assert feed.feeds.ack("feed", None, 1020) == 1020
    assert (feed.sink.resolved_ts(), feed.sink.checkpoint_ts()) == (1020, 1020)
    feed.ddl(1040, B)
    feed.put(B, 1050, 1, x=1)
    feed.resolve(1060)
    assert feed.latest(1020) == 1040
    assert feed.ids("s.b", 1040, 1060) == [(1050, 1)]
    assert feed.feeds.ack("feed", None, 1060) == 1060


def test_before_images_are_told_when_asked_for(opened):
    feed = opened(A)
    feed.change(A, 1010, 1, INSERT, {"x": 1}, None)
    feed.change(A, 1020, 1, UPDATE, {"x": 2}, {"x": 1})
    feed.change(A, 1030, 1, DELETE, None, {"x": 2})
    feed.resolve(1040)
    rows = feed.rows("s.a", START, 1040, before=True)
    assert [(row["_op"], row["x"], row["_before"]) for row in rows] == [
        ("insert", 1, None),
        ("update", 2, {"id": 1, "x": 1}),
        ("delete", 2, {"id": 1, "x": 2}),
    ]
    assert [{**row, "_before": 0} for row in rows] == [
        {**row, "_before": 0} for row in feed.rows("s.a", START, 1040)
    ]


def test_slices_cover_a_table_without_gaps(opened):
    feed = opened(A, B)
    for ts in range(1001, 1101):
        feed.put(A, ts, ts, x=ts)
    feed.put(B, 1050, 1, x=1)
    feed.resolve(1200)
    parts = [part for part in feed.planned(START, 1200, slice_bytes=1000) if part[0] == "s.a"]
    assert len(parts) > 3
    assert [parts[0][1], *(end for _, _, end in parts)] == [*(start for _, start, _ in parts), 1200]
    assert [row for _, start, end in parts for row in feed.ids("s.a", start, end)] == feed.ids(
        "s.a", START, 1200
    )


def test_two_readers_of_one_changefeed_read_and_acknowledge_side_by_side(opened):
    feed = opened(A)
    for ts in range(1001, 1041):
        feed.put(A, ts, ts, x=ts)
    feed.resolve(1040)
    positions, got = [START, START], ([], [])
    while min(positions) < 1040:
        for reader, rows in ((0, 7), (1, 9)):
            end = feed.latest(positions[reader], rows=rows) if positions[reader] < 1040 else 1040
            got[reader].extend(feed.ids("s.a", positions[reader], end))
            positions[reader] = end
        feed.feeds.ack("feed", None, min(positions))
    assert got[0] == got[1] == [(ts, ts) for ts in range(1001, 1041)]


def test_a_slow_reader_holds_what_it_has_yet_to_take_and_a_fast_one_goes_on(opened):
    feed = opened(A)
    for ts in range(1001, 1041):
        feed.put(A, ts, ts, x=ts)
    feed.resolve(1040)
    feed.readers.add("fast", START, START)
    feed.readers.add("slow", START, START)
    position, took = START, []
    while position < 1040:
        end = feed.latest(position, rows=7)
        took.extend(feed.ids("s.a", position, end))
        assert feed.feeds.ack("feed", None, end, reader="fast") == START
        position = end
    assert took == [(ts, ts) for ts in range(1001, 1041)]
    assert feed.feeds.describe("feed", reader="fast").checkpoint_ts == 1040
    assert feed.feeds.describe("feed", reader="slow").checkpoint_ts == START
    assert feed.ids("s.a", START, 1040) == took, "nothing was given up"

    assert feed.feeds.ack("feed", None, 1010, reader="slow") == START
    assert feed.feeds.ack("feed", None, 1020, reader="slow") == 1010
    assert feed.feeds.ack("feed", None, 1030, reader="slow") == 1020
    # What it took last may be taken once more, by a job that died before it noted that.
    assert feed.ids("s.a", 1020, 1030) == [(ts, ts) for ts in range(1021, 1031)]
    assert feed.ids("s.a", 1010, 1020) == [(ts, ts) for ts in range(1011, 1021)]
    for _ in range(2):
        feed.feeds.ack("feed", None, 1040, reader="slow")
    feed.feeds.ack("feed", None, 1040, reader="fast")
    assert feed.sink.checkpoint_ts() == 1040


def test_readers_that_are_not_known_or_ask_for_one_table_are_refused_by_name(opened, monkeypatch):
    monkeypatch.setattr(flight, "_CALL_WAIT_S", 0.2)
    feed = opened(A)
    feed.put(A, 1010, 1, x=1)
    feed.resolve(1040)
    with pytest.raises(ReaderNotExistsError, match="no reader 'etl'; it has none"):
        feed.feeds.describe("feed", reader="etl")
    with pytest.raises(ReaderNotExistsError):
        feed.feeds.ack("feed", None, 1040, reader="etl")
    feed.readers.add("etl", START, START)
    with pytest.raises(ReaderNotExistsError, match="say which one"):
        feed.feeds.ack("feed", None, 1040)
    for reader in ("", "etl"):
        with pytest.raises(ReaderInvalidError, match="all of its tables at once"):
            feed.feeds.ack("feed", "s.a", 1040, reader=reader)
    # One that claims what nobody can have would hold nothing any more.
    with pytest.raises(AckAboveResolvedError):
        feed.feeds.ack("feed", None, 1041, reader="etl")
    assert feed.readers.named() == {"etl": START}


def test_whoever_asks_for_rows_reads_the_changefeed(opened):
    feed = opened(A)
    reading = feed.reading
    assert (reading.asked_s, reading.idle_s(reading.since_s + 7)) == (None, 7)
    feed.feeds.describe("feed")
    assert reading.asked_s is None
    feed.latest(START)
    assert reading.idle_s(reading.asked_s + 3) == 3


def test_a_reader_from_before_the_checkpoint_moved_back_does_not_move_it(opened):
    """An idle reader repeats its position: the next one began there, and missed rows silently."""
    feed = opened(A)
    feed.put(A, 1010, 1, x=1)
    feed.resolve(1040)
    assert feed.feeds.describe("feed").epoch == 0
    feed.info.epoch = 1
    assert feed.feeds.describe("feed").epoch == 1
    with pytest.raises(ChangefeedMovedBackError, match=f"it is {START} now"):
        feed.feeds.ack("feed", None, 1040, 0)
    assert feed.feeds.ack("feed", None, 1010, 1) == 1010
    assert feed.feeds.ack("feed", None, 1040) == 1040, "an old reader knows of no epochs"
