"""Names that clients' certificates may have, and certificates that are replaced while a listener
serves, on real connections of both engines.
"""

import asyncio
import http.client
import ssl
import time
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2
from hypothesis import given
from hypothesis import strategies as st
from kvproto import kvrpcpb_pb2 as kvrpcpb
from kvproto import tikvpb_pb2 as tikvpb
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from server.capture.listener import serving_flight
from server.http import listen
from server.routes import Answer, Request, Routes, json_answer
from server.rpc import credentials, reloaded
from server.rpc.client import connect
from server.rpc.config import Engine
from server.rpc.credentials import (
    AllowedNames,
    CredentialsError,
    ListenerTls,
    SecurityConfig,
    client_tls,
    common_names,
    expires_s,
    grpcio_credentials,
)
from server.rpc.server import RpcServer
from tests.unit.server.certificates import Certificates

TIKV = tikvpb.DESCRIPTOR.services_by_name["Tikv"]
HEALTH = "/grpc.health.v1.Health/Check"


class Servicer:
    """One method that answers once."""

    async def RawGet(self, _request: Any, _context: Any) -> Any:
        return kvrpcpb.RawGetResponse(value=b"v")


async def echo(requests: Any) -> list[bytes]:
    return list(requests)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(params=[Engine.NATIVE, Engine.GRPCIO], ids=lambda engine: engine.value)
def engine(request: pytest.FixtureRequest) -> Engine:
    return Engine(request.param)


@asynccontextmanager
async def serving(security: SecurityConfig, engine: Engine) -> AsyncIterator[str]:
    server = RpcServer(security, suited=engine)
    server.add_service(TIKV, Servicer(), {"KvGet": echo})

    async def paths(_request: Request) -> Answer:
        return json_answer("ok")

    server.serve_http1(paths)
    async with server.listen("127.0.0.1:0") as bound:
        yield bound


async def statuses(bound: str, security: SecurityConfig) -> set[str]:
    """What calls of each kind end with; one call each."""
    ended = set()
    async with connect(bound, security) as channel:
        for call in (_batched, _unary, _streamed, _health):
            try:
                await call(channel)
                ended.add("OK")
            except grpc.aio.AioRpcError as err:
                ended.add(f"{err.code().name} {err.details()}")
    return ended


async def _batched(channel: grpc.aio.Channel) -> None:
    assert await channel.unary_unary("/tikvpb.Tikv/KvGet")(b"k", timeout=60) == b"k"


async def _unary(channel: grpc.aio.Channel) -> None:
    assert await channel.unary_unary("/tikvpb.Tikv/RawGet")(b"", timeout=60)


async def _streamed(channel: grpc.aio.Channel) -> None:
    # Not a stream of requests: gRPC's client reports INTERNAL if a call ends while it writes.
    request = health_pb2.HealthCheckRequest().SerializeToString()
    call = channel.unary_stream("/grpc.health.v1.Health/Watch")(request, timeout=60)
    assert await call.read()
    call.cancel()


async def _health(channel: grpc.aio.Channel) -> None:
    request = health_pb2.HealthCheckRequest().SerializeToString()
    assert await channel.unary_unary(HEALTH)(request, timeout=60)


def get(bound: str, context: ssl.SSLContext) -> int:
    with closing(http.client.HTTPSConnection(bound, timeout=60, context=context)) as connection:
        connection.request("GET", "/things")
        return connection.getresponse().status


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def client_of(security: SecurityConfig) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=security.ca_path)
    context.load_cert_chain(security.cert_path, security.key_path)
    return context


async def test_a_name_that_is_not_allowed_is_refused_at_every_call(
    certificates: Certificates, engine: Engine
) -> None:
    other = certificates.sign("intruder")
    security = replace(certificates.security(ca=True), cert_allowed_cn=("node", "spare"))
    with capture_logs() as logs:
        async with serving(security, engine) as bound:
            assert await statuses(bound, certificates.security(ca=True)) == {"OK"}
            (refused,) = await statuses(bound, other)
            assert "PERMISSION_DENIED [TM:ErrUnauthorized] the common name 'intruder'" in refused
            assert await asyncio.to_thread(get, bound, client_of(other)) == 403
            assert await asyncio.to_thread(get, bound, client_of(security)) == 200
    told = [line for line in logs if "not allowed" in line["event"]]
    assert [line["name"] for line in told] == ["intruder"]


async def answer_to_one_flight(bound: str, context: ssl.SSLContext, request: bytes) -> bytes:
    """What comes back for a request that goes out with the end of the handshake."""
    host, _, port = bound.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_hostname=host)
    while True:
        try:
            tls.do_handshake()
            break
        except ssl.SSLWantReadError:
            writer.write(outgoing.read())
            incoming.write(await reader.read(1 << 16))
    tls.write(request)
    writer.write(outgoing.read())
    incoming.write(await reader.read())
    writer.close()
    return tls.read(1 << 16)


async def test_a_request_behind_a_refused_handshake_is_no_error_of_ours(
    certificates: Certificates, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    security = replace(certificates.security(ca=True), cert_allowed_cn=("node",))
    context = client_of(certificates.sign("intruder"))
    async with serving(security, engine) as bound:
        answer = await answer_to_one_flight(bound, context, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 403 ")
    assert not [record.message for record in caplog.records if record.levelname == "ERROR"]


def test_a_file_that_vanishes_while_it_is_read_is_one_that_cannot_be_used(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    security = replace(certificates.sign("first", "vanishing"), key_path="/nowhere/key.pem")
    monkeypatch.setattr(credentials, "_check_pem", lambda _security: None)
    with pytest.raises(CredentialsError, match="No such file"):
        credentials.server_tls(security)


async def test_a_changed_certificate_is_shown_to_later_connections(
    certificates: Certificates, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reloaded, "_LOOK_EVERY_S", 0.0)
    security = certificates.sign("first", f"shown-{engine.value}")

    async def shown(bound: str, protocol: str) -> bytes:
        context = certificates.client(certificate=True)
        context.set_alpn_protocols([protocol])
        host, _, port = bound.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port), ssl=context)
        (name,) = common_names(writer.get_extra_info("peercert"))
        writer.close()
        return name

    async with serving(security, engine) as bound:
        assert [await shown(bound, protocol) for protocol in ("h2", "http/1.1")] == [b"first"] * 2
        # A file that is half written changes nothing; nobody sees an error.
        cut_short(Path(security.cert_path))
        assert [await shown(bound, protocol) for protocol in ("h2", "http/1.1")] == [b"first"] * 2
        certificates.sign("second", f"shown-{engine.value}")
        assert [await shown(bound, protocol) for protocol in ("h2", "http/1.1")] == [b"second"] * 2


def test_the_http_port_looks_at_names_and_reads_changed_files_too(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reloaded, "_LOOK_EVERY_S", 0.0)
    other = certificates.sign("visitor")
    own = certificates.sign("first", "http")
    security = replace(own, cert_allowed_cn=("node",))
    routes = Routes()
    with (
        listen("127.0.0.1:0", ready=lambda: True, routes=routes, security=security) as bound,
        routes.serving({("GET", "/things"): lambda _request: json_answer("ok")}),
    ):
        node = certificates.client(certificate=True)
        assert (get(bound, client_of(other)), get(bound, node)) == (403, 200)
        certificates.sign("second", "http")
        connection = http.client.HTTPSConnection(bound, timeout=60, context=node)
        connection.connect()
        assert isinstance(connection.sock, ssl.SSLSocket)
        assert common_names(connection.sock.getpeercert() or {}) == (b"second",)
        connection.close()


async def test_flight_cannot_look_at_names_and_wants_a_token_instead(
    certificates: Certificates,
) -> None:
    security = replace(certificates.security(ca=True), cert_allowed_cn=("node",))
    feeds: Any = None
    with pytest.raises(CredentialsError, match="--flight-token-file"):
        async with serving_flight(feeds, "127.0.0.1:0", security=security):
            pass


def test_grpcs_own_engine_is_given_a_certificate_only_when_it_has_changed(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It replaces at once what its handshakes share, and crashed where others ended meanwhile."""
    fetchers: list[Any] = []
    monkeypatch.setattr(
        grpc, "dynamic_ssl_server_credentials", lambda _, fetcher, **__: fetchers.append(fetcher)
    )
    monkeypatch.setattr(reloaded, "_LOOK_EVERY_S", 0)
    grpcio_credentials(certificates.sign("first", "given"))
    (fetch,) = fetchers
    assert [fetch(), fetch()] == [None, None]
    certificates.sign("second", "given")
    assert fetch() is not None
    assert fetch() is None


@pytest.mark.parametrize("days", [2, 20_000], ids=["UTCTime", "GeneralizedTime"])
def test_a_metric_says_when_the_certificate_in_use_runs_out(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch, days: int
) -> None:
    monkeypatch.setattr(reloaded, "_LOOK_EVERY_S", 0)
    security = certificates.sign("ends", "ends", days=days)
    listener = ListenerTls(security)
    ends_s = REGISTRY.get_sample_value("tidemark_rpc_certificate_expires_timestamp_seconds")
    assert ends_s == pytest.approx(time.time() + days * 86_400, abs=600)
    Path(security.cert_path).write_bytes(b"no certificate")
    listener.context()
    assert ends_s == REGISTRY.get_sample_value("tidemark_rpc_certificate_expires_timestamp_seconds")


@given(st.binary())
def test_what_is_no_certificate_has_no_end(data: bytes) -> None:
    body = b64encode(data).decode()
    assert expires_s(f"-----BEGIN CERTIFICATE-----{body}-----END CERTIFICATE-----") == 0.0


def test_several_listeners_of_a_process_say_once_which_file_cannot_be_used(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reloaded, "_LOOK_EVERY_S", 0)
    security = certificates.sign("shared", "shared")
    listeners = [ListenerTls(security) for _ in range(2)]
    Path(security.cert_path).write_bytes(b"\xff no certificate")
    with capture_logs() as logs:
        before = [listener.context() for listener in listeners]
        assert [listener.context() for listener in listeners] == before
    (line,) = logs
    assert f"{security.cert_path} holds no certificate in PEM" in line["reason"]


def test_names_without_a_ca_are_refused_at_the_start(certificates: Certificates) -> None:
    security = replace(certificates.security(ca=False), cert_allowed_cn=("node",))
    for given_security in (security, SecurityConfig(cert_allowed_cn=("node",))):
        with pytest.raises(CredentialsError, match="--ca-path"):
            RpcServer(given_security)


def test_an_encrypted_key_is_refused_and_nobody_is_asked_for_its_pass_phrase(
    certificates: Certificates, engine: Engine
) -> None:
    encrypted = replace(
        certificates.security(ca=True), key_path=certificates.encrypted_key("secret")
    )
    with pytest.raises(CredentialsError, match="key is encrypted; write it without a pass phrase"):
        RpcServer(encrypted, suited=engine)
    with pytest.raises(CredentialsError, match="key is encrypted"):
        client_tls(encrypted)


def test_a_file_that_goes_while_it_is_read_changes_nothing(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reloaded, "_LOOK_EVERY_S", 0)
    security = certificates.sign("gone", "gone")
    listener = ListenerTls(security)
    before = listener.context()
    Path(security.key_path).rename(f"{security.key_path}.old")
    # it is there when its content is looked at, and not when OpenSSL opens it
    monkeypatch.setattr(credentials, "_check_pem", lambda _: None)
    with capture_logs() as logs:
        assert listener.context() is before
    assert "No such file" in logs[0]["reason"]


def test_a_key_that_does_not_fit_is_one_clear_error(
    certificates: Certificates, engine: Engine
) -> None:
    own = certificates.security(ca=True)
    other = certificates.sign("other")
    with pytest.raises(CredentialsError, match="cannot be used"):
        RpcServer(replace(own, key_path=other.key_path), suited=engine)
    with pytest.raises(CredentialsError, match="cannot be used"):
        ListenerTls(replace(own, key_path=other.key_path))


@given(st.sets(st.text(max_size=4)), st.lists(st.binary(max_size=4), max_size=3))
def test_all_names_of_a_certificate_have_to_be_allowed(
    allowed: set[str], names: list[bytes]
) -> None:
    expected = not allowed or (bool(names) and {name.encode() for name in allowed} >= set(names))
    assert (AllowedNames(sorted(allowed)).refusal(names) == "") == expected
