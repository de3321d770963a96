"""`tidemark spark run`: supervision of the job, as a user sees it."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)


def start(captures, target, *more, env=None):
    arguments = ["--endpoint", captures.uri, "--changefeed", "bank", "--target", target, *more]
    return subprocess.Popen(
        [sys.executable, "-m", "server.cli.main", "spark", "run", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )


def line_with(process, field):
    while line := process.stdout.readline():
        document = json.loads(line)
        if field in document:
            return document
    raise AssertionError(process.stderr.read())


def children_of(pid):
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_without_java_it_ends_with_one_clear_error(captures, tmp_path):
    env = {**os.environ, "PATH": str(tmp_path), "JAVA_HOME": ""}
    process = start(captures, f"parquet://{tmp_path}/lake", env=env)
    _, said = process.communicate(timeout=200)
    assert process.returncode == 1
    assert next(line for line in said.splitlines() if line.startswith("[TM:")).startswith(
        "[TM:ErrJavaNotFound] "
    )
    assert not (tmp_path / "lake").exists()


def test_an_unknown_changefeed_ends_it_without_a_restart(captures, tmp_path):
    process = start(captures, f"parquet://{tmp_path}", "--changefeed", "none")
    _, said = process.communicate(timeout=200)
    assert process.returncode == 1
    assert "[TM:ErrChangefeedNotFound] no changefeed 'none'" in said


def test_a_killed_driver_is_started_again_and_sigterm_ends_it_well(captures, upstream, tmp_path):
    captures.resolve(400)
    process = start(captures, f"parquet://{tmp_path}", "--trigger", "0 seconds")
    try:
        http = line_with(process, "endpoints")["endpoints"]["http"]
        assert line_with(process, "end_ts")["end_ts"] == 400
        for driver in children_of(process.pid):
            os.kill(driver, signal.SIGKILL)
        captures.resolve(upstream.end_ts)
        while (cut := line_with(process, "end_ts"))["end_ts"] < upstream.end_ts:
            assert cut["rows"] == {}, "a replayed cut is not counted twice"
        metrics = urllib.request.urlopen(f"http://{http}/metrics", timeout=60).read().decode()
        assert f'tidemark_spark_cut_ts{{changefeed="bank"}} {float(upstream.end_ts)}' in metrics
        starts = metrics.partition('tidemark_spark_job_starts_total{changefeed="bank"} ')[
            2
        ].partition("\n")[0]
        assert (
            float(starts) >= 2
        )  # more where the machine is too busy for a Python worker of Spark's
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=200) == 0
    finally:
        process.kill()
        process.communicate()
    assert captures.checkpoint_ts == upstream.end_ts
