"""A lake behind Hadoop's file systems, by its own for local files: files,
and drivers that die or sleep.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pyspark_tidemark import sink_uri
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.hadoop import HadoopFiles
from pyspark_tidemark.lake.iceberg.target import check_reachable
from pyspark_tidemark.lake.manifest import DIRECTORY, FileManifest, cuts_in
from pyspark_tidemark.lake.reading import as_of_cut, version_at
from pyspark_tidemark.sink_uri import SinkUri

from server.verify.lake import file_lake
from server.verify.lake.file_lake import FileLake
from tests.integration.spark.test_source import plain

pytestmark = pytest.mark.timeout(600)
EX_TEMPFAIL = 75


@pytest.fixture(autouse=True)
def local_files(monkeypatch):
    """See `remote_job.allow_local_files`."""
    for name in ("SYSTEMS", "RENAMING"):
        monkeypatch.setattr(sink_uri, name, (*getattr(sink_uri, name), "file"))


@pytest.fixture
def files(spark, tmp_path):
    return HadoopFiles(spark, f"file://{tmp_path}/lake/some")


def test_a_file_is_created_once_and_whole(files, tmp_path):
    assert files.names() == []
    assert files.create("b", "ä\n")
    assert not files.create("b", "other")
    assert files.create("a", "")
    assert (files.names(), files.read("b"), files.read("a")) == (["a", "b"], "ä\n", "")
    files.remove(["a", "never"])
    assert files.names() == ["b"]
    with pytest.raises(FileNotFoundError):
        files.read("a")
    assert sorted(path.name for path in (tmp_path / "lake" / "some").iterdir()) == [
        ".b.crc",
        "b",
    ], "nothing is left"


def test_a_writer_that_died_at_a_file_is_not_seen(files, tmp_path):
    files.create("a", "1")
    (tmp_path / "lake" / "some" / ".staged-0").write_text('{"format"')
    assert files.names() == ["a"]


def test_what_hadoop_throws_is_told(spark, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(SourceError, match="ErrTargetUnavailable") as caught:
        HadoopFiles(spark, f"file://{tmp_path}/file/below").create("a", "")
    assert caught.value.retryable
    with pytest.raises(SourceError, match=r"ErrTargetUnusable.*jars"):
        HadoopFiles(spark, "s3a://bucket/lake")
    monkeypatch.setattr(sink_uri, "RENAMING", ())
    with pytest.raises(SourceError, match=r"ErrTargetUnusable.*only if there is none"):
        HadoopFiles(spark, f"file://{tmp_path}")


def test_iceberg_says_what_it_needs_to_write_to_hdfs():
    with pytest.raises(SourceError, match=r"ErrTargetUnusable.*libhdfs"):
        check_reachable("hdfs://127.0.0.1:1/lake")


def test_a_lake_behind_hadoop_is_not_written_with_a_lock(spark, tmp_path):
    cuts = HadoopFiles(spark, f"file://{tmp_path}/{DIRECTORY}")
    FileManifest.taken(cuts, HadoopFiles(spark, f"{cuts.uri}/.claims"), "bank", str(tmp_path))
    with (
        pytest.raises(SourceError, match=r"ErrTargetUnusable.*FORMAT\+SCHEME"),
        FileManifest.opened(str(tmp_path), "bank"),
    ):
        pass


def started(captures, uri, scratch, number, step, batch, *, max_rows):
    arguments = [
        "--endpoint",
        captures.uri,
        "--changefeed",
        "bank",
        "--target",
        uri,
        "--trigger",
        "0 seconds",
    ]
    arguments += [
        "--max-rows-per-trigger",
        str(max_rows),
        "--until-ts",
        str(captures.upstream.end_ts),
    ]
    command = [
        sys.executable,
        "-m",
        "tests.integration.lake.remote_job",
        number,
        step,
        str(batch),
        *arguments,
    ]
    return subprocess.Popen(
        [*command, "--checkpoint-dir", str(scratch), "--compact-every", "3"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@contextlib.contextmanager
def life(captures, uri, scratch, number="SIGKILL", step="never", batch=0, *, max_rows=60):
    process = started(captures, uri, scratch, number, step, batch, max_rows=max_rows)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def lived(captures, uri, scratch, *stop, max_rows=60):
    """One life to its end; its lines."""
    status = EX_TEMPFAIL
    while status == EX_TEMPFAIL:  # as whoever supervises it starts it again
        with life(captures, uri, scratch, *stop, max_rows=max_rows) as process:
            out, err = process.communicate(timeout=300)
            status = process.returncode
    assert status == (-signal.SIGKILL if stop else 0), err
    return [json.loads(line) for line in out.splitlines()]


@contextlib.contextmanager
def sleeping(captures, uri, scratch, step, batch):
    """A life that is stopped at a step, for the block."""
    while True:
        with life(captures, uri, scratch, "SIGSTOP", step, batch) as process:
            while process.poll() is None and not stopped(process.pid):
                time.sleep(0.1)
            if process.returncode is None:
                yield process
                return
            assert process.returncode == EX_TEMPFAIL, process.stderr.read()


def stopped(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("T")


def chain(spark, root):
    cuts = cuts_in(HadoopFiles(spark, f"file://{root}/{DIRECTORY}"))
    assert [cut.start_ts for cut in cuts] == [0] + [cut.end_ts for cut in cuts[:-1]]
    return cuts


def test_delta_tables_equal_the_replay_after_drivers_died(
    spark, captures, upstream, tmp_path, monkeypatch
):
    root, uri = tmp_path / "lake", f"delta+file://{tmp_path}/lake"
    lived(captures, uri, tmp_path / "one", "SIGKILL", "tables", 1)
    lived(captures, uri, tmp_path / "two", max_rows=90)

    cuts = chain(spark, root)
    assert cuts[-1].end_ts == captures.checkpoint_ts == upstream.end_ts
    for cut in (cuts[1], cuts[-1]):
        shown = as_of_cut(spark, uri, cut.end_ts)["bank.accounts"].collect()
        assert {(row.id,): row.asDict() for row in shown} == upstream.accounts.state(cut.end_ts)
        assert len(shown) == len(upstream.accounts.state(cut.end_ts))
    assert version_at(uri, "bank.accounts") == version_at(uri, "bank.accounts", upstream.end_ts)

    monkeypatch.setattr(file_lake, "_IDLE_S", 0.1)
    with FileLake.open(SinkUri.parse(uri), "bank", tmp_path / "verify", locked=True) as lake:
        assert lake.cut(None)["cut"] == upstream.end_ts
    with FileLake.open(SinkUri.parse(uri), "bank", tmp_path / "verify", locked=False) as lake:
        assert lake.cut(upstream.end_ts - 1)["cut"] == cuts[-2].end_ts


def test_a_driver_that_slept_through_its_successors_life_writes_nothing_more(
    spark, captures, upstream, tmp_path
):
    root, uri = tmp_path / "lake", f"parquet+file://{tmp_path}/lake"
    with sleeping(captures, uri, tmp_path / "one", "manifest", 1) as asleep:
        lived(captures, uri, tmp_path / "two", max_rows=35)
        before = chain(spark, root)
        asleep.send_signal(signal.SIGCONT)
        _, said = asleep.communicate(timeout=300)
    assert asleep.returncode == 1
    assert "[TM:ErrTargetBusy] another job has taken this lake over" in said
    assert chain(spark, root) == before
    assert before[-1].end_ts == upstream.end_ts
    rows = spark.read.parquet(f"{root}/bank/kinds").drop("cut").collect()
    assert plain(rows) == plain(upstream.kinds.rows)
