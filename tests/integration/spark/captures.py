"""The oracle's Flight server: the captures' contract over an `Upstream` in memory,
on a real socket.

`ddls` are the schema changes it tells and never cuts across; `slice_rows` makes a plan split
tables, as slice_bytes does with a real capture; with `token` calls must name themselves; after
`die_after` batches of a DoGet it fails once, as if killed.
"""

import base64
import json
import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl

from tests.integration.spark.upstream import Table, Upstream

ROW_BYTES = 100


class _Caller(fl.ServerMiddleware):  # type: ignore[misc]
    """What a call says of itself."""

    def __init__(self, authorization: str) -> None:
        self.authorization = authorization


class _Headers(fl.ServerMiddlewareFactory):  # type: ignore[misc]
    """Keeps it."""

    def start_call(self, info: Any, headers: dict[str, list[str]]) -> Any:
        return _Caller(next(iter(headers.get("authorization", [])), ""))


def _encoded(schema: Any) -> str:
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


class Captures(fl.FlightServerBase):  # type: ignore[misc]
    """One capture; `resolved_ts` is what readers may see,
    `checkpoint_ts` what they have acknowledged.
    """

    def __init__(self, upstream: Upstream, changefeed: str = "bank") -> None:
        super().__init__("grpc://127.0.0.1:0", middleware={"headers": _Headers()})
        self.upstream = upstream
        self.changefeed = changefeed
        self.resolved_ts = upstream.end_ts
        self.checkpoint_ts = 0
        self.cleaned_ts = 0
        self.acks: list[int] = []
        self.reads: list[tuple[str, int, int]] = []
        self.ddls: list[dict[str, Any]] = []
        self.skipped: list[tuple[int, int]] = []
        self.epoch = 0
        self.slice_rows = 0
        self.token = ""
        self.die_after = 0
        self._moved = threading.Condition()

    @property
    def uri(self) -> str:
        return f"grpc://127.0.0.1:{self.port}"

    def resolve(self, ts: int) -> None:
        with self._moved:
            self.resolved_ts = ts
            self._moved.notify_all()

    def do_action(self, context: Any, action: Any) -> list[bytes]:
        self._check_token(context)
        body = json.loads(action.body.to_pybytes())
        if body["changefeed"] != self.changefeed:
            raise fl.FlightServerError(
                f"[TM:ErrChangefeedNotFound] no changefeed {body['changefeed']!r}"
            )
        answer = getattr(self, f"_{action.type}")(body)
        return [json.dumps(answer).encode()]

    def do_get(self, context: Any, ticket: Any) -> Any:
        self._check_token(context)
        body = json.loads(ticket.ticket)
        table = self._table(body["table"])
        self.reads.append((table.name, body["start"], body["end"]))
        if body["end"] > self.resolved_ts:
            raise fl.FlightUnavailableError(f"[TM:ErrNotResolved] {body['end']} is not resolved")
        rows = table.between(body["start"], body["end"])
        schema = table.schema_at(body["start"], before=body.get("before", False))
        batches = [
            pa.RecordBatch.from_pylist(rows[at : at + 7], schema=schema)
            for at in range(0, len(rows), 7)
        ]
        return fl.GeneratorStream(schema, self._sent(batches))

    def _sent(self, batches: list[Any]) -> Iterator[Any]:
        for number, batch in enumerate(batches):
            if self.die_after and number >= self.die_after:
                self.die_after = 0
                raise fl.FlightUnavailableError("[TM:ErrWorkerLost] as if killed")
            yield batch

    def _check_token(self, context: Any) -> None:
        given = context.get_middleware("headers").authorization
        if self.token and given != f"Bearer {self.token}":
            raise fl.FlightUnauthenticatedError(
                "[TM:ErrUnauthenticated] the call names nobody: give a token"
            )

    def _describe(self, body: dict[str, Any]) -> dict[str, Any]:
        ts = body.get("ts", self.checkpoint_ts)
        tables = [
            {
                "table": table.name,
                "table_id": number,
                "key": table.key,
                "schema": _encoded(table.schema_at(ts, before=body.get("before", False))),
                "resolved_ts": self.resolved_ts,
                "checkpoint_ts": self.checkpoint_ts,
            }
            for number, table in enumerate(self.upstream.tables.values())
        ]
        ddls = [ddl for ddl in self.ddls if ts <= ddl["ts"] <= self.resolved_ts]
        progress = {
            "start_ts": 0,
            "checkpoint_ts": self.checkpoint_ts,
            "resolved_ts": self.resolved_ts,
        }
        return {
            "changefeed": self.changefeed,
            "state": "normal",
            "sink_uri": "",
            "tables": tables,
            "ddls": ddls,
            "skipped": self.skipped,
            "epoch": self.epoch,
        } | progress

    def _latest(self, body: dict[str, Any]) -> dict[str, Any]:
        start = body["start"]
        with self._moved:
            self._moved.wait_for(lambda: self.resolved_ts > start, body.get("wait_ms", 200) / 1000)
            tables = (
                [self._table(body["table"])]
                if "table" in body
                else list(self.upstream.tables.values())
            )
            end = min([ddl["ts"] for ddl in self.ddls if ddl["ts"] > start] + [self.resolved_ts])
            commits = sorted(
                row["_commit_ts"] for table in tables for row in table.between(start, end)
            )
            limit = min(
                body.get("max_rows", len(commits)), body.get("max_bytes", 1 << 60) // ROW_BYTES
            )
            if len(commits) <= limit:
                return {"ts": max(start, end)}
            fitting = [ts for ts in commits[:limit] if ts < commits[limit]]
            return {"ts": fitting[-1] if fitting else commits[0]}

    def _plan(self, body: dict[str, Any]) -> dict[str, Any]:
        slices = []
        if any(body["start"] < ddl["ts"] < body["end"] for ddl in self.ddls):
            raise fl.FlightServerError("[TM:ErrRangeCrossesDdl] ask for the parts")
        if body["start"] < self.cleaned_ts:
            raise fl.FlightServerError("[TM:ErrRangeCleaned] begin at checkpoint_ts")
        for name in body.get("tables", self.upstream.tables):
            for start, end, rows in self._slices(self._table(name), body["start"], body["end"]):
                ticket = {"changefeed": self.changefeed, "table": name, "start": start, "end": end}
                size = {"rows": rows, "bytes": rows * ROW_BYTES}
                slices.append({"table": name, "locations": [self.uri], "ticket": ticket} | size)
        return {"slices": slices}

    def _slices(self, table: Table, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Ranges of some `slice_rows` rows; a commit_ts is never split."""
        rows, last = 0, start
        for row in table.between(start, end):
            if self.slice_rows and rows >= self.slice_rows and row["_commit_ts"] > last:
                yield start, last, rows
                start, rows = last, 0
            rows, last = rows + 1, row["_commit_ts"]
        if rows:
            yield start, end, rows

    def _ack(self, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("epoch", self.epoch) != self.epoch:
            raise fl.FlightServerError("[TM:ErrChangefeedMovedBack] it was moved back")
        self.acks.append(body["ts"])
        self.cleaned_ts = self.checkpoint_ts if body["ts"] > self.checkpoint_ts else self.cleaned_ts
        self.checkpoint_ts = max(self.checkpoint_ts, body["ts"])
        return {"checkpoint_ts": self.checkpoint_ts}

    def _table(self, name: str) -> Table:
        if name not in self.upstream.tables:
            raise fl.FlightServerError(f"[TM:ErrTableNotFound] no table {name!r}")
        return self.upstream.tables[name]
