"""`--write spark`: the rows of all tables of a cut are read and written by the tasks of one Spark
job, and the lake is the same as one that the driver writes.
"""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.flight import Changefeed
from pyspark_tidemark.lake import cut_tasks
from pyspark_tidemark.lake.arguments import Arguments
from pyspark_tidemark.lake.cut import Cut, CutApplier, TableWriters
from pyspark_tidemark.lake.failure import named
from pyspark_tidemark.lake.opening import open_target, opened_manifest
from pyspark_tidemark.lake.parquet.target import ChangelogTarget
from pyspark_tidemark.lake.reading import as_of_cut
from pyspark_tidemark.options import parse

pytestmark = pytest.mark.timeout(400)
CUTS = (100, 200, 300, 600, 1000)
LAKES = (
    "delta?mode=upsert",
    "delta?mode=scd2",
    "delta?mode=append",
    "iceberg?mode=upsert",
    "iceberg?mode=upsert&deletion-vectors=off",
    "iceberg?mode=soft-delete",
    "iceberg?mode=append",
    "iceberg?mode=upsert&partition-by=bank.accounts=truncate(50,balance),bucket(2,id);*.*=amount",
    "iceberg?mode=append&partition-by=*.*=_op",
    "delta?mode=upsert&partition-by=bank.accounts=balance;*.*=amount,k2",
    "delta?mode=append&partition-by=*.*=_op",
    "parquet?mode=append",
)


class Job:
    """A lake job's steps in this process."""

    def __init__(self, spark, captures, directory: Path, lake: str, write: str) -> None:
        lake_format, _, query = lake.partition("?")
        self.uri = f"{lake_format}://{directory}"
        flags = ["--endpoint", captures.uri, "--changefeed", "bank", "--compact-every", "0"]
        target = f"{self.uri}?{query}&write={write}"
        self._arguments = Arguments.parse([*flags, "--target", target])
        self.tasks_from_bytes = self._arguments.tasks_from_bytes
        options = self._arguments.source_options | {"cuts": "true"}
        self._changefeed = Changefeed(parse(options))
        self._spark = spark

    def apply(self, *ends: int):
        """Bring the lake over cuts; returns the manifest's records of all."""
        arguments = self._arguments
        with opened_manifest(arguments, lambda: self._spark) as manifest:
            target = open_target(arguments, self._spark, manifest)
            applier = CutApplier(
                self._changefeed,
                "bank",
                target,
                manifest,
                policy=arguments.policy,
                writers=TableWriters(
                    arguments.source_options, self._spark, 2, arguments.write, self.tasks_from_bytes
                ),
            )
            for number, end_ts in enumerate(ends):
                start_ts = 0 if manifest.last is None else manifest.last.end_ts
                applier.apply(Cut(number, start_ts, end_ts))
            target.close()
            return manifest.cuts()

    def rows(self, spark, ts: int | None = None):
        """All rows of all tables at a cut, in one order."""
        return {
            name: sorted(repr(sorted(row.asDict().items())) for row in frame.collect())
            for name, frame in as_of_cut(spark, self.uri, ts).items()
        }


def brought(cuts):
    """What each cut brought to each table, as the manifest has it."""
    return [
        (cut.end_ts, each.table, each.rows, each.checksum) for cut in cuts for each in cut.tables
    ]


def jobs_of(spark):
    """How many Spark jobs there were so far."""
    return spark.sparkContext._jsc.sc().dagScheduler().numTotalJobs()


@pytest.mark.parametrize("lake", LAKES)
def test_a_lake_that_tasks_write_is_the_one_that_the_driver_writes(
    spark, captures, tmp_path, monkeypatch, lake
):
    by_driver = Job(spark, captures, tmp_path / "driver", lake, "driver")
    told = brought(by_driver.apply(*CUTS))
    by_tasks = Job(spark, captures, tmp_path / "tasks", lake, "spark")
    by_tasks.apply(*CUTS[:1])

    def refused(*_):
        raise AssertionError("the driver reads rows")

    monkeypatch.setattr(Changefeed, "read", refused)
    jobs = jobs_of(spark)
    assert brought(by_tasks.apply(*CUTS[1:])) == told
    assert jobs_of(spark) == jobs + len(CUTS) - 1, "one Spark job a cut"
    for ts in (CUTS[1], CUTS[-1]):
        assert by_tasks.rows(spark, ts) == by_driver.rows(spark, ts)


def test_auto_lets_tasks_write_the_cuts_that_are_large(spark, captures, tmp_path):
    job = Job(spark, captures, tmp_path, "delta?tasks-from-mib=1", "auto")
    assert job.tasks_from_bytes == 1 << 20
    job.apply(*CUTS[:1])
    before = jobs_of(spark)
    job.apply(*CUTS[1:2])
    assert jobs_of(spark) == before, "the driver writes"
    job.tasks_from_bytes = 1
    job.apply(*CUTS[2:3])
    assert jobs_of(spark) == before + 1
    by_driver = Job(spark, captures, tmp_path / "driver", "delta?mode=upsert", "driver")
    by_driver.apply(*CUTS[:3])
    assert job.rows(spark) == by_driver.rows(spark)


@pytest.mark.parametrize(
    "lake", ["delta?mode=upsert", "iceberg?mode=upsert", "parquet?mode=append"]
)
def test_a_job_that_dies_when_its_tasks_have_written_begins_the_cut_anew(
    spark, captures, tmp_path, monkeypatch, lake
):
    by_driver = Job(spark, captures, tmp_path / "driver", lake, "driver")
    told = brought(by_driver.apply(*CUTS[:2]))
    by_tasks = Job(spark, captures, tmp_path / "tasks", lake, "spark")

    def dying(session, writers):
        cut_tasks.write_by_tasks(session, writers)
        raise KeyboardInterrupt

    for end_ts in CUTS[:2]:
        with monkeypatch.context() as patch:
            patch.setattr("pyspark_tidemark.lake.cut.write_by_tasks", dying)
            with pytest.raises(KeyboardInterrupt):
                by_tasks.apply(end_ts)
        cuts = by_tasks.apply(end_ts)
    assert brought(cuts) == told
    assert by_tasks.rows(spark) == by_driver.rows(spark)


def test_an_error_of_a_task_keeps_its_code_and_names_the_table(spark, captures, upstream, tmp_path):
    upstream.accounts.rows[-1]["id"] = None
    job = Job(spark, captures, tmp_path, "delta?mode=upsert", "spark")
    with pytest.raises(Exception, match="ErrKeyValueUnsupported") as refused:
        job.apply(*CUTS)
    error = named(refused.value)
    assert (error.code, error.retryable) == ("ErrKeyValueUnsupported", False)
    assert error.message.startswith("bank.accounts: a row's key column id is null")


def test_slices_of_a_large_changelog_are_files_of_several_tasks(
    spark, captures, upstream, tmp_path, monkeypatch
):
    monkeypatch.setattr(cut_tasks, "SHARE_BYTES", 1)
    captures.slice_rows = 20
    job = Job(spark, captures, tmp_path, "parquet?mode=append", "spark")
    [cut] = job.apply(upstream.end_ts)
    assert len(list(tmp_path.glob("bank/accounts/cut=*/part-*.parquet"))) > 1
    assert {each.table: each.rows for each in cut.tables} == {
        name: len(table.rows) for name, table in upstream.tables.items()
    }
    assert {name: len(rows) for name, rows in job.rows(spark).items()} == {
        name: len(table.rows) for name, table in upstream.tables.items()
    }


def test_files_of_tasks_that_are_no_part_of_the_outcome_are_in_no_cut(
    spark, captures, upstream, tmp_path, monkeypatch
):
    """As of a task that was tried again, or of a job that died."""
    lake = Job(spark, captures, tmp_path, "parquet?mode=append", "spark")
    begun = ChangelogTarget.task_writer

    def with_litter(target, changes, *, is_new):
        writer = begun(target, changes, is_new=is_new)
        (Path(writer.directory) / "other.parquet").write_bytes(b"half of a file")
        return writer

    monkeypatch.setattr(ChangelogTarget, "task_writer", with_litter)
    lake.apply(*CUTS)
    places = [path for path in tmp_path.rglob("*") if path.name.startswith("_written")]
    assert places == []
    accounts = upstream.accounts.rows
    assert len(lake.rows(spark)["bank.accounts"]) == len(accounts)
    for path in tmp_path.rglob("cut=*/*.parquet"):
        assert pq.read_metadata(path).num_rows >= 0, "no file is half of one"


@pytest.mark.parametrize("lake", ["delta?mode=append", "parquet?mode=append"])
def test_a_file_that_does_not_arrive_stops_the_job_by_name(
    spark, captures, tmp_path, monkeypatch, lake
):
    """As where the executors have a directory of the same name, and not the driver's."""
    job = Job(spark, captures, tmp_path, lake, "spark")
    job.apply(*CUTS[:1])
    written = cut_tasks.write_by_tasks

    def lost(session, writers):
        before = set(tmp_path.rglob("*.parquet"))
        outcome = written(session, writers)
        for path in set(tmp_path.rglob("*.parquet")) - before:
            path.unlink()
        return outcome

    monkeypatch.setattr("pyspark_tidemark.lake.cut.write_by_tasks", lost)
    with pytest.raises(SourceError, match=r"ErrTargetUnusable.*mount the lake"):
        job.apply(*CUTS[1:2])


def test_an_upsert_that_another_version_came_before_is_made_anew(
    spark, captures, upstream, tmp_path, monkeypatch
):
    job = Job(spark, captures, tmp_path, "delta?mode=upsert", "spark")
    job.apply(*CUTS[:2])
    written = cut_tasks.write_by_tasks

    def overtaken(session, writers):
        outcome = written(session, writers)
        session.sql(f"OPTIMIZE delta.`{tmp_path}/bank/accounts`").collect()
        return outcome

    monkeypatch.setattr("pyspark_tidemark.lake.cut.write_by_tasks", overtaken)
    job.apply(*CUTS[2:3])
    history = spark.sql(f"DESCRIBE HISTORY delta.`{tmp_path}/bank/accounts`").collect()
    operations = [row.operation for row in sorted(history, key=lambda row: row.version)]
    assert operations == ["CUT", "CUT", "OPTIMIZE", "CUT"]
    rows = as_of_cut(spark, job.uri)["bank.accounts"].collect()
    assert {(row.id,): row.asDict() for row in rows} == upstream.accounts.state(CUTS[2])
