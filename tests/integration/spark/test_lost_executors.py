"""Executors that are killed in the middle of a cut's job, on a standalone cluster of two workers:
the cut is right, and there once.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark_tidemark.lake.reading import as_of_cut

from tests.integration.spark.test_lake import by_key, cuts_of
from tests.integration.spark.test_source import plain
from tests.spark_cluster import LIGHT, running_cluster

pytestmark = pytest.mark.timeout(900)
KILLS, REPOSITORY = 3, Path(__file__).parents[3]
CONF = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": LIGHT,
    "spark.executorEnv.PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/sink/spark",
}


@pytest.fixture(scope="module")
def spark_cluster(tmp_path_factory):
    with running_cluster(tmp_path_factory.mktemp("standalone"), workers=2) as cluster:
        yield cluster


@pytest.mark.parametrize(
    "lake_format",
    ["delta", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("iceberg", "parquet"))],
)
def test_a_cut_whose_executor_is_killed_is_right_and_there_once(
    spark, captures, upstream, spark_cluster, tmp_path, lake_format
):
    lake, markers = tmp_path / "lake", tmp_path / "markers"
    markers.mkdir()
    arguments = {
        "--endpoint": captures.uri,
        "--changefeed": "bank",
        "--target": f"{lake_format}://{lake}?write=spark",
        "--master": spark_cluster.url,
        "--max-rows-per-trigger": "60",
        "--trigger": "0 seconds",
        "--until-ts": str(upstream.end_ts),
    }
    flags = [part for pair in arguments.items() for part in pair]
    flags += [f"--conf={name}={value}" for name, value in CONF.items()]
    module = "tests.integration.spark.lost_executor"
    done = subprocess.run(
        [sys.executable, "-m", module, str(markers), str(KILLS), *flags],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(list(markers.iterdir())) == KILLS

    cuts = cuts_of(spark, lake)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [cut.end_ts for cut in cuts] == [line["end_ts"] for line in lines if "end_ts" in line]
    brought = sum(item.rows for cut in cuts for item in cut.tables)
    assert brought == sum(len(table.rows) for table in upstream.tables.values())
    kinds = as_of_cut(spark, f"{lake_format}://{lake}")["bank.kinds"].collect()
    if lake_format == "parquet":
        assert plain(kinds) == plain(upstream.kinds.rows)
        return
    state = upstream.kinds.state(upstream.end_ts)
    assert (len(kinds), by_key(kinds)) == (len(state), by_key(state.values()))
