"""The source against a real capture: killed in the middle of batches,
and read by a standalone cluster.
"""

import json
import subprocess
import sys
import threading

import pytest

from server.demo.bank import ACCOUNTS, TRANSFERS
from storage.tidb.record import encode_record
from tests.integration.spark.cluster import changefeed, flight, write
from tests.spark_cluster import running_cluster

pytestmark = pytest.mark.timeout(600)
NOBODY = "grpc://127.0.0.1:1"


def accounts(first, count, balance):
    rows = (
        {"id": n, "owner": f"owner {n}", "balance": balance, "updated_at": 0}
        for n in range(first, first + count)
    )
    return dict(encode_record(ACCOUNTS, row) for row in rows)


@pytest.fixture(scope="module")
def written(cluster):
    """60 transactions of 20 rows each, updates of the first among them, in two changefeeds:
    one is acknowledged.
    """
    both = [changefeed(cluster, name, [("bank", ACCOUNTS)]) for name in ("followed", "looked-at")]
    with both[0] as (followed, _), both[1] as (looked_at, start_ts):
        commit_ts = write(cluster, *(accounts(20 * (n % 50), 20, n) for n in range(60)))
        yield start_ts, max(reader.wait_resolved(commit_ts) for reader in (followed, looked_at))


def options(cluster, name, **more):
    endpoints = f"{NOBODY},{flight(cluster)}"
    return {"endpoint": endpoints, "changefeed": name, "table": "bank.accounts"} | more


def test_a_capture_killed_in_the_middle_of_a_batch_is_found_again(
    spark, cluster, written, tmp_path
):
    found, restarts = [], []

    def batch(frame, number):
        if number in (1, 3):
            cluster.capture.kill()
            restarts.append(threading.Thread(target=cluster.capture.start))
            restarts[-1].start()
        found.append(frame.collect())
        for restart in restarts:
            restart.join()

    query = (
        spark.readStream.format("tidemark")
        .options(
            **options(
                cluster,
                "followed",
                startTs=str(written[0]),
                endTs=str(written[1]),
                maxRowsPerTrigger="250",
            )
        )
        .load()
        .writeStream.option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .foreachBatch(batch)
        .start()
    )
    assert query.awaitTermination(250)
    assert len(restarts) == 2
    assert [len(rows) for rows in found if rows] == [240] * 5
    changes = [
        (row.id, row.balance)
        for rows in found
        for row in sorted(rows, key=lambda row: row._commit_ts)
    ]
    assert changes == [(20 * (n % 50) + at, n) for n in range(60) for at in range(20)]
    assert cluster.cli("changefeed", "query", "-c", "followed")["checkpoint_tso"] > written[0]


def test_two_queries_read_one_changefeed_each_at_its_own_pace(spark, cluster, tmp_path):
    def taken(reader):
        """The balances that a query of this reader takes now; of one table, or of several."""
        found = []
        several = {"table": "", "tablePattern": "bank.*", "envelope": "true"}
        chosen = {"reader": reader} | (several if reader == "early" else {})
        query = (
            spark.readStream.format("tidemark")
            .options(**options(cluster, "shared", **chosen))
            .load()
            .writeStream.option("checkpointLocation", str(tmp_path / reader))
            .trigger(availableNow=True)
            .foreachBatch(lambda frame, _: found.extend(frame.collect()))
            .start()
        )
        assert query.awaitTermination(250)
        if reader == "early":
            return sorted(json.loads(row.after)["balance"] for row in found)
        return sorted(row.balance for row in found)

    with changefeed(cluster, "shared", [("bank", ACCOUNTS)]) as (reader, start_ts):
        for name in ("early", "late"):
            cluster.cli("changefeed", "add-reader", "-c", "shared", "--reader", name)
        reader.wait_resolved(write(cluster, accounts(2000, 5, 1)))
        assert taken("early") == [1] * 5
        reader.wait_resolved(write(cluster, accounts(2005, 5, 2)))
        assert taken("early") == [2] * 5
        shown = cluster.cli("changefeed", "query", "-c", "shared")
        assert shown["checkpoint_tso"] == start_ts
        assert taken("late") == [1] * 5 + [2] * 5
        assert taken("late") == []
        with pytest.raises(Exception, match=r"ErrReaderNotExists.*no reader 'other'; it has early"):
            taken("other")


def test_slices_of_one_table_hold_each_change_once_with_the_row_before(spark, cluster, written):
    ranges = {
        "startTs": str(written[0]),
        "endTs": str(written[1]),
        "sliceBytes": "8000",
        "beforeImage": "true",
    }
    frame = spark.read.format("tidemark").options(**options(cluster, "looked-at", **ranges)).load()
    assert frame.rdd.getNumPartitions() > 3
    rows = sorted(frame.collect(), key=lambda row: (row._commit_ts, row._seq))
    assert [(row.id, row.balance) for row in rows] == [
        (20 * (n % 50) + at, n) for n in range(60) for at in range(20)
    ]
    before = [
        None if row._before is None else (row._before.id, row._before.balance) for row in rows
    ]
    assert before == [None] * 1000 + [(20 * n + at, n) for n in range(10) for at in range(20)]


def test_a_standalone_cluster_splits_the_slices_over_its_workers(cluster, tmp_path):
    both = [("bank", ACCOUNTS), ("bank", TRANSFERS)]
    with (
        changefeed(cluster, "cut", both) as (reader, start_ts),
        running_cluster(tmp_path, workers=2) as spark_cluster,
    ):
        moved = dict(
            encode_record(TRANSFERS, {"id": n, "src": 1, "dst": 2, "amount": 3}) for n in range(100)
        )
        end_ts = reader.wait_resolved(
            write(cluster, moved, *(accounts(5000 + 20 * n, 20, n) for n in range(5)))
        )
        ranges = {
            "startTs": str(start_ts),
            "endTs": str(end_ts),
            "sliceBytes": "1000",
            "envelope": "true",
        }
        given = {
            "endpoint": flight(cluster),
            "changefeed": "cut",
            "tablePattern": "bank.*",
        } | ranges
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.integration.spark.standalone",
                spark_cluster.url,
            ],
            input=json.dumps(given),
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    rows_of_executor = json.loads(done.stdout.splitlines()[-1])
    assert sum(rows_of_executor.values()) == 200
    assert len(rows_of_executor) == 2, "both workers read"
