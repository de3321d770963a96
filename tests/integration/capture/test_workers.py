"""A capture with two worker processes behaves as one: the same rows, cuts and checkpoints,
whoever dies meanwhile.
"""

import os
import signal
import time
import urllib.request
from pathlib import Path

import grpc
import pyarrow.flight as fl
import pytest
from tidemarkpb.v1 import capture_pb2
from tidemarkpb.v1.capture_pb2_grpc import CaptureServiceStub

from server.capture.metrics import STAGES
from tests.integration.capture.many_tables import NAMES, TABLES, Feed, changes
from tests.integration.capture.processes import patiently, running_cluster, transaction_client

pytest.importorskip("tikv_client")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running_cluster(tmp_path_factory.mktemp("workers"), "--workers", "2") as running:
        yield running


@pytest.fixture(scope="module")
def store(cluster):
    with transaction_client(cluster) as client:
        yield client


@pytest.fixture(scope="module")
def shared_feed(cluster, store):
    return Feed(cluster, store)


@pytest.fixture
def feed(shared_feed):
    """The changefeed, with some rows not acknowledged yet."""
    shared_feed.write(10)
    return shared_feed


def workers(capture):
    """The worker processes of a capture: their ids by their numbers."""
    found = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (directory / "cmdline").read_text().split("\0")
            parent = int((directory / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == capture.process.pid and "worker" in arguments:
            found[int(arguments[arguments.index("--number") + 1])] = int(directory.name)
    return found


def alive(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_each_table_is_handed_out_by_its_worker_and_by_the_capture(feed):
    end = feed.resolved()
    slices = feed.reader.ask("plan", start=feed.start, end=end)["slices"]
    assert sorted((part["table"], part["rows"]) for part in slices) == [
        (name, len(feed.expected)) for name in NAMES
    ]
    own = {part["locations"][0] for part in slices}
    assert len(own) == 2
    assert len({part["locations"][1] for part in slices}) == 1
    for part in slices:
        direct, passed_on = (
            feed.reader.read(feed.start, end, part["table"], where) for where in part["locations"]
        )
        assert direct.equals(passed_on)
        assert changes(direct) == feed.expected


def test_a_cut_counts_the_rows_of_all_workers(feed):
    end = feed.resolved()
    few = feed.reader.ask("latest", start=feed.start, max_rows=3 * len(TABLES), wait_ms=5000)["ts"]
    assert [
        part["rows"] for part in feed.reader.ask("plan", start=feed.start, end=few)["slices"]
    ] == [3] * len(TABLES)
    assert feed.reader.ask("latest", start=feed.start, max_rows=10**6, wait_ms=5000)["ts"] >= end
    of_one = feed.reader.ask("latest", start=feed.start, max_rows=3, table=NAMES[0], wait_ms=5000)[
        "ts"
    ]
    assert of_one == few


def test_a_worker_hands_out_rows_and_nothing_else(feed):
    end = feed.resolved()
    [first, *_] = feed.reader.ask("plan", start=feed.start, end=end)["slices"]
    ack = fl.Action("ack", b'{"changefeed":"many","ts":1}')
    with (
        fl.FlightClient(first["locations"][0]) as worker,
        pytest.raises(fl.FlightServerError, match="WorkerRowsOnly"),
    ):
        list(worker.do_action(ack))


def test_metrics_and_blockers_of_all_workers_are_the_captures(cluster, feed):
    feed.resolved()
    lines = soon(lambda: metrics(cluster), lambda lines: len(taken_of(lines)) == 2)
    assert sum(taken_of(lines)) >= len(feed.expected) * len(TABLES)
    assert all(taken_of(lines))
    assert (
        len([line for line in lines if line.startswith("# TYPE tidemark_sorter_rows_in_total ")])
        == 1
    )
    lags = [line for line in lines if line.startswith("tidemark_capture_stage_lag_seconds{")]
    assert len(lags) == len(STAGES), "two stages are the workers' own"
    [blocked] = soon(lambda: blockers(cluster), lambda found: len(found[0].tables) == len(TABLES))
    assert sorted(table.name for table in blocked.tables) == NAMES
    assert all(table.regions for table in blocked.tables)


def soon(ask, is_whole):
    """The answer once all workers are in it: one that takes longer than a second to answer is left
    out.
    """
    deadline = time.monotonic() + 60
    while not is_whole(found := ask()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def metrics(cluster):
    with urllib.request.urlopen(f"http://{cluster.capture.endpoints['http']}/metrics") as answer:
        return answer.read().decode().splitlines()


def taken_of(lines):
    return [
        float(line.split()[1])
        for line in lines
        if line.startswith("tidemark_sorter_rows_in_total{worker=")
    ]


def blockers(cluster):
    with grpc.insecure_channel(cluster.capture.endpoints["capture"]) as channel:
        return (
            CaptureServiceStub(channel)
            .GetBlockers(capture_pb2.GetBlockersRequest(limit=10))
            .changefeeds
        )


def test_a_worker_killed_while_rows_are_read_changes_no_range(cluster, feed):
    middle = feed.resolved()
    before = feed.rows(middle)
    feed.write(10)
    [first, *_] = feed.reader.ask("plan", start=feed.start, end=middle)["slices"]
    victim = workers(cluster.capture)[0]
    os.kill(victim, signal.SIGKILL)
    feed.write(10)
    after = feed.rows(middle)
    assert all(after[name].equals(before[name]) for name in NAMES)
    assert patiently(
        feed.reader.read, feed.start, middle, first["table"], first["locations"][0]
    ).equals(before[first["table"]])
    feed.check(feed.resolved())
    assert workers(cluster.capture)[0] != victim


def test_acknowledging_reaches_all_workers_and_survives_their_death(cluster, feed):
    end = feed.resolved()
    feed.check(end)
    assert patiently(feed.reader.ask, "ack", ts=end) == {"checkpoint_ts": end}
    shown = cluster.cli("changefeed", "query", "-c", "many")
    assert shown["checkpoint_tso"] == end
    for pid in workers(cluster.capture).values():
        os.kill(pid, signal.SIGKILL)
    feed.start, feed.expected = end, []
    assert patiently(feed.reader.read, end, feed.resolved(), NAMES[0]).num_rows == 0
    assert feed.reader.ask("describe")["checkpoint_ts"] == end


def test_killing_the_capture_ends_its_workers(cluster, feed):
    pids = workers(cluster.capture).values()
    assert len(pids) == 2
    cluster.capture.kill()
    deadline = time.monotonic() + 60
    while any(map(alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    cluster.capture.start()
    feed.resolved()
    assert cluster.capture.terminate() == 0
    assert not list((cluster.directory / "capture" / "run").iterdir())
    cluster.capture.start()
