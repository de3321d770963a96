"""Somebody else touches the tables of a lake, while its job runs or between two of its lives: what
was there before stays in the lake, or the job stops by name; nothing comes twice.
"""

import shutil

import pyarrow as pa
import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake import changes
from pyspark_tidemark.lake.cut import Cut, CutApplier, TableWriters
from pyspark_tidemark.lake.delta.tables import DeltaTables
from pyspark_tidemark.lake.delta.target import DeltaTarget
from pyspark_tidemark.lake.iceberg.catalog import Catalog
from pyspark_tidemark.lake.iceberg.files import joined
from pyspark_tidemark.lake.iceberg.snapshot import Snapshot
from pyspark_tidemark.lake.parquet.target import ChangelogTarget
from pyspark_tidemark.lake.schema import Policy

from tests.integration.lake.aged import AcknowledgedFeed
from tests.integration.lake.test_evolution import Directory

pytestmark = pytest.mark.timeout(600)
CUTS = 8
MIDST = pytest.mark.parametrize("is_amid", [True, False], ids=["amid", "between"])


class Lake(Directory):
    """A lake of files, kept in any mode."""

    def __init__(self, spark, kind, path, mode="upsert"):
        super().__init__(spark, kind, path)
        self.kind, self.path, self.mode = kind, path, mode
        self.table = path / "bank" / "t"

    def target(self):
        if self.kind == "parquet":
            return ChangelogTarget(self.spark, str(self.path))
        if self.kind == "delta":
            return DeltaTarget(self.spark, str(self.path), "evolving", mode=self.mode)
        return super().target()

    def keep(self, feed, first, last, *, before=None, touch=None):
        """Apply cuts; somebody else comes before one of them."""
        self.forget()
        with self.opened(feed) as manifest:
            target = self.target()
            writers = TableWriters(source_options={}, spark=self.spark, parallel=1)
            cuts = CutApplier(
                feed, "evolving", target, manifest, policy=Policy(self.mode), writers=writers
            )
            try:
                for number in range(first, last + 1):
                    if number == before:
                        touch()
                    start_ts = 0 if manifest.last is None else manifest.last.end_ts
                    cuts.apply(Cut(0, start_ts, number * 10))
                    cuts.acknowledge()
            finally:
                target.close()

    def touched(self, feed, touch, *, is_amid):
        """Six cuts; somebody else comes before the fifth."""
        if is_amid:
            self.keep(feed, 3, 6, before=5, touch=touch)
        else:
            self.keep(feed, 3, 4)
            touch()
            self.keep(feed, 5, 6)

    def forget(self):
        """Delta's own, as in a new process."""
        self.spark._jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()

    def sql(self, statement):
        self.spark.newSession().sql(statement.format(f"delta.`{self.table}`"))

    @property
    def iceberg(self):
        """By Iceberg's own library, as its procedures for engines do."""
        java = self.spark._jvm
        tables = java.org.apache.iceberg.hadoop.HadoopTables(self.spark._jsc.hadoopConfiguration())
        return tables.load(str(self.table))

    def rewrite(self):
        """All rows into one new file, in another order, and nothing is left of what was before."""
        if self.kind == "delta":
            table = f"delta.`{self.table}`"
            session = self.spark.newSession()
            session.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
            # Else listing a table is ten thousand tasks.
            session.conf.set("spark.sql.sources.parallelPartitionDiscovery.parallelism", "2")
            session.sql(f"OPTIMIZE {table} ZORDER BY (v)")
            session.sql(f"VACUUM {table} RETAIN 0 HOURS")
            return
        catalog, table = Catalog(self.spark, str(self.path), "evolving"), self.iceberg
        snapshot = Snapshot(self.spark, catalog, table, table.currentSnapshot().snapshotId())
        shares = [snapshot.whole_share(file) for file in reversed(snapshot.data)]
        update = table.newRewrite().validateFromSnapshot(table.currentSnapshot().snapshotId())
        update.addFile(catalog.java_files.data(table, joined(catalog.layout(table, ()), shares)))
        for file in (*snapshot.data, *snapshot.deletes):
            update.deleteFile(file)
        update.commit()
        newest = table.currentSnapshot().timestampMillis()
        table.expireSnapshots().expireOlderThan(newest).retainLast(1).commit()

    def shows(self, feed, ts):
        self.forget()
        rows = self.rows("bank.t", ts)
        assert len({row["id"] for row in rows}) == len(rows)
        return {row["id"]: row for row in rows} == feed.state(ts)["bank.t"]


@pytest.fixture
def feed():
    feed = AcknowledgedFeed()
    feed.create(0, "bank.t", id=pa.int64(), v=pa.string())
    feed.create(0, "bank.u", id=pa.int64(), v=pa.string())
    feed.put(3, "bank.t", {"id": 1, "v": "first"}, {"id": 100, "v": "stays"})
    for number in range(1, CUTS + 1):
        ts = number * 10 - 5
        feed.put(ts, "bank.t", {"id": number + 1, "v": f"v{ts}"}, {"id": 1, "v": f"again {ts}"})
        feed.put(ts, "bank.u", {"id": number, "v": f"v{ts}"})
    return feed


@pytest.fixture(params=["delta", "iceberg"])
def lake(request, spark, tmp_path, feed):
    lake = Lake(spark, request.param, tmp_path)
    lake.keep(feed, 1, 2)
    return lake


@MIDST
def test_a_table_that_was_removed_does_not_begin_anew_with_a_part_of_its_rows(lake, feed, is_amid):
    with pytest.raises(SourceError) as refused:
        lake.touched(feed, lambda: shutil.rmtree(lake.table), is_amid=is_amid)
    assert refused.value.code in ("ErrTableRemoved", "ErrTableRolledBack")
    assert not refused.value.retryable


@MIDST
def test_a_table_that_lost_its_newest_version_as_in_an_older_copy_is_refused(lake, feed, is_amid):
    def take_away():
        if lake.kind == "delta":
            max(lake.table.glob("_delta_log/*.json")).unlink()
            return
        metadata = lake.table / "metadata"
        newest = len(list(metadata.glob("v*.metadata.json")))
        (metadata / f"v{newest}.metadata.json").unlink()
        (metadata / "version-hint.text").write_text(str(newest - 1))
        (metadata / ".version-hint.text.crc").unlink(missing_ok=True)

    with pytest.raises(SourceError) as refused:
        lake.touched(feed, take_away, is_amid=is_amid)
    assert refused.value.code == "ErrTableRolledBack"


@MIDST
def test_a_table_that_was_rolled_back_is_refused_until_it_is_rolled_forward(lake, feed, is_amid):
    newest = []

    def roll_back():
        if lake.kind == "delta":
            newest.append(len(list(lake.table.glob("_delta_log/*.json"))) - 1)
            lake.sql("RESTORE TABLE {} TO VERSION AS OF 1")
        else:
            ids = [snapshot.snapshotId() for snapshot in list(lake.iceberg.snapshots())]
            newest.append(ids[-1])
            lake.iceberg.manageSnapshots().rollbackTo(ids[1]).commit()

    with pytest.raises(SourceError) as refused:
        lake.touched(feed, roll_back, is_amid=is_amid)
    assert refused.value.code == "ErrTableRolledBack"
    with pytest.raises(SourceError):
        lake.keep(feed, 5, 6)

    if lake.kind == "delta":
        assert f"TO VERSION AS OF {newest[0]}" in refused.value.message
        lake.sql(f"RESTORE TABLE {{}} TO VERSION AS OF {newest[0]}")
    else:
        lake.iceberg.manageSnapshots().setCurrentSnapshot(newest[0]).commit()
    lake.keep(feed, 5, 6)
    assert lake.shows(feed, 60)


@MIDST
def test_a_table_that_somebody_made_anew_is_refused(lake, feed, is_amid):
    def make_anew():
        if lake.kind == "delta":
            shutil.rmtree(lake.table)
            rows = lake.spark.newSession().createDataFrame(
                [(5, "r", 1)], "id BIGINT, v STRING, _commit_ts BIGINT"
            )
            for _ in range(4):
                rows.write.format("delta").mode("append").save(str(lake.table))
            return
        table, java = lake.iceberg, lake.spark._jvm
        schema, spec = table.schema(), table.spec()
        shutil.rmtree(lake.table)
        tables = java.org.apache.iceberg.hadoop.HadoopTables(lake.spark._jsc.hadoopConfiguration())
        tables.create(schema, spec, str(lake.table))

    with pytest.raises(SourceError) as refused:
        lake.touched(feed, make_anew, is_amid=is_amid)
    assert refused.value.code in ("ErrTargetForeign", "ErrTableRolledBack")


@MIDST
def test_columns_of_somebody_else_stop_the_job_by_name(lake, feed, is_amid):
    if lake.kind == "delta" and is_amid:
        pytest.skip("tests/unit/sink/spark/test_delta_tables.py has that")

    def add_column():
        if lake.kind == "delta":
            lake.sql("ALTER TABLE {} ADD COLUMNS (z INT)")
        else:
            lake.iceberg.updateSchema().addColumn("z", java_type("int")).commit()

    def make_anew():
        lake.iceberg.updateSchema().deleteColumn("v").commit()
        lake.iceberg.updateSchema().addColumn("v", java_type("string")).commit()

    java_type = lake.spark._jvm.org.apache.iceberg.types.Types.fromPrimitiveString
    with pytest.raises(SourceError, match=r"ErrTargetSchema.*\bz\b"):
        lake.touched(feed, add_column, is_amid=is_amid)
    if lake.kind == "iceberg" and is_amid:
        lake.iceberg.updateSchema().deleteColumn("z").commit()
        with pytest.raises(SourceError, match=r"ErrTargetSchema.*its own names \(v\)"):
            lake.keep(feed, 5, 7, before=6, touch=make_anew)
        with pytest.raises(SourceError, match=r"ErrTargetSchema.*its own names \(v\)"):
            lake.keep(feed, 6, 7)


@pytest.mark.parametrize(
    "statement",
    [
        "ALTER TABLE {} SET TBLPROPERTIES ('delta.enableInCommitTimestamps' = 'true')",
        "ALTER TABLE {} SET TBLPROPERTIES ('delta.enableRowTracking' = 'true')",
        "ALTER TABLE {} SET TBLPROPERTIES ('delta.enableChangeDataFeed' = 'true')",
        "ALTER TABLE {} SET TBLPROPERTIES ('delta.checkpointPolicy' = 'v2')",
        "ALTER TABLE {} CLUSTER BY (v)",
    ],
    ids=["commit timestamps", "row tracking", "change data feed", "checkpoints", "clusters"],
)
def test_a_delta_table_that_somebody_asked_more_of_follows_a_schema_change(
    spark, tmp_path, statement
):
    lake, feed = Lake(spark, "delta", tmp_path), AcknowledgedFeed()
    feed.create(0, "bank.t", id=pa.int64(), v=pa.string())
    for number in (1, 2):
        feed.put(number * 10 - 5, "bank.t", {"id": 1, "v": "a"}, {"id": number + 1, "v": "b"})
    columns = {"id": pa.int64(), "w": pa.string(), "n": pa.int64()}
    feed.alter(20, "bank.t", "ALTER TABLE …", {"v": "w"}, None, (), **columns)
    for number in (3, 4):
        feed.put(number * 10 - 5, "bank.t", {"id": 1, "w": "renamed", "n": number})
    lake.keep(feed, 1, 3, before=3, touch=lambda: lake.sql(statement))
    lake.keep(feed, 4, 4)
    assert lake.shows(feed, 40)


@MIDST
def test_an_iceberg_table_that_somebody_partitioned_is_written_in_its_partitions(
    spark, tmp_path, feed, is_amid
):
    lake = Lake(spark, "iceberg", tmp_path)
    lake.keep(feed, 1, 2)
    bucket = spark._jvm.org.apache.iceberg.expressions.Expressions.bucket

    def partition():
        lake.iceberg.updateSpec().addField("by_id", bucket("id", 4)).commit()

    lake.touched(feed, partition, is_amid=is_amid)
    assert lake.iceberg.spec().isPartitioned()
    assert lake.shows(feed, 60)


def test_a_row_in_a_partition_of_somebody_else_is_masked_there(spark, tmp_path, feed):
    """Engines that follow the specification look for vectors in the partition of their file."""
    lake = Lake(spark, "iceberg", tmp_path)
    lake.keep(feed, 1, 2)
    iceberg = spark._jvm.org.apache.iceberg
    lake.iceberg.updateSpec().addField("by_v", iceberg.expressions.Expressions.ref("v")).commit()
    table = lake.iceberg
    partition = iceberg.PartitionData(table.spec().partitionType())
    partition.set(0, "first")
    rewrite = table.newRewrite()
    tasks = table.newScan().includeColumnStats().planFiles().iterator()
    while tasks.hasNext():
        task = tasks.next()
        if task.deletes().isEmpty():
            file = task.file()
            moved = iceberg.DataFiles.builder(table.spec()).withPartition(partition)
            moved.withPath(file.location()).withFormat("parquet")
            moved.withRecordCount(file.recordCount()).withFileSizeInBytes(file.fileSizeInBytes())
            rewrite.deleteFile(file).addFile(moved.build())
    rewrite.commit()
    lake.iceberg.updateSpec().removeField("by_v").commit()
    lake.keep(feed, 3, 4)
    assert lake.shows(feed, 40)


@MIDST
def test_snapshots_that_somebody_expired_are_no_rollback(spark, tmp_path, feed, is_amid):
    lake = Lake(spark, "iceberg", tmp_path)
    lake.keep(feed, 1, 2)

    def expire():
        lake.iceberg.newAppend().commit()
        newest = lake.iceberg.currentSnapshot()
        lake.iceberg.expireSnapshots().expireOlderThan(newest.timestampMillis()).retainLast(
            1
        ).commit()
        assert len(list(lake.iceberg.snapshots())) == 1

    lake.touched(feed, expire, is_amid=is_amid)
    assert lake.shows(feed, 60)


@MIDST
@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_files_that_somebody_has_rewritten_are_masked_where_rows_are_now(
    spark, tmp_path, kind, is_amid
):
    """As by rewrite_data_files with a sort, expire_snapshots, OPTIMIZE and VACUUM: what the job
    remembers of the files is out of date, and they are gone.
    """
    feed = AcknowledgedFeed()
    for name in ("bank.t", "bank.u"):
        feed.create(0, name, id=pa.int64(), v=pa.string())
    for number in range(1, CUTS + 1):
        ts = number * 10 - 5
        kept = [number, *(range(100, 130) if number == 1 else (100 + number, 110 + number))]
        # Other orders of `v` than of `id`: sorted by it, rows lie elsewhere.
        feed.put(ts, "bank.t", *({"id": key, "v": f"{-key % 7} {ts}"} for key in kept))
        feed.delete(ts + 1, "bank.t", 120 + number)
        feed.put(ts + 2, "bank.u", {"id": number, "v": f"v{ts}"})
    lake = Lake(spark, kind, tmp_path)
    lake.keep(feed, 1, 2)
    lake.touched(feed, lake.rewrite, is_amid=is_amid)
    assert lake.shows(feed, 60)
    lake.rewrite()
    lake.keep(feed, 7, CUTS)
    assert lake.shows(feed, CUTS * 10)


@MIDST
def test_a_changelog_that_lost_its_newest_cut_is_refused(spark, tmp_path, feed, is_amid):
    lake = Lake(spark, "parquet", tmp_path, "append")
    lake.keep(feed, 1, 2)
    if is_amid:
        lake.touched(feed, lambda: None, is_amid=True)
        shutil.rmtree(lake.table / "cut=60")
    else:
        shutil.rmtree(lake.table / "cut=20")
    with pytest.raises(SourceError) as refused:
        lake.keep(feed, 7, 8)
    assert refused.value.code == "ErrTableRolledBack"


@pytest.mark.parametrize("mode", ["append", "scd2"])
def test_a_dead_jobs_shorter_cut_amid_a_cut_of_spark_stops_by_name(
    spark, tmp_path, feed, monkeypatch, mode
):
    """Where Spark writes, as behind Hadoop, Delta compares ends of cuts only."""
    lake = Lake(spark, "delta", tmp_path, mode)
    lake.keep(feed, 1, 4)
    dead = lake.target()._tables._app_id
    monkeypatch.setattr(DeltaTables, "listing", lambda self, name: None)
    monkeypatch.setattr(changes, "DRIVER_READ_MAX_BYTES", 1 << 40)
    fenced = DeltaTables.fenced

    def woken(self, cut, **named):
        if cut.table.name == "bank.t":
            rows = lake.spark.newSession().read.format("delta").load(str(lake.table)).limit(0)
            writer = rows.write.format("delta").mode("append")
            writer.option("txnAppId", dead).option("txnVersion", 50).save(str(lake.table))
        return fenced(self, cut, **named)

    monkeypatch.setattr(DeltaTables, "fenced", woken)
    with pytest.raises(SourceError) as refused:
        keep_to(lake, feed, 60)
    assert refused.value.code == "ErrTargetForeign"


def keep_to(lake, feed, end_ts):
    """One cut that goes so far."""
    with lake.opened(feed) as manifest:
        writers = TableWriters(source_options={}, spark=lake.spark, parallel=1)
        cuts = CutApplier(
            feed, "evolving", lake.target(), manifest, policy=Policy(lake.mode), writers=writers
        )
        cuts.apply(Cut(0, manifest.last.end_ts, end_ts))
