"""The captures' contract (docs/format/flight.md) as this package uses it:
a JSON document per action, batches by DoGet.

An older capture ignores members that it does not know (`slice_bytes`, `before`, `ts` of describe):
a table then comes in one slice, and whoever needs a member that its answer lacks raises an error.
"""

import base64
import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.flight as fl

from pyspark_tidemark.column_metadata import column_ids, defaults_of, without_metadata
from pyspark_tidemark.connection import (
    RETRYABLE,
    Pause,
    call_options,
    client,
    first_answer,
    last_good_first,
    sleep,
    token_may_change,
)
from pyspark_tidemark.errors import MOVED_BACK, SourceError, from_text
from pyspark_tidemark.options import Options

BEFORE = "_before"
_ACTION_TIMEOUT_S = 30.0
_READ_TIMEOUT_S = 3600.0
_REPORT_TIMEOUT_S = 5.0
_ACK_AGAIN_TIMEOUT_S = 5.0
_TRACED_SLICES_MAX: Final = 100
"""A first cut may have a slice for each of 100,000 tables; nobody looks at so many spans."""
ACK_AGAIN_S: Final = 10.0
"""How often an idle reader repeats its last acknowledgement."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """Of which table of the target a table is a shard, and which column there has its name."""

    table: str
    column: str


@dataclasses.dataclass(frozen=True)
class TableMeta:
    """One table of a changefeed as the captures hand it out, or several merged (`lake.shards`)."""

    name: str
    key: tuple[str, ...]
    schema: Any
    """pyarrow.Schema of the mounted rows: `_op, _commit_ts, _start_ts, _seq`,
    then the table's columns.
    """
    schema_ts: int = 0
    """The commit_ts of the DDL that gave this schema; the changefeed's start for the first one."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    """What rows hold that are older than a column, by column, as JSON (`column_metadata`);
    null where nothing is said.
    """
    table_id: int = 0
    """The upstream's id: a table that was dropped and made again has another one;
    0 if the capture does not say.
    """
    column_ids: Mapping[str, int] = dataclasses.field(default_factory=dict, hash=False)
    """The identity of each column, which a rename keeps;
    empty if the capture is too old to say it.
    """
    shard: Shard | None = None
    """Where it is merged with others in the target."""
    shards: "tuple[TableMeta, ...]" = ()
    """The tables that it was merged from."""


FILTER_UPDATE: Final = "/* tidemark changefeed update --filter"
"""How the query of a schema change begins by which a changefeed gets a new table filter."""


@dataclasses.dataclass(frozen=True)
class Ddl:
    """A schema change: rows up to `ts` have the old schema, rows above it the new one."""

    ts: int
    query: str
    tables: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    truncated: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()

    @property
    def is_filter_update(self) -> bool:
        """Whether it is none of the source's: the changefeed takes other tables from here on."""
        return self.query.startswith(FILTER_UPDATE)

    @property
    def touched(self) -> frozenset[str]:
        """Every table it is about, by its names before and after."""
        names = (name for pair in self.renamed for name in pair)
        return frozenset((*self.tables, *self.dropped, *self.truncated, *names))


@dataclasses.dataclass(frozen=True)
class ChangefeedMeta:
    """A changefeed's progress, its tables above a ts, and the schema changes from that ts on,
    in order.
    """

    checkpoint_ts: int
    resolved_ts: int
    tables: dict[str, TableMeta]
    ddls: tuple[Ddl, ...] = ()
    target_ts: int | None = None
    """Where the changefeed ends; None: nowhere."""
    skipped: tuple[tuple[int, int], ...] = ()
    """Ranges `(start_ts, end_ts]` that an operator chose not to deliver, ascending."""
    state: str = ""
    """`normal`, `warning`, `stopped`, `failed` or `finished`."""
    start_ts: int | None = None
    """Where the changefeed began; None: the captures do not say."""


@dataclasses.dataclass(frozen=True)
class Known:
    """The tables in force above `ts`, by name, as they were described before."""

    ts: int
    tables: dict[str, TableMeta]


@dataclasses.dataclass(frozen=True)
class SliceEndpoint:
    """One DoGet: a self-contained ticket and the captures that can serve it."""

    table: str
    locations: tuple[str, ...]
    ticket: bytes
    rows: int
    size_bytes: int
    is_traced: bool = False
    """Whether its ticket names the span that the read is a part of."""


class Changefeed:
    """One changefeed, asked through any capture; holds no connection, so it can be pickled."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._epoch: int | None = None
        self.traceparent = options.traceparent
        """The span of which the reads that are planned now are a part; empty: nothing is traced."""
        self.resolved_ts = 0
        """How far the captures were when they described the changefeed last."""
        self.pause: Pause = sleep
        """Waits between two tries of a call; a lake job that is told to stop waits no longer."""

    def __getstate__(self) -> dict[str, Any]:
        """Without `pause`: on executors nobody sees that the job is to stop."""
        return self.__dict__ | {"pause": sleep}

    @property
    def epoch(self) -> int:
        """How often the changefeed's checkpoint had been moved back when this object first
        described it: captures refuse acknowledgements of an earlier epoch.
        """
        if self._epoch is None:
            self.describe()
        assert self._epoch is not None, "describe notes it"
        return self._epoch

    def describe(
        self,
        ts: int | None = None,
        *,
        known: Known | None = None,
        retry_s: float | None = None,
    ) -> ChangefeedMeta:
        """The changefeed's progress, and the tables of rows above `ts` (None: the checkpoint).

        Captures leave the tables out if they are those of `known`, which are returned then. For
        `retry_s` see `first_answer`.
        """
        body: dict[str, Any] = {"before": True} if self._options.before_image else {}
        body |= ({} if ts is None else {"ts": ts}) | (
            {} if known is None else {"known_ts": known.ts}
        )
        answer = self._action("describe", body | self._reader_member(), retry_s=retry_s)
        if self._epoch is None:
            self._epoch = int(answer.get("epoch", 0))
        if known is not None and "tables" not in answer:
            tables = known.tables
        else:
            tables = {item["table"]: _table(item) for item in answer["tables"]}
        ddls = tuple(_ddl(item) for item in answer.get("ddls", ()))
        skipped = tuple((start_ts, end_ts) for start_ts, end_ts in answer.get("skipped", ()))
        checkpoint_ts, resolved_ts = answer["checkpoint_ts"], answer["resolved_ts"]
        self.resolved_ts = resolved_ts
        return ChangefeedMeta(
            checkpoint_ts,
            resolved_ts,
            tables,
            ddls,
            answer.get("target_ts"),
            skipped,
            answer.get("state", ""),
            answer.get("start_ts"),
        )

    def latest(
        self,
        start_ts: int,
        *,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        wait_ms: int = 0,
    ) -> int:
        """The largest cut after `start_ts` within the limits;
        `start_ts` itself if nothing is new.
        """
        limits = {
            "max_rows": max_rows,
            "max_bytes": max_bytes,
            "idle_ms": self._options.idle_ms,
        }
        body: dict[str, Any] = {"start": start_ts, "wait_ms": wait_ms} | self._table_member()
        body |= {name: limit for name, limit in limits.items() if limit is not None}
        return max(start_ts, int(self._action("latest", body)["ts"]))

    def plan(
        self, start_ts: int, end_ts: int, tables: Sequence[str] | None = None
    ) -> list[SliceEndpoint]:
        """The slices that hold `(start_ts, end_ts]` of `tables`, or of all,
        a table's in commit order.
        """
        options = self._options
        body: dict[str, Any] = {
            "start": start_ts,
            "end": end_ts,
            "slice_bytes": options.slice_bytes,
        }
        more: dict[str, Any] = {"before": True} if options.before_image else {}
        if tables is not None:
            body["tables"] = list(tables)
        slices = [
            SliceEndpoint(
                item["table"],
                tuple(item["locations"]),
                json.dumps(item["ticket"] | more).encode(),
                int(item.get("rows", 0)),
                int(item.get("bytes", 0)),
            )
            for item in self._action("plan", body | more)["slices"]
        ]
        return slices_within(self.traceparent, slices)

    def ack(self, ts: int, table: str | None = None) -> int:
        """Acknowledge that everything up to `ts` is durable at the reader, of `table` or of what
        the options choose; returns the changefeed's checkpoint_ts.

        A capture may die before it has saved that, so an idle reader repeats it every `ACK_AGAIN_S`
        by `ack_again`.

        Raises:
            SourceError: ErrChangefeedMovedBack, its checkpoint was moved back meanwhile.
        """
        return int(self._action("ack", self._ack_body(ts, table))["checkpoint_ts"])

    def ack_again(self, ts: int, table: str | None = None) -> None:
        """Repeat an acknowledgement, in one try of a few seconds. A failure is ignored, since the
        next repetition may succeed.

        Raises:
            SourceError: ErrChangefeedMovedBack, no later one can succeed.
        """
        try:
            self._action(
                "ack", self._ack_body(ts, table), timeout_s=_ACK_AGAIN_TIMEOUT_S, retry_s=0.0
            )
        except SourceError as err:
            if err.code == MOVED_BACK:
                raise

    def report(
        self,
        state: str,
        cut_ts: int,
        error: SourceError | None = None,
        commits: str = "",
        ui: str = "",
    ) -> None:
        """Report the state of the job that keeps the changefeed's lake, what it commits in one step
        (`cut`, `table`), and where its Spark's web UI is; tried once at each capture. A reader with
        a name is no such job: it reports nothing.

        Raises:
            SourceError: no capture took the report; ErrFlightRequestInvalid from a capture that has
                no reports yet.
        """
        if self._options.reader:
            return
        body: dict[str, Any] = {"state": state, "cut_ts": cut_ts}
        if error is not None:
            body |= {"code": error.code, "message": error.message}
        if commits:
            body["commits"] = commits
        if ui:
            body["ui"] = ui
        self._action("report", body, timeout_s=_REPORT_TIMEOUT_S, retry_s=0.0)

    def read(self, part: SliceEndpoint) -> Iterator[Any]:
        """The mounted batches of one slice.

        A capture that fails is replaced by another, or waited for.
        """
        endpoints = self._options.endpoints
        uris = (*part.locations, *(uri for uri in endpoints if uri not in part.locations))
        skip = 0
        # The same ticket gives the same rows in the same order, so another capture goes on behind
        # those that came already; batches may be cut elsewhere.
        while True:
            opened = functools.partial(self._open_stream, part.ticket, skip)
            stream, batch = first_answer(uris, opened, pause=self.pause)
            try:
                while batch is not None:
                    skip += batch.num_rows
                    yield batch
                    chunk = next(stream, None)
                    batch = None if chunk is None else chunk.data
            except RETRYABLE:
                continue
            except fl.FlightError as err:
                raise from_text(str(err), retryable=True) from None
            return

    def _open_stream(self, ticket: bytes, skip: int, uri: str) -> tuple[Any, Any]:
        """A stream behind its first `skip` rows, and its next batch."""
        credentials = self._options.credentials
        with token_may_change(uri, credentials):
            stream = client(uri, credentials).do_get(
                fl.Ticket(ticket), call_options(credentials, _READ_TIMEOUT_S)
            )
            for chunk in stream:
                if skip == 0 or chunk.data.num_rows > skip:
                    return stream, chunk.data.slice(skip)
                skip -= chunk.data.num_rows
            return stream, None

    def _ack_body(self, ts: int, table: str | None) -> dict[str, Any]:
        body = {"ts": ts, "epoch": self.epoch}
        if self._options.reader:
            return body | self._reader_member()
        return body | (self._table_member() if table is None else {"table": table})

    def _reader_member(self) -> dict[str, str]:
        return {"reader": self._options.reader} if self._options.reader else {}

    def _table_member(self) -> dict[str, str]:
        return {} if self._options.table is None else {"table": self._options.table}

    def _action(
        self,
        name: str,
        body: dict[str, Any],
        *,
        timeout_s: float = _ACTION_TIMEOUT_S,
        retry_s: float | None = None,
    ) -> dict[str, Any]:
        document = json.dumps({"changefeed": self._options.changefeed} | body).encode()
        credentials = self._options.credentials

        def asked(uri: str) -> dict[str, Any]:
            options = call_options(credentials, timeout_s)
            action = fl.Action(name, document)
            with token_may_change(uri, credentials):
                results = list(client(uri, credentials).do_action(action, options))
            answer: dict[str, Any] = json.loads(results[0].body.to_pybytes())
            return answer

        return last_good_first(self._options.endpoints, asked, retry_s, self.pause)


def slices_within(traceparent: str, slices: Sequence[SliceEndpoint]) -> list[SliceEndpoint]:
    """The same slices, whose reads are a part of a span: the first ones of many."""
    if not traceparent:
        return list(slices)
    member = {"traceparent": traceparent}
    traced = [
        dataclasses.replace(
            part, ticket=json.dumps(json.loads(part.ticket) | member).encode(), is_traced=True
        )
        for part in slices[:_TRACED_SLICES_MAX]
    ]
    return [*traced, *slices[_TRACED_SLICES_MAX:]]


def _table(item: dict[str, Any]) -> TableMeta:
    schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(item["schema"])))
    key, schema_ts = tuple(item["key"]), int(item.get("schema_ts", 0))
    plain, table_id = without_metadata(schema), int(item.get("table_id", 0))
    defaults, ids, merged = defaults_of(schema), column_ids(schema), item.get("shard")
    shard = None if merged is None else Shard(merged["table"], merged["column"])
    return TableMeta(item["table"], key, plain, schema_ts, defaults, table_id, ids, shard)


def _ddl(item: dict[str, Any]) -> Ddl:
    tables, dropped, truncated = (
        tuple(item.get(member, ())) for member in ("tables", "dropped", "truncated")
    )
    renamed = tuple((old, new) for old, new in item.get("renamed", ()))
    return Ddl(int(item["ts"]), item.get("query", ""), tables, dropped, truncated, renamed)
