"""The order of steps and the replay rules, with targets and a changefeed that only remember."""

import dataclasses

import pyarrow as pa
import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import FILTER_UPDATE, ChangefeedMeta, Ddl, SliceEndpoint, TableMeta
from pyspark_tidemark.lake.cut import NO_BATCH, Cut, CutApplier, TableWriters, skip
from pyspark_tidemark.lake.manifest import FileManifest
from pyspark_tidemark.lake.schema import Policy, lake_schema
from pyspark_tidemark.lake.target import Applied
from pyspark_tidemark.sink_uri import SinkUri

SCHEMA = pa.schema(
    [
        ("_op", pa.string()),
        *((name, pa.int64()) for name in ("_commit_ts", "_start_ts", "_seq", "id")),
    ]
)
TABLES = {name: TableMeta(name, ("id",), SCHEMA) for name in ("d.a", "d.b")}


class Feed:
    def __init__(self, changed):
        self.changed = changed  # table -> commit timestamps
        self.acked = []

    def describe(self, ts=None, *, known=None):
        return ChangefeedMeta(0, 0, TABLES)

    def plan(self, start_ts, end_ts, tables=None):
        rows = {
            name: sum(start_ts < ts <= end_ts for ts in found)
            for name, found in self.changed.items()
        }
        return [
            SliceEndpoint(name, (), b"", count, 0)
            for name, count in rows.items()
            if count and name in (tables or rows)
        ]

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

    def rekey(self, table):
        self.rekeyed = [*getattr(self, "rekeyed", []), table.name]

    def maintain(self, kept):
        pass


def applier(feed, lake, manifest, on_drop="keep"):
    return CutApplier(
        feed,
        "feed",
        lake,
        manifest,
        policy=Policy("upsert", on_drop=on_drop),
        writers=TableWriters(source_options={}, spark=None, parallel=1),
    )


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
    with pytest.raises(SourceError, match=r"ErrQueryFailed\] d\.b: OSError: crash"):
        applier(feed, lake, manifest).apply(Cut(1, 10, 20))
    lake.fail_at = None
    record = applier(feed, lake, manifest).apply(Cut(1, 10, 20))
    assert lake.ranges == {"d.a": [(0, 10), (10, 20)], "d.b": [(0, 10), (10, 20)]}
    assert [(item.table, item.rows) for item in record.tables] == [("d.a", 1), ("d.b", 1)]


def test_a_table_ahead_of_a_larger_cut_gets_only_what_it_lacks(manifest):
    """The checkpoint directory was lost after a crash,
    so the cut has another end than the first time.
    """
    feed, lake = Feed({"d.a": [5, 15, 25], "d.b": [6, 16]}), Lake()
    applier(feed, lake, manifest).apply(Cut(0, 0, 10))
    lake.ranges["d.a"].append((10, 20))
    applier(feed, lake, manifest).apply(Cut(0, 10, 30))
    assert lake.ranges == {"d.a": [(0, 10), (10, 20), (20, 30)], "d.b": [(0, 10), (10, 30)]}


def test_a_checkpoint_without_its_lake_is_refused(manifest):
    with pytest.raises(SourceError, match="ErrCutGap"):
        applier(Feed({}), Lake(), manifest).apply(Cut(4, 10, 20))


class EmptyTopic(Lake):
    def write_statement(self, ddl, before, now):
        raise AssertionError


def test_a_topic_whose_messages_have_expired_is_told_as_such(manifest):
    with pytest.raises(SourceError, match=r"ErrCutGap.*retention.*--checkpoint-dir"):
        applier(Feed({}), EmptyTopic(), manifest).apply(Cut(4, 10, 20))


def test_a_cut_beyond_the_end_of_the_lake_is_refused(manifest):
    cuts = applier(Feed({}), Lake(), manifest)
    cuts.apply(Cut(0, 0, 10))
    with pytest.raises(SourceError, match="ErrCutGap"):
        cuts.apply(Cut(1, 15, 20))


def described(checkpoint_ts, *skipped, tables=None):
    return ChangefeedMeta(
        checkpoint_ts, checkpoint_ts, TABLES if tables is None else tables, skipped=skipped
    )


def test_a_stretch_that_an_operator_skipped_is_a_cut_of_its_own_and_said_by_all_later_ones(
    manifest,
):
    feed, lake = Feed({"d.a": [5, 25]}), Lake()
    applier(feed, lake, manifest).apply(Cut(0, 0, 10))
    gone = skip(
        manifest, described(20, (10, 15), (15, 20), tables={"d.a": TABLES["d.a"]}), "upsert"
    )
    assert (gone.start_ts, gone.end_ts, gone.batch, gone.tables, gone.dropped) == (
        10,
        20,
        NO_BATCH,
        (),
        ("d.b",),
    )
    assert gone.is_skipped
    assert skip(manifest, described(20, (10, 20)), "upsert") is None, (
        "a restart has nothing left to do"
    )
    cuts = applier(feed, lake, manifest)
    later = cuts.apply(Cut(0, 20, 30))
    assert (later.start_ts, later.skipped, later.is_skipped) == (20, ((10, 20),), False)
    assert (cuts.take_altered(), cuts.take_altered()) == (["d.a", "d.b"], []), "told once"
    assert lake.ranges["d.a"] == [(0, 10), (20, 30)]
    assert lake.rekeyed == ["d.a", "d.b"], "what happened to the key in between is not known"
    assert [item.table for item in later.tables] == ["d.a", "d.b"], (
        "all tables are compared with the changefeed's"
    )
    kept = {(cut.start_ts, cut.end_ts): cut.skipped for cut in manifest.cuts()}
    assert kept == {(0, 10): (), (10, 20): ((10, 20),), (20, 30): ((10, 20),)}


@pytest.mark.parametrize(
    ("checkpoint_ts", "skipped"),
    [
        (20, []),
        (20, [(10, 15)]),
        (20, [(12, 20)]),
        (20, [(0, 10)]),
        (25, [(10, 20)]),
        (20, [(10, 14), (15, 20)]),
    ],
)
def test_changes_that_somebody_else_took_are_never_passed_over(manifest, checkpoint_ts, skipped):
    applier(Feed({}), Lake(), manifest).apply(Cut(0, 0, 10))
    with pytest.raises(SourceError, match=r"ErrCutGap.*--overwrite-checkpoint-ts 10"):
        skip(manifest, described(checkpoint_ts, *skipped), "upsert")
    assert manifest.last.end_ts == 10


@pytest.mark.parametrize("checkpoint_ts", [5, 10])
def test_a_lake_that_is_further_than_what_was_skipped_goes_on_where_it_ends(
    manifest, checkpoint_ts
):
    applier(Feed({}), Lake(), manifest).apply(Cut(0, 0, 10))
    assert skip(manifest, described(checkpoint_ts, (2, checkpoint_ts)), "upsert") is None


def test_an_empty_lake_has_nothing_to_skip(manifest):
    assert skip(manifest, described(20, (10, 20)), "upsert") is None
    assert manifest.last is None


def test_a_crash_after_a_skipped_stretch_and_before_the_next_cut_repeats_nothing_of_it(manifest):
    feed, lake = Feed({"d.a": [5, 25], "d.b": [26]}), Lake()
    applier(feed, lake, manifest).apply(Cut(0, 0, 10))
    skip(manifest, described(20, (10, 20)), "upsert")
    lake.fail_at = "d.b"
    with pytest.raises(SourceError, match="crash"):
        applier(feed, lake, manifest).apply(Cut(0, 20, 30))
    lake.fail_at = None
    assert skip(manifest, described(20, (10, 20)), "upsert") is None
    applier(feed, lake, manifest).apply(Cut(0, 20, 30))
    assert lake.ranges == {"d.a": [(0, 10), (20, 30)], "d.b": [(0, 10), (20, 30)]}


def test_targets_are_absolute_local_directories():
    assert SinkUri.parse("delta:///lake/x/") == SinkUri("delta", "/lake/x")
    for text in ("delta://host/lake", "nosuch:///lake", "/lake", "parquet:lake"):
        with pytest.raises(SourceError, match="ErrTargetInvalid"):
            SinkUri.parse(text)


def test_a_table_with_another_key_and_the_same_columns_is_written_by_that_key(
    manifest, monkeypatch
):
    lake, keys = Lake(), []
    feed = Feed({"d.a": [5, 15, 25]})
    rekeyed = {**TABLES, "d.a": dataclasses.replace(TABLES["d.a"], key=("_seq",))}
    ddls = (Ddl(20, "ALTER TABLE a DROP PRIMARY KEY, ADD PRIMARY KEY (_seq)", ("d.a",)),)

    def describe(ts=None, *, known=None):
        return ChangefeedMeta(
            0, 0, TABLES if ts < 20 else rekeyed, tuple(ddl for ddl in ddls if ddl.ts >= ts)
        )

    monkeypatch.setattr(feed, "describe", describe)
    applied = lake.apply
    monkeypatch.setattr(
        lake, "apply", lambda changes: (keys.append(changes.table.key), applied(changes))[1]
    )
    cuts = applier(feed, lake, manifest)
    for number, (start_ts, end_ts) in enumerate([(0, 10), (10, 20), (20, 30)]):
        cuts.apply(Cut(number, start_ts, end_ts))
    assert lake.rekeyed == ["d.a"]
    assert [key for key in keys if key != ("id",)] == [("_seq",)]


@pytest.mark.parametrize(
    ("query", "is_dropped"), [("DROP TABLE b", True), (f"{FILTER_UPDATE} d.a */", False)]
)
def test_a_table_that_the_filter_takes_no_more_stays_in_the_lake(
    manifest, monkeypatch, query, is_dropped
):
    lake, feed, gone = Lake(), Feed({"d.a": [5, 25], "d.b": [5]}), []
    ddl = Ddl(20, query, dropped=("d.b",))

    def describe(ts=None, *, known=None):
        tables = TABLES if ts < 20 else {"d.a": TABLES["d.a"]}
        return ChangefeedMeta(0, 0, tables, (ddl,) if ts <= 20 else ())

    monkeypatch.setattr(feed, "describe", describe)
    monkeypatch.setattr(lake, "drop", lambda table: gone.append(table.name), raising=False)
    cuts = applier(feed, lake, manifest, on_drop="drop")
    for number, (start_ts, end_ts) in enumerate([(0, 20), (20, 30)]):
        last = cuts.apply(Cut(number, start_ts, end_ts))
    assert gone == ["d.b"] * is_dropped
    assert last.dropped == ("d.b",)


def test_a_cut_that_was_planned_before_a_filter_left_a_table_out_is_planned_again(
    manifest, monkeypatch
):
    lake, feed = Lake(), Feed({"d.a": [5], "d.b": [6]})
    cuts = applier(feed, lake, manifest)
    cuts.apply(Cut(0, 0, 3))
    known = feed.describe()
    monkeypatch.setattr(
        feed,
        "describe",
        lambda *_, **__: dataclasses.replace(known, tables={"d.a": known.tables["d.a"]}),
    )
    with pytest.raises(SourceError, match="ErrPlanOutdated") as raised:
        cuts.apply(Cut(1, 3, 10))
    assert raised.value.retryable
    assert lake.ranges == {"d.a": [(0, 3)], "d.b": [(0, 3)]}
    feed.changed = {"d.a": [5]}
    cuts.apply(Cut(1, 3, 10))
    assert lake.ranges == {"d.a": [(0, 3), (3, 10)], "d.b": [(0, 3)]}
