"""A stretch that an operator gave up: the job passes over it, says so,
and goes on above it after each death.
"""

import json
import os
import signal
import subprocess
import sys

import pytest
from pyspark_tidemark.lake.manifest import read_cuts

from tests.integration.spark.test_source import plain

pytestmark = pytest.mark.timeout(600)
EX_TEMPFAIL = 75
FIRST, LAST = 300, 500


def run(captures, target, step, until_ts):
    """One life of the job, killed at a step of its first batch;
    returns its status and the lines it printed.
    """
    arguments = [
        "--endpoint",
        captures.uri,
        "--changefeed",
        "bank",
        "--target",
        target,
        "--trigger",
        "0 seconds",
    ]
    command = [
        sys.executable,
        "-m",
        "tests.integration.spark.killed",
        step,
        "0",
        "mask",
        *arguments,
    ]
    while True:  # Spark gives a new Python worker ten seconds, which a busy machine may need
        done = subprocess.run(
            [*command, "--until-ts", str(until_ts)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode != EX_TEMPFAIL:
            return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def test_the_job_goes_on_above_what_was_skipped(spark, captures, upstream, tmp_path):
    target = f"parquet://{tmp_path}"
    assert run(captures, target, "never", FIRST)[0] == os.EX_OK
    captures.checkpoint_ts, captures.skipped = (
        LAST,
        [(FIRST, LAST)],
    )  # resume --overwrite-checkpoint-ts

    status, lines = run(captures, target, "manifest", upstream.end_ts)
    assert status == -signal.SIGKILL, "it dies at the commit of the first cut above"
    assert lines[0] == {"skipped": {"start_ts": FIRST, "end_ts": LAST}}
    for step, died in (("ack", -signal.SIGKILL), ("never", os.EX_OK)):
        status, lines = run(captures, target, step, upstream.end_ts)
        assert (status, [line for line in lines if "skipped" in line]) == (died, [])

    rows = spark.read.parquet(f"{tmp_path}/bank/kinds").drop("cut").collect()
    kept = [row for row in upstream.kinds.rows if not FIRST < row["_commit_ts"] <= LAST]
    assert 0 < len(kept) < len(upstream.kinds.rows)
    assert plain(rows) == plain(kept)
    cuts = read_cuts(tmp_path / "_tidemark_cuts")
    assert [cut.start_ts for cut in cuts] == [0] + [cut.end_ts for cut in cuts[:-1]]
    assert [cut.end_ts for cut in cuts if cut.is_skipped] == [LAST]
    assert cuts[-1].skipped == ((FIRST, LAST),)
    assert captures.checkpoint_ts == upstream.end_ts
