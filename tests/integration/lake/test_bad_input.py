"""Full disks, other modes, a second driver: a named error that says what to do,
and nothing is written twice.
"""

import contextlib
import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.cut import Cut, CutApplier, TableWriters
from pyspark_tidemark.lake.manifest import DIRECTORY, FileManifest
from pyspark_tidemark.lake.parquet.target import ChangelogTarget
from pyspark_tidemark.lake.schema import Policy

from tests.integration.lake.deaths import Killed
from tests.integration.lake.evolving import EvolvingFeed
from tests.small_disk import small_disk


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", "256k") as disk:
        yield disk


def test_a_full_disk_is_told_and_the_cut_is_applied_once_when_there_is_room(
    changefeed, upstream, disk
):
    ballast = disk / "ballast"

    def keep(ends):
        target = ChangelogTarget(None, str(disk))
        with FileManifest.opened(str(disk), "bank") as manifest:
            cuts = CutApplier(
                changefeed,
                "bank",
                target,
                manifest,
                policy=Policy("append"),
                writers=TableWriters(source_options={}, spark=None, parallel=1),
            )
            for end_ts in ends:
                cuts.apply(Cut(0, 0 if manifest.last is None else manifest.last.end_ts, end_ts))

    keep((300,))
    free = os.statvfs(disk)
    ballast.write_bytes(bytes(free.f_bavail * free.f_bsize))
    with pytest.raises((SourceError, OSError), match=r"No space left|ErrTargetFull"):
        keep((600,))
    ballast.unlink()
    keep((600, 1000))
    files = sorted((disk / "bank" / "accounts").glob("cut=*/*.parquet"))
    rows = [row for file in files for row in pq.read_table(file, partitioning=None).to_pylist()]
    assert sorted((row["_commit_ts"], row["_seq"]) for row in rows) == [
        (row["_commit_ts"], row["_seq"]) for row in upstream.accounts.rows
    ]


class DyingTarget(ChangelogTarget):
    """Dies at its second table."""

    def create(self, changes):
        if changes.table.name == "bank.u":
            raise Killed
        return super().create(changes)


def test_a_job_does_not_end_a_cut_earlier_that_one_before_it_has_written_in_part(tmp_path):
    """This failed: of a cut that ended at 30, `bank.t` had the changes up to 50, `bank.u` not."""
    feed = EvolvingFeed()
    for name in ("bank.t", "bank.u"):
        feed.create(0, name, id=pa.int64())
        for ts in (5, 15, 35):
            feed.put(ts, name, {"id": ts})

    def keep(target, *ends):
        with FileManifest.opened(str(tmp_path), "bank") as manifest:
            writers = TableWriters(source_options={}, spark=None, parallel=1)
            cuts = CutApplier(
                feed, "bank", target, manifest, policy=Policy("append"), writers=writers
            )
            for end_ts in ends:
                cuts.apply(Cut(0, 0 if manifest.last is None else manifest.last.end_ts, end_ts))
            return manifest.last

    keep(ChangelogTarget(None, str(tmp_path)), 10)
    with contextlib.suppress(Killed):
        keep(DyingTarget(None, str(tmp_path)), 50)
    last = keep(ChangelogTarget(None, str(tmp_path)), 30)
    assert {(table.table, table.version) for table in last.tables} == {
        ("bank.t", last.end_ts),
        ("bank.u", last.end_ts),
    }
    assert last.end_ts == 50


def job(captures, target, *more):
    """The job's process, which ends before it starts a JVM."""
    arguments = ["--endpoint", captures.uri, "--changefeed", "bank", "--target", target, *more]
    command = [sys.executable, "-m", "pyspark_tidemark.job", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_a_lake_is_kept_in_one_mode(captures, tmp_path):
    (tmp_path / DIRECTORY).mkdir()
    cut = {
        "format": 1,
        "changefeed": "bank",
        "start_ts": 0,
        "end_ts": 10,
        "batch": 0,
        "mode": "upsert",
    }
    cut |= {"applied_at": "2026-01-01T00:00:00+00:00", "tables": []}
    (tmp_path / DIRECTORY / f"{10:020d}.json").write_text(json.dumps(cut))
    done = job(captures, f"delta://{tmp_path}", "--mode", "scd2")
    assert done.returncode == 1
    assert "[TM:ErrTargetMode] this lake is kept with --mode upsert, not scd2" in done.stderr


def test_a_second_driver_ends_with_an_error_that_names_the_first_ones_lake(captures, tmp_path):
    with FileManifest.opened(str(tmp_path), "bank"):
        done = job(captures, f"delta://{tmp_path}")
    assert done.returncode == 1
    assert f"[TM:ErrTargetBusy] another job writes to {tmp_path}; stop it first" in done.stderr


@pytest.mark.parametrize(("mode", "target"), [("scd2", "iceberg"), ("upsert", "parquet")])
def test_a_mode_that_the_target_cannot_do_is_refused_by_name(captures, tmp_path, mode, target):
    done = job(captures, f"{target}://{tmp_path}", "--mode", mode)
    assert done.returncode == 1
    assert f"[TM:ErrModeUnsupported] a {target} target cannot do --mode {mode}" in done.stderr
