"""Lakes that are old: after 300 cuts with checkpoints, compaction, expiry, schema changes and
restarts they equal their upstream, and the next life starts on them. TIDEMARK_TEST_AGED_TIMES=4
makes four times as many.
"""

import os
from operator import itemgetter

import pyarrow.parquet as pq
import pytest
from pyspark_tidemark.digest import Ranges
from pyspark_tidemark.lake.cut import Cut, CutApplier, TableWriters
from pyspark_tidemark.lake.delta import checkpoints, maintenance
from pyspark_tidemark.lake.delta.target import DeltaTarget
from pyspark_tidemark.lake.iceberg.catalog import Catalog
from pyspark_tidemark.lake.iceberg.target import IcebergTarget
from pyspark_tidemark.lake.maintenance import KeptCuts, Maintenance
from pyspark_tidemark.lake.manifest import DIRECTORY, read_cuts
from pyspark_tidemark.lake.parquet.target import ChangelogTarget
from pyspark_tidemark.lake.reading import as_of_cut
from pyspark_tidemark.lake.schema import Policy
from pyspark_tidemark.sink_uri import SinkUri

from server.verify.lake.file_lake import LakeTable
from server.verify.lake.question import Question
from tests.integration.lake.aged import STEP, aged_feed, read_changelog
from tests.integration.lake.test_evolution import Database, Directory, opened_place
from tests.integration.lake.test_readers import PYTHON, by_engines, newest_metadata, plain

TIMES = int(os.environ.get("TIDEMARK_TEST_AGED_TIMES", "1"))
pytestmark = pytest.mark.timeout(1200 * TIMES)
LIVES = tuple(
    TIMES * cut + after
    for cut, after in [(66, 0), (66, 1), *((cut, 0) for cut in (114, 157, 205, 253, 270, 300))]
)
"""The cuts after which a life ends: at statements, right after them, and between them."""
COMPARED = (LIVES[1], LIVES[4], LIVES[-1])
"""The lives after which Spark reads the whole lake, which takes longer than forty cuts."""
DROPPED_TS = TIMES * 234 * STEP
"""The last cut of a table whose name comes again later."""


class Files(Directory):
    """A lake of files, read at once: each reading of a cut looks at all its tables."""

    @property
    def path(self):
        return self._path

    def tables(self, feed, ts):
        uri = f"{self._kind}://{self.path}"
        return {
            name: [row.asDict() for row in frame.collect()]
            for name, frame in as_of_cut(self.spark, uri, ts).items()
        }


class DeltaPlace(Files):
    """Delta, compacted often; each life reads the log anew, as a new process does."""

    def target(self):
        target = DeltaTarget(self.spark, str(self._path), "evolving", compact_every=16)
        self.spark._jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()
        return target

    def grow_older(self, target, feed, kept):
        """Remove old files as the job does once an hour, but to the second:
        Delta's RETAIN has whole hours.
        """
        retention_s, table = (
            target._maintenance.retention_s("bank.t", kept),
            f"delta.`{self._path}/bank/t`",
        )
        session, name = self.spark.newSession(), "delta.deletedFileRetentionDuration"
        session.conf.set(
            "spark.sql.sources.parallelPartitionDiscovery.parallelism", "2"
        )  # else ten thousand tasks
        session.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
        session.sql(
            f"ALTER TABLE {table} SET TBLPROPERTIES ('{name}' = 'interval "
            f"{int(retention_s * 1000)} milliseconds')"
        )
        session.sql(f"VACUUM {table}")
        session.sql(f"ALTER TABLE {table} UNSET TBLPROPERTIES ('{name}')")


class IcebergPlace(Files):
    """Iceberg, rewritten and expired after each life, and now and then within."""

    def target(self):
        return IcebergTarget(self.spark, str(self._path), "evolving", compact_every=16)

    def grow_older(self, target, feed, kept):
        for name in feed.state(feed.acked_ts - 1):
            target._maintenance.rewrite(name)
            target._maintenance.expire(name, kept)


class ParquetPlace(Files):
    """A changelog is never tidied."""

    def target(self):
        return ChangelogTarget(self.spark, str(self._path))

    def grow_older(self, target, feed, kept):
        pass


class DatabasePlace(Database):
    """A database looks after itself."""

    def tables(self, feed, ts):
        return {name: self.rows(name, ts) for name in feed.state(ts - 1)}

    def grow_older(self, target, feed, kept):
        pass


def keep(place, feed, ends, *, mode="upsert"):
    """One life of a job: apply and acknowledge cuts, do what is due between them, end,
    and let the lake grow older.
    """
    with place.opened(feed) as manifest:
        target = place.target()
        cuts = CutApplier(
            feed,
            "evolving",
            target,
            manifest,
            policy=Policy(mode),
            writers=TableWriters(source_options={}, spark=place.spark, parallel=2),
        )
        maintenance = Maintenance(target, manifest, 0.0)
        for number, end_ts in enumerate(ends):
            start_ts = 0 if manifest.last is None else manifest.last.end_ts
            cuts.apply(Cut(number, start_ts, end_ts))
            cuts.acknowledge()
            maintenance.maintain()
        maintenance.close()
        place.grow_older(target, feed, KeptCuts(manifest, 0.0))


def assert_equal(place, feed):
    """Every table that is there upstream has the same rows in the lake."""
    ts = feed.acked_ts - 1  # a DDL at its end has yet to be taken
    tables = place.tables(feed, feed.acked_ts)
    for name, rows in feed.state(ts).items():
        assert {row["id"]: row for row in tables[name]} == rows, name


def lived(place, feed, *, mode="upsert", equal=assert_equal, compared=LIVES):
    """All lives of a lake; it is compared with its upstream after some of them."""
    before = 0
    for last in LIVES:
        keep(place, feed, [number * STEP for number in range(before + 1, last + 1)], mode=mode)
        if last in compared:
            equal(place, feed)
        before = last


@pytest.fixture(params=["postgresql", "mysql"])
def database_place(request, tmp_path):
    opened = opened_place(request, tmp_path)
    return DatabasePlace(opened._uri)


def test_an_old_delta_lake(spark, tmp_path, monkeypatch):
    monkeypatch.setattr(maintenance, "VACUUM_MARGIN_S", 20.0)
    monkeypatch.setattr(checkpoints, "REST", 0.0)
    place, feed = DeltaPlace(spark, "delta", tmp_path), aged_feed(1, cuts=LIVES[-1])
    lived(place, feed, compared=COMPARED)
    table = tmp_path / "bank" / "t"
    assert len(list(table.glob("_delta_log/*.checkpoint*"))) > 3
    written = sum(entry.read_text().count('{"add":') for entry in table.glob("_delta_log/*.json"))
    left = len(list(table.glob("*.parquet")))
    assert left < written / 3, (
        "most files of earlier versions were removed, those of the last seconds stay"
    )
    assert rolled_up(tmp_path)


@pytest.mark.nightly
def test_an_old_iceberg_lake(spark, tmp_path):
    place, feed = (
        IcebergPlace(spark, "iceberg", tmp_path),
        aged_feed(2, cuts=LIVES[-1], renames=False),
    )
    lived(place, feed, compared=COMPARED)
    assert rolled_up(tmp_path)
    newest = Catalog(spark, str(tmp_path), "evolving").load("bank.t")
    assert len(list(newest.snapshots())) < 100
    if PYTHON.exists():
        state = feed.state(feed.acked_ts - 1)
        jobs = [{"engine": "pyiceberg", "path": newest_metadata(tmp_path, name)} for name in state]
        for name, rows in zip(state, by_engines(tmp_path, jobs), strict=True):
            assert plain(rows) == plain(state[name].values()), name


@pytest.mark.nightly
def test_an_old_changelog(spark, tmp_path):
    """Parquet keeps every change, once, and each reader sees those of the table that has the name
    at the cut.
    """
    place, feed = ParquetPlace(spark, "parquet", tmp_path), aged_feed(4, cuts=LIVES[-1])
    lived(place, feed, mode="append", equal=assert_changes)
    assert rolled_up(tmp_path)

    stored = [
        row
        for part in tmp_path.glob("bank/*/cut=*/*.parquet")
        for row in pq.ParquetFile(part).read().to_pylist()
    ]
    envelope = itemgetter("_commit_ts", "_seq", "_op", "id")
    assert sorted(map(envelope, stored)) == sorted(envelope(row) for _, row in feed.changes), (
        "of all tables, ever"
    )

    at_statements = {ddl.ts + step for ddl in feed.ddls for step in (0, STEP)}
    for cut_ts in sorted(at_statements | {STEP, feed.acked_ts}):
        for name in feed.tables_at(cut_ts):
            assert_read(read_changelog(tmp_path, name, cut_ts), feed.history(name, cut_ts))
    for cut_ts in (DROPPED_TS, feed.acked_ts):
        for name, rows in place.tables(feed, cut_ts).items():
            assert_read(rows, feed.history(name, cut_ts))
    assert_verified(place, feed)


def test_an_old_database(database_place):
    feed = aged_feed(3, cuts=LIVES[-1])
    lived(database_place, feed, compared=LIVES[:-1])
    assert_equal(database_place, feed)


def assert_changes(place, feed):
    """Every change is there once, with what its row was, for readers without Spark."""
    for name in feed.tables_at(feed.acked_ts):
        assert_read(
            read_changelog(place.path, name, feed.acked_ts), feed.history(name, feed.acked_ts)
        )


def assert_verified(place, feed):
    """`verify` finds the rows of the upstream in the changes of the lake."""
    uri, cuts = SinkUri.parse(f"parquet://{place.path}"), tuple(read_cuts(place.path / DIRECTORY))
    truncated = {name: ddl.ts for ddl in feed.ddls for name in ddl.truncated}
    for name, rows in feed.state(feed.acked_ts).items():
        columns = feed.describe(feed.acked_ts).tables[name].schema
        question = Question(
            name, feed.acked_ts, truncated.get(name, 0), ("id",), columns, Ranges(0, ())
        )
        frame = LakeTable(uri, "evolving", cuts, question).frame(place.spark)
        found = {
            row["id"]: row.asDict() for row in frame.drop("_op", "_start_ts", "_seq").collect()
        }
        assert found == rows


def assert_read(found, changes):
    """The same changes; a reader may show columns that a change's table had at another time."""
    changes = by_change(changes)
    found = by_change(found)
    assert found.keys() == changes.keys()
    assert {
        at: {column: found[at].get(column) for column in row} for at, row in changes.items()
    } == changes


def by_change(rows):
    """Rows by (_commit_ts, _seq), no two of the same."""
    rows = list(rows)
    found = {(row["_commit_ts"], row["_seq"]): row for row in rows}
    assert len(found) == len(rows), "a change is there twice"
    return found


def rolled_up(root):
    return [path for path in (root / DIRECTORY).iterdir() if "-" in path.name]
