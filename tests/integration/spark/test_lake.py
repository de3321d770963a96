"""The lake equals the replay, whatever step of whatever batch the driver is killed at,
however a cut is written.
"""

import json
import signal
import subprocess
import sys

import pytest
from pyspark_tidemark.lake.reading import as_of_cut

from tests.integration.spark.test_source import plain, unzoned

pytestmark = pytest.mark.timeout(900)
NIGHTLY = pytest.mark.nightly
EX_TEMPFAIL = 75


def run_job(captures, target, step, batch, way, *, max_rows):
    """One life of the job; returns its exit status and the lines it printed."""
    arguments = [
        "--endpoint",
        captures.uri,
        "--changefeed",
        "bank",
        "--target",
        target,
        "--max-rows-per-trigger",
    ]
    command = [
        sys.executable,
        "-m",
        "tests.integration.spark.killed",
        step,
        str(batch),
        way,
        *arguments,
        str(max_rows),
    ]
    done = subprocess.run(
        [
            *command,
            "--trigger",
            "0 seconds",
            "--until-ts",
            str(captures.upstream.end_ts),
            "--compact-every",
            "2",
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def killed(captures, target, *lives, max_rows=60):
    """Lives that end by SIGKILL, then one that ends well; returns the lines of all."""
    lines = []
    for step, batch, way in (*lives, ("never", 0, "mask")):
        status, said = EX_TEMPFAIL, []
        while (
            status == EX_TEMPFAIL
        ):  # Spark gives a new Python worker ten seconds, which a busy machine may need
            status, more = run_job(captures, target, step, batch, way, max_rows=max_rows)
            said += more
        assert status == (0 if step == "never" else -signal.SIGKILL), (step, batch, said)
        lines += said
    return lines


def by_key(rows):
    return {(fields["k1"], fields["k2"]): fields for fields in (unzoned(row) for row in rows)}


def cuts_of(spark, root):
    return sorted(spark.read.json(f"{root}/_tidemark_cuts").collect(), key=lambda row: row.end_ts)


def test_delta_tables_equal_the_replay_after_kills_at_every_step(
    spark, captures, upstream, tmp_path
):
    lives = [
        ("tables", 1, "mask"),
        ("manifest", 2, "merge"),
        ("ack", 3, "mask"),
        ("rewrite", 4, "mask"),
    ]
    killed(captures, f"delta://{tmp_path}", *lives, max_rows=30)

    accounts = spark.read.format("delta").load(f"{tmp_path}/bank/accounts").collect()
    assert len(accounts) == len(upstream.accounts.state(upstream.end_ts))
    assert {(row.id,): row.asDict() for row in accounts} == upstream.accounts.state(upstream.end_ts)
    kinds = spark.read.format("delta").load(f"{tmp_path}/bank/kinds").collect()
    assert len(kinds) == len(upstream.kinds.state(upstream.end_ts))
    assert by_key(kinds) == by_key(upstream.kinds.state(upstream.end_ts).values())

    cuts = cuts_of(spark, tmp_path)
    assert [cut.start_ts for cut in cuts] == [0] + [cut.end_ts for cut in cuts[:-1]]
    assert cuts[-1].end_ts == captures.checkpoint_ts == upstream.end_ts
    middle = cuts[len(cuts) // 2]
    version = {item.table: item.version for item in middle.tables}["bank.accounts"]
    then = (
        spark.read.format("delta")
        .option("versionAsOf", version)
        .load(f"{tmp_path}/bank/accounts")
        .collect()
    )
    assert {(row.id,): row.asDict() for row in then} == upstream.accounts.state(middle.end_ts)


@pytest.mark.parametrize(
    "lake_format",
    [pytest.param("delta", marks=NIGHTLY), "iceberg", pytest.param("parquet", marks=NIGHTLY)],
)
def test_a_lake_that_tasks_write_equals_the_replay_after_kills(
    spark, captures, upstream, tmp_path, lake_format
):
    lives = [(step, batch, "mask") for batch, step in enumerate(("written", "tables", "manifest"))]
    killed(captures, f"{lake_format}://{tmp_path}?write=spark", *lives)
    tables = as_of_cut(spark, f"{lake_format}://{tmp_path}")
    kinds = tables["bank.kinds"].collect()
    if lake_format == "parquet":
        assert plain(kinds) == plain(upstream.kinds.rows)
        return
    state = upstream.kinds.state(upstream.end_ts)
    assert (len(kinds), by_key(kinds)) == (len(state), by_key(state.values()))
    accounts = [row.asDict() for row in tables["bank.accounts"].collect()]
    assert len(accounts) == len(upstream.accounts.state(upstream.end_ts))
    assert {(row["id"],): row for row in accounts} == upstream.accounts.state(upstream.end_ts)


def test_a_parquet_changelog_holds_every_change_once_after_kills(
    spark, captures, upstream, tmp_path
):
    lines = killed(captures, f"parquet://{tmp_path}", ("commit", 1, "mask"))
    rows = spark.read.parquet(f"{tmp_path}/bank/kinds").drop("cut").collect()
    assert plain(rows) == plain(upstream.kinds.rows)
    applied = {line["end_ts"]: line for line in lines if "end_ts" in line}
    assert cuts_of(spark, tmp_path)[-1].end_ts == upstream.end_ts
    assert max(line["checkpoint"] for line in applied.values()) == upstream.end_ts
