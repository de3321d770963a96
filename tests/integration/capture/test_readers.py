"""Several readers of one changefeed on real captures: each takes all of it at its own pace, whoever
dies meanwhile.
"""

import json
import time

import pytest
from tidemarkpb.v1 import changefeed_pb2 as pb

from tests.integration.capture.many_tables import NAMES, TABLES, Feed, changes
from tests.integration.capture.processes import patiently, running_cluster, transaction_client

pytest.importorskip("tikv_client")
PATIENCE_S = 60


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    # Less memory than what the slow reader leaves: the rest is read from the sorter.
    flags = ("--memory-quota-bytes", str(64 << 10))
    with running_cluster(tmp_path_factory.mktemp("readers"), *flags) as running:
        yield running


@pytest.fixture(scope="module")
def store(cluster):
    with transaction_client(cluster) as client:
        yield client


class Named:
    """One reader with a name, as Spark's source is."""

    def __init__(self, feed, name):
        self.feed, self.name, self.rows = feed, name, {table: [] for table in NAMES}

    @property
    def position(self):
        return patiently(self.feed.reader.ask, "describe", reader=self.name)["checkpoint_ts"]

    def take(self, end, step=None):
        """Cuts from where it is up to `end`, each acknowledged."""
        at = self.position
        while at < end:
            limit = {"max_rows": step} if step else {}
            cut = patiently(self.feed.reader.ask, "latest", start=at, wait_ms=1000, **limit)["ts"]
            cut = min(cut, end)
            for table in NAMES:
                rows = patiently(self.feed.reader.read, at, cut, table)
                self.rows[table] += changes(rows)
            patiently(self.feed.reader.ask, "ack", ts=cut, reader=self.name)
            at = cut

    def has_all(self):
        return all(rows == self.feed.expected for rows in self.rows.values())


def until(seen, wanted):
    deadline = time.monotonic() + PATIENCE_S
    while (found := seen()) != wanted:
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


def test_each_reader_takes_all_at_its_own_pace_over_deaths_and_is_held_for(cluster, store):
    feed = Feed(cluster, store)
    for name in ("fast", "slow"):
        cluster.cli("changefeed", "add-reader", "-c", "many", "--reader", name)
    fast, slow = Named(feed, "fast"), Named(feed, "slow")
    # The sink is a lake, whose job counts as well: it has everything from now on.
    start = feed.start

    def lake_job(ts):
        for _ in range(2):
            patiently(feed.reader.ask, "ack", ts=ts)

    feed.write(60)
    end = feed.resolved()
    fast.take(end, step=16)
    lake_job(end)
    assert fast.has_all()
    assert patiently(feed.reader.ask, "describe")["checkpoint_ts"] == start
    shown = {
        each["name"]: each["checkpoint_tso"]
        for each in cluster.cli("changefeed", "query", "-c", "many")["readers"]
    }
    assert shown == {"fast": end, "slow": start}

    time.sleep(0.5)  # positions are saved five times a second
    cluster.capture.kill()
    cluster.capture.start()
    until(lambda: fast.position, end)
    feed.write(20)
    end = feed.resolved()
    slow.take(end, step=25)
    fast.take(end)
    lake_job(end)
    assert slow.has_all()
    assert fast.has_all()
    slow.take(feed.resolved())
    held = patiently(feed.reader.ask, "describe")["checkpoint_ts"]
    assert start < held <= end

    # Without the slow one the others' next acknowledgements move the checkpoint.
    cluster.cli("changefeed", "remove-reader", "-c", "many", "--reader", "slow", "--yes")
    feed.write(5)
    end = feed.resolved()
    fast.take(end)
    lake_job(end)
    patiently(feed.reader.ask, "ack", ts=end, reader="fast")
    until(lambda: patiently(feed.reader.ask, "describe")["checkpoint_ts"], end)
    assert fast.has_all()
    with pytest.raises(Exception, match=r"ErrReaderNotExists.*no reader 'slow'; it has fast"):
        feed.reader.ask("ack", ts=end, reader="slow")

    # All begin again where an operator moves the changefeed to.
    cluster.cli("changefeed", "pause", "-c", "many")
    cluster.cli(
        "changefeed", "resume", "-c", "many", "--overwrite-checkpoint-ts", str(start), "--yes"
    )
    cluster.capture.kill()
    cluster.capture.start()
    until(lambda: fast.position, start)
    again = Named(feed, "fast")
    again.take(feed.resolved())
    assert again.has_all()
    cluster.cli("changefeed", "remove", "-c", "many", "--yes")


def test_wrong_names_are_refused_and_change_nothing(cluster):
    tables = [pb.Table(schema_name="many", table_info_json=table.to_json()) for table in TABLES]
    create = pb.CreateChangefeedRequest(id="other", sink_uri="flight://", tables=tables)
    cluster.api("CreateChangefeed", create)
    for name, told in (("a b", "ErrReaderInvalid"), ("x" * 65, "ErrReaderInvalid")):
        assert told in cluster.cli("changefeed", "add-reader", "-c", "other", "--reader", name)
    told = cluster.cli("changefeed", "remove-reader", "-c", "other", "--reader", "none", "--yes")
    assert "ErrReaderNotExists" in told
    told = cluster.cli("changefeed", "add-reader", "-c", "nothing", "--reader", "a")
    assert "ErrChangeFeedNotExists" in told
    assert "readers" not in json.dumps(cluster.cli("changefeed", "query", "-c", "other"))
