"""Tables move between captures while a reader goes on: it gets every row once, in order, and the
changefeed neither fails nor begins again.
"""

import threading
import time
from contextlib import contextmanager

import pytest
from tidemarkpb.v1 import changefeed_pb2 as pb

from storage.model.ts import physical_s
from storage.tidb.record import encode_record
from storage.tidb.schema import Column, TableInfo
from tests.integration.capture.many_tables import NAMES, TABLES, Feed, Follower
from tests.integration.capture.processes import (
    Reader,
    patiently,
    running_cluster,
    transaction_client,
)

pytest.importorskip("tikv_client")
PATIENCE_S = 120


@contextmanager
def followed(feed):
    """Read all that is written meanwhile; at the end it is what was written."""
    reader = Follower(feed)
    reader.start()
    try:
        yield reader
        deadline = time.monotonic() + PATIENCE_S
        while reader.error is None and any(rows != feed.expected for rows in reader.rows.values()):
            assert time.monotonic() < deadline, {
                name: len(rows) for name, rows in reader.rows.items()
            }
            time.sleep(0.1)
    finally:
        reader.ending.set()
        reader.join()
    if reader.error is not None:
        raise reader.error
    assert all(rows == feed.expected for rows in reader.rows.values())


def captures_of_tables(cluster):
    listed = cluster.cli("changefeed", "query", "-c", "many")["tables"]
    return {each["table"]: each.get("capture", "") for each in listed}


def write_until(feed, done, patience_s=PATIENCE_S):
    deadline = time.monotonic() + patience_s
    while not done():
        assert time.monotonic() < deadline
        feed.write(5)


def metric(cluster, name):
    """Of the changefeed, at the owner."""
    import urllib.request

    with urllib.request.urlopen(
        f"http://{cluster.capture.endpoints['http']}/metrics", timeout=60
    ) as answer:
        lines = answer.read().decode().splitlines()
    values = [
        line.rsplit(" ", 1)[1] for line in lines if line.startswith(f'{name}{{changefeed="many"')
    ]
    return float(values[0]) if values else 0.0


def has_left(cluster, capture):
    """Whether the share of a capture that is drained has ended."""
    lines = cluster.capture.log.read_text().splitlines()
    return any("worker has no share any more" in line and capture in line for line in lines)


class Mover(threading.Thread):
    """Moves a table to and fro, whatever comes of it."""

    def __init__(self, cluster, captures):
        super().__init__()
        self.cluster, self.captures = cluster, captures
        self.moved, self.ending = 0, threading.Event()

    def run(self):
        number = 0
        while not self.ending.is_set():
            number += 1
            told = self.cluster.cli(
                *("changefeed", "move-table", "-c", "many", "--table", NAMES[number % 2]),
                *("--to", self.captures[number // 2 % len(self.captures)]),
            )
            self.moved += isinstance(told, dict)


@pytest.mark.timeout(600)
def test_a_capture_that_dies_while_tables_move_loses_and_doubles_nothing(tmp_path):
    with running_cluster(tmp_path) as cluster, transaction_client(cluster) as store:
        second = cluster.another_capture()
        feed = Feed(cluster, store)
        write_until(feed, lambda: len(set(captures_of_tables(cluster).values()) - {""}) == 2)
        with followed(feed):
            mover = Mover(cluster, [each["id"] for each in cluster.cli("capture", "list")])
            mover.start()
            try:
                for _ in range(3):
                    before = mover.moved
                    write_until(feed, lambda before=before: mover.moved > before)
                    second.kill()
                    feed.write(20)
                    second.start()
                    mover.captures = [each["id"] for each in cluster.cli("capture", "list")]
            finally:
                mover.ending.set()
                mover.join()
            feed.write(10)


@pytest.mark.timeout(600)
def test_a_changefeed_goes_from_one_capture_to_two_and_back_without_beginning_again(tmp_path):
    with running_cluster(tmp_path) as cluster, transaction_client(cluster) as store:
        feed = Feed(cluster, store)
        feed.write(20)
        alone = set(captures_of_tables(cluster).values())
        assert len(alone) == 1
        with followed(feed):
            for _ in range(2):
                second = cluster.another_capture()
                write_until(feed, lambda: len(set(captures_of_tables(cluster).values())) == 2)
                [joined] = set(captures_of_tables(cluster).values()) - alone
                cluster.cli("capture", "drain", joined)
                write_until(feed, lambda: set(captures_of_tables(cluster).values()) == alone)
                write_until(feed, lambda joined=joined: has_left(cluster, joined))
                assert second.terminate() == 0
                feed.write(10)
        assert metric(cluster, "tidemark_capture_tables_moved_total") >= 4
        assert "changefeed error" not in cluster.capture.log.read_text()
        assert cluster.cli("changefeed", "query", "-c", "many")["state"] == "normal"


class Heated:
    """A changefeed of tables, of which one changes a hundred times as much as all others."""

    ROWS, TEXT = 20, "x" * 4000

    def __init__(self, cluster, store):
        self.tables = [
            TableInfo.build(400 + n, f"h{n}", [Column.bigint("id"), Column.varchar("v", 8000)])
            for n in range(8)
        ]
        tables = [pb.Table(schema_name="many", table_info_json=t.to_json()) for t in self.tables]
        request = pb.CreateChangefeedRequest(id="many", sink_uri="delta:///lake", tables=tables)
        self.start = cluster.api("CreateChangefeed", request).changefeed.start_ts
        self.reader, self.written = Reader(cluster, "many"), 0
        self._store = store

    def write(self, transactions):
        for _ in range(transactions):
            self.written += 1
            txn = self._store.begin(pessimistic=False)
            hot, *others = self.tables
            for number in range(self.ROWS):
                txn.put(*encode_record(hot, {"id": number, "v": f"{self.written} {self.TEXT}"}))
            for table in others:
                txn.put(*encode_record(table, {"id": 1, "v": f"{self.written}"}))
            txn.commit()

    def check(self, end):
        """Every row is there once, in order, wherever its table was."""
        for table in self.tables:
            rows = patiently(self.reader.read, self.start, end, f"many.{table.name}").to_pylist()
            seen = [int(row["v"].split()[0]) for row in rows]
            per_write = self.ROWS if table is self.tables[0] else 1
            assert seen == [n for n in range(1, self.written + 1) for _ in range(per_write)]


@pytest.mark.nightly  # it waits for more than a minute; tests/unit has the same with a clock of its own
@pytest.mark.timeout(900)
def test_tables_move_away_from_a_busy_one_once_and_stay_there(tmp_path):
    with running_cluster(tmp_path) as cluster, transaction_client(cluster) as store:
        cluster.another_capture()
        feed = Heated(cluster, store)

        def with_the_hot():
            captures = captures_of_tables(cluster)
            return sum(each == captures["many.h0"] for each in captures.values())

        def tables_moved():
            return metric(cluster, "tidemark_capture_tables_moved_total")

        write_until(feed, lambda: len(set(captures_of_tables(cluster).values()) - {""}) == 2)
        write_until(feed, lambda: with_the_hot() <= 2, patience_s=400)
        write_until(feed, lambda: "tables moved" in cluster.capture.log.read_text())
        # Where moves for weight end is below where they begin: with the same load, nothing moves at
        # the next look, a minute later.
        captures, moved, since_ts = captures_of_tables(cluster), tables_moved(), cluster.now()
        assert moved >= 1
        write_until(feed, lambda: seconds_between(since_ts, cluster.now()) > 75, patience_s=400)
        assert (captures_of_tables(cluster), tables_moved()) == (captures, moved)
        feed.check(feed.reader.wait_resolved(cluster.now()))
        assert cluster.cli("changefeed", "query", "-c", "many")["state"] == "normal"


def seconds_between(ts, later_ts):
    return physical_s(later_ts) - physical_s(ts)


@pytest.mark.timeout(600)
def test_tables_move_while_a_reader_goes_on(tmp_path):
    with running_cluster(tmp_path) as cluster, transaction_client(cluster) as store:
        second = cluster.another_capture()
        feed = Feed(cluster, store)
        write_until(feed, lambda: len(set(captures_of_tables(cluster).values()) - {""}) == 2)
        divided = metric(cluster, "tidemark_capture_moves_total")
        with followed(feed):
            third = cluster.start(
                "capture", "--coordinator", cluster.pd, "--data-dir", str(tmp_path / "third")
            )
            write_until(feed, lambda: len(set(captures_of_tables(cluster).values())) == 3)

            ids = {each["address"]: each["id"] for each in cluster.cli("capture", "list")}
            for number in range(6):
                capture = ids[(second, third, cluster.capture)[number % 3].endpoints["capture"]]
                moved = cluster.cli(
                    "changefeed", "move-table", "-c", "many", "--table", NAMES[0], "--to", capture
                )
                assert moved["capture"] == capture
                assert captures_of_tables(cluster)[NAMES[0]] == capture
                feed.write(10)

            where = f"?tableID={TABLES[0].id}&targetNodeID={ids[third.endpoints['capture']]}"
            path = f"/api/v2/changefeeds/many/move_table{where}"
            assert cluster.http("POST", path) == (200, {})
            capture = ids[third.endpoints["capture"]]
            assert captures_of_tables(cluster)[NAMES[0]] == capture
            status, processor = cluster.http("GET", f"/api/v2/processors/many/{capture}")
            assert status == 200
            assert TABLES[0].id in processor["table_ids"]

            told = cluster.cli(
                *("changefeed", "move-table", "-c", "many", "--table", NAMES[0], "--to", "nobody")
            )
            assert "[TM:ErrTableMoveRefused]" in told
            told = cluster.cli(
                *("changefeed", "move-table", "-c", "many", "--table", "many.no", "--to", capture)
            )
            assert "no" in told
            assert "[TM:ErrTableNotExists]" in told

            drained = ids[second.endpoints["capture"]]
            cluster.cli("capture", "drain", drained)
            write_until(feed, lambda: drained not in captures_of_tables(cluster).values())
            assert second.terminate() == 0
            feed.write(10)
        assert metric(cluster, "tidemark_capture_moves_total") == divided, "nothing began again"
        assert metric(cluster, "tidemark_capture_tables_moved_total") >= 6
        assert cluster.cli("changefeed", "query", "-c", "many")["state"] == "normal"
