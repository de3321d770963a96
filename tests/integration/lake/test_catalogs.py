"""Iceberg tables in a REST catalog: read back through the catalog by Iceberg's own reader,
while answers get lost, the catalog is down, and other drivers come.
"""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import TableMeta
from pyspark_tidemark.jvm import java_classes
from pyspark_tidemark.lake.cut import Cut, CutApplier, TableWriters
from pyspark_tidemark.lake.cut_record import CutRecord, TableCut, versions_at
from pyspark_tidemark.lake.iceberg import manifest as catalog_manifest
from pyspark_tidemark.lake.iceberg.catalog import Catalog
from pyspark_tidemark.lake.iceberg.java_catalog import MultiTableCommit, java_catalog
from pyspark_tidemark.lake.iceberg.manifest import CatalogManifest, cuts_in_catalog
from pyspark_tidemark.lake.iceberg.target import IcebergTarget
from pyspark_tidemark.lake.maintenance import KeptCuts
from pyspark_tidemark.lake.partitioning import PartitionRules
from pyspark_tidemark.lake.reading import as_of_cut, version_at
from pyspark_tidemark.lake.schema import Policy
from pyspark_tidemark.sink_uri import SinkUri

from server.verify.lake.file_lake import FileLake
from tests.integration.lake.test_iceberg import balances, held
from tests.integration.lake.test_verify import KEY, NAME, asked, state

pytestmark = pytest.mark.timeout(300)
CUTS = tuple(range(100, 1001, 100))


PARTITIONS = PartitionRules.parse(
    "bank.accounts=truncate(50,balance),bucket(2,id); bank.kinds=amount"
)


def keep(spark, changefeed, captures, root, ends, *, mode="upsert", partitions=None):
    """One life of a job."""
    options = {"endpoint": captures.uri, "changefeed": "bank", "ack": "false"}
    with CatalogManifest.opened(spark, root, "bank", mode=mode) as manifest:
        target = IcebergTarget(
            spark, root, "bank", mode=mode, compact_every=0, partitions=partitions
        )
        target.multi_table_commit = manifest.multi_table_commit
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
            manifest.tidy(datetime.now(UTC) - timedelta(hours=1))
            target.maintain(KeptCuts(manifest, 1.0))
    target.close()
    return target


def test_tables_in_a_catalog_equal_the_replay_over_two_lives(
    spark, changefeed, captures, upstream, rest, root
):
    keep(spark, changefeed, captures, root, CUTS[:1])
    # Partitioned from then on, beside the files of before.
    keep(spark, changefeed, captures, root, CUTS[1:3], partitions=PARTITIONS)
    shown = rest.rows("mysql.bank.accounts")
    assert balances(shown) == held(upstream, CUTS[2])

    uri = f"iceberg+{root}"
    assert version_at(uri, "bank.accounts", changefeed="bank") == version_at(uri, "bank.accounts")


def test_tables_of_format_version_2_have_equality_deletes(
    spark, changefeed, captures, upstream, rest, root, catalog_name, tmp_path
):
    """Version 2 has no deletion vectors; a catalog's settings may ask for it."""
    setting = f"spark.sql.catalog.{catalog_name}.table-override.format-version"
    spark.conf.set(setting, "2")
    target = keep(spark, changefeed, captures, root, CUTS[:3])
    spark.conf.unset(setting)
    table = target._catalog.load("bank.accounts")
    assert not target._catalog.knows_vectors(table)
    assert int(table.currentSnapshot().summary().get("total-equality-deletes")) > 0
    assert balances(rest.rows("mysql.bank.accounts")) == held(upstream, CUTS[2])

    uri, question = SinkUri.parse(f"iceberg+{root}"), asked(upstream, CUTS[2])
    rows = pa.Table.from_batches([state(upstream, CUTS[2])])
    with CatalogManifest.opened(spark, root, "bank", idle_s=0.01) as manifest:
        side = FileLake(uri, "bank", tmp_path, manifest=manifest, session=spark)
        side.repair(question, rows.select(list(KEY)), rows)
    target = keep(spark, changefeed, captures, root, CUTS[3:4])
    target._maintenance.rewrite("bank.accounts")
    summary = target._catalog.load("bank.accounts").currentSnapshot().summary()
    assert int(summary.get("total-equality-deletes")) == 0
    assert balances(rest.rows("mysql.bank.accounts")) == held(upstream, CUTS[3])


def test_a_table_is_repaired_and_read_at_its_cut_and_its_job_goes_on(
    spark, changefeed, captures, upstream, root, tmp_path
):
    keep(spark, changefeed, captures, root, CUTS[:1], partitions=PARTITIONS)
    uri, question = SinkUri.parse(f"iceberg+{root}"), asked(upstream, CUTS[0])
    some = pa.Table.from_batches([state(upstream, CUTS[0]).slice(0, 2)])
    with CatalogManifest.opened(spark, root, "bank", idle_s=0.01) as manifest:
        side = FileLake(uri, "bank", tmp_path, manifest=manifest, session=spark)
        side.check_repair(question)
        repaired = side.repair(question, some.select(list(KEY)), some)
        assert version_at(str(uri), NAME) == repaired
    keep(spark, changefeed, captures, root, CUTS[1:2], partitions=PARTITIONS)
    rows = as_of_cut(spark, str(uri), 150)[NAME].collect()
    held_there = {key: row["amount"] for key, row in upstream.kinds.state(CUTS[0]).items()}
    assert {(row.k1, row.k2): row.amount for row in rows} == held_there
    assert len(rows) == len(held_there)


def test_a_commit_whose_answer_was_lost_is_made_once(
    spark, changefeed, captures, upstream, rest, root
):
    rest.lost_answers = 1000
    keep(spark, changefeed, captures, root, CUTS[:2], mode="append")
    assert rest.lost_answers < 1000
    rows = rest.rows("mysql.bank.accounts")
    assert sorted((row["_commit_ts"], row["_seq"], row["_op"], row["id"]) for row in rows) == [
        (row["_commit_ts"], row["_seq"], row["_op"], row["id"])
        for row in upstream.accounts.rows
        if row["_commit_ts"] <= CUTS[1]
    ]


def test_a_catalog_that_is_down_is_named_and_the_job_goes_on_when_it_is_back(
    spark, changefeed, captures, upstream, rest, root
):
    keep(spark, changefeed, captures, root, CUTS[:1])
    with CatalogManifest.opened(spark, root, "bank") as manifest:
        rest.down = True
        for step in (
            lambda: manifest.announce(CUTS[0], CUTS[1]),
            lambda: keep(spark, changefeed, captures, root, CUTS[1:2]),
        ):
            with pytest.raises(SourceError, match=r"ErrTargetUnavailable.*catalog lake") as caught:
                step()
            assert caught.value.retryable
    rest.down = False
    keep(spark, changefeed, captures, root, CUTS[1:2])
    assert balances(rest.rows("mysql.bank.accounts")) == held(upstream, CUTS[1])


def test_wrong_credentials_and_missing_settings_are_named(spark, rest, root, catalog_name):
    rest.token = "right"
    spark.conf.set(f"spark.sql.catalog.{catalog_name}.token", "wr0ng")
    with pytest.raises(SourceError, match="ErrCredentials") as caught:
        cuts_in_catalog(spark, root, "bank")
    assert not caught.value.retryable
    assert "wr0ng" not in str(caught.value)
    spark.conf.set(f"spark.sql.catalog.{catalog_name}.token", "right")
    assert cuts_in_catalog(spark, root, "bank") == []
    with pytest.raises(SourceError, match=r"ErrTargetUnusable.*spark\.sql\.catalog\.other\.type"):
        cuts_in_catalog(spark, "catalog://other", "bank")
    spark.conf.set(f"spark.sql.catalog.{catalog_name}.type", "hadoop")
    spark.conf.set(f"spark.sql.catalog.{catalog_name}.warehouse", "s3a://bucket/lake")
    with pytest.raises(SourceError, match=r"ErrTargetUnusable.*renaming"):
        cuts_in_catalog(spark, root, "bank")
    spark.conf.unset(f"spark.sql.catalog.{catalog_name}.warehouse")


def test_the_newer_driver_goes_on_with_the_cut_that_was_begun(spark, rest, root):
    with CatalogManifest.opened(spark, root, "bank") as asleep:
        assert asleep.announce(0, 500) == 500
        asleep.note_moved(7)
        with CatalogManifest.opened(spark, root, "bank") as newer:
            assert newer.announce(0, 450) == 500, "the cut that the other one may still write"
            assert newer.moved_at(7)
            for step in (lambda: asleep.announce(0, 500), lambda: asleep.note_moved(9)):
                with pytest.raises(SourceError, match=r"ErrTargetBusy.*taken this lake over"):
                    step()
            with pytest.raises(SourceError, match="ErrCutGap"):
                newer.announce(1, 600)
            assert newer.announce(0, 450, moved=True) == 450


def test_files_of_cuts_become_one_and_old_ones_go(spark, rest, root, monkeypatch):
    monkeypatch.setattr(catalog_manifest, "_ROLL_UP_CUTS", 2)
    now = datetime.now(UTC)
    with CatalogManifest.opened(spark, root, "bank") as manifest:
        for end_ts in CUTS[:5]:
            tables = (TableCut(f"bank.t{end_ts}", 1, end_ts),)
            start_ts = manifest.announce(end_ts - 100, end_ts) - 100
            manifest.commit(CutRecord("bank", start_ts, end_ts, 0, now.isoformat(), tables))
            manifest.tidy(now - timedelta(hours=1))
        manifest.replace(dataclasses.replace(manifest.last, batch=9))
        assert [(cut.end_ts, cut.batch) for cut in manifest.cuts()] == [
            *((end_ts, 0) for end_ts in CUTS[:4]),
            (500, 9),
        ]
        table = Catalog(spark, root, "bank", kind="tidemark-cuts").load("tidemark_cuts.bank")
        assert len(list(table.snapshots())) == 4, "of the last roll-up, and since"
        manifest._since_tidied = 2
        manifest.tidy(now + timedelta(hours=1))
        assert [cut.end_ts for cut in manifest.cuts()] == list(CUTS[2:5])
    kept = cuts_in_catalog(spark, root, "")
    assert versions_at(kept, 500) == {f"bank.t{end_ts}": end_ts for end_ts in CUTS[:5]}


def test_the_table_of_cuts_does_not_grow_over_short_lives(spark, rest, root, monkeypatch):
    """Each life counted anew, so one that ended before 64 cuts rolled nothing up and expired
    nothing, and every commit writes the list of all snapshots.
    """
    monkeypatch.setattr(catalog_manifest, "_ROLL_UP_CUTS", 2)
    now, snapshots = datetime.now(UTC), []
    for end_ts in CUTS[:4]:
        for commits in (False, True):
            with CatalogManifest.opened(spark, root, "bank") as manifest:
                start_ts = manifest.announce(end_ts - 100, end_ts) - 100
                if commits:
                    manifest.commit(CutRecord("bank", start_ts, end_ts, 0, now.isoformat(), ()))
                manifest.tidy(now - timedelta(hours=1))
        table = Catalog(spark, root, "bank", kind="tidemark-cuts").load("tidemark_cuts.bank")
        snapshots.append(len(list(table.snapshots())))
    assert max(snapshots) <= 8, "four cuts alone are twenty snapshots"
    assert [cut.end_ts for cut in cuts_in_catalog(spark, root, "bank")] == list(CUTS[:4])


def test_a_catalog_may_miss_the_namespace_of_a_table_that_is_not_there_yet(
    spark, changefeed, captures, upstream, rest, root
):
    """The REST protocol has a name for that, too; the job took it for a refusal, for good."""
    rest.misses_namespaces = True
    assert cuts_in_catalog(spark, root, "bank") == []
    keep(spark, changefeed, captures, root, CUTS[:2])
    assert balances(rest.rows("mysql.bank.accounts")) == held(upstream, CUTS[1])


def test_a_tag_on_the_table_of_cuts_ends_no_job(spark, rest, root, monkeypatch):
    monkeypatch.setattr(catalog_manifest, "_ROLL_UP_CUTS", 2)
    now = datetime.now(UTC)
    with CatalogManifest.opened(spark, root, "bank") as manifest:
        for end_ts in CUTS[:4]:
            start_ts = manifest.announce(end_ts - 100, end_ts) - 100
            manifest.commit(CutRecord("bank", start_ts, end_ts, 0, now.isoformat(), ()))
            if end_ts == CUTS[0]:
                table = Catalog(spark, root, "bank", kind="tidemark-cuts").load(
                    "tidemark_cuts.bank"
                )
                tagged = table.currentSnapshot().snapshotId()
                table.manageSnapshots().createTag("audit", tagged).commit()
            manifest.tidy(now - timedelta(hours=1))
        assert [cut.end_ts for cut in manifest.cuts()] == list(CUTS[:4])
    table.refresh()
    left = [each.snapshotId() for each in table.snapshots()]
    assert left == [tagged, table.currentSnapshot().snapshotId()]


def test_what_is_not_ours_is_not_touched(spark, changefeed, captures, upstream, rest, root):
    target = keep(spark, changefeed, captures, root, CUTS[:1])
    table = TableMeta("bank.accounts", ("id",), upstream.accounts.schema)
    other = IcebergTarget(spark, root, "other")
    for step in (other.position, other.drop):
        with pytest.raises(SourceError, match="ErrTargetForeign"):
            step(table)
    rest.folds_case = True
    with pytest.raises(SourceError, match=r"ErrNameUnsupported.*bank\.accounts and bank\.Accounts"):
        target.position(TableMeta("bank.Accounts", ("id",), upstream.accounts.schema))
    target.drop(table)
    assert target.position(table) is None


@pytest.fixture
def seen(rest, monkeypatch):
    """The sets of cuts that an engine could have seen in the tables, after each request."""
    sets, answer = [], rest.answer

    def watched(*request):
        text = answer(*request)
        sets.append(frozenset(rest.cuts()))
        return text

    monkeypatch.setattr(rest, "answer", watched)
    return sets


@pytest.mark.parametrize("commits_together", [True, False])
def test_an_engine_sees_whole_cuts_where_the_catalog_commits_tables_together(
    spark, changefeed, captures, upstream, rest, root, seen, commits_together
):
    rest.commits_together = commits_together
    target = keep(spark, changefeed, captures, root, CUTS[:3])
    assert any(len(cuts) > 1 for cuts in seen) is not commits_together
    assert (target.multi_table_commit is not None) is commits_together
    with CatalogManifest.opened(spark, root, "bank") as manifest:
        assert manifest.commits == ("cut" if commits_together else "table")
    assert balances(rest.rows("mysql.bank.accounts")) == held(upstream, CUTS[2])
    # a catalog that learns it, or forgets it, goes on with the same tables
    rest.commits_together = not commits_together
    keep(spark, changefeed, captures, root, CUTS[3:5])
    assert balances(rest.rows("mysql.bank.accounts")) == held(upstream, CUTS[4])


def test_nothing_of_a_cut_is_visible_when_another_driver_takes_the_lake_before_its_commit(
    spark, changefeed, captures, upstream, rest, root, monkeypatch
):
    keep(spark, changefeed, captures, root, CUTS[:1])
    commit = CatalogManifest.commit

    def overtaken(self, record):
        monkeypatch.setattr(CatalogManifest, "commit", commit)
        with CatalogManifest.opened(spark, root, "bank") as newer:
            assert newer.last.end_ts == CUTS[0]
        commit(self, record)

    monkeypatch.setattr(CatalogManifest, "commit", overtaken)
    with pytest.raises(SourceError, match="ErrTargetBusy"):
        keep(spark, changefeed, captures, root, CUTS[1:2])
    assert rest.cuts() == {str(CUTS[0])}
    assert balances(rest.rows("mysql.bank.accounts")) == held(upstream, CUTS[0])
    keep(spark, changefeed, captures, root, CUTS[1:2])
    assert rest.cuts() == {str(CUTS[1])}
    assert balances(rest.rows("mysql.bank.accounts")) == held(upstream, CUTS[1])


def test_a_rewrite_waits_for_the_cut_that_is_being_committed(
    spark, changefeed, captures, upstream, rest, root, monkeypatch
):
    """Otherwise it would come between, and the whole cut fail."""
    keep(spark, changefeed, captures, root, CUTS[:2])
    target = IcebergTarget(spark, root, "bank")
    target.multi_table_commit = MultiTableCommit(java_classes(spark), java_catalog(spark, root))
    target._committing.acquire()
    target._is_waiting = True
    with ThreadPoolExecutor(1) as pool:
        rewriting = pool.submit(target._maintenance.rewrite, "bank.accounts")
        with pytest.raises(TimeoutError):
            rewriting.result(timeout=2)
        target.close()
        rewriting.result(timeout=60)
    assert balances(rest.rows("mysql.bank.accounts")) == held(upstream, CUTS[1])


def test_a_catalog_that_shows_the_newest_snapshots_only_is_followed_and_read_at_its_newest_cut(
    spark, changefeed, captures, upstream, rest, root
):
    rest.shows_newest_only = True
    keep(spark, changefeed, captures, root, CUTS[:2])
    keep(spark, changefeed, captures, root, CUTS[2:4])
    rows = as_of_cut(spark, f"iceberg+{root}", changefeed="bank")["bank.accounts"].collect()
    assert balances([row.asDict() for row in rows]) == held(upstream, CUTS[3])
    with pytest.raises(SourceError, match="ErrCutExpired"):
        as_of_cut(spark, f"iceberg+{root}", CUTS[0], changefeed="bank")


def test_somebody_elses_snapshot_hides_ours_and_the_job_goes_on_by_what_the_table_records(
    spark, changefeed, captures, upstream, rest, root
):
    keep(spark, changefeed, captures, root, CUTS[:2])
    table = rest.java.loadTable(Catalog(spark, root, "bank").identifier("bank.accounts"))
    table.newAppend().commit()
    rest.shows_newest_only = True
    keep(spark, changefeed, captures, root, CUTS[2:3])
    assert balances(rest.rows("mysql.bank.accounts")) == held(upstream, CUTS[2])
    # an earlier version recorded nothing
    table.refresh()
    table.newAppend().commit()
    table.updateProperties().remove("tidemark.cut").commit()
    with pytest.raises(SourceError, match=r"ErrTargetForeign.*somebody else has written"):
        keep(spark, changefeed, captures, root, CUTS[3:4])
    rest.shows_newest_only = False
    keep(spark, changefeed, captures, root, CUTS[3:4])
    assert balances(rest.rows("mysql.bank.accounts")) == held(upstream, CUTS[3])


def test_a_namespace_that_somebody_else_makes_at_the_same_time_is_taken(
    spark, changefeed, captures, upstream, rest, root
):
    rest.is_raced = True
    keep(spark, changefeed, captures, root, CUTS[:1])
    assert balances(rest.rows("mysql.bank.accounts")) == held(upstream, CUTS[0])
