"""A changefeed that runs, as Flight knows it: real sorter, sink, versions and TiDB rows,
without an owner.
"""

from dataclasses import dataclass
from types import SimpleNamespace

from server.capture.feed import Delivery, ReadActivity
from server.capture.feed import Feed as RealFeed
from server.capture.flight import OwnerFeeds
from server.capture.history import KeptHistory
from server.capture.processor import ProcessorPosition
from server.capture.readers import Readers
from server.capture.run import LocalSink
from server.changefeed.info import State
from server.changefeed.table import SourceTable, TableRecord
from server.puller.source import TableChange
from sink.flight.feeds import Poll
from sink.holds import Holds
from sink.tidb_mounter import TidbMounter
from sink.versions import Versions
from sorter import Sorter, SorterSettings
from storage.model.event import INSERT, raw_batch
from storage.tidb.record import encode_record, table_span
from storage.tidb.schema import Column, TableInfo

START = 1000


@dataclass(frozen=True)
class Shape:
    """A table as TiDB has it at some time."""

    info: TableInfo

    @classmethod
    def of(cls, table_id, name, *columns):
        return cls(
            TableInfo.build(table_id, name, [Column.bigint("id"), *map(Column.bigint, columns)])
        )

    @property
    def source(self):
        return SourceTable(
            TableRecord("s", {}), table_span(self.info.id), TidbMounter(self.info, "s")
        )

    def row(self, identity, **values):
        return encode_record(self.info, {"id": identity} | values)


class KnownFeed(SimpleNamespace):
    """What of a changefeed follows from the rest."""

    kept_ts = RealFeed.kept_ts
    start_of_reader = RealFeed.start_of_reader


class RunningProcessor(ProcessorPosition):
    """A processor that is where its sink is."""

    def locations(self, _span):
        return ()


class Feed:
    """A changefeed that runs: what Flight knows of it."""

    def __init__(self, directory, *shapes, keeps=False):
        self.sorter = Sorter(
            directory,
            SorterSettings(
                memory_bytes=4000, block_bytes=500, segment_bytes=4000, clean_interval_s=0
            ),
        )
        self.versions = Versions(START, [shape.source for shape in shapes])
        self.sink = LocalSink(self.sorter, memory_quota_bytes=1 << 20)
        if keeps:
            self.sink.keep_above(START)
        for spans in self.versions.spans(START):
            self.sink.follow(spans, START)
        self.sink.start()
        self.shapes = {shape.source.span: shape for shape in shapes}
        processor = SimpleNamespace(
            sink=self.sink,
            start_ts=START,
            locations=lambda _: (),
            checkpoint_ts=START,
            resolved_ts=START,
        )
        if keeps:
            processor = RunningProcessor()
            processor.sink, processor.start_ts = self.sink, START
        self.processor = processor
        info = self.info = SimpleNamespace(
            state=State.NORMAL,
            error=None,
            shown_sink_uri="lake:",
            start_ts=START,
            target_ts=0,
            stop_ts=0,
            skipped=(),
            epoch=0,
        )
        self.holds = Holds()
        self.sink.withhold(self.holds)
        catalog = SimpleNamespace(
            versions=self.versions,
            refusal=None,
            holds=self.holds,
            left_out=frozenset(),
            record=lambda _: SimpleNamespace(shard=None),
        )
        self.catalog = catalog
        reading = self.reading = ReadActivity(0.0)
        self.delivery = Delivery(START)
        self.readers = Readers({}, START, has_lake_job=False)
        self.history = KeptHistory(is_kept=keeps)
        feed = self.feed = KnownFeed(
            id="feed",
            info=info,
            processor=processor,
            catalog=catalog,
            reading=reading,
            delivery=self.delivery,
            readers=self.readers,
            history=self.history,
        )
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
        self.sorter.add(
            shape.source.span, raw_batch([commit_ts], [commit_ts - 1], [op], [key], [new], [before])
        )

    def ddl(self, ts, *shapes, dropped=(), truncated=()):
        """As a source does: resolve what was before, then tell the change."""
        self.resolve(ts - 1)
        change = TableChange(
            ts, f"DDL at {ts}", tuple(shape.source for shape in shapes), dropped, truncated
        )
        ddl = self.versions.change(change)
        for spans in self.versions.spans_of(ddl):
            self.sink.follow(spans, START)

    def resolve(self, ts):
        for spans in self.versions.spans(START):
            if self.sink._tables.get(spans[0].span):
                self.sorter.resolve(spans[0].span, ts)

    def latest(self, start, table=None, **limits):
        rows, size = limits.get("rows"), limits.get("bytes")
        return self.feeds.latest("feed", table, start, rows, size, Poll(5.0))

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
            (part.table, part.start_ts, part.end_ts)
            for part in self.feeds.plan("feed", tables, start, end, **asked)
        ]


A, A_WIDE = Shape.of(1, "a", "x"), Shape.of(1, "a", "x", "y")
B = Shape.of(2, "b", "x")
