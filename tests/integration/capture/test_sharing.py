"""Two captures share the tables of a changefeed: the same rows, cuts and checkpoints, whoever dies
or hangs meanwhile.
"""

import signal
import time

import pytest

from tests.integration.capture.many_tables import NAMES, Feed, changes
from tests.integration.capture.processes import patiently, running_cluster, transaction_client

pytest.importorskip("tikv_client")
PATIENCE_S = 120


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running_cluster(tmp_path_factory.mktemp("sharing")) as running:
        yield running


@pytest.fixture(scope="module")
def store(cluster):
    with transaction_client(cluster) as client:
        yield client


def slices(feed, captures):
    """Those of all rows so far, once the tables are divided among so many captures."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        end = feed.resolved()
        parts = patiently(feed.reader.ask, "plan", start=feed.start, end=end)["slices"]
        if len({part["locations"][0] for part in parts}) == captures:
            return end, parts
        time.sleep(0.2)
    raise TimeoutError(f"the tables are not divided among {captures} captures: {parts}")


def is_owner(cluster, capture):
    """Wait until it is."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        listed = cluster.cli("capture", "list")
        owners = [each["address"] for each in listed if each["is-owner"]]
        if owners == [capture.endpoints["capture"]]:
            return True
        time.sleep(0.2)
    return False


def test_captures_share_the_tables_and_whoever_dies_or_hangs_the_rows_are_the_same(
    cluster, store, request
):
    feed = Feed(cluster, store)
    feed.write(10)
    feed.check(feed.resolved())
    first, second = cluster.capture, cluster.another_capture()

    end, parts = slices(feed, captures=2)
    assert sorted((part["table"], part["rows"]) for part in parts) == [(name, 10) for name in NAMES]
    for part in parts:
        for where in part["locations"]:
            rows = patiently(feed.reader.read, feed.start, end, part["table"], where)
            assert changes(rows) == feed.expected
    assert patiently(feed.reader.ask, "ack", ts=end)["checkpoint_ts"] == end
    feed.start, feed.expected = end, []

    second.kill()  # the owner goes on alone
    feed.write(10)
    end, _ = slices(feed, captures=1)
    feed.check(end)
    second.start()
    slices(feed, captures=2)
    feed.write(5)
    feed.check(feed.resolved())

    first.process.send_signal(signal.SIGSTOP)  # the owner, for longer than its lease
    request.addfinalizer(lambda: first.process.send_signal(signal.SIGCONT))
    cluster.capture = second
    assert is_owner(cluster, second)
    feed.write(5)
    end = feed.resolved()
    feed.check(end)
    assert patiently(feed.reader.ask, "ack", ts=end)["checkpoint_ts"] == end
    feed.start, feed.expected = end, []
    first.process.send_signal(signal.SIGCONT)  # it still believes to own the changefeeds
    feed.write(5)
    end, _ = slices(feed, captures=2)
    feed.check(end)
    assert patiently(feed.reader.ask, "describe")["checkpoint_ts"] >= feed.start
    assert is_owner(cluster, second)
    assert cluster.cli("changefeed", "query", "-c", "many")["state"] == "normal"
