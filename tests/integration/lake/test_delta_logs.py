"""A job starts on any Delta log, whoever wrote it: checkpoints of all kinds,
and logs that lost their past.
"""

import os
import shutil
import time

import pytest
from pyspark_tidemark.lake.delta.checkpoints import CHECKPOINT_EVERY

from tests.integration.lake.aged import STEP, aged_feed
from tests.integration.lake.test_aged import DeltaPlace, assert_equal, keep

pytestmark = pytest.mark.timeout(400)
WRITTEN, CUTS = CHECKPOINT_EVERY + 3, CHECKPOINT_EVERY + 6
MONTHS_S = 100 * 86_400


@pytest.fixture(scope="module")
def written(spark, tmp_path_factory):
    """A lake of so many cuts that its log has a checkpoint, and the newest commits are ours."""
    root = tmp_path_factory.mktemp("written")
    keep(DeltaPlace(spark, "delta", root), feed_of_before(0), ends(0, WRITTEN))
    return root


@pytest.fixture
def lake(spark, written, tmp_path):
    """A copy: where it lies is in no log."""
    shutil.copytree(written, tmp_path / "lake")
    return tmp_path / "lake"


def feed_of_before(cuts):
    feed = aged_feed(5, cuts=CUTS, statements=False)
    feed.ack(cuts * STEP)
    return feed


def ends(first, last):
    return [number * STEP for number in range(first + 1, last + 1)]


def go_on(spark, lake):
    """Two more lives on the lake."""
    place, feed = DeltaPlace(spark, "delta", lake), feed_of_before(WRITTEN)
    for number in (WRITTEN, WRITTEN + 1):
        keep(place, feed, ends(number, number + 1))
        assert_equal(place, feed)


def log_of(lake, *patterns):
    return [
        path for pattern in patterns for path in (lake / "bank" / "t" / "_delta_log").glob(pattern)
    ]


def delta_log(spark, lake):
    jvm = spark._jvm
    jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()
    # Delta asks the active session for its settings: this thread's may be another test's.
    jvm.org.apache.spark.sql.SparkSession.setActiveSession(spark._jsparkSession)
    return jvm.org.apache.spark.sql.delta.DeltaLog.forTable(spark._jsparkSession, f"{lake}/bank/t")


def test_a_job_starts_on_a_checkpoint_of_its_own(spark, lake):
    """This failed with DELTA_SPARK_SESSION_NOT_SET under exactly these conditions,
    all of them met here.

    The log has a checkpoint. Its newest version has no .crc file: it is a commit of ours, while
    Delta writes that file with each of its own (MERGE, ALTER, OPTIMIZE) and then need not read the
    checkpoint. And the first who looks at the table in a new process is a thread of the pool in
    which no createDataFrame was called: not a barrier, which looks from the thread of foreachBatch,
    where Spark has set the active session. So some lakes started, as after an ALTER.
    """
    assert log_of(lake, "*.checkpoint*.parquet")
    assert not log_of(lake, f"{WRITTEN:020}.crc", f"{WRITTEN - 1:020}.crc")
    go_on(spark, lake)


def test_a_job_starts_after_somebody_else_has_optimized_and_vacuumed(spark, lake):
    session, table = spark.newSession(), f"delta.`{lake}/bank/t`"
    session.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
    session.conf.set(
        "spark.sql.sources.parallelPartitionDiscovery.parallelism", "2"
    )  # else ten thousand tasks
    session.sql(f"OPTIMIZE {table}")
    session.sql(f"VACUUM {table} RETAIN 0 HOURS")
    go_on(spark, lake)


def test_a_job_starts_on_a_checkpoint_in_many_parts(spark, lake):
    spark.conf.set("spark.databricks.delta.checkpoint.partSize", "3")
    try:
        delta_log(spark, lake).checkpoint()
    finally:
        spark.conf.unset("spark.databricks.delta.checkpoint.partSize")
    assert len(log_of(lake, "*.checkpoint.*.*.parquet")) > 1
    go_on(spark, lake)


def test_a_job_starts_on_a_v2_checkpoint(spark, lake):
    spark.sql(
        f"ALTER TABLE delta.`{lake}/bank/t` SET TBLPROPERTIES ('delta.checkpointPolicy' = 'v2')"
    )
    delta_log(spark, lake).checkpoint()
    assert log_of(lake, "_sidecars/*.parquet")
    for path in log_of(lake, "*.crc"):
        path.unlink()
    go_on(spark, lake)


def test_a_job_starts_on_a_log_that_lost_its_past_and_its_hint(spark, lake):
    long_ago = time.time() - MONTHS_S
    for path in log_of(lake, "*.json", "*.parquet"):
        os.utime(path, (long_ago, long_ago))
    log, none = delta_log(spark, lake), spark._jvm.scala.Option.empty()
    log.checkpointAndCleanUpDeltaLog(log.update(False, none, none), none)
    assert not log_of(lake, f"{0:020}.json")
    for path in log_of(lake, "_last_checkpoint", "._last_checkpoint.crc"):
        path.unlink()
    go_on(spark, lake)
