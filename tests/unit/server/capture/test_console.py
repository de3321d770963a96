"""The console's document: one answer with everything that its page shows."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import pytest
from kvproto import metapb_pb2, pdpb_pb2
from tidemarkpb.v1 import capture_pb2, changefeed_pb2, dump_pb2, explain_pb2

from gcsafepoint.worker.records import LEADER_ADDR, LEADER_DESC, LEADER_UUID
from server.capture.cluster_map import mapped_by
from server.capture.console import Console, Services
from server.capture.errors import NotOwnerError
from server.dump.service import DumpNotFoundError
from server.pump.registry import PUMPS, STARTS, VERSIONS, Node
from server.routes import Answer, Request
from server.rpc.credentials import SecurityConfig
from server.rpc.pd import PdUnavailableError
from storage.meta.meta import KeyValue
from storage.model.ts import compose

TS = compose(1_700_000_000_000, 0)
FEED = changefeed_pb2.Changefeed(
    id="orders",
    state=changefeed_pb2.CHANGEFEED_STATE_FAILED,
    sink_uri="delta:///lake",
    checkpoint_ts=TS,
    holding=changefeed_pb2.Holding(pulled_ts=TS, sorted_ts=TS),
    error=changefeed_pb2.RunningError(code="ErrX", message="<b>why</b>", time="t"),
    tables=[
        changefeed_pb2.TableStatus(name="shop.new", checkpoint_ts=TS + 9),
        changefeed_pb2.TableStatus(name="shop.old", checkpoint_ts=TS),
    ],
    schema_changes=[
        changefeed_pb2.SchemaChange(commit_ts=TS, query="CREATE TABLE a"),
        changefeed_pb2.SchemaChange(commit_ts=TS + 1, query="DROP TABLE a"),
    ],
)
EXPLANATION = explain_pb2.ExplainGCResponse(
    summary="GC waits for ticdc-orders",
    blockers=[
        explain_pb2.GCBlocker(
            id="ticdc-orders",
            blocks=True,
            chain=[
                explain_pb2.GCBlockerLink(reason="held", holds_back_seconds=7200),
                explain_pb2.GCBlockerLink(reason="failed", commands=["tidemark x"]),
            ],
        )
    ],
)


class Captures:
    """All gRPC services of a capture that has one failed changefeed, with a dump or without."""

    def __init__(self, *, has_dump=True, error=None):
        self.has_dump = has_dump
        self.error = error
        self.dumps_asked = 0

    async def ListChangefeeds(self, request, context):
        if self.error:
            raise self.error
        return changefeed_pb2.ListChangefeedsResponse(changefeeds=[FEED])

    async def ListCaptures(self, request, context):
        one = capture_pb2.Capture(id="one", address="a:8300", is_owner=True, version="1")
        return capture_pb2.ListCapturesResponse(captures=[one])

    async def GetDumpStatus(self, request, context):
        self.dumps_asked += 1
        if not self.has_dump:
            raise DumpNotFoundError("no dump")
        dump = dump_pb2.Dump(state="running", progress_percent=40, eta_seconds=9, tables_known=3)
        return dump_pb2.GetDumpStatusResponse(dump=dump)


class Api:
    async def answer(self, request):
        return Answer(418, b"the API")


async def explanation():
    return EXPLANATION


def console(captures, explain_gc=explanation, cluster=None):
    services = Services(captures, captures, captures)
    return Console(Api(), services, explain_gc, cluster=cluster)


async def asked(served, path="/console.json", **query):
    named = {name: [value] for name, value in query.items()}
    return await served.answer(Request("GET", path, named))


async def test_one_answer_has_all_that_the_page_shows():
    answer = await asked(console(Captures()), changefeed="orders")
    assert (answer.status, answer.content_type) == (200, "application/json")
    document = json.loads(answer.body)
    [row] = document["changefeeds"]
    assert (row["state"], row["error"]["code"]) == ("failed", "TM:ErrX")
    assert list(row["stages"]) == ["source", "sorter", "checkpoint"]
    assert row["dump"] == {"state": "running", "progress_percent": 40.0, "eta_seconds": 9}
    worst, *_ = document["findings"]
    assert (worst["level"], worst["where"]) == ("problem", "changefeed orders")
    assert document["gc"] == {
        "summary": "GC waits for ticdc-orders",
        "blockers": [
            {"id": "ticdc-orders", "blocks": True, "reason": "failed", "commands": ["tidemark x"]}
        ],
    }
    opened = document["detail"]
    assert [each["table"] for each in opened["tables"]] == ["shop.old", "shop.new"]
    assert [each["query"] for each in opened["ddls"]] == ["DROP TABLE a", "CREATE TABLE a"]


async def test_without_a_choice_there_are_no_details_and_without_a_dump_none_is_shown():
    document = json.loads((await asked(console(Captures(has_dump=False)))).body)
    assert document["detail"] is None
    assert document["changefeeds"][0]["dump"] is None


async def test_pages_that_look_often_share_what_is_dear_to_ask():
    explained = 0

    async def explain():
        nonlocal explained
        explained += 1
        return EXPLANATION

    captures = Captures()
    served = console(captures, explain)
    for _ in range(5):
        await asked(served)
    assert (explained, captures.dumps_asked) == (1, 1)


class Metadata:
    """A pump that is there, one that has left, and a GC worker."""

    def __init__(self):
        self.values = {
            PUMPS + b"here": Node("here", "p:8250", "online").record(1, 2),
            PUMPS + b"left": Node("left", "q:8250", "offline").record(1, 2),
            STARTS + b"here": b"1700000000000",
            VERSIONS + b"here": b"0.2.0",
            LEADER_UUID.encode(): b"%x" % TS,
            LEADER_ADDR.encode(): b"g:8302",
            LEADER_DESC.encode(): b"host:g, pid:7, start at 2023-11-14, version:0.2.0",
        }

    async def get_prefix(self, prefix):
        return [
            KeyValue(key, value, 1, 1, 1)
            for key, value in sorted(self.values.items())
            if key.startswith(prefix)
        ]


@pytest.fixture
def status_url():
    """Where a coordinator that was started then has its HTTP API."""

    class Status(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path.startswith("/no-http"):
                self.wfile.write(b"nonsense\r\n")
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"start_timestamp": 1700000000, "version": "v8"}')

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Status) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


async def test_the_map_has_all_daemons_and_outlives_a_coordinator_that_is_away(status_url):
    class Pd:
        is_away = False

        async def members(self):
            if self.is_away:
                raise PdUnavailableError("away")
            one, two = (
                pdpb_pb2.Member(name=name, member_id=number, client_urls=[url])
                for number, (name, url) in enumerate(
                    (("one", f"{status_url}/no-http"), ("two", status_url)), 1
                )
            )
            return pdpb_pb2.GetMembersResponse(members=[one, two], leader=two)

        async def stores(self):
            return [
                metapb_pb2.Store(
                    id=4,
                    address="s:20160",
                    version="1",
                    start_timestamp=1_700_000_000,
                    node_state=1,
                )
            ]

    pd = Pd()
    served = console(Captures(), cluster=mapped_by(pd, Metadata(), SecurityConfig()))
    served._cluster._every_s = 0.0
    seen = json.loads((await asked(served)).body)
    assert [(each["kind"], each["name"], each["role"]) for each in seen["daemons"]] == [
        ("coordinator", "one", ""),
        ("coordinator", "two", "leader"),
        ("store", "4", "up"),
        ("pump", "here", "online"),
        ("gc-worker", f"{TS:x}", "leader"),
    ]
    started = [each["started"] for each in seen["daemons"]]
    assert started == ["", *["2023-11-14T22:13:20+00:00"] * 4]
    assert [each["version"] for each in seen["daemons"]] == ["", "v8", "1", "0.2.0", "0.2.0"]
    [capture] = seen["captures"]
    assert (capture["is_draining"], capture["started"]) == (False, "")
    pd.is_away = True
    assert json.loads((await asked(served)).body)["daemons"] == seen["daemons"]


async def test_a_real_pd_explains_no_gc_and_the_rest_is_shown():
    async def unimplemented():
        raise grpc.RpcError

    document = json.loads((await asked(console(Captures(), unimplemented))).body)
    assert document["gc"] is None
    assert document["changefeeds"]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [(NotOwnerError("nobody"), 503, "TM:"), (ValueError("a defect"), 500, "TM:Err")],
)
async def test_what_cannot_be_answered_is_an_error_in_the_apis_form(error, status, code):
    answer = await asked(console(Captures(error=error)))
    assert answer.status == status
    assert json.loads(answer.body)["error_code"].startswith(code)


async def test_pages_are_served_beside_the_api():
    served = console(Captures())
    assert (await asked(served, "/")).content_type.startswith("text/html")
    assert (await asked(served, "/console.js")).content_type.startswith("text/javascript")
    assert (await asked(served, "/api/v2/changefeeds")).status == 418
