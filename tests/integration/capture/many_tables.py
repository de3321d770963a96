"""A changefeed over several tables, and what its reader must see."""

import threading
import time

import pyarrow.flight as fl
from tidemarkpb.v1 import changefeed_pb2 as pb

from storage.tidb.record import encode_record
from storage.tidb.schema import Column, TableInfo
from tests.integration.capture.processes import Reader, patiently

TABLES = [
    TableInfo.build(300 + n, f"t{n}", [Column.bigint("id"), Column.bigint("v")]) for n in range(4)
]
NAMES = [f"many.{table.name}" for table in TABLES]
ROWS = 5


class Feed:
    """One changefeed over all tables, and what its reader must see."""

    def __init__(self, cluster, store, name="many", sink_uri="delta:///lake", **more):
        tables = [pb.Table(schema_name="many", table_info_json=table.to_json()) for table in TABLES]
        create = pb.CreateChangefeedRequest(id=name, sink_uri=sink_uri, tables=tables, **more)
        self.start = cluster.api("CreateChangefeed", create).changefeed.start_ts
        self.reader = Reader(cluster, name)
        self.expected, self.written = [], 0
        self._cluster, self._store = cluster, store

    def write(self, transactions):
        """Each changes one row of every table."""
        for _ in range(transactions):
            number, self.written = self.written, self.written + 1
            txn = self._store.begin(pessimistic=False)
            for table in TABLES:
                txn.put(*encode_record(table, {"id": number % ROWS, "v": number}))
            txn.commit()
            self.expected.append(("insert" if number < ROWS else "update", number % ROWS, number))

    def resolved(self):
        """The end of a cut that holds all that was written."""
        now, reached, deadline = self._cluster.now(), 0, time.monotonic() + 120
        while reached < now:
            assert time.monotonic() < deadline
            reached = patiently(self.reader.ask, "describe")["resolved_ts"]
        return reached

    def rows(self, end):
        """What the capture itself hands out, by table."""
        return {name: patiently(self.reader.read, self.start, end, name) for name in NAMES}

    def check(self, end):
        for rows in self.rows(end).values():
            assert changes(rows) == self.expected


class Follower(threading.Thread):
    """A reader that takes cut after cut, from the locations that it is told, and acknowledges each
    one.
    """

    def __init__(self, feed):
        super().__init__(daemon=True)
        self.feed, self.start_ts = feed, feed.start
        self.rows = {name: [] for name in NAMES}
        self.error = None
        self.ending = threading.Event()

    def run(self):
        try:
            while not self.ending.is_set():
                self.take(self.feed.reader)
        except BaseException as err:  # noqa: BLE001 - the test tells it
            self.error = err

    def take(self, reader):
        start = self.start_ts
        end = patiently(reader.ask, "latest", start=start, wait_ms=300, max_rows=40)["ts"]
        if end <= start:
            return
        parts = patiently(reader.ask, "plan", start=start, end=end)["slices"]
        assert len({part["table"] for part in parts}) == len(parts)
        for part in parts:
            rows = self.read(reader, start, end, part)
            assert rows.num_rows == part["rows"]
            self.rows[part["table"]] += changes(rows)
        patiently(reader.ask, "ack", ts=end)
        self.start_ts = end

    @staticmethod
    def read(reader, start, end, part):
        try:
            return reader.read(start, end, part["table"], part["locations"][0])
        except fl.FlightUnavailableError:
            return patiently(reader.read, start, end, part["table"])


def changes(rows):
    return [(row["_op"], row["id"], row["v"]) for row in rows.to_pylist()]
