"""The Flight server over a scripted capture, asked by pyarrow's own client."""

import base64
import json
import threading
from contextlib import contextmanager

import grpc
import pyarrow as pa
import pyarrow.flight as fl
import pytest

from sink.flight.feeds import (
    ChangefeedNotExistsError,
    FeedDescription,
    Poll,
    Report,
    SliceEndpoint,
    TableDescription,
    TableNotExistsError,
)
from sink.flight.server import CallGuard, FlightPortError, open_server
from sink.flight.tokens import OneToken
from sink.versions import Ddl
from sorter.errors import NotResolvedError, RangeCleanedError

SCHEMA = pa.schema([("_op", pa.string()), ("_commit_ts", pa.int64()), ("id", pa.int64())])


class Capture:
    def __init__(self):
        self.calls = []
        self.break_after = None

    def remote_action(self, changefeed):
        return None

    def describe(self, changefeed, ts=None, *, before=False, known_ts=None, reader=""):
        self.calls.append((changefeed, ts, before, known_ts, reader))
        if changefeed != "feed":
            raise ChangefeedNotExistsError(f"there is no changefeed {changefeed!r}")
        table = TableDescription(
            table="bank.accounts",
            table_id=101,
            key=("id",),
            schema=SCHEMA,
            schema_ts=3,
            resolved_ts=9,
            checkpoint_ts=4,
        )
        return FeedDescription(
            changefeed=changefeed,
            state="normal",
            sink_uri="delta:///lake",
            start_ts=1,
            checkpoint_ts=4,
            resolved_ts=9,
            tables=(table,),
            ddls=(Ddl(8, "RENAME TABLE a TO b", ("bank.b",), (), (), (("bank.a", "bank.b"),)),),
        )

    def latest(self, *asked):
        self.calls.append(asked)
        return 7

    def plan(self, changefeed, tables, start_ts, end_ts, slice_bytes=None):
        self.calls.append((changefeed, tables, start_ts, end_ts, slice_bytes))
        if slice_bytes is None:
            return [SliceEndpoint("bank.accounts", start_ts, end_ts, 3, 120)]
        return [
            SliceEndpoint("bank.accounts", start_ts, 5, 1, 40),
            SliceEndpoint("bank.accounts", 5, end_ts, 2, 80),
        ]

    def read(self, changefeed, table, start_ts, end_ts, *, before=False):
        self.calls.append((changefeed, table, start_ts, end_ts, before))
        if table != "bank.accounts":
            raise TableNotExistsError(f"no table {table}")
        if start_ts < 4:
            raise RangeCleanedError("gone")
        if end_ts > 9:
            raise NotResolvedError("not yet")
        return SCHEMA, self._batches()

    def _batches(self):
        for number in range(3):
            if number == self.break_after:
                raise RangeCleanedError("cleaned meanwhile")
            yield pa.RecordBatch.from_pydict(
                {"_op": ["insert"], "_commit_ts": [5], "id": [number]}, schema=SCHEMA
            )

    def ack(self, *asked):
        self.calls.append(asked)
        return 6

    def report(self, *asked):
        self.calls.append(asked)


@contextmanager
def serving(capture, readers=None, advertise_addr=""):
    server = open_server(capture, "127.0.0.1:0", advertise_addr, readers=readers)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        with fl.FlightClient(f"grpc://{server.bound}") as client:
            yield server, client
    finally:
        server.shutdown()
        thread.join()


def ask(client, action, **members):
    [result] = client.do_action(fl.Action(action, json.dumps(members).encode()))
    return json.loads(result.body.to_pybytes())


def test_describe_carries_positions_and_schemas():
    with serving(Capture()) as (_, client):
        answer = ask(client, "describe", changefeed="feed")
    [table] = answer.pop("tables")
    assert answer == {
        "changefeed": "feed",
        "state": "normal",
        "sink_uri": "delta:///lake",
        "start_ts": 1,
        "checkpoint_ts": 4,
        "resolved_ts": 9,
        "ddls": [
            {
                "ts": 8,
                "query": "RENAME TABLE a TO b",
                "tables": ["bank.b"],
                "dropped": [],
                "truncated": [],
                "renamed": [["bank.a", "bank.b"]],
            }
        ],
    }
    assert pa.ipc.read_schema(pa.py_buffer(base64.b64decode(table.pop("schema")))) == SCHEMA
    assert table == {
        "table": "bank.accounts",
        "table_id": 101,
        "key": ["id"],
        "schema_ts": 3,
        "resolved_ts": 9,
        "checkpoint_ts": 4,
    }


def test_latest_and_ack_pass_their_arguments_on():
    capture = Capture()
    with serving(capture) as (_, client):
        assert ask(
            client, "latest", changefeed="feed", start=5, max_rows=10, wait_ms=1500, idle_ms=9000
        ) == {"ts": 7}
        assert ask(client, "ack", changefeed="feed", table="bank.accounts", ts=6) == {
            "checkpoint_ts": 6
        }
        ask(client, "ack", changefeed="feed", ts=8, epoch=2, reader="etl")
    assert capture.calls == [
        ("feed", None, 5, 10, None, Poll(1.5, 9000)),
        ("feed", "bank.accounts", 6, None, ""),
        ("feed", None, 8, 2, "etl"),
    ]


def test_a_planned_ticket_reads_the_rows():
    with serving(Capture()) as (server, client):
        [part] = ask(client, "plan", changefeed="feed", start=4, end=9)["slices"]
        assert part["locations"] == [f"grpc://{server.bound}"]
        assert (part["table"], part["rows"], part["bytes"]) == ("bank.accounts", 3, 120)
        rows = client.do_get(fl.Ticket(json.dumps(part["ticket"]).encode())).read_all()
    assert rows.schema == SCHEMA
    assert rows["id"].to_pylist() == [0, 1, 2]


def test_describe_passes_on_where_the_reader_stands():
    capture = Capture()
    with serving(capture) as (_, client):
        ask(client, "describe", changefeed="feed", ts=8, before=True, known_ts=7, reader="etl")
    assert capture.calls == [("feed", 8, True, 7, "etl")]


def test_slices_cover_the_range_and_their_tickets_say_what_was_asked_for():
    capture = Capture()
    with serving(capture) as (_, client):
        parts = ask(client, "plan", changefeed="feed", start=4, end=9, slice_bytes=50, before=True)[
            "slices"
        ]
        tickets = [part["ticket"] for part in parts]
        client.do_get(fl.Ticket(json.dumps(tickets[0]).encode())).read_all()
    table = {"changefeed": "feed", "table": "bank.accounts", "before": True}
    assert tickets == [table | {"start": 4, "end": 5}, table | {"start": 5, "end": 9}]
    assert capture.calls == [("feed", None, 4, 9, 50), ("feed", "bank.accounts", 4, 5, True)]


def test_readers_are_told_the_advertised_address():
    with serving(Capture(), advertise_addr="capture-1.example:8301") as (_, client):
        [part] = ask(client, "plan", changefeed="feed", start=4, end=9)["slices"]
    assert part["locations"] == ["grpc://capture-1.example:8301"]


def ticket(**members):
    return fl.Ticket(
        json.dumps(
            {"changefeed": "feed", "table": "bank.accounts", "start": 4, "end": 9} | members
        ).encode()
    )


@pytest.mark.parametrize(
    ("wanted", "kind", "code"),
    [
        (ticket(table="bank.none"), fl.FlightServerError, "[TM:ErrTableNotExists]"),
        (ticket(start=1), fl.FlightServerError, "[TM:ErrRangeCleaned]"),
        (ticket(end=99), fl.FlightUnavailableError, "[TM:ErrNotResolved]"),
        (fl.Ticket(b"?"), fl.FlightServerError, "[TM:ErrFlightRequestInvalid]"),
    ],
)
def test_errors_of_a_read_carry_their_code_and_whether_to_try_again(wanted, kind, code):
    with serving(Capture()) as (_, client), pytest.raises(kind) as caught:
        client.do_get(wanted).read_all()
    assert code in str(caught.value)


def test_an_error_in_the_middle_of_the_rows_is_told():
    capture = Capture()
    capture.break_after = 2
    with serving(capture) as (_, client), pytest.raises(fl.FlightServerError) as caught:
        client.do_get(ticket()).read_all()
    assert "[TM:ErrRangeCleaned]" in str(caught.value)


def test_an_unknown_changefeed_and_an_unknown_action_are_named():
    with serving(Capture()) as (_, client):
        with pytest.raises(fl.FlightServerError) as caught:
            ask(client, "describe", changefeed="other")
        assert "[TM:ErrChangeFeedNotExists]" in str(caught.value)
        with pytest.raises(fl.FlightServerError) as caught:
            ask(client, "explain")
        assert "describe, latest, plan, ack" in str(caught.value)


def test_actions_are_listed():
    with serving(Capture()) as (_, client):
        assert {action.type for action in client.list_actions()} == {
            "describe",
            "latest",
            "plan",
            "ack",
            "report",
        }


def test_a_busy_port_is_one_clear_error():
    with serving(Capture()) as (server, _), pytest.raises(FlightPortError, match="--flight-addr"):
        open_server(Capture(), server.bound)


def test_a_report_of_the_lake_job_passes_and_garbage_does_not():
    capture = Capture()
    with (
        serving(capture, OneToken("secret")) as (_, client),
        pytest.raises(fl.FlightUnauthenticatedError),
    ):
        ask(client, "report", changefeed="feed", state="ready", cut_ts=5)
    assert not capture.calls
    with serving(capture) as (_, client):
        assert (
            ask(
                client,
                "report",
                changefeed="feed",
                state="failed",
                code="ErrX",
                message="why",
                later=1,
            )
            == {}
        )
        with pytest.raises(fl.FlightServerError, match="ErrFlightRequestInvalid"):
            ask(client, "report", changefeed="feed", state="fine")
    assert capture.calls == [("feed", Report("failed", 0, "ErrX", "why"))]


@pytest.mark.parametrize("method", ["DoPut", "DoExchange"])
def test_a_stream_that_nobody_serves_is_refused_before_its_first_message(method):
    """It would hold a thread until that comes."""
    over = threading.Event()

    def nothing():
        over.wait()
        yield from ()

    with serving(Capture()) as (server, _), grpc.insecure_channel(server.bound) as channel:
        call = channel.stream_stream(f"/arrow.flight.protocol.FlightService/{method}")
        with pytest.raises(grpc.RpcError) as refused:
            list(call(nothing(), timeout=60))
        over.set()
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "DoAction" in refused.value.details()


def test_one_call_too_many_is_refused_until_another_ends():
    guard = CallGuard(None, most=2)
    action = fl.CallInfo(fl.FlightMethod.DO_ACTION)
    first, _ = guard.start_call(action, {}), guard.start_call(action, {})
    with pytest.raises(fl.FlightUnavailableError, match="2 Flight calls are under way"):
        guard.start_call(action, {})
    first.call_completed(None)
    guard.start_call(action, {})


def test_a_call_that_is_refused_takes_no_room():
    guard = CallGuard(OneToken("t"), most=1)
    action = fl.CallInfo(fl.FlightMethod.DO_ACTION)
    for _ in range(2):
        with pytest.raises(fl.FlightUnauthenticatedError):
            guard.start_call(action, {})
    guard.start_call(action, {"authorization": ["Bearer t"]})
