"""The HTTP port: metrics, alive, ready, and one clear error for an address that cannot be had."""

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter
from structlog.testing import capture_logs

from server.config import ConfigError
from server.http import MAX_CONNECTIONS_PER_ADDRESS, HttpPortError, listen
from server.routes import Answer, Routes
from server.rpc.access_list import AccessFile, digest


class Ready:
    """A switch."""

    def __init__(self) -> None:
        self.on = False

    def __call__(self) -> bool:
        return self.on


@pytest.fixture
def ready() -> Ready:
    return Ready()


@pytest.fixture
def bound(ready: Ready) -> Iterator[str]:
    registry = CollectorRegistry()
    Counter("tidemark_example_things_total", "Things", registry=registry).inc(3)
    with listen("127.0.0.1:0", ready=ready, registry=registry) as address:
        yield address


def ask(address: str, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_metrics_are_those_of_the_registry(bound: str) -> None:
    status, body = ask(bound, "/metrics")
    assert status == 200
    assert "tidemark_example_things_total 3.0" in body


def test_alive_is_not_ready(bound: str, ready: Ready) -> None:
    assert ask(bound, "/healthz") == (200, "ok\n")
    assert ask(bound, "/readyz")[0] == 503
    ready.on = True
    assert ask(bound, "/readyz") == (200, "ready\n")


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nX: y"])
def test_connections_that_do_not_end_their_request_make_room(bound: str, sent: bytes) -> None:
    host, _, port = bound.rpartition(":")
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
            for _ in range(MAX_CONNECTIONS_PER_ADDRESS)
        ]
        for each in silent:
            each.sendall(sent)
        assert ask(bound, "/healthz") == (200, "ok\n")
        assert silent[0].recv(1) == b""


def test_a_request_that_is_refused_is_read_to_its_end(tmp_path: Path) -> None:
    """An answer is lost where the connection is closed before that."""
    file = tmp_path / "access.toml"
    file.write_text(f'[[client]]\nname = "a"\nrole = "read"\ntoken-sha256 = "{digest(b"t")}"\n')
    routes = Routes()
    handlers = {("PUT", "/things"): lambda _request: Answer(200, b"")}
    access = AccessFile(str(file))
    with (
        listen("127.0.0.1:0", ready=lambda: True, routes=routes, access=access) as bound,
        routes.serving(handlers),
    ):
        connection = http.client.HTTPConnection(bound, timeout=60)
        connection.putrequest("PUT", "/things")
        connection.putheader("Authorization", "Bearer t")
        connection.putheader("Content-Length", "60000")
        connection.endheaders()
        connection.send(b"x" * 30_000)
        connection.send(b"x" * 30_000)
        answer = connection.getresponse()
        assert answer.status == 403
        assert answer.headers["Server"] == "tidemark"
        connection.close()


ODD = {
    "a length of 5,000 digits": (b"PUT /x HTTP/1.1\r\nContent-Length: " + b"9" * 5000, 411),
    "two lengths": (b"PUT /x HTTP/1.1\r\nContent-Length: 0\r\nContent-Length: 0", 411),
    "a host that is none": (b"GET http://[ HTTP/1.1", 400),
    "another one, to be changed": (b"PUT http://]/x HTTP/1.1\r\nContent-Length: 0", 400),
    "an unknown method": (b"BREW / HTTP/1.1", 501),
    "no version": (b"GET / HTTP/x.y", 400),
    "too many headers": (b"GET / HTTP/1.1" + b"\r\nX: y" * 101, 431),
    "TLS": (b"\x16\x03\x01\x00\xc8\x01\x00", 400),
}


@pytest.mark.parametrize("which", ODD)
def test_odd_requests_are_answered_as_all_errors_are(bound: str, which: str) -> None:
    sent, status = ODD[which]
    head, body = answered(bound, sent + b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 %d " % status)
    assert json.loads(body)["error_code"] == "TM:ErrAPIInvalidParam"


def test_the_answer_to_head_has_no_body(bound: str) -> None:
    head, body = answered(bound, b"HEAD / HTTP/1.1\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 501 ")
    assert body == b""


def answered(address: str, sent: bytes) -> tuple[bytes, bytes]:
    """The head and the body of what the port answers."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(sent)
        with connection.makefile("rb") as answer:
            head, _, body = answer.read().partition(b"\r\n\r\n")
    return head, body


def test_people_get_a_page(bound: str) -> None:
    status, body = ask(bound, "/")
    assert (status, "<title>Tidemark daemon</title>" in body) == (200, True)


def test_other_paths_show_the_way(bound: str) -> None:
    status, body = ask(bound, "/none")
    assert status == 404
    assert json.loads(body) == {
        "error_msg": "nothing is served at /none; try /healthz, /metrics, /readyz",
        "error_code": "TM:ErrPathUnknown",
    }


def test_an_answer_brings_its_headers(ready: Ready) -> None:
    routes, policy = Routes(), ("Content-Security-Policy", "default-src 'none'")
    page = Answer(200, b"<p>", "text/html", headers=[policy])
    with (
        routes.serving({("GET", "/page"): lambda _: page}),
        listen("127.0.0.1:0", ready=ready, routes=routes) as address,
    ):
        connection = http.client.HTTPConnection(address, timeout=60)
        connection.request("GET", "/page")
        assert policy in connection.getresponse().getheaders()
        connection.close()


def test_a_busy_port_says_what_to_do(bound: str, ready: Ready) -> None:
    with (
        pytest.raises(
            HttpPortError, match=r"cannot listen on .* for HTTP: .*; choose another --http-addr"
        ),
        listen(bound, ready=ready),
    ):
        pass


def test_the_port_is_free_again_after_the_block(ready: Ready) -> None:
    with listen("127.0.0.1:0", ready=ready) as address:
        pass
    with listen(address, ready=ready) as again:
        assert again == address


@pytest.mark.parametrize(
    "addr", ["", "localhost", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:99999"]
)
def test_something_that_is_no_address_says_so(addr: str, ready: Ready) -> None:
    with pytest.raises(ConfigError, match="--http-addr is host:port"), listen(addr, ready=ready):
        pass


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/pd/api/v1/gc/safepoint", {"sees", "runs", "node", "boss"}),
        ("DELETE", "/pd/api/v1/gc/safepoint/br", {"node", "boss"}),
        ("GET", "/log-level", {"sees", "runs", "node", "boss"}),
        ("PUT", "/log-level", {"runs", "boss"}),
    ],
)
def test_routes_take_roles_and_changes_are_in_the_audit_log(
    ready: Ready, tmp_path: Path, method: str, path: str, allowed: set[str]
) -> None:
    roles = {"sees": "read", "runs": "operate", "node": "cluster", "boss": "admin"}
    clients = tmp_path / "access.toml"
    clients.write_text(
        "".join(
            f"[[client]]\nname='{name}'\nrole='{role}'\ntoken-sha256='{digest(name.encode())}'\n"
            for name, role in roles.items()
        )
    )
    routes, statuses = Routes(), {}
    with (
        capture_logs() as logs,
        routes.serving({(method, path): lambda _: Answer(200, b"")}),
        listen(
            "127.0.0.1:0", ready=ready, routes=routes, access=AccessFile(str(clients))
        ) as address,
    ):
        for name in roles:
            connection = http.client.HTTPConnection(address, timeout=60)
            connection.request(method, path, headers={"Authorization": f"Bearer {name}"})
            statuses[name] = connection.getresponse().status
            connection.close()
    assert statuses == {name: 200 if name in allowed else 403 for name in roles}
    audit = {line["client"]: line for line in logs if line.get("logger") == "audit"}
    assert {name: line["outcome"] for name, line in audit.items()} == (
        {}
        if method == "GET"
        else {name: "ok" if name in allowed else "ErrUnauthorized" for name in roles}
    )
    assert all(line["peer"].startswith("ipv4:127.0.0.1:") for line in audit.values())
