"""Tables that change under their readers: a ts has its schemas, cuts end at DDLs, what ended is served to its end.

Real sorter, sink, versions and TiDB rows; only the owner around them is missing.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from server.capture.changefeed import State
from server.capture.flight import OwnerFeeds
from server.capture.sink import LocalSink
from server.puller.source import TableChange
from server.puller.table import SourceTable, TableRecord
from sink.errors import RangeCleanedError, RangeCrossesDdlError, TableNotFoundError
from sink.flight.feeds import TableNotExistsError
from sink.holds import Holds
from sink.mounter import Mounter
from sink.versions import Versions
from sorter import Sorter
from storage.model.event import DELETE, INSERT, UPDATE, raw_batch
from storage.tidb.column import Column
from storage.tidb.key import table_span
from storage.tidb.record import encode_record
from storage.tidb.schema import TableInfo

START = 1000


@dataclass(frozen=True)
class Shape:
    """A table as TiDB has it at some time."""

    info: TableInfo

    @classmethod
    def of(cls, table_id, name, *columns):
        return cls(TableInfo.build(table_id, name, [Column.bigint("id"), *map(Column.bigint, columns)]))

    @property
    def source(self):
        return SourceTable(TableRecord("s", {}), table_span(self.info.id), Mounter(self.info, "s"))

    def row(self, identity, **values):
        return encode_record(self.info, {"id": identity} | values)


class Feed:
    """A changefeed that runs: what Flight knows of it."""

    def __init__(self, directory, *shapes):
        self.sorter = Sorter(directory, memory_bytes=4000, block_bytes=500, segment_bytes=4000, clean_interval_s=0)
        self.versions = Versions(START, [shape.source for shape in shapes])
        self.sink = LocalSink(self.sorter, memory_quota_bytes=1 << 20)
        for spans in self.versions.spans(START):
            self.sink.follow(spans, START)
        self.sink.start()
        self.shapes = {shape.source.span: shape for shape in shapes}
        processor = SimpleNamespace(
            sink=self.sink, start_ts=START, locations=lambda _: (), checkpoint_ts=START, resolved_ts=START
        )
        info = SimpleNamespace(
            state=State.NORMAL, error=None, shown_sink_uri="lake:", start_ts=START, target_ts=0, skipped=()
        )
        self.holds = Holds()
        self.sink.withhold(self.holds)
        catalog = SimpleNamespace(versions=self.versions, refusal=None, holds=self.holds)
        feed = SimpleNamespace(id="feed", info=info, processor=processor, catalog=catalog)
        self.feeds = OwnerFeeds(SimpleNamespace(feed=lambda _: feed))

    def close(self):
        self.sink.stop()
        self.sorter.close()

    def put(self, shape, commit_ts, identity, **values):
        self.change(shape, commit_ts, identity, INSERT, values, None)

    def change(self, shape, commit_ts, identity, op, values, old):
        key, value = shape.row(identity, **(values or old))
        new, before = (value, None) if values else (None, value)
        if values and old:
            before = shape.row(identity, **old)[1]
        self.sorter.add(shape.source.span, raw_batch([commit_ts], [commit_ts - 1], [op], [key], [new], [before]))

    def ddl(self, ts, *shapes, dropped=(), truncated=()):
        """As a source does: resolve what was before, then tell the change."""
        self.resolve(ts - 1)
        change = TableChange(ts, f"DDL at {ts}", tuple(shape.source for shape in shapes), dropped, truncated)
        ddl = self.versions.change(change)
        for spans in self.versions.spans_of(ddl):
            self.sink.follow(spans, START)

    def resolve(self, ts):
        for spans in self.versions.spans(START):
            if self.sink._tables.get(spans[0].span):
                self.sorter.resolve(spans[0].span, ts)

    def latest(self, start, table=None, **limits):
        return self.feeds.latest("feed", table, start, limits.get("rows"), limits.get("bytes"), 5.0)

    def rows(self, table, start, end, **asked):
        schema, batches = self.feeds.read("feed", table, start, end, **asked)
        rows = []
        for batch in batches:
            assert batch.schema == schema
            rows += batch.to_pylist()
        return rows

    def ids(self, table, start, end):
        return [(row["_commit_ts"], row["id"]) for row in self.rows(table, start, end)]

    def planned(self, start, end, tables=None, **asked):
        return [
            (part.table, part.start_ts, part.end_ts) for part in self.feeds.plan("feed", tables, start, end, **asked)
        ]


@pytest.fixture
def opened(tmp_path):
    feeds = []

    def make(*shapes):
        feeds.append(Feed(tmp_path, *shapes))
        return feeds[-1]

    yield make
    for feed in feeds:
        feed.close()


A, A_WIDE = Shape.of(1, "a", "x"), Shape.of(1, "a", "x", "y")
B = Shape.of(2, "b", "x")


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
    assert [(ddl.ts, ddl.tables, ddl.dropped) for ddl in at.ddls] == [(1020, ("s.a",), ()), (1030, (), ("s.b",))]
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
    assert feed.planned(1020, 1040) == feed.planned(1020, 1040, ["s.a", "s.b"]) == [("s.a", 1020, 1040)]
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
    assert feed.feeds.ack("feed", "s.c", 1040) == START  # the rows of its old name are somebody else's
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
    assert [{**row, "_before": 0} for row in rows] == [{**row, "_before": 0} for row in feed.rows("s.a", START, 1040)]


def test_slices_cover_a_table_without_gaps(opened):
    feed = opened(A, B)
    for ts in range(1001, 1101):
        feed.put(A, ts, ts, x=ts)
    feed.put(B, 1050, 1, x=1)
    feed.resolve(1200)
    parts = [part for part in feed.planned(START, 1200, slice_bytes=1000) if part[0] == "s.a"]
    assert len(parts) > 3
    assert [parts[0][1], *(end for _, _, end in parts)] == [*(start for _, start, _ in parts), 1200]
    assert [row for _, start, end in parts for row in feed.ids("s.a", start, end)] == feed.ids("s.a", START, 1200)


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
