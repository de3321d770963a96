"""Who gets in at ports with mTLS: gRPC of both engines, HTTP and Flight; who is refused is told in
metrics and, once, in the log.
"""

import asyncio
import http.client
import socket
import ssl
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import grpc
import pyarrow as pa
import pyarrow.flight as fl
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

import server.http
from server.capture.listener import readers_of, serving_flight
from server.http import listen
from server.routes import Answer, Request, Routes, json_answer
from server.rpc import grpcio_front, listener
from server.rpc.access_list import open_access
from server.rpc.config import Engine
from server.rpc.credentials import SecurityConfig
from server.rpc.server import RpcServer
from tests.unit.server.certificates import Certificates

NODE, VISITOR, ENDED, STRANGER, NOBODY = "node", "visitor", "ended", "stranger", "nobody"
TOKEN = b"t" * 32
COUNTER = "tidemark_rpc_tls_handshakes_refused_total"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def own(certificates: Certificates) -> SecurityConfig:
    return replace(certificates.security(ca=True), cert_allowed_cn=(NODE,))


@pytest.fixture(scope="module")
def shown(certificates: Certificates, tmp_path_factory) -> Callable[[str], SecurityConfig]:
    """What a client of this kind shows."""
    elsewhere = Certificates(tmp_path_factory.mktemp("other")).sign(NODE)
    files = {
        NODE: certificates.security(ca=True),
        VISITOR: certificates.sign(VISITOR),
        ENDED: certificates.sign(NODE, ENDED, days=-1),
        STRANGER: replace(elsewhere, ca_path=certificates.security(ca=True).ca_path),
        NOBODY: SecurityConfig(ca_path=certificates.security(ca=True).ca_path),
    }
    return files.__getitem__


def refused() -> dict[str, float]:
    """How many handshakes failed, by reason."""
    (metric,) = (each for each in REGISTRY.collect() if each.name == COUNTER.removesuffix("_total"))
    return {
        sample.labels["reason"]: sample.value
        for sample in metric.samples
        if sample.name == COUNTER and sample.value
    }


def since(before: dict[str, float]) -> dict[str, float]:
    return {
        reason: count - before.get(reason, 0)
        for reason, count in refused().items()
        if count != before.get(reason, 0)
    }


def lines(logs: list[Any]) -> list[str]:
    return [line["reason"] for line in logs if "TLS handshake" in line["event"]]


def status_of(bound: str, client: SecurityConfig) -> grpc.StatusCode:
    """What one call ends with."""
    credentials = grpc.ssl_channel_credentials(
        root_certificates=content(client.ca_path),
        private_key=content(client.key_path),
        certificate_chain=content(client.cert_path),
    )
    with grpc.secure_channel(bound, credentials) as channel:
        try:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
        except grpc.RpcError as err:
            return err.code()
    return grpc.StatusCode.OK


def content(path: str) -> bytes | None:
    return Path(path).read_bytes() if path else None


@pytest.mark.parametrize("engine", [Engine.NATIVE, Engine.GRPCIO], ids=lambda engine: engine.value)
async def test_grpc(own: SecurityConfig, shown, engine: Engine) -> None:
    expected = {
        NODE: grpc.StatusCode.OK,
        VISITOR: grpc.StatusCode.PERMISSION_DENIED,
        ENDED: grpc.StatusCode.UNAVAILABLE,
        STRANGER: grpc.StatusCode.UNAVAILABLE,
        NOBODY: grpc.StatusCode.UNAVAILABLE,
    }
    server, before = RpcServer(own, suited=engine), refused()
    server.serve_http1(nothing)
    with capture_logs() as logs:
        async with server.listen("127.0.0.1:0") as bound:
            for _ in range(2):
                for kind, status in expected.items():
                    assert await asyncio.to_thread(status_of, bound, shown(kind)) is status, kind
    counts = since(before)
    assert counts["certificate"] >= 4
    assert counts["no_certificate"] >= 2
    no_certificate = "it shows no certificate; this port demands one (--ca-path)"
    assert sorted(reason.rpartition(": ")[2] for reason in lines(logs)) == (
        [no_certificate, "its certificate is not accepted"]
        if engine is Engine.GRPCIO  # it does not say why, and the records do not, either
        else [
            "certificate has expired",
            no_certificate,
            "unable to get local issuer certificate",
        ]
    )


@pytest.mark.parametrize("kind", ["grpc", "http", "flight"])
async def test_a_handshake_that_does_not_end_has_a_deadline(
    own: SecurityConfig, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (listener, grpcio_front):
        monkeypatch.setattr(module, "HANDSHAKE_S", 0.05)
    monkeypatch.setattr(server.http, "REQUEST_SECONDS", 0.05)
    before, feeds = refused(), Feeds()
    security = replace(own, cert_allowed_cn=())
    with capture_logs() as logs:
        async with AsyncExitStack() as stack:
            if kind == "grpc":
                port = RpcServer(security, suited=Engine.NATIVE).listen("127.0.0.1:0")
                bound = await stack.enter_async_context(port)
            elif kind == "http":
                bound = stack.enter_context(
                    listen("127.0.0.1:0", ready=lambda: True, security=security)
                )
            else:
                rows = serving_flight(cast("Any", feeds), "127.0.0.1:0", security=security)
                bound = (await stack.enter_async_context(rows)).bound
            host, _, number = bound.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(number))
            writer.write(bytes.fromhex("160301020001"))  # a ClientHello begins
            with suppress(OSError):
                await reader.read()
            writer.close()
            assert await counted(before, expects=True) == {"timeout": 1}
    assert lines(logs) == ["it did not end its part in time"]


async def test_a_client_is_told_why_it_is_refused(own: SecurityConfig, shown) -> None:
    async with RpcServer(own, suited=Engine.NATIVE).listen("127.0.0.1:0") as bound:
        assert await asyncio.to_thread(alert, bound, shown(ENDED)) == "CERTIFICATE_EXPIRED"


def alert(bound: str, client: SecurityConfig) -> str:
    host, _, port = bound.rpartition(":")
    context = ssl.create_default_context(cafile=client.ca_path)
    context.load_cert_chain(client.cert_path, client.key_path)
    context.set_alpn_protocols(["h2"])
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        try:
            with context.wrap_socket(connection, server_hostname=host) as encrypted:
                encrypted.recv(1)
        except ssl.SSLError as err:
            return err.reason.rpartition("ALERT_")[2]
    return "nothing"


async def nothing(_: Request) -> Answer:
    return Answer(404, b"")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_handshakes_with_grpcs_own_engine_are_told_by_their_records(
    own: SecurityConfig, shown, version: ssl.TLSVersion
) -> None:
    server = RpcServer(own, suited=Engine.GRPCIO)
    server.serve_http1(nothing)
    expected = {
        NODE: None,
        VISITOR: None,
        ENDED: "certificate",
        STRANGER: "certificate",
        NOBODY: "no_certificate",
        "trusts nobody": "refused_by_client",
        "goes away": None,
        "no TLS": "not_tls",
    }
    seen = {}
    async with server.listen("127.0.0.1:0") as bound:
        for kind, reason in expected.items():
            before = refused()
            await asyncio.to_thread(knock, bound, kind, shown, version)
            seen[kind] = await counted(before, expects=reason is not None)
    assert seen == {kind: {reason: 1.0} if reason else {} for kind, reason in expected.items()}


async def counted(before, *, expects: bool) -> dict:
    """What was counted; a client may be gone before that, so what is expected is waited for."""
    async with asyncio.timeout(60):
        while expects and not since(before):  # noqa: ASYNC110 - a counter tells nobody
            await asyncio.sleep(0.01)
    return since(before)


def knock(bound: str, kind: str, shown, version: ssl.TLSVersion) -> None:
    """Connect as such a client does, until the server closes, or says something after the
    handshake.
    """
    host, _, port = bound.rpartition(":")
    with suppress(OSError), socket.create_connection((host, int(port)), timeout=20) as connection:
        if kind == "goes away":
            return
        if kind == "no TLS":
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            connection.recv(1)
            return
        node = shown(NODE)
        if kind == "trusts nobody":
            context = ssl.create_default_context()
        else:
            client = shown(kind)
            context = ssl.create_default_context(cafile=node.ca_path)
            if client.cert_path:
                context.load_cert_chain(client.cert_path, client.key_path)
        context.maximum_version = version
        context.set_alpn_protocols(["h2"])
        with context.wrap_socket(connection, server_hostname=host) as encrypted:
            encrypted.recv(1)


def http_status(bound: str, client: SecurityConfig) -> int | str:
    context = ssl.create_default_context(cafile=client.ca_path)
    if client.cert_path:
        context.load_cert_chain(client.cert_path, client.key_path)
    connection = http.client.HTTPSConnection(bound, timeout=20, context=context)
    try:
        connection.request("GET", "/things")
        return connection.getresponse().status
    except OSError:  # ssl.SSLError is one, and so is a connection that is reset
        return "refused"
    finally:
        connection.close()


def test_http(own: SecurityConfig, shown) -> None:
    expected = {NODE: 200, VISITOR: 403, ENDED: "refused", STRANGER: "refused", NOBODY: 403}
    routes, before = Routes(), refused()
    with (
        capture_logs() as logs,
        listen("127.0.0.1:0", ready=lambda: True, routes=routes, security=own) as bound,
        routes.serving({("GET", "/things"): lambda _request: json_answer("ok")}),
    ):
        for _ in range(2):
            assert {kind: http_status(bound, shown(kind)) for kind in expected} == expected
    assert since(before) == {"certificate": 4}
    assert len(lines(logs)) == 2


async def test_plain_text_at_a_port_with_tls_is_counted_and_told(own: SecurityConfig) -> None:
    before = refused()
    with capture_logs() as logs:
        async with RpcServer(own, suited=Engine.NATIVE).listen("127.0.0.1:0") as bound:
            host, _, port = bound.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            with suppress(OSError):
                await reader.read()
            writer.close()
    assert since(before) == {"not_tls": 1}
    assert lines(logs) == ["it speaks no TLS, and this port does"]


class Feeds:
    """One changefeed with a row."""

    def close(self) -> None: ...

    def read(self, *_: object, before: bool = False) -> Any:
        del before
        rows = pa.record_batch({"n": [1]})
        return rows.schema, iter([rows])


def rows_read(bound: str, client: SecurityConfig, token: bytes) -> int:
    flight = fl.FlightClient(
        f"grpc+tls://{bound}",
        tls_root_certs=content(client.ca_path),
        cert_chain=content(client.cert_path),
        private_key=content(client.key_path),
    )
    headers = [(b"authorization", b"Bearer " + token)] if token else []
    ticket = fl.Ticket(b'{"changefeed": "c", "table": "t", "start": 1, "end": 2}')
    with flight:
        options = fl.FlightCallOptions(timeout=20, headers=headers)
        return int(flight.do_get(ticket, options).read_all().num_rows)


async def test_flight(own: SecurityConfig, shown, tmp_path: Path) -> None:
    """It cannot look at names, so it asks for a token, too."""
    feeds: Any = Feeds()
    (tmp_path / "token").write_bytes(TOKEN)
    readers = readers_of(open_access(""), str(tmp_path / "token"))
    async with serving_flight(feeds, "127.0.0.1:0", security=own, readers=readers) as flight:
        for kind in (NODE, VISITOR):
            assert await asyncio.to_thread(rows_read, flight.bound, shown(kind), TOKEN) == 1
            for wrong in (b"", b"x" * 32):
                with pytest.raises(fl.FlightUnauthenticatedError):
                    await asyncio.to_thread(rows_read, flight.bound, shown(kind), wrong)
        for kind, reason in {
            ENDED: "certificate",
            STRANGER: "certificate",
            NOBODY: "no_certificate",
        }.items():
            before = refused()
            with pytest.raises(fl.FlightUnavailableError):
                await asyncio.to_thread(rows_read, flight.bound, shown(kind), TOKEN)
            assert (await counted(before, expects=True)).keys() == {reason}
