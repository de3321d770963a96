"""A changefeed over several tables, and what its reader must see."""

import time

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

    def __init__(self, cluster, store):
        tables = [pb.Table(schema_name="many", table_info_json=table.to_json()) for table in TABLES]
        create = pb.CreateChangefeedRequest(id="many", sink_uri="delta:///lake", tables=tables)
        self.start = cluster.api("CreateChangefeed", create).changefeed.start_ts
        self.reader = Reader(cluster, "many")
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


def changes(rows):
    return [(row["_op"], row["id"], row["v"]) for row in rows.to_pylist()]
