"""The JSON documents of actions and tickets, read strictly, and those that answer them
(docs/format/flight.md). Pure.

A number is a JSON integer in [0, 2^63); an unknown member is ignored, so that newer readers can
talk to older captures.
"""

import base64
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from sink.flight.feeds import (
    COMMITS,
    FAILED,
    REPORT_STATES,
    RETRYING,
    FeedDescription,
    Report,
    SliceEndpoint,
    TableDescription,
)
from storage.client_json import read_json
from storage.model.errors import InvalidError

_MAX_INT64 = (1 << 63) - 1
_WAIT_MS = 200
_WAIT_MS_MAX = 20_000
_BODY_BYTES_MAX = 1 << 20
_SHARD = ("table", "column")
_CODE = re.compile(r"Err[A-Za-z0-9]{1,60}")
_UI = re.compile(r"https?://[A-Za-z0-9._\[\]:-]{1,200}")
_MESSAGE_CHARACTERS_MAX = 2000
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
Answer: TypeAlias = dict[str, Any]


class FlightRequestError(InvalidError):
    """The action's body or the ticket is not what docs/format/flight.md says."""

    code = "ErrFlightRequestInvalid"


@dataclass(frozen=True, slots=True)
class Describe:
    """`describe`."""

    changefeed: str
    ts: int | None
    before: bool
    known_ts: int | None = None
    reader: str = ""

    @classmethod
    def parse(cls, body: bytes) -> "Describe":
        """Read the action's body; raises FlightRequestError."""
        doc = _document(body)
        ts, known_ts = (_optional_number(doc, name) for name in ("ts", "known_ts"))
        reader = _optional_text(doc, "reader") or ""
        return cls(_text(doc, "changefeed"), ts, _flag(doc, "before"), known_ts, reader)


@dataclass(frozen=True, slots=True)
class Latest:
    """`latest`."""

    changefeed: str
    table: str | None
    start: int
    max_rows: int | None
    max_bytes: int | None
    wait_ms: int
    idle_ms: int | None = None

    @classmethod
    def parse(cls, body: bytes) -> "Latest":
        """Read the action's body; raises FlightRequestError."""
        doc = _document(body)
        wait_ms = _optional_number(doc, "wait_ms")
        return cls(
            _text(doc, "changefeed"),
            _optional_text(doc, "table"),
            _number(doc, "start"),
            _optional_number(doc, "max_rows"),
            _optional_number(doc, "max_bytes"),
            min(_WAIT_MS if wait_ms is None else wait_ms, _WAIT_MS_MAX),
            _optional_number(doc, "idle_ms"),
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """`plan`."""

    changefeed: str
    tables: tuple[str, ...] | None
    start: int
    end: int
    slice_bytes: int | None
    before: bool

    @classmethod
    def parse(cls, body: bytes) -> "Plan":
        """Read the action's body; raises FlightRequestError."""
        doc = _document(body)
        tables = doc.get("tables")
        if tables is not None and not (
            isinstance(tables, list) and all(isinstance(name, str) for name in tables)
        ):
            raise FlightRequestError("`tables` must be a list of strings")
        slice_bytes = _optional_number(doc, "slice_bytes")
        if slice_bytes == 0:
            raise FlightRequestError("`slice_bytes` must be above 0")
        names = None if tables is None else tuple(tables)
        return cls(_text(doc, "changefeed"), names, *_range(doc), slice_bytes, _flag(doc, "before"))


@dataclass(frozen=True, slots=True)
class Ack:
    """`ack`."""

    changefeed: str
    table: str | None
    ts: int
    epoch: int | None
    reader: str = ""

    @classmethod
    def parse(cls, body: bytes) -> "Ack":
        """Read the action's body; raises FlightRequestError."""
        doc = _document(body)
        changefeed, table = _text(doc, "changefeed"), _optional_text(doc, "table")
        reader = _optional_text(doc, "reader") or ""
        return cls(changefeed, table, _number(doc, "ts"), _optional_number(doc, "epoch"), reader)


@dataclass(frozen=True, slots=True)
class JobReport:
    """`report`."""

    changefeed: str
    report: Report

    @classmethod
    def parse(cls, body: bytes) -> "JobReport":
        """Read the action's body; raises FlightRequestError."""
        doc = _document(body)
        state = _text(doc, "state")
        if state not in REPORT_STATES:
            raise FlightRequestError(f"`state` must be one of {', '.join(REPORT_STATES)}")
        commits = _optional_text(doc, "commits") or ""
        if commits and commits not in COMMITS:
            raise FlightRequestError(f"`commits` must be one of {', '.join(COMMITS)}")
        ui = _optional_text(doc, "ui") or ""
        # The console makes a link of it.
        if ui and not _UI.fullmatch(ui):
            raise FlightRequestError("`ui` must be http://host:port or https://host:port")
        cut_ts = _optional_number(doc, "cut_ts") or 0
        if state not in (RETRYING, FAILED):
            return cls(_text(doc, "changefeed"), Report(state, cut_ts, commits=commits, ui=ui))
        code = _text(doc, "code")
        if not _CODE.fullmatch(code):
            raise FlightRequestError("`code` must be Err and at most 60 letters and digits")
        # It is shown to people, in terminals and logs: no line of a report may look like another's.
        message = _CONTROL.sub(" ", _optional_text(doc, "message") or "")[:_MESSAGE_CHARACTERS_MAX]
        return cls(_text(doc, "changefeed"), Report(state, cut_ts, code, message, commits, ui))


@dataclass(frozen=True, slots=True)
class Ticket:
    """The rows that DoGet reads: of one table with `start < _commit_ts <= end`, with `before` also
    their values before.
    """

    changefeed: str
    table: str
    start: int
    end: int
    before: bool = False
    traceparent: str = ""
    """The reader's span, of which the read is a part; empty: it traces nothing."""

    @classmethod
    def parse(cls, body: bytes) -> "Ticket":
        """Read the ticket; raises FlightRequestError."""
        doc = _document(body)
        traceparent = _optional_text(doc, "traceparent") or ""
        names = _text(doc, "changefeed"), _text(doc, "table")
        return cls(*names, *_range(doc), _flag(doc, "before"), traceparent)

    def document(self) -> dict[str, Any]:
        """The members, for a plan; those that say nothing are left out."""
        members = asdict(self)
        for name in ("before", "traceparent"):
            if not members[name]:
                del members[name]
        return members


def _document(body: bytes) -> Mapping[str, Any]:
    # Before it is parsed: a client must not choose how much memory its request takes.
    if len(body) > _BODY_BYTES_MAX:
        raise FlightRequestError(
            f"the body has {len(body)} bytes; at most {_BODY_BYTES_MAX} are read"
        )
    try:
        doc = read_json(body)
    except ValueError as err:
        raise FlightRequestError(f"the body is not JSON: {err}") from err
    if not isinstance(doc, dict):
        raise FlightRequestError("the body must be a JSON object")
    return doc


def _range(doc: Mapping[str, Any]) -> tuple[int, int]:
    start, end = _number(doc, "start"), _number(doc, "end")
    if end < start:
        raise FlightRequestError(f"`end` {end} is below `start` {start}")
    return start, end


def _text(doc: Mapping[str, Any], name: str) -> str:
    value = doc.get(name)
    if not isinstance(value, str) or not value:
        raise FlightRequestError(f"`{name}` must be a string that is not empty")
    return value


def _optional_text(doc: Mapping[str, Any], name: str) -> str | None:
    return None if doc.get(name) is None else _text(doc, name)


def _flag(doc: Mapping[str, Any], name: str) -> bool:
    value = doc.get(name)
    if value is not None and not isinstance(value, bool):
        raise FlightRequestError(f"`{name}` must be true or false")
    return bool(value)


def _number(doc: Mapping[str, Any], name: str) -> int:
    value = doc.get(name)
    # JSON's true is an int in Python. Spark's timestamps are signed 64-bit numbers.
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_INT64:
        raise FlightRequestError(f"`{name}` must be an integer from 0 to 2^63-1")
    return value


def _optional_number(doc: Mapping[str, Any], name: str) -> int | None:
    return None if doc.get(name) is None else _number(doc, name)


def described(feed: FeedDescription) -> Answer:
    """The answer to `describe`; without `tables` where the reader knows them."""
    tables = {} if feed.tables is None else {"tables": [_table(table) for table in feed.tables]}
    return {
        "changefeed": feed.changefeed,
        "state": feed.state,
        "sink_uri": feed.sink_uri,
        "start_ts": feed.start_ts,
        **({"target_ts": feed.target_ts} if feed.target_ts else {}),
        "checkpoint_ts": feed.checkpoint_ts,
        "resolved_ts": feed.resolved_ts,
        **({"skipped": [list(each) for each in feed.skipped]} if feed.skipped else {}),
        **({"epoch": feed.epoch} if feed.epoch else {}),
        **({"kept_ts": feed.kept_ts} if feed.kept_ts else {}),
        **tables,
        "ddls": [asdict(ddl) for ddl in feed.ddls],
    }


def planned(request: Plan, part: SliceEndpoint, location: str) -> Answer:
    """One slice of the answer to `plan`; `location` is the server's own."""
    ticket = Ticket(request.changefeed, part.table, part.start_ts, part.end_ts, request.before)
    return {
        "table": part.table,
        "locations": [*part.locations, location],
        "ticket": ticket.document(),
        "rows": part.rows,
        "bytes": part.bytes,
    }


def _table(table: TableDescription) -> Answer:
    return {
        "table": table.table,
        "table_id": table.table_id,
        "key": list(table.key),
        "schema": base64.b64encode(table.schema.serialize().to_pybytes()).decode(),
        "schema_ts": table.schema_ts,
        "resolved_ts": table.resolved_ts,
        "checkpoint_ts": table.checkpoint_ts,
        **({"shard": dict(zip(_SHARD, table.shard, strict=True))} if table.shard else {}),
    }
