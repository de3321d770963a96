"""Routes on the HTTP port: which handler, which status, and who is let in."""

import http.client
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from server.http import MAX_BODY_BYTES, MAX_CONNECTIONS, MAX_CONNECTIONS_PER_ADDRESS, listen
from server.routes import (
    Answer,
    MethodRefusedError,
    Request,
    Routes,
    error_answer,
    json_answer,
)
from server.rpc.credentials import CredentialsError, SecurityConfig
from storage.model.errors import ConflictError, UnavailableError
from tests.unit.server.certificates import Certificates


def echo(request: Request) -> Answer:
    return json_answer([request.method, request.tail, request.query, request.body.decode()])


def fails(request: Request) -> Answer:
    raise {
        "busy": UnavailableError("not now"),
        "late": TimeoutError(),
        "first": ConflictError("too late"),
    }.get(request.tail, ZeroDivisionError())


class Slow:
    """A handler that answers when it may; `begun` counts its calls."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Event()

    def __call__(self, request: Request) -> Answer:
        self.begun.release()
        assert self.may_end.wait(60)
        return echo(request)


HANDLERS = {
    ("GET", "/things"): echo,
    ("GET", "/things/"): echo,
    ("DELETE", "/things/"): echo,
    ("POST", "/things/"): echo,
    ("GET", "/fails/"): fails,
}


@pytest.fixture(scope="module")
def routes() -> Routes:
    return Routes()


@pytest.fixture(scope="module")
def bound(routes: Routes) -> Iterator[str]:
    with (
        listen("127.0.0.1:0", ready=lambda: True, routes=routes) as address,
        routes.serving(HANDLERS),
    ):
        yield address


def ask(
    connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None = None
) -> tuple[int, object]:
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        text = answer.read().decode()
        return answer.status, json.loads(text) if text.startswith(("[", "{")) else text
    finally:
        connection.close()


def plain(address: str, method: str, path: str, body: bytes | None = None) -> tuple[int, object]:
    return ask(http.client.HTTPConnection(address, timeout=60), method, path, body)


def test_a_handler_gets_what_follows_its_path_decoded(bound: str) -> None:
    assert plain(bound, "GET", "/things?a=1&a=2") == (200, ["GET", "", {"a": ["1", "2"]}, ""])
    assert plain(bound, "DELETE", "/things/a%2Fb") == (200, ["DELETE", "a/b", {}, ""])
    assert plain(bound, "POST", "/things/x", b"text") == (200, ["POST", "x", {}, "text"])


def test_bytes_that_are_no_text_reach_the_handler_and_the_answer(bound: str) -> None:
    assert plain(bound, "GET", "/things/a%FF") == (200, ["GET", "a\udcff", {}, ""])


def test_a_method_that_is_not_served_names_those_that_are(bound: str) -> None:
    status, answer = plain(bound, "PUT", "/things/x")
    assert status == 405
    assert answer == {
        "error_msg": "/things/x takes DELETE, GET, POST, not PUT",
        "error_code": "TM:ErrMethodNotAllowed",
    }
    refused = error_answer(MethodRefusedError("/things/x", "PUT", ["POST", "GET"]))
    assert refused.headers == [("Allow", "GET, POST")]


@pytest.mark.parametrize(
    ("tail", "status"), [("busy", 503), ("first", 409), ("late", 504), ("defect", 500)]
)
def test_errors_of_a_handler_have_their_status(bound: str, tail: str, status: int) -> None:
    assert plain(bound, "GET", f"/fails/{tail}")[0] == status


def test_routes_end_with_their_block(bound: str, routes: Routes) -> None:
    with routes.serving({("GET", "/more"): echo}):
        assert plain(bound, "GET", "/more")[0] == 200
    assert plain(bound, "GET", "/more")[0] == 404


def test_a_large_body_and_one_without_length_are_refused(bound: str) -> None:
    assert plain(bound, "POST", "/things/x", b"x" * (MAX_BODY_BYTES + 1))[0] == 413
    connection = http.client.HTTPConnection(bound, timeout=60)
    connection.putrequest("POST", "/things/x")
    connection.putheader("Transfer-Encoding", "chunked")
    connection.endheaders()
    assert connection.getresponse().status == 411
    connection.close()


def test_more_connections_than_the_port_holds_are_turned_away() -> None:
    half = MAX_CONNECTIONS_PER_ADDRESS
    sources = ["127.0.0.2"] * half + ["127.0.0.3"] * (MAX_CONNECTIONS - half)
    with busy(sources) as bound, connected(bound, "127.0.0.1") as one_more:
        assert one_more.recv(100).startswith(b"HTTP/1.0 503")


def test_one_address_has_half_of_the_ports_connections() -> None:
    with busy(["127.0.0.2"] * MAX_CONNECTIONS_PER_ADDRESS) as bound:
        with connected(bound, "127.0.0.2") as one_more:
            assert one_more.recv(100).startswith(b"HTTP/1.0 503")
        assert plain(bound, "GET", "/healthz")[0] == 200


@contextmanager
def busy(sources: Sequence[str]) -> Iterator[str]:
    """A request that is being answered from each of the sources; others would make room. At a port
    of its own, where no earlier connection is about to end.
    """
    slow, routes = Slow(), Routes()
    with (
        pytest.MonkeyPatch.context() as patched,
        listen("127.0.0.1:0", ready=lambda: True, routes=routes) as bound,
        routes.serving({("GET", "/slow"): slow}),
        ExitStack() as connections,
    ):
        # A machine that is busy with other work may take longer to read them all.
        patched.setattr("server.http.REQUEST_SECONDS", 300)
        connections.callback(slow.may_end.set)
        for source in sources:
            connection = connections.enter_context(connected(bound, source))
            connection.sendall(b"GET /slow HTTP/1.0\r\n\r\n")
        for _ in sources:
            assert slow.begun.acquire(timeout=60)
        yield bound


def connected(bound: str, source: str) -> socket.socket:
    host, _, port = bound.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60, source_address=(source, 0))


def test_endless_headers_are_cut_off(bound: str) -> None:
    host, _, port = bound.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(b"GET /things HTTP/1.0\r\n")
        try:
            for number in range(80):
                connection.sendall(b"X-%d: %s\r\n" % (number, b"y" * 4000))
            received = connection.recv(100)
        except (ConnectionResetError, BrokenPipeError):
            received = b""
    assert received == b""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls"))


def refused() -> float:
    """How many requests of nobody who is known were refused so far."""
    reason = {"reason": "unauthenticated"}
    return REGISTRY.get_sample_value("tidemark_rpc_access_refused_total", reason) or 0


@pytest.mark.parametrize("ca", [True, False])
def test_with_certificates_a_route_is_for_tls_and_its_clients_only(
    certificates: Certificates, ca: bool
) -> None:
    routes = Routes()
    security = certificates.security(ca=ca)
    with (
        listen("127.0.0.1:0", ready=lambda: True, routes=routes, security=security) as bound,
        routes.serving(HANDLERS),
    ):

        def tls(path: str, *, certificate: bool) -> int:
            context = certificates.client(certificate=certificate)
            return ask(
                http.client.HTTPSConnection(bound, timeout=60, context=context), "GET", path
            )[0]

        before = refused()
        assert plain(bound, "DELETE", "/things/x")[0] == 403
        assert plain(bound, "GET", "/healthz") == (200, "ok\n")
        assert tls("/healthz", certificate=False) == 200
        assert tls("/things", certificate=False) == (403 if ca else 200)
        assert tls("/things", certificate=True) == 200
        assert refused() - before == (2 if ca else 1)


def test_tls_files_that_cannot_be_read_are_one_clear_error(tmp_path: Path) -> None:
    security = SecurityConfig(
        cert_path=str(tmp_path / "none.pem"), key_path=str(tmp_path / "none.key")
    )
    with (
        pytest.raises(CredentialsError, match="check --cert-path"),
        listen("127.0.0.1:0", ready=lambda: True, security=security),
    ):
        pass


def test_a_client_that_sends_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.http.REQUEST_SECONDS", 0.1)
    with listen("127.0.0.1:0", ready=lambda: True) as bound:
        host, _, port = bound.rpartition(":")
        for begun in (b"", b"GET / HTTP/1.0\r\nX: "):
            with socket.create_connection((host, int(port)), timeout=60) as connection:
                connection.sendall(begun)
                assert connection.recv(100) == b""
