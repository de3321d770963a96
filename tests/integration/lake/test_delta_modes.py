"""Delta's other modes, its maintenance, and the view of all tables at one cut."""

import os
import re

import pyarrow as pa
import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import TableMeta
from pyspark_tidemark.lake import changes, compaction
from pyspark_tidemark.lake.checksum import checksum
from pyspark_tidemark.lake.cut import Cut, CutApplier, TableWriters
from pyspark_tidemark.lake.delta import maintenance, modes, tables
from pyspark_tidemark.lake.delta.target import DeltaTarget
from pyspark_tidemark.lake.maintenance import KeptCuts
from pyspark_tidemark.lake.manifest import FileManifest
from pyspark_tidemark.lake.reading import as_of_cut
from pyspark_tidemark.lake.schema import Policy

pytestmark = pytest.mark.timeout(400)
CUTS = (300, 600, 1000)


def keep(spark, changefeed, captures, root, mode, ends=CUTS, *, compact_every=0, keep_hours=1.0):
    target = DeltaTarget(spark, str(root), "bank", mode=mode, compact_every=compact_every)
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
        found = []
        for number, end_ts in enumerate(ends):
            cuts.apply(Cut(number, 0 if manifest.last is None else manifest.last.end_ts, end_ts))
            found.append(target.maintain(KeptCuts(manifest, keep_hours)))
        return target, [health for health in found if health is not None], manifest.cuts()


def operations(spark, root):
    """What made the versions of the accounts, in order."""
    told = spark.sql(f"DESCRIBE HISTORY delta.`{root}/bank/accounts`").collect()
    return [row.operation for row in sorted(told, key=lambda row: row.version)]


@pytest.mark.parametrize("way", ["CUT", "MERGE"])
def test_every_version_of_a_row_has_the_time_in_which_it_was_valid(
    spark, changefeed, captures, upstream, tmp_path, monkeypatch, way
):
    if way == "MERGE":
        monkeypatch.setattr(modes, "MOST_SEARCHED_BYTES", -1)
    target, _, _ = keep(spark, changefeed, captures, tmp_path, "scd2", CUTS[:2])
    target._maintenance.compact("bank.accounts")
    keep(spark, changefeed, captures, tmp_path, "scd2", CUTS[2:])
    assert operations(spark, tmp_path) == ["CUT", way, "COMPACT", way]
    versions = [
        row.asDict() for row in as_of_cut(spark, f"delta://{tmp_path}")["bank.accounts"].collect()
    ]
    for ts in (*CUTS, 25, 405, 995):
        valid = [
            row for row in versions if row["valid_from_ts"] <= ts < (row["valid_to_ts"] or 1 << 62)
        ]
        held = upstream.accounts.state(ts)
        assert {(row["id"], row["balance"], row["valid_from_ts"]) for row in valid} == {
            (row["id"], row["balance"], row["_commit_ts"]) for row in held.values()
        }
        assert len(valid) == len(held)
    assert all(row["is_current"] == (row["valid_to_ts"] is None) for row in versions)


@pytest.mark.parametrize("arrow_bytes", [1 << 20, -1], ids=["by the driver", "by tasks"])
def test_a_changelog_holds_every_change_once_and_its_checksum_says_so(
    spark, changefeed, captures, upstream, tmp_path, monkeypatch, arrow_bytes
):
    # Too much for Spark in one message, which a table on a disk of this machine does not need.
    monkeypatch.setattr(changes, "DRIVER_READ_MAX_BYTES", -1)
    monkeypatch.setattr(changes, "ARROW_READ_MAX_BYTES", arrow_bytes)
    ends = CUTS[1:] if arrow_bytes > 0 else CUTS[2:]
    _, _, cuts = keep(spark, changefeed, captures, tmp_path, "append", ends)
    assert operations(spark, tmp_path) == (["CUT", "CUT"] if arrow_bytes > 0 else ["WRITE"])
    rows = as_of_cut(spark, f"delta://{tmp_path}")["bank.accounts"].collect()
    assert sorted((row._commit_ts, row._seq, row._op, row.id) for row in rows) == [
        (row["_commit_ts"], row["_seq"], row["_op"], row["id"]) for row in upstream.accounts.rows
    ]
    told = [item for cut in cuts for item in cut.tables if item.table == "bank.accounts"]
    assert sum(item.rows for item in told) == len(upstream.accounts.rows)
    total = sum(int(item.checksum or "", 16) for item in told) % (1 << 64)
    table = pa.Table.from_pylist(upstream.accounts.rows, schema=upstream.accounts.schema)
    assert total == checksum([table])[1], "however it was cut and read"


def test_a_job_that_wakes_up_amid_other_cuts_than_its_own_commits_nothing(
    spark, changefeed, captures, upstream, tmp_path
):
    """Its cut ended above the other job's, so what both hold was there twice."""
    late, _, _ = keep(spark, changefeed, captures, tmp_path, "append", CUTS[:1])
    keep(spark, changefeed, captures, tmp_path, "append", (450,))
    cut = changes_of(changefeed, captures, "bank.accounts", CUTS[0], CUTS[1])
    with pytest.raises(SourceError, match=r"ErrTargetBusy.*another job has applied") as caught:
        late.apply(cut)
    assert caught.value.retryable
    rows = spark.read.format("delta").load(f"{tmp_path}/bank/accounts").collect()
    assert len(rows) == len(upstream.accounts.between(0, 450))


def changes_of(changefeed, captures, name, start_ts, end_ts):
    """What a job applies of a table."""
    options = {"endpoint": captures.uri, "changefeed": "bank", "ack": "false"}
    meta = changefeed.describe(start_ts).tables[name]
    slices = tuple(changefeed.plan(start_ts, end_ts, [name]))
    return changes.Changes(meta, start_ts, end_ts, slices, changefeed, options)


def test_maintenance_compacts_and_leaves_what_a_kept_cut_needs(
    spark, changefeed, captures, upstream, tmp_path, monkeypatch
):
    monkeypatch.setattr(maintenance, "VACUUM_EVERY_S", 1e-3)
    ends = (200, 300, 600, 1000)
    target, found, _ = keep(spark, changefeed, captures, tmp_path, "append", ends, compact_every=3)
    assert found
    assert found[-1].files >= found[-1].small_files > 0
    table = TableMeta("bank.accounts", ("id",), upstream.accounts.schema)
    assert target.version(table) >= len(ends), "compaction is a version of its own"
    for ts in ends:
        rows = as_of_cut(spark, f"delta://{tmp_path}", ts)["bank.accounts"].collect()
        assert len(rows) == len(upstream.accounts.between(0, ts))


def make_older(spark, root, hours):
    """All that is on disk, and what the log says of when, is so many hours older."""
    moved_ms = round(hours * 3_600_000)
    for path in (root / "bank" / "accounts").rglob("*.crc"):
        path.unlink()
    for path in (root / "bank" / "accounts").rglob("*.*"):
        at = path.stat().st_mtime - moved_ms / 1000
        if path.suffix == ".json":
            text = path.read_text()
            path.write_text(
                re.sub(r"(?<=Timestamp\":)\d+", lambda found: str(int(found[0]) - moved_ms), text)
            )
        os.utime(path, (at, at))
    spark._jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()


def test_files_that_the_newest_cut_shows_outlive_a_compaction_and_an_idle_day(
    spark, changefeed, captures, tmp_path
):
    _, found, _ = keep(spark, changefeed, captures, tmp_path, "upsert", CUTS, compact_every=3)
    assert len(found) == 1, "it was compacted behind its last cut"
    uri, files = f"delta://{tmp_path}", tmp_path / "bank" / "accounts"
    rows = sorted(as_of_cut(spark, uri)["bank.accounts"].collect())
    make_older(spark, tmp_path, 24)
    before = len(list(files.glob("*.parquet")))
    with FileManifest.opened(str(tmp_path), "bank") as manifest:
        DeltaTarget(spark, str(tmp_path), "bank", compact_every=3)._maintenance.vacuum(
            "bank.accounts", KeptCuts(manifest, 1.0)
        )
        assert len(list(files.glob("*.parquet"))) == before
        assert sorted(as_of_cut(spark, uri)["bank.accounts"].collect()) == rows
    keep(spark, changefeed, captures, tmp_path, "upsert", (2000,))


@pytest.mark.parametrize(
    "ways", [["SET TBLPROPERTIES", "COMPACT"], ["OPTIMIZE"]], ids=["joined again", "by Spark"]
)
def test_cuts_go_on_after_a_compaction_and_those_before_it_are_still_read(
    spark, changefeed, captures, upstream, tmp_path, monkeypatch, ways
):
    """Somebody else commits while files are joined; or they are too large for that."""
    rewrite, seen = tables.DeltaTables.rewrite, []

    def raced(found, name, known, actions):
        seen.append(known.version)
        if len(seen) == 1:
            spark.sql(
                f"ALTER TABLE delta.`{found.path(name)}` SET TBLPROPERTIES "
                "('delta.checkpointInterval' = '60')"
            )
        return rewrite(found, name, known, actions)

    monkeypatch.setattr(tables.DeltaTables, "rewrite", raced)
    if ways == ["OPTIMIZE"]:
        monkeypatch.setattr(compaction, "MOST_BYTES", -1)
    target, _, _ = keep(spark, changefeed, captures, tmp_path, "upsert", CUTS[:2])
    target._maintenance.compact("bank.accounts")
    assert seen == ([1, 2] if "COMPACT" in ways else [])
    keep(spark, changefeed, captures, tmp_path, "upsert", CUTS[2:])
    assert operations(spark, tmp_path) == ["CUT", "CUT", *ways, "CUT"]
    for ts in CUTS[1:]:
        rows = as_of_cut(spark, f"delta://{tmp_path}", ts)["bank.accounts"].collect()
        assert len(rows) == len(upstream.accounts.state(ts))
        assert {(row.id,): row.asDict() for row in rows} == upstream.accounts.state(ts)
