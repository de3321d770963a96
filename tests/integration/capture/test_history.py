"""Acknowledged history on real captures: readers that come later take all of it, it holds back no
GC, and what it has lost is said by name.
"""

import pytest

from tests.integration.capture.many_tables import NAMES, Feed
from tests.integration.capture.processes import patiently, running_cluster, transaction_client
from tests.integration.capture.test_readers import Named, until

pytest.importorskip("tikv_client")
pytestmark = pytest.mark.timeout(300)
DAY_S = 86_400


@pytest.fixture(scope="module", params=[(), ("--workers", "2")], ids=["one process", "workers"])
def cluster(request, tmp_path_factory):
    flags = ("--memory-quota-bytes", str(64 << 10), *request.param)
    with running_cluster(tmp_path_factory.mktemp("history"), *flags) as running:
        yield running


@pytest.fixture(scope="module")
def store(cluster):
    with transaction_client(cluster) as client:
        yield client


class History:
    """A changefeed without a lake job that keeps its history, and the commands about it."""

    def __init__(self, cluster, store, name, **more):
        self.cluster, self.name = cluster, name
        self.feed = Feed(cluster, store, name, "flight://", **more)

    def run(self, verb, *arguments):
        return self.cluster.cli("changefeed", verb, "-c", self.name, *arguments)

    def add(self, reader, *arguments):
        answer = self.run("add-reader", "--reader", reader, *arguments)
        return Named(self.feed, reader) if isinstance(answer, dict) else answer

    def state(self, reader):
        shown = {each["name"]: each["state"] for each in self.run("list-readers")}
        return shown[reader]

    @property
    def checkpoint_ts(self):
        return self.run("query")["checkpoint_tso"]

    @property
    def kept_ts(self):
        return self.run("query")["retain"]["kept_tso"]


def has(reader, first=0):
    """Whether a reader has all changes of all tables, from that one on, each once and in order.

    Rows of an earlier test may be there: whether a change is an insert depends on them.
    """
    expected = [change[1:] for change in reader.feed.expected[first:]]
    return all([change[1:] for change in reader.rows[table]] == expected for table in NAMES)


def acknowledge(reader, ts):
    """As an idle reader does, which says it again and again."""
    for _ in range(2):
        patiently(reader.feed.reader.ask, "ack", ts=ts, reader=reader.name)


def test_a_late_reader_takes_all_that_is_kept_while_others_go_on(cluster, store):
    history = History(cluster, store, "kept", retain_s=DAY_S)
    feed, fast = history.feed, history.add("fast")
    feed.write(40)
    first = feed.resolved()
    fast.take(first, step=10)
    feed.write(10)
    end = feed.resolved()
    fast.take(end, step=7)
    acknowledge(fast, end)
    until(lambda: history.checkpoint_ts >= first, True)
    assert has(fast)
    # GC goes on up to the checkpoint, whatever is kept.
    until(lambda: held_by(cluster, history) >= first - 1, True)
    until(lambda: history.run("query")["retain"]["kept_bytes"] > 0, True)
    assert history.kept_ts == feed.start

    late = history.add("late")
    assert late.position == feed.start
    half = feed.start + (first - feed.start) // 2
    late.take(half, step=8)
    held = history.checkpoint_ts
    feed.write(10)
    end = feed.resolved()
    fast.take(end)
    acknowledge(fast, end)
    assert history.checkpoint_ts == held, "it waits until the late one has caught up"
    late.take(end, step=9)
    acknowledge(late, end)
    assert has(late)
    assert has(fast)
    until(lambda: history.checkpoint_ts, end)

    # One that begins in the middle has all that follows.
    middle = history.add("middle", "--start-ts", str(first))
    middle.take(end)
    assert has(middle, 40)

    # One that asks for more is told where history begins.
    told = history.add("too-early", "--start-ts", str(feed.start - 1))
    assert "ErrRangeCleaned" in told
    assert str(feed.start) in told
    assert "cannot begin at" in history.add("too-late", "--start-ts", str(end << 1))
    history.run("remove", "--yes")


def held_by(cluster, history):
    """The changefeed's service safepoint."""
    services = cluster.cli("gc", "safepoint")["service_gc_safe_points"]
    return next(
        (each["safe_point"] for each in services if each["service_id"].endswith(history.name)), 0
    )


def test_a_capture_that_dies_takes_history_with_it_and_says_so(cluster, store):
    history = History(cluster, store, "dying", retain_s=DAY_S)
    feed, fast = history.feed, history.add("fast")
    feed.write(30)
    end = feed.resolved()
    fast.take(end, step=10)
    acknowledge(fast, end)
    until(lambda: history.checkpoint_ts, end)
    late = history.add("late")
    half = feed.start + (end - feed.start) // 2
    late.take(half, step=5)
    late_at = late.position
    assert feed.start < late_at < end
    # It is kept five times a second, with the others'.
    feed.write(1)
    moved = feed.resolved()
    fast.take(moved)
    acknowledge(fast, moved)

    cluster.capture.kill()
    cluster.capture.start()
    until(lambda: patiently(feed.reader.ask, "describe").get("kept_ts", 0), end)
    # Its position is not moved past what it has not had.
    assert late.position == late_at
    with pytest.raises(Exception, match=rf"ErrRangeCleaned.*committed after {end}"):
        feed.reader.ask("latest", start=late_at, wait_ms=100)
    with pytest.raises(Exception, match="ErrRangeCleaned"):
        feed.reader.ask("plan", start=late_at, end=end)
    until(lambda: history.state("late"), "lost")

    # The other one goes on, and is not held up.
    feed.write(10)
    end = feed.resolved()
    fast.take(end)
    acknowledge(fast, end)
    until(lambda: history.checkpoint_ts, end)
    # What it had acknowledged last may not have been kept: it came once more then.
    fast.rows = {table: list(dict.fromkeys(rows)) for table, rows in fast.rows.items()}
    assert has(fast)
    history.run("remove-reader", "--reader", "late", "--yes")
    again = history.add("late")
    again.take(end)
    assert has(again, 30)
    history.run("remove", "--yes")


def test_what_is_over_the_size_goes_and_a_silent_reader_lets_go(cluster, store):
    history = History(cluster, store, "small", retain_bytes=1, reader_ttl_s=5)
    feed, fast = history.feed, history.add("fast")
    history.add("gone")
    feed.write(20)
    end = feed.resolved()
    fast.take(end, step=4)

    def state():
        acknowledge(fast, end)
        return history.state("gone")

    until(lambda: state() in ("let go", "lost"), True)
    until(lambda: (acknowledge(fast, end), history.checkpoint_ts)[1], end)
    until(lambda: history.kept_ts, end)
    until(state, "lost")
    with pytest.raises(Exception, match=rf"ErrRangeCleaned.*committed after {end}"):
        feed.reader.ask("latest", start=feed.start, wait_ms=100)

    # More is kept from now on, without beginning anew.
    shown = history.run("update", "--retain", "24h,1GiB")
    assert shown["retain"]["seconds"] == DAY_S
    assert shown["retain"]["bytes"] == 1 << 30
    feed.write(5)
    after = feed.resolved()
    fast.take(after)
    acknowledge(fast, after)
    until(lambda: history.checkpoint_ts, after)
    assert history.kept_ts == end
    again = history.add("again")
    again.take(after)
    assert has(again, 20)
    history.run("remove", "--yes")
