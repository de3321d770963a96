"""Iceberg tables without Iceberg's Spark connector: read back by Iceberg's own reader,
and by ours at any cut.
"""

import json
import math
from datetime import UTC, datetime
from decimal import Decimal
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyspark_tidemark.column_metadata import with_column_ids
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import TableMeta
from pyspark_tidemark.jvm import java_classes
from pyspark_tidemark.lake import changes
from pyspark_tidemark.lake.cut import Cut, CutApplier, TableWriters
from pyspark_tidemark.lake.iceberg import maintenance, rewriting
from pyspark_tidemark.lake.iceberg.catalog import Catalog
from pyspark_tidemark.lake.iceberg.files import write
from pyspark_tidemark.lake.iceberg.java_catalog import without_processes
from pyspark_tidemark.lake.iceberg.target import IcebergTarget
from pyspark_tidemark.lake.maintenance import KeptCuts
from pyspark_tidemark.lake.manifest import FileManifest
from pyspark_tidemark.lake.reading import as_of_cut, version_at
from pyspark_tidemark.lake.schema import Policy

pytestmark = pytest.mark.timeout(300)
CUTS = tuple(range(100, 1001, 100))


def keep(spark, changefeed, captures, root, ends, *, mode="upsert", **settings):
    settings = {"compact_every": 0} | settings
    target = IcebergTarget(spark, str(root), "bank", mode=mode, **settings)
    options = {"endpoint": captures.uri, "changefeed": "bank", "ack": "false"}
    with FileManifest.opened(str(root), "bank") as manifest:
        cuts = CutApplier(
            changefeed,
            "bank",
            target,
            manifest,
            policy=Policy(mode),
            writers=TableWriters(source_options=options, spark=spark, parallel=2),
        )
        for number, end_ts in enumerate(ends):
            start_ts = 0 if manifest.last is None else manifest.last.end_ts
            cuts.apply(Cut(number, start_ts, end_ts))
            target.maintain(KeptCuts(manifest, 1.0))
    target.close()
    return target


def read_by_iceberg(spark, root, name):
    """What the table library's own generic reader gives: rows as text, by column."""
    jvm = spark._jvm
    catalog = jvm.org.apache.iceberg.hadoop.HadoopCatalog(
        spark.sparkContext._jsc.hadoopConfiguration(), str(root)
    )
    table = catalog.loadTable(jvm.org.apache.iceberg.catalog.TableIdentifier.parse(name))
    names = [field.name() for field in table.schema().columns()]
    found = jvm.org.apache.iceberg.relocated.com.google.common.collect.Lists.newArrayList(
        jvm.org.apache.iceberg.data.IcebergGenerics.read(table).build()
    )
    return [{column: row.getField(column) for column in names} for row in found]


def balances(rows):
    """Accounts by id; fails if an id comes twice."""
    found = {row["id"]: (row["owner"], row["balance"], row["_commit_ts"]) for row in rows}
    assert len(found) == len(rows)
    return found


def held(upstream, ts):
    return balances(list(upstream.accounts.state(ts).values()))


@pytest.mark.parametrize(
    "here_bytes", [1 << 20, -1], ids=["written by the driver", "written by tasks"]
)
def test_tables_equal_the_replay_at_every_cut_for_iceberg_and_for_us(
    spark, changefeed, captures, upstream, tmp_path, monkeypatch, here_bytes
):
    for most in ("DRIVER_READ_MAX_BYTES", "ARROW_READ_MAX_BYTES"):
        monkeypatch.setattr(changes, most, here_bytes)
    keep(spark, changefeed, captures, tmp_path, CUTS if here_bytes > 0 else CUTS[:3])
    end_ts = CUTS[-1] if here_bytes > 0 else CUTS[2]
    assert balances(read_by_iceberg(spark, tmp_path, "bank.accounts")) == held(upstream, end_ts)
    for ts in (150, end_ts):
        tables = as_of_cut(spark, f"iceberg://{tmp_path}", ts)
        assert balances([row.asDict() for row in tables["bank.accounts"].collect()]) == held(
            upstream, ts // 100 * 100
        )
        kinds = {(row.k1, row.k2): row.amount for row in spark.table("bank_kinds").collect()}
        state = upstream.kinds.state(ts // 100 * 100)
        assert kinds == {key: row["amount"] for key, row in state.items()}


@pytest.fixture(params=["vectors", "vectors, joined by tasks", "equality deletes"])
def vectors(request, monkeypatch):
    """How rows that are gone are told."""
    if request.param == "vectors, joined by tasks":
        monkeypatch.setattr(rewriting, "MOST_BYTES", -1)
    return {"deletion_vectors": request.param != "equality deletes"}


def test_compaction_leaves_no_deletes_and_every_kept_cut_readable(
    spark, changefeed, captures, upstream, tmp_path, monkeypatch, vectors
):
    # No rest, and each piece of work ends before the next cut: on a slow machine one outlasts all
    # of them.
    monkeypatch.setattr(maintenance, "_REST", 0)
    begin = maintenance.Maintenance.run

    def run_to_its_end(self, kept):
        health = begin(self, kept)
        if self._running is not None:
            self._running.outcome.result()
        return health

    monkeypatch.setattr(maintenance.Maintenance, "run", run_to_its_end)
    target = keep(spark, changefeed, captures, tmp_path, CUTS, compact_every=3, **vectors)
    table = target._catalog.load("bank.accounts")
    replaced = [found for found in table.snapshots() if found.operation() == "replace"]
    assert replaced, "the table was compacted"
    assert balances(read_by_iceberg(spark, tmp_path, "bank.accounts")) == held(upstream, CUTS[-1])
    for ts in CUTS[::3]:
        tables = as_of_cut(spark, f"iceberg://{tmp_path}", ts)
        assert balances([row.asDict() for row in tables["bank.accounts"].collect()]) == held(
            upstream, ts
        )


def test_a_rewrite_keeps_deletes_that_were_committed_meanwhile(
    spark, changefeed, captures, upstream, tmp_path, vectors
):
    target = keep(spark, changefeed, captures, tmp_path, CUTS[:5], **vectors)
    running = target._maintenance._rewriting
    finished = running._commit

    def late(*work):
        keep(spark, changefeed, captures, tmp_path, CUTS[5:], **vectors)
        return finished(*work)

    running._commit = late
    before = target._catalog.load("bank.accounts").currentSnapshot().summary()
    assert int(before.get("total-data-files")) > 1
    running.run("bank.accounts")
    after = target._catalog.load("bank.accounts").currentSnapshot()
    assert after.operation() == "replace"
    assert balances(read_by_iceberg(spark, tmp_path, "bank.accounts")) == held(upstream, CUTS[-1])
    meta = TableMeta("bank.accounts", ("id",), upstream.accounts.schema)
    assert target.position(meta) == CUTS[-1]


def test_a_rewrite_of_a_table_that_was_emptied_meanwhile_commits_nothing(
    spark, changefeed, captures, upstream, tmp_path
):
    target = keep(spark, changefeed, captures, tmp_path, CUTS)
    running = target._maintenance._rewriting
    finished = running._commit
    meta = TableMeta("bank.accounts", ("id",), upstream.accounts.schema)

    def late(*work):
        target.truncate(meta, CUTS[-1])
        return finished(*work)

    running._commit = late
    running.run("bank.accounts")
    assert read_by_iceberg(spark, tmp_path, "bank.accounts") == []
    newest = target._catalog.load("bank.accounts").currentSnapshot()
    assert newest.operation() == "delete"


def test_a_table_that_is_dropped_while_it_is_rewritten_ends_no_job(
    spark, changefeed, captures, upstream, tmp_path, monkeypatch
):
    """Its commit found no table, which was taken for a mistake of the program."""
    target = keep(spark, changefeed, captures, tmp_path, CUTS, deletion_vectors=True)
    joined = rewriting.Rewriting._joined

    def dropped(found, table, groups):
        new = joined(found, table, groups)
        target.drop(TableMeta("bank.accounts", ("id",), upstream.accounts.schema))
        return new

    monkeypatch.setattr(rewriting.Rewriting, "_joined", dropped)
    with pytest.raises(SourceError, match="ErrTableNotFound"):
        target._maintenance.rewrite("bank.accounts")


def test_a_table_with_equality_deletes_gets_vectors_in_their_place(
    spark, changefeed, captures, upstream, tmp_path
):
    """A lake of earlier versions, or of a job that was told to write them, back and forth."""
    for number, end in enumerate(CUTS):
        target = keep(
            spark, changefeed, captures, tmp_path, (end,), deletion_vectors=number % 3 == 1
        )

    def deletes(kind):
        summary = target._catalog.load("bank.accounts").currentSnapshot().summary()
        return int(summary.get(f"total-{kind}-deletes"))

    assert deletes("equality") > 0
    assert deletes("position") > 0
    assert balances(read_by_iceberg(spark, tmp_path, "bank.accounts")) == held(upstream, CUTS[-1])
    [rows] = [as_of_cut(spark, f"iceberg://{tmp_path}")["bank.accounts"]]
    assert balances([row.asDict() for row in rows.collect()]) == held(upstream, CUTS[-1])

    target = keep(spark, changefeed, captures, tmp_path, (), deletion_vectors=True)
    target._maintenance.rewrite("bank.accounts")
    assert deletes("equality") == 0
    assert balances(read_by_iceberg(spark, tmp_path, "bank.accounts")) == held(upstream, CUTS[-1])
    meta = TableMeta("bank.accounts", ("id",), upstream.accounts.schema)
    assert target.position(meta) == CUTS[-1]


def test_masks_are_made_for_the_files_that_the_commit_finds(
    spark, changefeed, captures, upstream, tmp_path
):
    """A rewrite that commits between a cut's look at the files and its commit."""
    target = keep(spark, changefeed, captures, tmp_path, CUTS[:-1])
    written = target._writer.written

    def overtaken(*work):
        done = written(*work)
        target._maintenance.rewrite("bank.accounts")
        return done

    target._writer.written = overtaken
    before = target._catalog.load("bank.accounts").currentSnapshot().snapshotId()
    meta = changefeed.describe(0).tables["bank.accounts"]
    slices = tuple(changefeed.plan(CUTS[-2], CUTS[-1], ["bank.accounts"]))
    options = {"endpoint": captures.uri, "changefeed": "bank", "ack": "false"}
    target.apply(changes.Changes(meta, CUTS[-2], CUTS[-1], slices, changefeed, options))
    table = target._catalog.load("bank.accounts")
    assert table.snapshot(table.currentSnapshot().parentId()).operation() == "replace"
    assert table.snapshot(table.currentSnapshot().parentId()).parentId() == before
    assert balances(read_by_iceberg(spark, tmp_path, "bank.accounts")) == held(upstream, CUTS[-1])


def test_snapshots_of_a_cut_that_is_not_in_the_manifest_yet_are_kept(
    spark, changefeed, captures, upstream, tmp_path
):
    target = keep(spark, changefeed, captures, tmp_path, CUTS)
    table = TableMeta("bank.accounts", ("id",), upstream.accounts.schema)
    told = target.version(table)
    target._maintenance.rewrite("bank.accounts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(maintenance, "_EXPIRE_EVERY_COMMITS", 1)
        target._maintenance.expire("bank.accounts", SimpleNamespace(versions=lambda _: frozenset()))
    left = {int(found.snapshotId()) for found in target._catalog.load("bank.accounts").snapshots()}
    assert left == {told, target.version(table)}
    tables = as_of_cut(spark, f"iceberg://{tmp_path}")
    assert balances([row.asDict() for row in tables["bank.accounts"].collect()]) == held(
        upstream, CUTS[-1]
    )


def test_a_snapshot_that_somebody_has_tagged_stays_and_others_expire(
    spark, changefeed, captures, upstream, tmp_path
):
    """Iceberg refuses to forget a tagged one, and with it all others: their list grew."""
    target = keep(spark, changefeed, captures, tmp_path, CUTS)
    table = target._catalog.load("bank.accounts")
    first, *others = [int(each.snapshotId()) for each in table.snapshots()]
    table.manageSnapshots().createTag("audit", first).commit()

    def versions(_):
        assert not target._committing.locked(), "cuts do not wait for the manifest to be read"
        return frozenset()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(maintenance, "_EXPIRE_EVERY_COMMITS", 1)
        target._maintenance.expire("bank.accounts", SimpleNamespace(versions=versions))
    left = {int(each.snapshotId()) for each in target._catalog.load("bank.accounts").snapshots()}
    assert left == {first, others[-1]}


def test_a_job_that_was_overtaken_while_it_wrote_commits_nothing(
    spark, changefeed, captures, upstream, tmp_path
):
    late = keep(spark, changefeed, captures, tmp_path, CUTS[:1])
    meta = changefeed.describe(0).tables["bank.accounts"]
    slices = tuple(changefeed.plan(CUTS[0], CUTS[1], ["bank.accounts"]))
    options = {"endpoint": captures.uri, "changefeed": "bank", "ack": "false"}
    cut = changes.Changes(meta, CUTS[0], CUTS[1], slices, changefeed, options)
    write, load, loads = late._writer.written, late._catalog.load, []

    def overtaken(*arguments):
        keep(spark, changefeed, captures, tmp_path, CUTS[1:2])
        return write(*arguments)

    late._writer.written = overtaken
    late._catalog.load = lambda name: (loads.append(name), load(name))[1]
    with pytest.raises(SourceError, match="ErrTargetBusy"):
        late.apply(cut)
    assert loads == ["bank.accounts"], "once, and the fence is fresh nevertheless"
    assert balances(read_by_iceberg(spark, tmp_path, "bank.accounts")) == held(upstream, CUTS[1])


def test_a_commit_goes_on_top_of_what_was_read_or_is_none(spark, upstream, tmp_path):
    catalog = Catalog(spark, str(tmp_path), "bank")
    schema = with_column_ids(upstream.accounts.schema, {})
    table = catalog.create("bank.accounts", schema, ("id",))
    late = table.newTransaction()
    assert catalog.position(late.table(), "bank.accounts") is None
    first = catalog.load("bank.accounts").newTransaction()
    catalog.fenced(first, first.newAppend(), 100)
    with pytest.raises(SourceError, match="ErrTargetBusy") as caught:
        catalog.fenced(late, late.newAppend(), 100)
    assert caught.value.retryable
    assert len(list(catalog.load("bank.accounts").snapshots())) == 1


def test_iceberg_alone_writes_to_disks_without_a_process_for_each_file(spark, tmp_path):
    classes, place = java_classes(spark), spark._jvm.org.apache.hadoop.fs.Path(str(tmp_path))
    conf = classes.org.apache.hadoop.conf.Configuration(spark._jsc.hadoopConfiguration())
    ours = place.getFileSystem(without_processes(classes, conf))
    assert ours.getClass().getSimpleName() == "BareLocalFileSystem"
    # Which does not list a directory behind a link, as a user's table may be.
    others = place.getFileSystem(spark._jsc.hadoopConfiguration())
    assert not others.getClass().equals(ours.getClass())
    conf.set("fs.file.impl", "org.apache.hadoop.fs.RawLocalFileSystem")
    assert without_processes(classes, conf).get("fs.file.impl").endswith("RawLocalFileSystem")


def test_files_have_the_statistics_that_iceberg_itself_reads(spark, tmp_path):
    catalog, iceberg = Catalog(spark, str(tmp_path), "bank"), java_classes(spark).org.apache.iceberg
    columns = {
        "id": pa.array([3, 1, None], pa.int64()),
        "v": pa.array(["a" * 40, None, "\U0001f600" * 20]),
        "d": pa.array([Decimal("-1.50"), Decimal("70.25"), None], pa.decimal128(20, 2)),
        "x": pa.array([math.nan, -0.5, None]),
        "at": pa.array([datetime(2026, 1, 2, tzinfo=UTC), None, None], pa.timestamp("us", "UTC")),
        "b": pa.array([b"\xff" * 20, b"", None]),
    }
    table = catalog.create("bank.t", pa.table(columns).schema, ())
    [file] = write(catalog.layout(table, ()), pa.table(columns))
    place = table.io().newInputFile(file.path)
    metrics = iceberg.parquet.ParquetUtil.fileMetrics(place, iceberg.MetricsConfig.forTable(table))
    by_iceberg = iceberg.DataFiles.builder(table.spec()).withInputFile(place).withFormat("parquet")
    described = [
        str(iceberg.ContentFileParser.toJson(each, table.spec()))
        for each in (catalog.java_files.data(table, file), by_iceberg.withMetrics(metrics).build())
    ]
    assert described[0] == described[1]
    assert '"record-count":3' in described[0]
    assert '"lower-bounds"' in described[0]


def test_a_new_table_is_there_with_its_first_cut_and_made_once(spark, tmp_path):
    catalog, schema = Catalog(spark, str(tmp_path), "bank"), pa.schema([("id", pa.int64())])
    begun, late = (catalog.begin_new("bank.t", schema, ("id",)) for _ in range(2))
    assert catalog.load("bank.t") is None
    catalog.fenced(begun, begun.newAppend(), 10)
    assert catalog.position(catalog.load("bank.t"), "bank.t") == 10
    assert len(list((tmp_path / "bank" / "t" / "metadata").glob("v*.metadata.json"))) == 1
    with pytest.raises(SourceError, match="ErrTargetBusy") as caught:
        catalog.fenced(late, late.newAppend(), 10)
    assert caught.value.retryable
    assert catalog.begin_new("bank.t", schema, ("id",)) is None


def without_checksum(path, text):
    """Write a file anew, as another program would."""
    path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
    path.write_text(text)


def test_metadata_that_is_not_whole_is_damage_until_it_is_removed(spark, tmp_path):
    catalog, metadata = Catalog(spark, str(tmp_path), "bank"), tmp_path / "bank" / "t" / "metadata"
    catalog.create("bank.t", pa.schema([("id", pa.int64())]), ("id",))
    unfinished, hint = metadata / "v2.metadata.json", metadata / "version-hint.text"
    for text in ("", '{"format-version":3,"table'):
        without_checksum(unfinished, text)
        with pytest.raises(SourceError, match=r"ErrLakeDamaged.*v2\.metadata\.json") as caught:
            catalog.load("bank.t")
        assert not caught.value.retryable
    unfinished.unlink()
    without_checksum(hint, "500")
    with pytest.raises(SourceError, match=r"ErrLakeDamaged.*version-hint\.text"):
        catalog.load("bank.t")
    hint.unlink()
    assert catalog.load("bank.t") is not None


def test_a_clock_that_is_far_behind_is_told_and_a_later_try_commits(spark, tmp_path):
    catalog, metadata = Catalog(spark, str(tmp_path), "bank"), tmp_path / "bank" / "t" / "metadata"

    def commit(cut):
        transaction = catalog.begin(catalog.load("bank.t"))
        catalog.fenced(transaction, transaction.newAppend(), cut)

    def move_times(days):
        described = json.loads((metadata / "v2.metadata.json").read_text())
        moved_ms = days * 86_400_000
        described["last-updated-ms"] += moved_ms
        for each in (*described["snapshots"], *described["snapshot-log"]):
            each["timestamp-ms"] += moved_ms
        without_checksum(metadata / "v2.metadata.json", json.dumps(described))

    catalog.create("bank.t", pa.schema([("id", pa.int64())]), ("id",))
    commit(10)
    move_times(1)
    with pytest.raises(SourceError, match=r"ErrTargetRefused.*clock") as caught:
        commit(20)
    assert caught.value.retryable
    move_times(-1)
    commit(20)
    assert catalog.position(catalog.load("bank.t"), "bank.t") == 20


def test_a_changelog_holds_every_change_once(spark, changefeed, captures, upstream, tmp_path):
    keep(spark, changefeed, captures, tmp_path, CUTS, mode="append")
    rows = read_by_iceberg(spark, tmp_path, "bank.accounts")
    assert sorted((row["_commit_ts"], row["_seq"], row["_op"], row["id"]) for row in rows) == [
        (row["_commit_ts"], row["_seq"], row["_op"], row["id"]) for row in upstream.accounts.rows
    ]


def test_a_table_of_somebody_else_is_not_touched_and_a_lost_ts_is_told(
    spark, changefeed, captures, tmp_path
):
    keep(spark, changefeed, captures, tmp_path, CUTS[:1])
    other = IcebergTarget(spark, str(tmp_path), "other")
    with pytest.raises(SourceError, match="ErrTargetForeign"):
        other.position(TableMeta("bank.accounts", ("id",), captures.upstream.accounts.schema))
    with pytest.raises(SourceError, match="ErrCutNotFound"):
        version_at(f"iceberg://{tmp_path}", "bank.accounts", 5)


def test_cuts_that_only_tasks_hold_mask_rows_too(
    spark, changefeed, captures, upstream, tmp_path, monkeypatch, vectors
):
    for most in ("DRIVER_READ_MAX_BYTES", "ARROW_READ_MAX_BYTES"):
        monkeypatch.setattr(changes, most, -1)
    target = keep(spark, changefeed, captures, tmp_path, CUTS, **vectors)
    assert balances(read_by_iceberg(spark, tmp_path, "bank.accounts")) == held(upstream, CUTS[-1])
    summary = target._catalog.load("bank.accounts").currentSnapshot().summary()
    kind = "position" if vectors["deletion_vectors"] else "equality"
    assert int(summary.get(f"total-{kind}-deletes")) > 0
