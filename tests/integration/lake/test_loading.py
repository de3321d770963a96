"""An initial load, rows told as updates in key order:
what no file can hold is not searched for and not deleted.
"""

import pytest
from pyspark_tidemark.lake import changes
from pyspark_tidemark.lake.delta import checkpoints

from tests.integration.lake import test_delta_modes, test_iceberg
from tests.integration.spark.upstream import Upstream

pytestmark = pytest.mark.timeout(300)
CUTS = (10, 20, 30)
CHUNKS = (range(10), range(10, 20), range(15, 25))
"""The last one brings some keys again."""


@pytest.fixture
def upstream() -> Upstream:
    upstream = Upstream(1, transactions=0)
    for ts, chunk in zip(CUTS, CHUNKS, strict=True):
        for seq, key in enumerate(chunk):
            envelope = {"_op": "update", "_commit_ts": ts, "_start_ts": ts - 1, "_seq": seq}
            upstream.accounts.rows.append(envelope | Upstream._account(key, ts))
    upstream.end_ts = CUTS[-1]
    return upstream


def test_delta_appends_large_chunks_and_merges_only_what_may_be_there(
    spark, changefeed, captures, upstream, tmp_path, monkeypatch
):
    for most in ("DRIVER_READ_MAX_BYTES", "ARROW_READ_MAX_BYTES"):
        monkeypatch.setattr(changes, most, -1)
    test_delta_modes.keep(spark, changefeed, captures, tmp_path, "upsert", CUTS)
    path = f"{tmp_path}/bank/accounts"
    history = sorted(
        spark.sql(f"DESCRIBE HISTORY delta.`{path}`").collect(), key=lambda row: row.version
    )
    assert [row.operation for row in history] == ["WRITE", "WRITE", "MERGE"]
    rows = [row.asDict() for row in spark.read.format("delta").load(path).collect()]
    assert test_iceberg.balances(rows) == test_iceberg.held(upstream, CUTS[-1])


@pytest.mark.parametrize("kind", ["position", "equality"])
def test_iceberg_deletes_only_keys_that_may_be_there(
    spark, changefeed, captures, upstream, tmp_path, kind
):
    deletes = []
    for end in range(
        1, len(CUTS) + 1
    ):  # a driver of its own for each cut: it reads what files hold
        target = test_iceberg.keep(
            spark,
            changefeed,
            captures,
            tmp_path,
            CUTS[end - 1 : end],
            deletion_vectors=kind == "position",
        )
        table = target._catalog.load("bank.accounts")
        deletes.append(int(table.currentSnapshot().summary().get(f"total-{kind}-deletes")))
    assert deletes == [0, 0, 5]
    assert test_iceberg.balances(
        test_iceberg.read_by_iceberg(spark, tmp_path, "bank.accounts")
    ) == (test_iceberg.held(upstream, CUTS[-1]))


def test_delta_is_read_from_the_checkpoints_of_its_log(
    spark, changefeed, captures, upstream, tmp_path, monkeypatch
):
    monkeypatch.setattr(checkpoints, "CHECKPOINT_EVERY", 2)
    target, _, _ = test_delta_modes.keep(spark, changefeed, captures, tmp_path, "upsert", CUTS)
    target.close()
    log = tmp_path / "bank" / "accounts" / "_delta_log"
    assert [path.name for path in log.glob("*.checkpoint*.parquet")] == [
        f"{2:020}.checkpoint.parquet"
    ]
    for version in (0, 1):
        (log / f"{version:020}.json").unlink()  # as Delta does when they are old
    spark._jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()
    rows = [row.asDict() for row in spark.read.format("delta").load(str(log.parent)).collect()]
    assert test_iceberg.balances(rows) == test_iceberg.held(upstream, CUTS[-1])
