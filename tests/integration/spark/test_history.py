"""Several Spark queries of one changefeed that keeps its history: at different speeds, late,
killed, and over the death of the capture; each row once for each of them.
"""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException

from server.demo.bank import ACCOUNTS
from tests.integration.spark.cluster import changefeed, flight, write
from tests.integration.spark.test_capture import accounts

pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).resolve().parents[3]
DAY_S = 86_400
TRIES, NOT_STARTED = 25, "Python worker failed to connect back"


def options(cluster, reader, **more):
    given = {"endpoint": flight(cluster), "changefeed": "past", "table": "bank.accounts"}
    return given | {"reader": reader} | more


def rows_of(frame):
    return [(row.id, row.balance, row._commit_ts) for row in frame.collect()]


class Query:
    """One reader, by `foreachBatch`, into a sink that knows its batches; each call takes what is
    there.
    """

    def __init__(self, spark, cluster, directory, reader, **more):
        self._spark, self._checkpoint = spark, str(directory / reader)
        self._options = options(cluster, reader, **more)
        self.taken = {}

    def take(self, at_batch=None, happens=lambda: None):
        # Spark gives its Python workers ten seconds to start, which a busy machine does not keep.
        for left in reversed(range(TRIES)):
            try:
                self._take(at_batch, happens)
                break
            except StreamingQueryException as err:
                if NOT_STARTED not in str(err) or not left:
                    raise
        return sorted(row for rows in self.taken.values() for row in rows)

    def _take(self, at_batch, happens):
        def batch(frame, number):
            rows = rows_of(frame)
            if number == at_batch:
                happens()
            self.taken[number] = rows

        query = (
            self._spark.readStream.format("tidemark")
            .options(**self._options)
            .load()
            .writeStream.option("checkpointLocation", self._checkpoint)
            .trigger(availableNow=True)
            .foreachBatch(batch)
            .start()
        )
        assert query.awaitTermination(300)


def by_program(cluster, directory, reader, kill_at, **more):
    """One life of a program that reads into files; its exit status."""
    command = [sys.executable, "-m", "tests.integration.spark.reading"]
    arguments = [
        json.dumps(options(cluster, reader, **more)),
        str(directory / "rows"),
        str(directory / "checkpoint"),
        str(kill_at),
    ]
    for _ in range(TRIES):
        done = subprocess.run(
            [*command, *arguments],
            cwd=ROOT,
            timeout=300,
            check=False,
            stderr=subprocess.PIPE,
            text=True,
        )
        if NOT_STARTED not in done.stderr:
            break
    return done.returncode


def test_readers_at_any_speed_late_or_killed_see_the_same_rows(spark, cluster, tmp_path):
    with changefeed(cluster, "past", [("bank", ACCOUNTS)], retain_s=DAY_S) as (reader, start_ts):

        def state(name):
            shown = cluster.cli("changefeed", "list-readers", "-c", "past")
            return next(each for each in shown if each["name"] == name)

        def add(name, *arguments):
            add = ("changefeed", "add-reader", "-c", "past", "--reader", name)
            return cluster.cli(*add, *arguments)

        for name in ("fast", "slow"):
            add(name)
        fast = Query(spark, cluster, tmp_path, "fast")
        slow = Query(spark, cluster, tmp_path, "slow", maxRowsPerTrigger="25")
        first = write(cluster, *(accounts(3000 + 20 * n, 20, n) for n in range(6)))
        reader.wait_resolved(first)
        everything = fast.take()
        assert len(everything) == 120
        assert slow.take() == everything
        assert len(slow.taken) > len(fast.taken)
        # Both come once more, with nothing: what they took last is acknowledged by that.
        end = reader.wait_resolved(write(cluster, accounts(3200, 5, 9)))
        everything = fast.take()
        assert slow.take() == everything
        assert len(everything) == 125

        # One that comes late has all, also what the others have acknowledged.
        add("late")
        assert state("late")["checkpoint_tso"] == start_ts
        late = Query(spark, cluster, tmp_path, "late", maxRowsPerTrigger="50")
        assert late.take() == everything
        told = add("too-early", "--start-ts", str(start_ts - 1))
        assert "ErrRangeCleaned" in told
        assert str(start_ts) in told

        # A program that is killed in the middle goes on where its checkpoint is.
        add("killed")
        status = by_program(cluster, tmp_path, "killed", 1, maxRowsPerTrigger="20")
        assert status == -9
        begun = state("killed")["checkpoint_tso"]
        assert start_ts <= begun < end
        assert by_program(cluster, tmp_path, "killed", -1, maxRowsPerTrigger="20") == 0
        assert sorted(rows_of(spark.read.parquet(str(tmp_path / "rows")))) == everything

        # The capture dies under a late one: what it has yet to take of history is gone, it is told
        # so, and its position stays.
        add("unlucky")
        unlucky = Query(spark, cluster, tmp_path, "unlucky", maxRowsPerTrigger="20")
        starts = []

        def die():
            cluster.capture.kill()
            starts.append(threading.Thread(target=cluster.capture.start))
            starts[-1].start()

        with pytest.raises(Exception, match=r"ErrRangeCleaned.*keeps what was committed after"):
            unlucky.take(at_batch=1, happens=die)
        starts[0].join()
        assert state("unlucky")["checkpoint_tso"] < end

        # The others lose nothing by it.
        reader.wait_resolved(write(cluster, accounts(3300, 7, 3)))
        everything = fast.take()
        assert len(everything) == 132
        assert slow.take() == late.take() == everything
