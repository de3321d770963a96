"""The Flight client: one JSON document per action, Arrow batches by DoGet; endpoints are tried in turn.

Invariant: a connection belongs to one process. Spark forks and pickles readers, so clients live in a module-level
cache keyed by pid and are opened at first use, never in a constructor.
"""

import base64
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.flight as fl

from pyspark_tidemark.errors import SourceError, from_text
from pyspark_tidemark.options import Options, Tls

T = TypeVar("T")

RETRY_S = 30.0
"""How long an unavailable capture is waited for before the query fails."""
_ACTION_TIMEOUT_S = 30.0
_READ_TIMEOUT_S = 3600.0
_BACKOFF_S, _BACKOFF_MAX_S = 0.1, 2.0
_RETRYABLE = (fl.FlightUnavailableError, fl.FlightTimedOutError)

_clients: dict[tuple[int, str, Tls], Any] = {}


@dataclasses.dataclass(frozen=True)
class TableMeta:
    """One table of a changefeed as the captures hand it out."""

    name: str
    key: tuple[str, ...]
    schema: Any
    """pyarrow.Schema of the mounted rows: `_op, _commit_ts, _start_ts, _seq`, then the table's columns."""
    schema_ts: int = 0
    """The commit_ts of the DDL that gave this schema; rows above it have it."""


@dataclasses.dataclass(frozen=True)
class Ddl:
    """A schema change: rows with commit_ts <= ts have the schemas before it, rows above it those after it."""

    ts: int
    query: str
    tables: tuple[str, ...] = ()
    """Tables that are new or have a new schema."""
    dropped: tuple[str, ...] = ()
    truncated: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    """Tables' (old, new) names."""

    @classmethod
    def of(cls, item: dict[str, Any]) -> "Ddl":
        """Read the member of `describe`."""
        names = {name: tuple(item.get(name, ())) for name in ("tables", "dropped", "truncated")}
        renamed = tuple((old, new) for old, new in item.get("renamed", ()))
        return cls(ts=int(item["ts"]), query=str(item.get("query", "")), renamed=renamed, **names)


@dataclasses.dataclass(frozen=True)
class ChangefeedMeta:
    """A changefeed's progress, its tables, and the schema changes ahead, in order."""

    checkpoint_ts: int
    resolved_ts: int
    tables: dict[str, TableMeta]
    ddls: tuple[Ddl, ...] = ()


@dataclasses.dataclass(frozen=True)
class Slice:
    """One DoGet: a self-contained ticket and the captures that can serve it."""

    table: str
    locations: tuple[str, ...]
    ticket: bytes
    rows: int
    size_bytes: int


class Changefeed:
    """One changefeed, asked through any capture; holds no connection, so it can be pickled."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def describe(self, ts: int | None = None) -> ChangefeedMeta:
        """State, the tables and schemas in force above `ts` (None: the checkpoint), and the DDLs from it on."""
        answer = self._action("describe", {} if ts is None else {"ts": ts})
        tables = {
            item["table"]: TableMeta(
                item["table"],
                tuple(item["key"]),
                pa.ipc.read_schema(pa.py_buffer(base64.b64decode(item["schema"]))),
                int(item.get("schema_ts", 0)),
            )
            for item in answer["tables"]
        }
        ddls = tuple(Ddl.of(item) for item in answer.get("ddls", ()))
        return ChangefeedMeta(answer["checkpoint_ts"], answer["resolved_ts"], tables, ddls)

    def latest(self, start_ts: int, *, max_rows: int | None = None, wait_ms: int = 0) -> int:
        """The largest cut after `start_ts` within `max_rows`; `start_ts` itself if nothing is new."""
        body: dict[str, Any] = {"start": start_ts, "wait_ms": wait_ms} | self._of_table()
        if max_rows is not None:
            body["max_rows"] = max_rows
        return max(start_ts, int(self._action("latest", body)["ts"]))

    def plan(self, start_ts: int, end_ts: int, tables: Sequence[str] | None = None) -> list[Slice]:
        """The slices that hold `(start_ts, end_ts]` of `tables`, or of all."""
        body: dict[str, Any] = {"start": start_ts, "end": end_ts}
        if tables is not None:
            body["tables"] = list(tables)
        return [
            Slice(
                item["table"],
                tuple(item["locations"]),
                json.dumps(item["ticket"]).encode(),
                int(item.get("rows", 0)),
                int(item.get("bytes", 0)),
            )
            for item in self._action("plan", body)["slices"]
        ]

    def ack(self, ts: int) -> int:
        """Say that everything up to `ts` is durable at the reader; returns the new checkpoint_ts."""
        return int(self._action("ack", {"ts": ts} | self._of_table())["checkpoint_ts"])

    def read(self, part: Slice) -> Iterator[Any]:
        """The mounted batches of one slice; a capture that fails before its first batch is replaced by the next."""

        def opened(uri: str) -> tuple[Any, Any]:
            options = fl.FlightCallOptions(timeout=_READ_TIMEOUT_S)
            stream = _client(uri, self._options.tls).do_get(fl.Ticket(part.ticket), options)
            return stream, next(stream, None)

        stream, chunk = _first_answer(part.locations or self._options.endpoints, opened)
        while chunk is not None:
            yield chunk.data
            try:
                chunk = next(stream, None)
            except fl.FlightError as err:
                raise from_text(str(err), retryable=True) from None

    def _of_table(self) -> dict[str, str]:
        return {} if self._options.table is None else {"table": self._options.table}

    def _action(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        document = json.dumps({"changefeed": self._options.changefeed} | body).encode()

        def asked(uri: str) -> dict[str, Any]:
            options = fl.FlightCallOptions(timeout=_ACTION_TIMEOUT_S)
            results = list(_client(uri, self._options.tls).do_action(fl.Action(name, document), options))
            answer: dict[str, Any] = json.loads(results[0].body.to_pybytes())
            return answer

        return _first_answer(self._options.endpoints, asked)


def _first_answer(uris: Sequence[str], ask: Callable[[str], T]) -> T:
    deadline = time.monotonic() + RETRY_S
    pause_s = _BACKOFF_S
    while True:
        for uri in uris:
            try:
                return ask(uri)
            except _RETRYABLE as err:
                last = from_text(f"{uri}: {err}", retryable=True)
            except (fl.FlightError, pa.ArrowException) as err:
                raise from_text(f"{uri}: {err}", retryable=False) from None
        if time.monotonic() + pause_s > deadline:
            raise last
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _BACKOFF_MAX_S)


def _client(uri: str, tls: Tls) -> Any:
    known = (os.getpid(), uri, tls)
    if known not in _clients:
        _clients[known] = _connect(uri, tls)
    return _clients[known]


def _connect(uri: str, tls: Tls) -> Any:
    scheme, separator, address = uri.partition("://")
    if not separator or scheme not in ("grpc", "grpc+tcp", "grpc+tls"):
        raise SourceError("ErrOptionInvalid", f"endpoint {uri!r} must look like grpc://host:port")
    if not tls.enabled:
        return fl.FlightClient(uri)
    return fl.FlightClient(
        f"grpc+tls://{address}",
        tls_root_certs=_pem(tls.ca_path),
        cert_chain=_pem(tls.cert_path),
        private_key=_pem(tls.key_path),
    )


def _pem(path: str) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as err:
        raise SourceError("ErrCredentials", f"cannot read the TLS file {path}: {err.strerror}") from None
