"""A changefeed with a target_ts and a real lake job: the lake ends exactly there,
the job says so, GC goes on.
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from tidemarkpb.v1 import changefeed_pb2 as pb

from gcsafepoint.explain.names import feed_of
from server.demo.bank import ACCOUNTS
from tests.integration.spark.cluster import flight, write
from tests.integration.spark.test_capture import accounts

pytestmark = pytest.mark.timeout(600)
EX_TEMPFAIL = 75


def run(cluster, target, step):
    """One life of the job, killed at a step of its first batch;
    returns its status and the lines it printed.
    """
    arguments = [
        "--endpoint",
        flight(cluster),
        "--changefeed",
        "ending",
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
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode != EX_TEMPFAIL:
            return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def services(cluster):
    found = cluster.cli("service-gc-safepoint")
    return {each["service_id"] for each in found["service_gc_safe_points"]}


@pytest.mark.parametrize("step", ["ack", "manifest"])
def test_everything_up_to_target_ts_and_nothing_above_it(spark, cluster, tmp_path, step):
    target, last = f"delta://{tmp_path}", {}
    start_ts = cluster.now()
    write(cluster, accounts(0, 20, 1))
    target_ts = cluster.now()
    write(cluster, accounts(0, 40, 2))
    tables = [pb.Table(schema_name="bank", table_info_json=ACCOUNTS.to_json())]
    request = pb.CreateChangefeedRequest(
        id="ending", sink_uri=target, tables=tables, start_ts=start_ts, target_ts=target_ts
    )
    cluster.api("CreateChangefeed", request)
    assert "ending" in map(feed_of, services(cluster))

    assert run(cluster, target, step)[0] == -signal.SIGKILL
    assert cluster.cli("changefeed", "query", "-c", "ending")["state"] == "normal"
    status, lines = run(cluster, target, "never")
    assert status == os.EX_OK
    assert lines[-1] == {"finished": {"at_ts": target_ts}}

    cuts = spark.read.json(f"{tmp_path}/_tidemark_cuts").collect()
    assert max(cut.end_ts for cut in cuts) == target_ts
    lake = spark.read.format("delta").load(f"{tmp_path}/bank/accounts").collect()
    assert {(row.id, row.balance) for row in lake} == {(number, 1) for number in range(20)}

    deadline = time.monotonic() + 200
    while last.get("state") != "finished" or "ending" in map(feed_of, services(cluster)):
        assert time.monotonic() < deadline, (last, services(cluster))
        time.sleep(0.2)
        last = cluster.cli("changefeed", "query", "-c", "ending")
    assert last["checkpoint_tso"] == target_ts

    assert run(cluster, target, "never") == (os.EX_OK, [{"finished": {"at_ts": target_ts}}]), (
        "started again"
    )
    said = cluster.cli("changefeed", "resume", "-c", "ending")
    assert f"--start-ts {target_ts}" in said
    cluster.cli("changefeed", "remove", "-c", "ending", "--no-confirm")
    request.id, request.start_ts, request.target_ts = "ending", target_ts, 0  # the printed way out
    assert cluster.api("CreateChangefeed", request).changefeed.checkpoint_ts == target_ts
    cluster.cli("changefeed", "remove", "-c", "ending", "--no-confirm")
