"""A Flight server whose rows cost nothing to make:
the captures' contract over a computed history of some tables.

Transaction t (from 1) has `txn_rows` rows of one table and commits at `base_ts + t` milliseconds;
the busy tables take turns, the others never have rows. A table's first rows insert its keys, later
ones update keys in an order that visits all of them, or insert others, whose keys ascend or are
random; of a dumped table the first rows are updates, too, in as many cuts as readers like. A row is
about 200 bytes in 9 columns.
"""

import base64
import json
import threading
import time
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl

_CHUNK_ROWS = 16_384
_STRIDE = 7_919
_ODD = np.uint64(0x9E3779B97F4A7C15)
"""Multiplied by it, modulo 2^64, no two numbers are the same, and neighbours lie far apart."""
_TEXT = "x" * 80
SCHEMA = pa.schema(
    [
        *(
            ("_op", pa.string()),
            ("_commit_ts", pa.int64()),
            ("_start_ts", pa.int64()),
            ("_seq", pa.int64()),
        ),
        *(("id", pa.int64()), ("a", pa.int64()), ("b", pa.float64()), ("c", pa.decimal128(12, 2))),
        *(("d", pa.timestamp("us")), ("e", pa.string()), ("f", pa.string()), ("g", pa.int32())),
        ("h", pa.timestamp("us", "UTC")),
    ]
)
_SCHEMA_TEXT = base64.b64encode(SCHEMA.serialize().to_pybytes()).decode()


class BenchFeed(fl.FlightServerBase):  # type: ignore[misc]  # pyarrow is untyped
    """`keys` rows of each busy table are inserted, then updated;
    `resolve` lets readers see more transactions.

    With `inserts` ("ascending" or "random") all rows are inserts of such keys.
    """

    def __init__(
        self,
        keys: int,
        *,
        tables: int = 1,
        busy: int = 1,
        txn_rows: int = 100,
        dumped: bool = False,
        inserts: str = "",
    ) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self.base_ms = int(time.time() * 1000)
        self.committed: dict[int, float] = {}
        """When readers could first see so many transactions, by a bench that paces them."""
        self.txn_rows = txn_rows
        self.names = [f"bench.t{number:03}" for number in range(tables)]
        self.loaded = 0 if dumped else -(-keys // txn_rows) * busy
        """Transactions after which all keys are there; they are one cut. None of a dump's."""
        self._first_op = "update" if dumped else "insert"
        self._keys = keys
        self._inserts = inserts
        self._busy = busy
        self._transactions = 0
        self._moved = threading.Condition()

    @property
    def uri(self) -> str:
        """Where it listens."""
        return f"grpc://127.0.0.1:{self.port}"

    def ts(self, transaction: int) -> int:
        """The commit_ts of a transaction."""
        return (self.base_ms + transaction) << 18

    def resolve(self, transactions: int) -> None:
        """Readers may see so many."""
        with self._moved:
            self._transactions = transactions
            self._moved.notify_all()

    def do_action(self, context: Any, action: Any) -> list[bytes]:
        """See docs/format/flight.md."""
        body = json.loads(action.body.to_pybytes())
        return [json.dumps(getattr(self, f"_{action.type}")(body)).encode()]

    def do_get(self, context: Any, ticket: Any) -> Any:
        """The rows of a range."""
        body = json.loads(ticket.ticket)
        table = self.names.index(body["table"])
        first, last = (
            self._turns(self._transaction(body[name]), table) * self.txn_rows
            for name in ("start", "end")
        )
        starts = range(first, last, _CHUNK_ROWS)
        rows = (self._rows(table, start, min(start + _CHUNK_ROWS, last)) for start in starts)
        return fl.GeneratorStream(SCHEMA, rows)

    def _transaction(self, ts: int) -> int:
        return max(0, (ts >> 18) - self.base_ms)

    def _turns(self, transactions: int, table: int) -> int:
        """How many of the first `transactions` are the table's."""
        return max(0, (transactions - table - 1) // self._busy + 1) if table < self._busy else 0

    def _describe(self, body: dict[str, Any]) -> dict[str, Any]:
        tables = [
            {
                "table": name,
                "table_id": number,
                "key": ["id"],
                "schema": _SCHEMA_TEXT,
                "schema_ts": 0,
            }
            for number, name in enumerate(self.names, 1)
        ]
        progress = {
            "start_ts": self.ts(0),
            "checkpoint_ts": self.ts(0),
            "resolved_ts": self.ts(self._transactions),
        }
        return {
            "changefeed": body["changefeed"],
            "state": "normal",
            "sink_uri": "",
            "tables": tables,
        } | progress

    def _latest(self, body: dict[str, Any]) -> dict[str, Any]:
        start = self._transaction(body["start"])
        with self._moved:
            self._moved.wait_for(
                lambda: self._transactions > start, body.get("wait_ms", 200) / 1000
            )
            most = max(1, body.get("max_rows", 1 << 60) // self.txn_rows, self.loaded - start)
            return {"ts": max(body["start"], self.ts(min(self._transactions, start + most)))}

    def _plan(self, body: dict[str, Any]) -> dict[str, Any]:
        slices = []
        for number, name in enumerate(self.names[: self._busy]):
            if name not in body.get("tables", self.names):
                continue
            first, last = (
                self._turns(self._transaction(body[end]), number) for end in ("start", "end")
            )
            rows = (last - first) * self.txn_rows
            ticket = {
                "changefeed": body["changefeed"],
                "table": name,
                "start": body["start"],
                "end": body["end"],
            }
            part = {
                "table": name,
                "locations": [self.uri],
                "ticket": ticket,
                "rows": rows,
                "bytes": 200 * rows,
            }
            slices += [part] if rows else []
        return {"slices": slices}

    def _ack(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"checkpoint_ts": body["ts"]}

    def _report(self, _body: dict[str, Any]) -> dict[str, Any]:
        return {}

    def _rows(self, table: int, start: int, stop: int) -> Any:
        number = np.arange(start, stop, dtype=np.int64)
        transaction = number // self.txn_rows * self._busy + table + 1
        inserted = (number < self._keys) | bool(self._inserts)
        ids = np.where(inserted, number, number * _STRIDE % max(self._keys, 1))
        if self._inserts == "random":
            ids = (number.astype(np.uint64) * _ODD).view(np.int64)
        text = pa.array([_TEXT] * len(number))
        columns = [
            pa.array(np.where(inserted, self._first_op, "update")),
            *(
                pa.array((self.base_ms + transaction) << 18),
                pa.array(((self.base_ms + transaction) << 18) - 1),
            ),
            *(
                pa.array(number % self.txn_rows),
                pa.array(ids),
                pa.array(number),
                pa.array(number * 0.5),
            ),
            *(
                pa.array((number % 10_000).astype(np.int32)).cast(pa.decimal128(12, 2)),
                pa.array(number, pa.timestamp("us")),
            ),
            *(text, text, pa.array((number % 1000).astype(np.int32))),
            pa.array(transaction * 1_000, pa.timestamp("us", "UTC")),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
