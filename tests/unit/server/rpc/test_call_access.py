"""Roles on ports of other products' protocols: the listener asks, for gRPC and HTTP alike."""

import asyncio
import http.client
import ssl
from contextlib import asynccontextmanager, closing, suppress
from datetime import UTC, datetime

import grpc
import grpc.aio
import pytest
from etcdpb import rpc_pb2 as etcd
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from kvproto import cdcpb_pb2, debugpb_pb2, keyspacepb_pb2, meta_storagepb_pb2, pdpb_pb2, tikvpb_pb2
from prometheus_client import REGISTRY
from structlog.testing import capture_logs
from tipb import pump_pb2

from server.config import ConfigError
from server.coordinator.daemon import CoordinatorConfig
from server.pump.app import PumpConfig
from server.routes import json_answer
from server.rpc.access_list import AccessFile, Right, digest
from server.rpc.call_access import right_of_call, right_of_request
from server.rpc.client import connect
from server.rpc.config import Engine
from server.rpc.credentials import SecurityConfig
from server.rpc.server import RpcServer
from server.store.config import StoreConfig
from tests.unit.server.certificates import Certificates

PD = pdpb_pb2.DESCRIPTOR.services_by_name["PD"]
MEMBERS, GC, SERVICE_GC = (
    f"/pdpb.PD/{name}" for name in ("GetMembers", "UpdateGCSafePoint", "UpdateServiceGCSafePoint")
)


def methods_with(right, file):
    """The methods of a file's services that need this right."""
    return {
        method.name
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        if right_of_call(f"/{service.full_name}/{method.name}") is right
    }


def test_what_hands_out_rows_and_what_tells_states_is_what_somebody_thought_of():
    assert methods_with(Right.ROWS, pdpb_pb2) == set()
    for name in ("Tso", "Bootstrap", "PutStore", "UpdateGCSafePoint", "UpdateServiceGCSafePoint"):
        assert right_of_call(f"/pdpb.PD/{name}") is Right.CLUSTER
    changing = ("Put", "Update", "Set", "Alloc", "Ask", "Report", "Split", "Scatter", "Delete")
    assert not [name for name in methods_with(Right.SEE, pdpb_pb2) if name.startswith(changing)]
    assert "GetMembers" in methods_with(Right.SEE, pdpb_pb2)
    for file in (etcd, meta_storagepb_pb2):
        # The metadata has whole records of changefeeds, and of databases.
        assert methods_with(Right.ROWS, file) == set()
        assert methods_with(Right.SEE, file) <= {"Status", "MemberList"}
    assert methods_with(Right.SEE, tikvpb_pb2) == set()
    writes = (
        "Prewrite",
        "Commit",
        "Rollback",
        "Put",
        "Delete",
        "Resolve",
        "PessimisticLock",
        "Ingest",
    )
    rows = methods_with(Right.ROWS, tikvpb_pb2)
    assert {"KvGet", "KvScan", "RawGet"} <= rows
    assert not [name for name in rows if any(write in name for write in writes)]
    assert methods_with(Right.ROWS, cdcpb_pb2) == {"EventFeed", "EventFeedV2"}
    assert methods_with(Right.ROWS, pump_pb2) == {"PullBinlogs"}
    assert methods_with(Right.CLUSTER, pump_pb2) == {"WriteBinlog"}
    assert methods_with(Right.SEE, debugpb_pb2) == set()
    assert "CreateKeyspace" not in methods_with(Right.SEE, keyspacepb_pb2)


def test_a_method_that_nobody_has_thought_of_is_for_the_cluster():
    assert right_of_call("/pdpb.PD/Explode") is Right.CLUSTER
    assert right_of_call("/new.Service/GetAll") is Right.CLUSTER
    assert right_of_call("/grpc.health.v1.Health/Check") is None
    assert right_of_call("/tidemarkpb.v1.PumpService/ChangeState") is None
    assert right_of_request("GET", "/pd/api/v1/stores") is Right.SEE
    assert right_of_request("GET", "/pd/api/v1/health") is None
    assert right_of_request("DELETE", "/pd/api/v1/health") is Right.CLUSTER


class Members:
    """Of PD's methods, one that looks and two that change."""

    async def GetMembers(self, _request, _context):
        return pdpb_pb2.GetMembersResponse()

    async def UpdateServiceGCSafePoint(self, _request, _context):
        return pdpb_pb2.UpdateServiceGCSafePointResponse()


async def echo(requests):
    return [
        request.SerializeToString() if isinstance(request, Message) else b"" for request in requests
    ]


@pytest.fixture(params=[Engine.NATIVE, Engine.GRPCIO], ids=lambda engine: engine.value)
def engine(request):
    return request.param


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def access(tmp_path):
    path = tmp_path / "access.toml"
    path.write_text(
        f"[[client]]\nname='looks'\nrole='read'\ntoken-sha256='{digest(b'looks')}'\n"
        f"[[client]]\nname='boss'\nrole='admin'\ntoken-sha256='{digest(b'all')}'\n"
        f"[[client]]\nname='late'\nrole='admin'\ntoken-sha256='{digest(b'late')}'\n"
        "expires=2020-01-01T00:00:00Z\n"
        "[[client]]\nname='tidb'\nrole='cluster'\ncommon-name='tidb'\n"
        "[[client]]\nname='panel'\nrole='read'\ncommon-name='panel'\n"
    )
    return AccessFile(str(path))


@asynccontextmanager
async def serving(engine, security, access):
    server = RpcServer(security, suited=engine, access=access)
    server.add_service(PD, Members(), {"UpdateGCSafePoint": echo})

    async def answer(request):
        return json_answer({"path": request.path})

    server.serve_http1(answer)
    async with server.listen("127.0.0.1:0") as bound:
        yield bound


async def outcome(channel, method, token=""):
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    try:
        await channel.unary_unary(method)(b"", timeout=60, metadata=metadata)
    except grpc.aio.AioRpcError as err:
        details = err.details() or ""
        return err.code().name if details.startswith("[TM:ErrUna") else details
    return "OK"


def refused(reason):
    return REGISTRY.get_sample_value("tidemark_rpc_access_refused_total", {"reason": reason}) or 0


async def test_roles_by_certificate_and_by_token(engine, certificates, access):
    """No token, a wrong one, one that has ended; a name that is known, and one that is not."""
    own = certificates.security(ca=True)
    async with serving(engine, own, access) as bound:
        before = refused("unauthenticated"), refused("unauthorized")
        with capture_logs() as logs:
            async with connect(bound, own) as channel:
                for token in ("", "wrong", "late"):
                    assert await outcome(channel, MEMBERS, token) == "UNAUTHENTICATED"
                assert await outcome(channel, MEMBERS) == "UNAUTHENTICATED"
                assert await outcome(channel, MEMBERS, "looks") == "OK"
                for method in (GC, SERVICE_GC):
                    assert await outcome(channel, method, "looks") == "PERMISSION_DENIED"
                    assert await outcome(channel, method, "all") == "OK"
        assert (refused("unauthenticated"), refused("unauthorized")) == (
            before[0] + 4,
            before[1] + 2,
        )
        told = [
            (each["method"], each["client"], each["outcome"]) for each in logs if "outcome" in each
        ]
        assert told == [
            ("GetMembers", "", "ErrUnauthenticated"),
            ("UpdateGCSafePoint", "looks", "ErrUnauthorized"),
            ("UpdateGCSafePoint", "boss", "begun"),
            ("UpdateServiceGCSafePoint", "looks", "ErrUnauthorized"),
            ("UpdateServiceGCSafePoint", "boss", "begun"),
        ]
        with capture_logs() as logs:
            async with connect(bound, certificates.sign("tidb")) as channel:
                assert [await outcome(channel, each) for each in (MEMBERS, GC, SERVICE_GC)] == [
                    "OK"
                ] * 3
            async with connect(bound, certificates.sign("panel")) as channel:
                assert await outcome(channel, MEMBERS) == "OK"
                assert await outcome(channel, GC) == "PERMISSION_DENIED"
                assert await outcome(channel, GC, "all") == "OK"
        # The cluster's own calls are too many to be told.
        assert [each["client"] for each in logs if "outcome" in each] == ["panel", "boss"]


class Feeds:
    """A stream that has nothing to say, and one that never ends."""

    async def EventFeed(self, requests, _context):
        async for _ in requests:
            yield cdcpb_pb2.ChangeDataEvent()

    async def PullBinlogs(self, _request, _context):
        while True:
            yield pump_pb2.PullBinlogResp()
            await asyncio.sleep(0.01)


def clients(**roles):
    """An access file's text."""
    return "".join(
        f"[[client]]\nname='{name}'\nrole='{role}'\ntoken-sha256='{digest(name.encode())}'\n"
        for name, role in roles.items()
    )


async def test_streams_end_once_their_clients_may_not_make_them_any_more(
    engine, certificates, tmp_path
):
    file = tmp_path / "access.toml"
    file.write_text(clients(leaves="admin", falls="admin", stays="admin"))
    own = certificates.security(ca=True)
    server = RpcServer(own, suited=engine, access=AccessFile(str(file)))
    server.add_service(PD, Members(), {"Tso": echo})
    server.add_service(cdcpb_pb2.DESCRIPTOR.services_by_name["ChangeData"], Feeds())
    server.add_service(pump_pb2.DESCRIPTOR.services_by_name["Pump"], Feeds())

    def opened(channel, token):
        metadata = (("authorization", f"Bearer {token}"),)
        return [
            channel.stream_stream("/pdpb.PD/Tso")(metadata=metadata),
            channel.stream_stream("/cdcpb.ChangeData/EventFeed")(metadata=metadata),
            channel.unary_stream("/binlog.Pump/PullBinlogs")(b"", metadata=metadata),
        ]

    async def goes_on(tso, feed, pull):
        for stream in (tso, feed):
            await stream.write(b"")
            assert await stream.read() is not grpc.aio.EOF
        assert await pull.read() is not grpc.aio.EOF

    async def drained(stream):
        with suppress(grpc.aio.AioRpcError):
            while await stream.read() is not grpc.aio.EOF:
                pass
        return (await stream.code()).name

    async with (
        asyncio.timeout(60),
        server.listen("127.0.0.1:0") as bound,
        connect(bound, own) as channel,
    ):
        streams = {token: opened(channel, token) for token in ("leaves", "falls", "stays")}
        for each in streams.values():
            await goes_on(*each)
        with capture_logs() as logs:
            file.write_text(clients(falls="read", stays="admin"))
            for token, code in (("leaves", "UNAUTHENTICATED"), ("falls", "PERMISSION_DENIED")):
                assert [await drained(each) for each in streams[token]] == [code] * 3
        assert "begun" not in [each.get("outcome") for each in logs]
        await goes_on(*streams["stays"])
        for each in streams["stays"]:
            each.cancel()


async def test_a_stream_ends_with_the_time_of_its_client(engine, certificates, tmp_path):
    file, now = tmp_path / "access.toml", [datetime(2030, 1, 1, tzinfo=UTC)]
    file.write_text(
        f"[[client]]\nname='x'\nrole='admin'\ntoken-sha256='{digest(b'x')}'\n"
        "expires=2030-01-02T00:00:00Z\n"
    )
    own = certificates.security(ca=True)
    server = RpcServer(own, suited=engine, access=AccessFile(str(file), lambda: now[0]))
    server.add_service(pump_pb2.DESCRIPTOR.services_by_name["Pump"], Feeds())
    async with (
        asyncio.timeout(60),
        server.listen("127.0.0.1:0") as bound,
        connect(bound, own) as channel,
    ):
        metadata = (("authorization", "Bearer x"),)
        stream = channel.unary_stream("/binlog.Pump/PullBinlogs")(b"", metadata=metadata)
        await stream.read()
        now[0] = datetime(2030, 1, 2, tzinfo=UTC)
        with suppress(grpc.aio.AioRpcError):
            while await stream.read() is not grpc.aio.EOF:
                pass
        assert await stream.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "has ended at" in await stream.details()


async def test_probes_and_reflection_are_answered_to_whom_the_port_lets_in(
    engine, certificates, access
):
    own = certificates.security(ca=True)
    async with serving(engine, own, access) as bound, connect(bound, own) as channel:
        request = health_pb2.HealthCheckRequest().SerializeToString()
        health = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert await health(request, timeout=60)
        assert await outcome(channel, "/no.Such/Method") in ("UNAUTHENTICATED", "UNIMPLEMENTED")


def http_status(bound, security, method, path, token=""):
    context = ssl.create_default_context(cafile=security.ca_path)
    context.load_cert_chain(security.cert_path, security.key_path)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with closing(http.client.HTTPSConnection(bound, timeout=60, context=context)) as connection:
        connection.request(method, path, headers=headers)
        return connection.getresponse().status


async def test_http_on_the_same_port_asks_for_the_same(engine, certificates, access):
    own, tidb = certificates.security(ca=True), certificates.sign("tidb")
    stores, service = "/pd/api/v1/stores", "/pd/api/v1/gc/safepoint/br"
    async with serving(engine, own, access) as bound:

        async def status(security, *rest):
            return await asyncio.to_thread(http_status, bound, security, *rest)

        assert await status(own, "GET", stores) == 401
        assert await status(own, "GET", stores, "looks") == 200
        assert await status(own, "GET", "/pd/api/v1/health") == 200
        with capture_logs() as logs:
            assert await status(own, "DELETE", service, "looks") == 403
            assert await status(own, "DELETE", service, "all") == 200
            assert await status(tidb, "DELETE", service) == 200
        assert [(each["method"], each["client"]) for each in logs if "outcome" in each] == [
            (f"DELETE {service}", "looks"),
            (f"DELETE {service}", "boss"),
        ]


async def test_without_a_file_nobody_is_asked(engine):
    async with serving(engine, None, None) as bound, connect(bound) as channel:
        assert [await outcome(channel, each) for each in (MEMBERS, GC, SERVICE_GC)] == ["OK"] * 3


@pytest.mark.parametrize("config", [CoordinatorConfig, StoreConfig, PumpConfig])
def test_a_file_without_certificates_would_keep_the_cluster_out(config, certificates):
    with pytest.raises(ConfigError, match="bring no tokens"):
        config(access_file="/access.toml").check_with(SecurityConfig())
    config(access_file="/access.toml").check_with(certificates.security(ca=True))
    config().check_with(SecurityConfig())
