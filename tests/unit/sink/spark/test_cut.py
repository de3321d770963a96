"""The order of steps and the replay rules, with targets and a changefeed that only remember."""

import pyarrow as pa
import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import ChangefeedMeta, Slice, TableMeta
from pyspark_tidemark.lake.barrier import Policy
from pyspark_tidemark.lake.cut import Cut, CutApplier
from pyspark_tidemark.lake.manifest import FileManifest
from pyspark_tidemark.lake.mode import lake_schema
from pyspark_tidemark.lake.target import Applied, TargetUri

SCHEMA = pa.schema([("_op", pa.string()), *((name, pa.int64()) for name in ("_commit_ts", "_start_ts", "_seq", "id"))])
TABLES = {name: TableMeta(name, ("id",), SCHEMA) for name in ("d.a", "d.b")}


class Feed:
    def __init__(self, changed):
        self.changed = changed  # table -> commit timestamps
        self.acked = []

    def describe(self, ts=None, *, known=None):
        return ChangefeedMeta(0, 0, TABLES)

    def plan(self, start_ts, end_ts, tables=None):
        rows = {name: sum(start_ts < ts <= end_ts for ts in found) for name, found in self.changed.items()}
        return [Slice(name, (), b"", count, 0) for name, count in rows.items() if count and name in (tables or rows)]

    def ack(self, ts):
        self.acked.append(ts)
        return ts


class Lake:
    """Remembers the ranges applied to each table; its positions outlive a crash."""

    def __init__(self):
        self.ranges = {}
        self.fail_at = None

    def position(self, table):
        return self.ranges[table.name][-1][1] if table.name in self.ranges else None

    def version(self, table):
        return len(self.ranges[table.name])

    def schema(self, table):
        return lake_schema(table)

    def storable(self, schema):
        return schema

    def create(self, changes):
        return self.apply(changes)

    def apply(self, changes):
        if self.fail_at == changes.table.name:
            raise OSError("crash")
        self.ranges.setdefault(changes.table.name, []).append((changes.start_ts, changes.end_ts))
        return Applied(changes.planned_rows, len(self.ranges[changes.table.name]))

    def maintain(self, kept):
        pass


def applier(feed, lake, manifest):
    return CutApplier(feed, "feed", lake, manifest, policy=Policy("upsert"), source_options={}, parallel=1)


@pytest.fixture
def manifest(tmp_path):
    with FileManifest.opened(str(tmp_path), "feed") as opened:
        yield opened


def test_the_first_cut_creates_all_tables_later_ones_touch_those_that_changed(manifest):
    lake = Lake()
    cuts = applier(Feed({"d.a": [5, 15]}), lake, manifest)
    cuts.apply(Cut(0, 0, 10))
    record = cuts.apply(Cut(1, 10, 20))
    assert lake.ranges == {"d.a": [(0, 10), (10, 20)], "d.b": [(0, 10)]}
    assert [(item.table, item.rows) for item in record.tables] == [("d.a", 1)]


def test_a_cut_in_the_manifest_is_acknowledged_but_not_applied_again(manifest):
    feed, lake = Feed({"d.a": [5]}), Lake()
    cuts = applier(feed, lake, manifest)
    first = cuts.apply(Cut(0, 0, 10))
    assert cuts.apply(Cut(0, 0, 10)) == first
    assert cuts.acknowledge() == 10
    assert lake.ranges["d.a"] == [(0, 10)]


def test_after_a_crash_between_tables_only_the_missing_ones_are_applied(manifest):
    feed, lake = Feed({"d.a": [5, 15], "d.b": [6, 16]}), Lake()
    applier(feed, lake, manifest).apply(Cut(0, 0, 10))
    lake.fail_at = "d.b"
    with pytest.raises(OSError, match="crash"):
        applier(feed, lake, manifest).apply(Cut(1, 10, 20))
    lake.fail_at = None
    record = applier(feed, lake, manifest).apply(Cut(1, 10, 20))
    assert lake.ranges == {"d.a": [(0, 10), (10, 20)], "d.b": [(0, 10), (10, 20)]}
    assert [(item.table, item.rows) for item in record.tables] == [("d.a", 1), ("d.b", 1)]


def test_a_table_ahead_of_a_larger_cut_gets_only_what_it_lacks(manifest):
    """The checkpoint directory was lost after a crash, so the cut has another end than the first time."""
    feed, lake = Feed({"d.a": [5, 15, 25], "d.b": [6, 16]}), Lake()
    applier(feed, lake, manifest).apply(Cut(0, 0, 10))
    lake.ranges["d.a"].append((10, 20))
    applier(feed, lake, manifest).apply(Cut(0, 10, 30))
    assert lake.ranges == {"d.a": [(0, 10), (10, 20), (20, 30)], "d.b": [(0, 10), (10, 30)]}


def test_a_checkpoint_without_its_lake_is_refused(manifest):
    with pytest.raises(SourceError, match="ErrCutGap"):
        applier(Feed({}), Lake(), manifest).apply(Cut(4, 10, 20))


def test_a_cut_beyond_the_end_of_the_lake_is_refused(manifest):
    cuts = applier(Feed({}), Lake(), manifest)
    cuts.apply(Cut(0, 0, 10))
    with pytest.raises(SourceError, match="ErrCutGap"):
        cuts.apply(Cut(1, 15, 20))


def test_targets_are_absolute_local_directories():
    assert TargetUri.parse("delta:///lake/x/") == TargetUri("delta", "/lake/x")
    for text in ("delta://host/lake", "hudi:///lake", "/lake", "parquet:lake"):
        with pytest.raises(SourceError, match="ErrTargetInvalid"):
            TargetUri.parse(text)
