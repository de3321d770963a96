"""TiCDC's HTTP API: what bodies ask for, what is refused by name, and that its document is true."""

import hashlib
import json
import re
import tomllib
from types import SimpleNamespace
from unittest.mock import AsyncMock

import grpc
import pytest
import structlog
from grpc.aio import AioRpcError
from hypothesis import given
from hypothesis import strategies as st
from tidemarkpb.v1 import capture_pb2 as capturepb
from tidemarkpb.v1 import changefeed_pb2 as pb

from server.capture.api_v2 import documents
from server.capture.api_v2.api import Api, _Operations
from server.capture.api_v2.operations import OPERATIONS, PREFIX, SCHEMAS, openapi
from server.capture.api_v2.replica_config import (
    ReplicaConfig,
    _with_underscores,
    replica_config,
)
from server.capture.errors import ChangefeedNotExistsError, NotOwnerError, ParameterError
from server.log import log_config, set_level, set_redaction
from server.routes import Request
from server.rpc.access_guard import guarded, right_of
from server.rpc.access_list import ROLES, Client, Right, open_access
from server.rpc.errors import passed_on
from storage.model.errors import InvalidError
from storage.model.ts import compose

CHECKPOINT = compose(1_700_000_000_123, 7)
FEED = pb.Changefeed(
    id="orders",
    maintainer="one",
    state=pb.CHANGEFEED_STATE_WARNING,
    sink_uri="delta:///lake",
    start_ts=CHECKPOINT,
    checkpoint_ts=CHECKPOINT,
    resolved_ts=CHECKPOINT + 5,
    filter=["shop.*"],
    error=pb.RunningError(code="ErrX", message="why", time="2026-01-01T00:00:00Z"),
    tables=[pb.TableStatus(name="shop.orders", table_id=7)],
)
TICDC_DEFAULTS = {
    "memory_quota": 1073741824,
    "case_sensitive": False,
    "force_replicate": False,
    "ignore_ineligible_table": False,
    "check_gc_safe_point": True,
    "enable_sync_point": False,
    "enable_table_monitor": False,
    "bdr_mode": False,
    "sync_point_interval": 600000000000,
    "sync_point_retention": 86400000000000,
    "filter": {"rules": ["*.*"]},
    "mounter": {"worker_num": 16},
    "sink": {
        "csv": {
            "delimiter": ",",
            "quote": '"',
            "null": "\\N",
            "include_commit_ts": False,
            "binary_encoding_method": "base64",
            "output_old_value": False,
            "output_handle_key": False,
            "output_field_header": False,
        },
        "encoder_concurrency": 32,
        "terminator": "\r\n",
        "date_separator": "day",
        "enable_partition_separator": True,
        "enable_kafka_sink_v2": False,
        "only_output_updated_columns": False,
        "delete_only_output_handle_key_columns": False,
        "content_compatible": False,
        "advance_timeout_in_sec": 150,
        "send_bootstrap_interval_in_sec": 120,
        "send_bootstrap_in_msg_count": 10000,
        "send_bootstrap_to_all_partition": True,
        "send_all_bootstrap_at_start": False,
        "debezium_disable_schema": False,
        "debezium": {"output_old_value": True},
        "open": {"output_old_value": True},
    },
    "consistent": {
        "level": "none",
        "max_log_size": 64,
        "flush_interval": 2000,
        "meta_flush_interval": 200,
        "encoding_worker_num": 16,
        "flush_worker_num": 8,
        "storage": "",
        "use_file_backend": False,
        "compression": "",
        "memory_usage": {"memory_quota_percentage": 50},
    },
    "scheduler": {
        "enable_table_across_nodes": False,
        "region_threshold": 100000,
        "write_key_threshold": 0,
    },
    "integrity": {"integrity_check_level": "none", "corruption_handle_level": "warn"},
    "changefeed_error_stuck_duration": 1800000000000,
    "synced_status": {"synced_check_interval": 300, "checkpoint_interval": 15},
}
"""As TiCDC shows the replica_config of a changefeed for which nothing was asked."""
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
MEMBERS = st.sampled_from(
    ["changefeed_id", "start_ts", "sink_uri", "replica_config", "filter", "rules", "tables", "x"]
)


class Services:
    """Both gRPC services: answers with FEED, or raises; keeps the requests."""

    def __init__(self, error=None):
        self.error = error
        self.requests = []

    def __getattr__(self, method):
        async def call(request, context):
            assert list(context.invocation_metadata()) == []
            if self.error:
                raise self.error
            if method == "ListCaptures":
                one = capturepb.Capture(id="one", address="host:8300", is_owner=True)
                return capturepb.ListCapturesResponse(captures=[one])
            self.requests.append(request)
            if method == "CheckChangefeed":
                eligible = pb.EligibleTable(name="shop.a.b", table_id=7)
                refused = pb.IneligibleTable(name="shop.log", reason="no key")
                other = pb.IneligibleTable(name="crm.t", reason="no rule")
                return pb.CheckChangefeedResponse(
                    tables=[eligible], ineligible=[refused], not_taken=[other]
                )
            if method in ("DrainCapture", "ResignOwner"):
                return getattr(capturepb, method + "Response")()
            response = getattr(pb, method + "Response")
            if method in ("MoveTable", "SplitTable"):
                return response()
            if method == "ListChangefeeds":
                return response(changefeeds=[FEED])
            return response(changefeed=FEED)

        return call

    async def tso(self):
        return CHECKPOINT

    async def metadata(self):
        return [{"key": "/tidemark/default/owner", "value": "{}"}]

    async def resolve_locks(self, region_id, ts):
        self.requests.append((region_id, ts))

    async def remove_safe_points(self):
        self.requests.append("removed")


async def asked(method, path, body=b"", query=None, error=None):
    services = Services(error)
    api = Api("one", services, services, services)
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = await api.answer(Request(method, path, query or {}, text))
    return answer.status, json.loads(answer.body), services.requests


def test_a_body_of_ticdcs_docs_creates_a_changefeed():
    config = {"filter": {"rules": ["shop.*"]}, "ignore_ineligible_table": True}
    body = {"changefeed_id": "c", "sink_uri": "delta:///d", "replica_config": config}
    request = documents.creation(json.dumps(body).encode())
    assert (request.id, request.sink_uri, list(request.filter)) == ("c", "delta:///d", ["shop.*"])
    assert request.ignore_ineligible_table


def test_tables_without_a_key_are_asked_for_in_ticdcs_words():
    config = {"force_replicate": True, "filter": {"rules": ["shop.*"]}}
    body = {"sink_uri": "parquet:///d", "replica_config": config}
    request = documents.creation(json.dumps(body | {"source_uri": "mysql://u@h"}).encode())
    assert request.source_uri == "mysql://u@h?force-replicate=true"
    with pytest.raises(InvalidError, match="force-replicate=true is of mysql://"):
        documents.creation(json.dumps(body).encode())
    read = ReplicaConfig.parse_toml("force-replicate = true")
    assert read.force_replicate


@pytest.mark.parametrize(
    ("text", "regions"),
    [
        ("", 0),
        ("[scheduler]\nenable-table-across-nodes = false\nregion-threshold = 5", 0),
        ("[scheduler]\nenable-table-across-nodes = true", 100_000),
        ("[scheduler]\nenable-table-across-nodes = true\nregion-threshold = 5", 5),
        ("[scheduler]\nenable-table-across-nodes = true\nwrite-key-threshold = 0", 100_000),
    ],
)
def test_big_tables_are_split_as_ticdcs_scheduler_section_asks(text, regions):
    config = ReplicaConfig.parse_toml(text)
    assert config.region_threshold == regions
    document = _with_underscores(tomllib.loads(text))
    body = {"sink_uri": "delta:///d", "replica_config": document}
    request = documents.creation(json.dumps(body).encode())
    assert request.region_threshold == regions


def test_a_write_key_threshold_is_refused():
    text = "[scheduler]\nenable-table-across-nodes = true\nwrite-key-threshold = 9"
    with pytest.raises(InvalidError, match="write_key_threshold"):
        ReplicaConfig.parse_toml(text)


def test_without_id_and_filter_it_gets_an_id_and_all_tables():
    request = documents.creation(b'{"sink_uri": "delta:///d"}')
    assert request.id
    assert list(request.filter) == ["*.*"]


def test_ticdcs_defaults_ask_for_nothing():
    config = TICDC_DEFAULTS
    body = {"sink_uri": "delta:///d", "replica_config": config, "pd_addrs": [], "namespace": ""}
    assert documents.creation(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"sink_urI": "x"}, "sink_urI"),
        ({"sink_uri": 7}, "sink_uri"),
        ({"start_ts": -1}, "start_ts"),
        ({"start_ts": True}, "start_ts"),
        ({"start_ts": 1 << 64}, "start_ts"),
        ({"replica_config": {"bdr_mode": True}}, "replica_config.bdr_mode"),
        ({"replica_config": {"force_replicate": 0}}, "replica_config.force_replicate"),
        ({"replica_config": {"sink": {"protocol": "avro"}}}, "replica_config.sink.protocol"),
        ({"replica_config": {"filter": {"rules": "*.*"}}}, "replica_config.filter.rules"),
        ({"replica_config": {"filter": {"event_filters": [1]}}}, "filter.event_filters"),
        ({"pd_addrs": ["http://other:2379"]}, "pd_addrs"),
        ({"namespace": "mine"}, "namespace"),
        ({"tables": [{"schema_name": "s"}]}, "tables"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(body, named):
    with pytest.raises(ParameterError, match=named):
        documents.creation(json.dumps(body).encode())


@pytest.mark.parametrize(
    "body",
    [b"{", b"[]", b"7", b"\xff", b"[" * 100_000, b'{"a": NaN}', rb'{"changefeed_id": "\ud800"}'],
)
async def test_garbage_is_the_clients_fault(body):
    status, answer, requests = await asked("POST", "/api/v2/changefeeds", body)
    assert (status, answer["error_code"], requests) == (400, "CDC:ErrAPIInvalidParam", [])


@given(st.dictionaries(MEMBERS, JSON))
def test_any_json_gives_a_request_or_a_named_error(document):
    try:
        documents.creation(json.dumps(document).encode())
    except ParameterError as err:
        assert err.message  # noqa: PT017 - both ends are right


@pytest.fixture
def log():
    """The log as it was, afterwards."""
    before = log_config()
    yield log_config
    set_level(before.log_level)
    set_redaction("on" if before.redact_info_log else "off")


async def test_the_log_is_steered_in_ticdcs_words(log):
    for body, level in (
        ({"log_level": "debug"}, "debug"),
        ({"log_level": "WARN"}, "warning"),
        ({}, "info"),
    ):
        assert await asked("POST", "/api/v2/log", body) == (200, {}, [])
        assert log().log_level == level
    for body in ({"log_level": "loud"}, {"log_level": 7}, {"level": "debug"}, b"debug"):
        status, answer, _ = await asked("POST", "/api/v2/log", body)
        assert (status, answer["error_code"]) == (400, "CDC:ErrAPIInvalidParam"), body
        assert log().log_level == "info"


async def test_a_log_is_redacted_and_not_the_other_way(log):
    set_redaction("off")
    path = "/api/v2/log/redact"
    for body in ({}, {"redact_info_log": "marker"}, {"redact_info_log": True}):
        status, _, _ = await asked("POST", path, body)
        assert (status, log().redact_info_log) == (400, False)
    for before in ("off", "on"):
        status, answer, _ = await asked("POST", path, {"redact_info_log": "on"})
        assert (status, log().redact_info_log) == (200, True)
        assert answer == {"previous_mode": before, "current_mode": "on"}
    status, answer, _ = await asked("POST", path, {"redact_info_log": "off"})
    assert (status, log().redact_info_log) == (400, True)
    assert "PUT /log-redact" in answer["error_msg"]


async def test_who_may_only_look_does_not_steer_the_log(log, tmp_path):
    entries = [(role, f'role = "{role}"') for role in ("read", "operate")]
    api = Api("one", *[Services()] * 3, clients_file(tmp_path, *entries))
    level = log().log_level
    for token, status in (("", 401), ("read", 403), ("operate", 200)):
        for path, body in (
            ("/log", {"log_level": level}),
            ("/log/redact", {"redact_info_log": "on"}),
        ):
            header = f"Bearer {token}" if token else ""
            request = Request(
                "POST", PREFIX + path, {}, json.dumps(body).encode(), authorization=header
            )
            assert (await api.answer(request)).status == status


def clients_file(tmp_path, *entries):
    """Clients whose tokens are their names."""
    path = tmp_path / "clients.toml"
    digests = [hashlib.sha256(name.encode()).hexdigest() for name, _ in entries]
    path.write_text(
        "".join(
            f'[[client]]\nname = "{name}"\ntoken-sha256 = "{digest}"\n{text}\n'
            for (name, text), digest in zip(entries, digests, strict=True)
        )
    )
    path.chmod(0o600)
    return open_access(str(path))


async def status_of(api, operation, token, changefeed="7", body=b"{"):
    path = re.sub(r"{\w+}", changefeed, PREFIX + operation.path)
    request = Request(operation.method, path, {}, body, authorization=f"Bearer {token}")
    return (await api.answer(request)).status


@pytest.mark.parametrize("role", ["read", "lake", "operate", "admin"])
async def test_the_role_that_an_operation_needs_is_looked_at_before_its_body_is(tmp_path, role):
    access = clients_file(tmp_path, ("one", f'role = "{role}"'))
    api = Api("one", *[Services()] * 3, access)
    for operation in OPERATIONS:
        may = operation.right is None or operation.right in ROLES[role]
        assert (await status_of(api, operation, "one") != 403) is may, operation.name
        if operation.right is not None:
            assert await status_of(api, operation, "nobody") == 401


async def test_a_client_of_some_changefeeds_steers_these_and_no_others(tmp_path):
    access = clients_file(tmp_path, ("team", 'role = "admin"\nchangefeeds = ["shop-*"]'))

    class Changefeeds:
        def __getattr__(self, method):
            async def call(_request, _context):
                return getattr(pb, method + "Response")()

            return call

    service = pb.DESCRIPTOR.services_by_name["ChangefeedService"]
    changefeeds = guarded(service, Changefeeds(), access)
    api = Api("one", changefeeds, Services(), Services(), access)
    creation = b'{"changefeed_id": "%s", "sink_uri": "delta:///d"}'
    for name in ("pause_changefeed", "resume_changefeed", "remove_changefeed", "create_changefeed"):
        operation = next(each for each in OPERATIONS if each.name == name)
        for changefeed, status in (("shop-1", 200), ("crm-1", 403)):
            body = creation % changefeed.encode() if operation.body == "NewChangefeed" else b""
            assert await status_of(api, operation, "team", changefeed, body) == status
    for name in ("resign_owner", "set_log_level", "unsafe_metadata"):
        operation = next(each for each in OPERATIONS if each.name == name)
        assert await status_of(api, operation, "team") == 403


async def test_an_operation_needs_the_right_of_the_calls_that_it_makes():
    bodies = {"NewChangefeed": b'{"sink_uri": "delta:///d"}'}
    services = [
        *pb.DESCRIPTOR.services_by_name.values(),
        *capturepb.DESCRIPTOR.services_by_name.values(),
    ]
    methods = {method.input_type.name: method for each in services for method in each.methods}
    highest, checked = list(Right).index, 0
    for operation in OPERATIONS:
        recorded = Services()
        api = Api("one", *[recorded] * 3)
        path = re.sub(r"{\w+}", "orders", PREFIX + operation.path)
        query = {"tableID": ["7"], "targetNodeID": ["one"]}
        body = bodies.get(operation.body, b"")
        await api.answer(Request(operation.method, path, query, body))
        calls = [each for each in recorded.requests if hasattr(each, "DESCRIPTOR")]
        rights = [right_of(methods[each.DESCRIPTOR.name], each) for each in calls]
        if rights and operation.right is not None:
            assert max(rights, key=highest) is operation.right, operation.name
            checked += 1
    assert checked > 18


async def test_a_change_is_in_the_audit_log_once_whatever_operation_makes_it():
    bodies = {
        "NewChangefeed": b'{"sink_uri": "delta:///d"}',
        "ChangefeedUpdate": b'{"audit_seconds": 0}',
        "ResolveLock": b'{"region_id": 7}',
        "TablesQuestion": b"{}",
    }
    questions = {"verify_table", "get_all_tables", "unsafe_metadata"}
    # Each changes this process: another test looks at their lines.
    steering = {"set_log_level", "redact_log"}
    for operation in OPERATIONS:
        if operation.name in steering:
            continue
        api = Api("one", *[Services()] * 3)
        path = re.sub(r"{\w+}", "one", PREFIX + operation.path)
        query = {"tableID": ["7"], "targetNodeID": ["one"]} if "table" in operation.name else {}
        with structlog.testing.capture_logs() as lines:
            request = Request(operation.method, path, query, bodies.get(operation.body, b""))
            answer = await api.answer(request)
        audited = [line["outcome"] for line in lines if line.get("logger") == "audit"]
        changes = operation.right not in (None, Right.SEE) and operation.name not in questions
        assert (answer.status, audited) == (200, ["ok"] * changes), (operation.name, answer.body)


async def test_a_refused_change_is_in_the_audit_log(tmp_path):
    access = clients_file(tmp_path, ("eyes", 'role = "read"'))
    api = Api("one", *[Services()] * 3, access)
    pause = next(each for each in OPERATIONS if each.name == "pause_changefeed")
    with structlog.testing.capture_logs() as lines:
        assert await status_of(api, pause, "eyes", "orders") == 403
    (line,) = lines
    shown = line["method"], line["of"], line["client"], line["outcome"]
    assert shown == ("pause_changefeed", "orders", "eyes", "ErrUnauthorized")


async def test_a_changefeed_is_shown_with_ticdcs_names():
    status, answer, _ = await asked("GET", "/api/v2/changefeeds/orders")
    assert status == 200
    assert answer["checkpoint_ts"] == CHECKPOINT
    assert answer["checkpoint_time"] == "2023-11-14 22:13:20.123"
    assert answer["config"]["filter"] == {"rules": ["shop.*"]}
    assert answer["maintainer_addr"] == "host:8300"
    assert answer["task_status"] == [{"capture_id": "one", "table_ids": [7]}]
    assert answer["error"]["code"] == "TM:ErrX"
    assert (answer["namespace"], answer["state"]) == ("default", "warning")


async def test_the_config_that_is_shown_can_be_sent_back():
    _, shown, _ = await asked("GET", "/api/v2/changefeeds/orders")
    body = {"sink_uri": shown["sink_uri"], "replica_config": shown["config"]}
    assert list(documents.creation(json.dumps(body).encode()).filter) == ["shop.*"]


def test_all_of_a_configuration_is_shown_and_is_the_same_when_it_comes_back():
    now = pb.Changefeed(
        id="orders",
        filter=["shop.*"],
        columns=["shop.users=id, name,!phone", "crm.*=*,_op->op"],
        masks=["crm.*=email:mask.hash.SHA-256,phone_?:mask.with.4.chars"],
        salt_file="/salt",
        routes=["shop_*.orders=shop.orders{shard=_shard}", " crm.* = lake.{schema}_{table}"],
        event_filters=[pb.EventFilter(matcher=["shop.*"], ignore_event=["delete"])],
        source_uri="mysql://u@h:1?force-replicate=true",
        ignore_ineligible_table=True,
        region_threshold=7,
    )
    shown = replica_config(now)
    assert shown["scheduler"] == {"enable_table_across_nodes": True, "region_threshold": 7}
    assert shown["sink"]["dispatchers"][0] == {
        "matcher": ["shop_*.orders"],
        "target_schema": "shop",
        "target_table": "orders",
        "shard_column": "_shard",
    }
    body = json.dumps({"replica_config": shown}).encode()
    assert documents.update(now, body) is None, "it is so already"
    assert len(ReplicaConfig.parse(shown).masks) == 2
    assert ReplicaConfig.parse(replica_config(pb.Changefeed(filter=["a.b"]))).rules


async def test_lists_have_ticdcs_form_and_filter_by_state():
    _, answer, _ = await asked("GET", "/api/v2/changefeeds")
    assert (answer["total"], [each["id"] for each in answer["items"]]) == (1, ["orders"])
    _, answer, _ = await asked("GET", "/api/v2/changefeeds", query={"state": ["normal"]})
    assert answer == {"total": 0, "items": []}
    status, answer, _ = await asked("GET", "/api/v2/changefeeds", query={"state": ["Normal"]})
    assert (status, "finished" in answer["error_msg"]) == (400, True)
    assert "finished" not in documents.listed_states("")
    assert "finished" in documents.listed_states("all")


async def test_the_rest_of_the_routes():
    assert (await asked("GET", "/api/v2/health"))[:2] == (200, {})
    assert (await asked("GET", "/status"))[1]["id"] == "one"
    assert (await asked("POST", "/api/v2/tso", {}))[1] == {
        "timestamp": 1_700_000_000_123,
        "logic_time": 7,
    }
    assert (await asked("GET", "/api/v2/processors"))[1]["items"][0]["capture_id"] == "one"
    assert (await asked("GET", "/api/v2/processors/orders/one"))[1] == {"table_ids": [7]}
    status, answer, _ = await asked("GET", "/api/v2/processors/orders/two")
    assert (status, answer["error_code"]) == (400, "CDC:ErrCaptureNotExist")
    assert (await asked("GET", "/api/v2/changefeeds/orders/status"))[1]["last_warning"]


async def test_whether_the_target_has_all_is_told_as_ticdc_tells_it():
    status, answer, _ = await asked("GET", "/api/v2/changefeeds/orders/synced")
    assert (status, answer["synced"]) == (200, False)
    assert answer["sink_checkpoint_ts"] == "2023-11-14 22:13:20.123"
    assert "behind: rows may be on their way" in answer["info"]


async def test_tables_are_verified_before_a_changefeed_is_made():
    _, answer, _ = await asked("POST", "/api/v2/verify_table", {"sink_uri": "delta:///d"})
    [eligible], [refused] = answer["eligible_tables"], answer["ineligible_tables"]
    assert (eligible["database_name"], eligible["table_name"]) == ("shop", "a.b")
    assert (refused["table_name"], refused["reason"]) == ("log", "no key")


async def test_all_tables_of_the_source_are_listed_for_a_filter_without_a_sink():
    _, answer, [request] = await asked("POST", "/api/v2/get_all_tables", {"sink_uri": None})
    assert (request.sink_uri, list(request.filter)) == ("blackhole://", ["*.*"])
    names = [(each["database_name"], each["table_name"]) for each in answer["all_tables"]]
    assert names == [("crm", "t"), ("shop", "a.b"), ("shop", "log")]
    assert not any("reason" in each for each in answer["all_tables"])
    assert [each["table_id"] for each in answer["eligible_tables"]] == [7]


async def test_tables_are_listed_by_capture():
    def table(number, capture=""):
        return pb.TableStatus(name=f"s.t{number}", table_id=number, capture=capture)

    feed = pb.Changefeed(maintainer="one", tables=[table(3), table(2, "two, one"), table(4, "two")])
    assert documents.node_tables(feed) == [
        {"node_id": "one", "table_ids": [2, 3]},
        {"node_id": "two", "table_ids": [2, 4]},
    ]
    assert documents.node_tables(pb.Changefeed(tables=[table(1)])) == []
    status, answer, _ = await asked("GET", "/api/v2/changefeeds/orders/tables")
    assert (status, answer["items"]) == (200, [{"node_id": "one", "table_ids": [7]}])
    _, answer, _ = await asked("GET", "/api/v2/changefeeds/orders/get_dispatcher_count")
    assert answer == {"count": 1}
    _, shown, _ = await asked("GET", "/api/v2/changefeeds/orders")
    assert (await asked("GET", "/api/v2/changefeeds/orders/meta_info"))[1] == shown


async def test_what_is_unsafe_is_about_the_cluster_of_the_capture():
    _, answer, _ = await asked("GET", "/api/v2/unsafe/metadata")
    assert answer == [{"key": "/tidemark/default/owner", "value": "{}"}]
    lock = {"region_id": 4, "ts": 9}
    status, answer, requests = await asked("POST", "/api/v2/unsafe/resolve_lock", lock)
    assert (status, answer, requests) == (200, {}, [(4, 9)])
    gone = await asked("DELETE", "/api/v2/unsafe/service_gc_safepoint", {"id": 0})
    assert gone == (200, {}, ["removed"])
    for method, path, body in (
        ("POST", "resolve_lock", {}),
        ("POST", "resolve_lock", {"region_id": 0, "ts": 1}),
        ("POST", "resolve_lock", lock | {"pd_addrs": ["http://other:2379"]}),
        ("POST", "resolve_lock", lock | {"ts": "9"}),
        ("DELETE", "service_gc_safepoint", {"id": 7}),
        ("DELETE", "service_gc_safepoint", {"more": 1}),
    ):
        status, answer, requests = await asked(method, f"/api/v2/unsafe/{path}", body)
        assert (status, answer["error_code"], requests) == (400, "CDC:ErrAPIInvalidParam", []), body


@pytest.mark.parametrize(
    ("role", "changefeeds", "status"),
    [("admin", (), 200), ("admin", ("a*",), 403), ("operate", (), 403), ("read", (), 403)],
)
async def test_what_is_unsafe_is_for_admins_of_all_changefeeds(role, changefeeds, status):
    services = Services(None)
    access = SimpleNamespace(client=lambda *_: Client("c", role, changefeeds))
    api = Api("one", services, services, services, access)
    for method, path, body in (
        ("GET", "metadata", b""),
        ("POST", "resolve_lock", b'{"region_id": 4}'),
        ("DELETE", "service_gc_safepoint", b"{}"),
    ):
        answer = await api.answer(Request(method, f"/api/v2/unsafe/{path}", {}, body))
        assert answer.status == status, path
    assert len(services.requests) == (2 if status == 200 else 0)


async def test_changes_are_passed_on():
    resume = {"overwrite_checkpoint_ts": 9}
    _, answer, requests = await asked("POST", "/api/v2/changefeeds/a%2Db/resume", resume)
    assert answer == {}
    assert requests == [pb.ResumeChangefeedRequest(id="a-b", overwrite_checkpoint_ts=9)]
    _, _, requests = await asked("PUT", "/api/v2/changefeeds/orders", {"audit_seconds": 0})
    assert requests[-1] == pb.UpdateChangefeedRequest(id="orders", audit_s=0)
    kept = {"retain_seconds": 60, "reader_ttl_seconds": 5}
    _, _, requests = await asked("PUT", "/api/v2/changefeeds/orders", kept)
    retention = pb.Retention(retain_s=60)
    expected = pb.UpdateChangefeedRequest(id="orders", retention=retention, reader_ttl_s=5)
    assert requests[-1] == expected
    _, _, requests = await asked("PUT", "/api/v2/changefeeds/orders", {"target_ts": 9})
    assert requests[-1] == pb.UpdateChangefeedRequest(id="orders", target_ts=9)
    for refused in ({"start_ts": 9}, {"replica_config": {"ignore_ineligible_table": True}}):
        status, answer, _ = await asked("PUT", "/api/v2/changefeeds/orders", refused)
        assert (status, answer["error_code"]) == (400, "CDC:ErrAPIInvalidParam")


async def test_tables_are_moved_split_and_put_together_by_their_ids():
    path, table = "/api/v2/changefeeds/orders", {"tableID": ["7"]}
    target = table | {"targetNodeID": ["b"], "wait": ["false"], "mode": ["0"]}
    for name in ("move_table", "move_split_table"):
        _, answer, [*_, request] = await asked("POST", f"{path}/{name}", query=target)
        moved = pb.MoveTableRequest(id="orders", table="shop.orders", capture="b")
        assert (answer, request) == ({}, moved)
    for name, together in (("split_table_by_region_count", False), ("merge_table", True)):
        _, answer, [*_, request] = await asked("POST", f"{path}/{name}", query=table)
        split = pb.SplitTableRequest(id="orders", table="shop.orders", put_together=together)
        assert (answer, request) == ({}, split)
    for wrong in ({"tableID": ["8"]}, table | {"mode": ["1"]}, table | {"giveUpHistory": ["x"]}):
        assert (await asked("POST", f"{path}/merge_table", query=wrong))[0] == 400


async def test_other_columns_masks_and_event_filters_are_asked_for_where_they_differ():
    sink = {
        "column_selectors": [{"matcher": ["shop.*"], "columns": ["*", "!phone"]}],
        "column_masks": [{"matcher": ["crm.*"], "columns": ["m"], "mask": "mask.with.4.chars"}],
        "salt_file": "/salt",
    }
    config = {"sink": sink, "filter": {"event_filters": []}}
    body = {"replica_config": config, "no_dump": True}
    _, _, [*_, request] = await asked("PUT", "/api/v2/changefeeds/orders", body)
    expected = pb.UpdateChangefeedRequest(id="orders", no_dump=True, salt_file="/salt")
    expected.columns.texts.append("shop.*=*,!phone")
    expected.masks.texts.append("crm.*=m:mask.with.4.chars")
    assert request == expected, "it has no event filters now"
    sink = {"column_selectors": [], "column_masks": []}
    now = pb.Changefeed(id="orders", columns=["a=b"], event_filters=[pb.EventFilter()])
    read = documents.update(now, json.dumps({"replica_config": {"sink": sink}}).encode())
    assert (read.HasField("columns"), list(read.columns.texts)) == (True, [])
    assert [read.HasField(each) for each in ("masks", "event_filters")] == [False, False]
    none = json.dumps({"replica_config": config | {"sink": {}}}).encode()
    assert documents.update(now, none).HasField("event_filters")
    routed = {"sink": {"dispatchers": [{"matcher": ["a.*"], "target_schema": "b"}]}}
    with pytest.raises(InvalidError, match=r"routes \(dispatchers\) would be changed"):
        documents.update(now, json.dumps({"replica_config": routed}).encode())


async def test_an_update_to_what_is_there_changes_nothing_and_an_empty_one_is_an_error():
    path = "/api/v2/changefeeds/orders"
    for body in ({"replica_config": {"filter": {"rules": ["shop.*"]}}}, {"target_ts": 0}):
        status, answer, requests = await asked("PUT", path, body)
        assert (status, answer["id"], len(requests)) == (200, "orders", 1)
    _, _, [*_, request] = await asked("PUT", path, {})
    assert request == pb.UpdateChangefeedRequest(id="orders"), (
        "it is refused where it is carried out"
    )


async def test_whether_tables_are_split_can_be_changed():
    for section, threshold in (
        ({"enable_table_across_nodes": True}, 100_000),
        ({"enable_table_across_nodes": True, "region_threshold": 9}, 9),
        ({"enable_table_across_nodes": False}, 0),
    ):
        body = json.dumps({"replica_config": {"scheduler": section}}).encode()
        request = documents.update(pb.Changefeed(id="orders", region_threshold=8), body)
        assert request == pb.UpdateChangefeedRequest(id="orders", region_threshold=threshold)


async def test_the_config_that_is_shown_can_be_sent_back_with_another_filter():
    _, shown, _ = await asked("GET", "/api/v2/changefeeds/orders")
    config = shown["config"]
    _, _, requests = await asked(
        "PUT", "/api/v2/changefeeds/orders", {"replica_config": config, "audit_seconds": 0}
    )
    assert requests[-1] == pb.UpdateChangefeedRequest(id="orders", audit_s=0), "the same filter"
    config["filter"]["rules"] = ["shop.*", "!shop.tmp"]
    _, _, requests = await asked("PUT", "/api/v2/changefeeds/orders", {"replica_config": config})
    assert requests[-1] == pb.UpdateChangefeedRequest(id="orders", filter=["shop.*", "!shop.tmp"])


@pytest.mark.parametrize(
    "error",
    [
        ChangefeedNotExistsError("no such"),
        passed_on(
            AioRpcError(
                grpc.StatusCode.NOT_FOUND, None, None, "[TM:ErrChangeFeedNotExists] no such"
            )
        ),
    ],
)
async def test_errors_have_ticdcs_form_from_here_and_from_the_owner(error):
    status, answer, _ = await asked("GET", "/api/v2/changefeeds/c", error=error)
    assert (status, answer) == (
        400,
        {"error_msg": "no such", "error_code": "CDC:ErrChangeFeedNotExists"},
    )
    assert (await asked("DELETE", "/api/v2/changefeeds/c", error=error))[:2] == (200, {})


async def test_who_may_ask_again_is_told_so():
    error = NotOwnerError("ask again")
    status, answer, _ = await asked("GET", "/api/v2/changefeeds", error=error)
    assert (status, answer["error_code"]) == (503, "CDC:ErrNotOwner")


async def test_unknown_paths_methods_and_defects():
    status, document, _ = await asked("GET", "/api/v1/changefeeds")
    assert (status, document["error_code"]) == (404, "TM:ErrPathUnknown")
    assert "/api/v2/openapi.json" in document["error_msg"]
    assert (await asked("PATCH", "/api/v2/changefeeds"))[0] == 405
    for query in ({"namespace": ["mine"]}, {"keyspace": ["mine"]}):
        assert (await asked("GET", "/api/v2/changefeeds", query=query))[0] == 400
    status, answer, _ = await asked("GET", "/api/v2/changefeeds", error=KeyError("x"))
    assert (status, "error_code" in answer) == (500, True)


def test_the_document_names_schemas_that_exist_and_methods_that_answer():
    document = openapi("1")
    assert json.loads(json.dumps(document)) == document
    assert all(hasattr(_Operations, operation.name) for operation in OPERATIONS)
    assert {operation.answer for operation in OPERATIONS} <= SCHEMAS.keys()
    assert {operation.body for operation in OPERATIONS} - {""} <= SCHEMAS.keys()
    assert document["servers"] == [{"url": PREFIX}]


async def test_answers_have_the_members_that_the_document_promises():
    _, answer, _ = await asked("GET", "/api/v2/changefeeds/orders")
    assert SCHEMAS["Changefeed"]["properties"].keys() <= answer.keys()
    _, answer, _ = await asked("GET", "/api/v2/status")
    assert SCHEMAS["ServerStatus"]["properties"].keys() == answer.keys()


TOML = """
case-sensitive = false
ignore-ineligible-table = true

[filter]
rules = ["shop.*", "!shop.tmp_*"]

[[filter.event-filters]]
matcher = ["shop.*"]
ignore-event = ["delete"]
ignore-insert-value-expr = "id > 100"

[[sink.column-selectors]]
matcher = ["shop.users", "crm.*"]
columns = ["*", "!phone"]

[[sink.column-masks]]
matcher = ["crm.*", "shop.users"]
columns = ["email", "phone_*"]
mask = "mask.hash.SHA-256"

[[sink.dispatchers]]
matcher = ["shop.*", "crm.*"]
target-schema = "lake"
target-table = "{schema}_{table}"

[[sink.dispatchers]]
matcher = ["*.*"]
target-schema = "rest"

[mounter]
worker-num = 16
"""


def test_ticdcs_configuration_file_gives_what_a_body_gives():
    config = ReplicaConfig.parse_toml(TOML)
    assert config.rules == ["shop.*", "!shop.tmp_*"]
    assert config.columns == ["shop.users=*,!phone", "crm.*=*,!phone"]
    assert config.ignore_ineligible_table
    hashed = "email:mask.hash.SHA-256,phone_*:mask.hash.SHA-256"
    assert config.masks == [f"crm.*={hashed}", f"shop.users={hashed}"]
    named = "lake.{schema}_{table}"
    assert config.routes == [f"shop.*={named}", f"crm.*={named}", "*.*=rest.{table}"]
    [ignored] = config.event_filters
    assert (ignored.matcher, ignored.ignore_event) == (["shop.*"], ["delete"])
    assert ignored.ignore_insert_value_expr == "id > 100"
    selector = {"matcher": ["shop.users"], "columns": ["id"]}
    body = {"sink_uri": "delta:///d", "replica_config": {"sink": {"column_selectors": [selector]}}}
    assert list(documents.creation(json.dumps(body).encode()).columns) == ["shop.users=id"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[filter", "no TOML"),
        ("[sink]\nprotocol = 'canal-json'", 'replica_config.sink.protocol: only "" is supported'),
        ("[filter]\nrules = 'shop.*'", "replica_config.filter.rules cannot be"),
        ("[[sink.column-selectors]]\nmatcher = ['a.b']", "replica_config.sink.column_selectors"),
        (
            "[[sink.column-masks]]\nmatcher = ['a.b']\ncolumns = ['c']\nsalt = 'x'",
            "replica_config.sink.column_masks cannot be",
        ),
        (
            "[[sink.dispatchers]]\nmatcher = ['a.b']\npartition = 'ts'",
            "partition 'ts': the changes of a key are in one partition",
        ),
        ("[sink]\nsalt-file = 5", "replica_config.sink.salt_file cannot be"),
        ("case-sensitive = true", "replica_config.case_sensitive: only false is supported"),
        ("[[filter.event-filters]]\nignore-sql = '^drop'", "event_filters.ignore_sql cannot be"),
        ("[[filter.event-filters]]\nignore = ['x']", "event_filters.ignore: no such member"),
        ("enable-old-value = false", "replica_config.enable_old_value: only true is supported"),
        ("later = true", "replica_config.later: this is not supported"),
        ("[[sink.dispatchers]]\nmatcher = ['a.b']\ntopic = 't'", "topic of its sink URI"),
        ("a = " + "[" * 5000, "is no TOML"),
        ("a = " + "9" * 5000, "is no TOML"),
    ],
)
def test_a_key_that_asks_for_something_else_is_an_error(text, said):
    with pytest.raises(ParameterError) as refused:
        ReplicaConfig.parse_toml(text)
    assert said in refused.value.message


def test_a_configuration_of_an_earlier_ticdc_is_taken_with_its_defaults():
    config = {
        "enable_old_value": True,
        "consistent": {"level": "none", "flush_interval": 0, "max_log_size": 0, "storage": ""},
        "sink": {
            "encoder_concurrency": 16,
            "date_separator": "none",
            "dispatchers": [{"matcher": ["a.*"], "partition": "index-value", "topic": ""}],
        },
    }
    assert ReplicaConfig.parse(config).routes == ["a.*={schema}.{table}"]


@pytest.mark.parametrize("draining", [False, True])
async def test_a_capture_that_is_drained_says_so_as_ticdc_does(draining):
    one = capturepb.Capture(id="one", draining=draining)
    services = SimpleNamespace(
        ListCaptures=AsyncMock(return_value=capturepb.ListCapturesResponse(captures=[one]))
    )
    api = Api("one", services, services, services)
    answer = await api.answer(Request("GET", "/api/v2/status", {}, b""))
    assert json.loads(answer.body)["liveness"] == draining
