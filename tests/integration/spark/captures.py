"""The oracle's Flight server: the captures' contract over an `Upstream` in memory, on a real socket."""

import base64
import json
import threading
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl

from tests.integration.spark.upstream import Table, Upstream


class Captures(fl.FlightServerBase):  # type: ignore[misc]
    """One capture; `resolved_ts` is what readers may see, `checkpoint_ts` what they have acknowledged."""

    def __init__(self, upstream: Upstream, changefeed: str = "bank") -> None:
        super().__init__("grpc://127.0.0.1:0")
        self.upstream = upstream
        self.changefeed = changefeed
        self.resolved_ts = upstream.end_ts
        self.checkpoint_ts = 0
        self.acks: list[int] = []
        self.reads: list[tuple[str, int, int]] = []
        self._moved = threading.Condition()

    @property
    def uri(self) -> str:
        return f"grpc://127.0.0.1:{self.port}"

    def resolve(self, ts: int) -> None:
        with self._moved:
            self.resolved_ts = ts
            self._moved.notify_all()

    def do_action(self, context: Any, action: Any) -> list[bytes]:
        body = json.loads(action.body.to_pybytes())
        if body["changefeed"] != self.changefeed:
            raise fl.FlightServerError(f"[TM:ErrChangefeedNotFound] no changefeed {body['changefeed']!r}")
        answer = getattr(self, f"_{action.type}")(body)
        return [json.dumps(answer).encode()]

    def do_get(self, context: Any, ticket: Any) -> Any:
        body = json.loads(ticket.ticket)
        table = self._table(body["table"])
        self.reads.append((table.name, body["start"], body["end"]))
        if body["end"] > self.resolved_ts:
            raise fl.FlightUnavailableError(f"[TM:ErrNotResolved] {body['end']} is not resolved")
        rows = table.between(body["start"], body["end"])
        batches = [pa.RecordBatch.from_pylist(rows[at : at + 7], schema=table.schema) for at in range(0, len(rows), 7)]
        return fl.GeneratorStream(table.schema, iter(batches))

    def _describe(self, body: dict[str, Any]) -> dict[str, Any]:
        tables = [
            {
                "table": table.name,
                "table_id": number,
                "key": table.key,
                "schema": base64.b64encode(table.schema.serialize().to_pybytes()).decode(),
                "resolved_ts": self.resolved_ts,
                "checkpoint_ts": self.checkpoint_ts,
            }
            for number, table in enumerate(self.upstream.tables.values())
        ]
        progress = {"start_ts": 0, "checkpoint_ts": self.checkpoint_ts, "resolved_ts": self.resolved_ts}
        return {"changefeed": self.changefeed, "state": "normal", "sink_uri": "", "tables": tables} | progress

    def _latest(self, body: dict[str, Any]) -> dict[str, Any]:
        start = body["start"]
        with self._moved:
            self._moved.wait_for(lambda: self.resolved_ts > start, body.get("wait_ms", 200) / 1000)
            tables = [self._table(body["table"])] if "table" in body else list(self.upstream.tables.values())
            commits = sorted(row["_commit_ts"] for table in tables for row in table.between(start, self.resolved_ts))
            limit = body.get("max_rows", len(commits))
            if len(commits) <= limit:
                return {"ts": max(start, self.resolved_ts)}
            fitting = [ts for ts in commits[:limit] if ts < commits[limit]]
            return {"ts": fitting[-1] if fitting else commits[0]}

    def _plan(self, body: dict[str, Any]) -> dict[str, Any]:
        slices = []
        for name in body.get("tables", self.upstream.tables):
            rows = len(self._table(name).between(body["start"], body["end"]))
            ticket = {"changefeed": self.changefeed, "table": name, "start": body["start"], "end": body["end"]}
            if rows:
                slices.append({"table": name, "locations": [self.uri], "ticket": ticket, "rows": rows, "bytes": 0})
        return {"slices": slices}

    def _ack(self, body: dict[str, Any]) -> dict[str, Any]:
        self.acks.append(body["ts"])
        self.checkpoint_ts = max(self.checkpoint_ts, body["ts"])
        return {"checkpoint_ts": self.checkpoint_ts}

    def _table(self, name: str) -> Table:
        if name not in self.upstream.tables:
            raise fl.FlightServerError(f"[TM:ErrTableNotFound] no table {name!r}")
        return self.upstream.tables[name]
