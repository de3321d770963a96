"""The HTTP port of every daemon: a page for people at `/`, `/metrics` for Prometheus, `/healthz`
(alive), `/readyz` (serving), and its routes.

Where the daemon has a certificate the port speaks plain HTTP and TLS, told apart by a connection's
first byte: probes and scrapes need no certificate, while routes are answered over TLS only, and
with a CA to verified clients only. Connections, in all and of one address, the size of a request
and the time to send one are bounded; where all are used, the one that has been sending its request
for the longest time makes room.
"""

import io
import re
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest

from server.config import listening_address
from server.console import daemon_pages
from server.routes import (
    Answer,
    Handler,
    Request,
    Routes,
    UnauthorizedError,
    answer_of,
    error_answer,
    fault,
)
from server.rpc.access_list import Access, Client, OpenAccess, Right, count_unauthenticated
from server.rpc.audit_log import log_change, outcome_of, shown_names
from server.rpc.call_access import right_of_request
from server.rpc.credentials import (
    AllowedNames,
    ListenerTls,
    RefusedHandshakes,
    SecurityConfig,
    common_names,
)
from server.rpc.listener import EVICTED, REFUSED, client_address, peer_text
from sink.flight.tokens import tokens_of
from storage.model.errors import TidemarkError, UnavailableError

MAX_CONNECTIONS = 64
MAX_CONNECTIONS_PER_ADDRESS = MAX_CONNECTIONS // 2
"""Half of all connections, so that one host alone cannot keep probes and scrapes out."""
MAX_BODY_BYTES = 64 << 10
MAX_REQUEST_BYTES = 128 << 10
REQUEST_SECONDS = 10.0
_LENGTH = re.compile("[0-9]{1,18}")
_PD = "/pd/"
_PAGES = daemon_pages()
_TLS_HANDSHAKE = b"\x16"
_FULL = b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"

_log = structlog.get_logger(__name__)


class HttpPortError(UnavailableError):
    """The HTTP address cannot be listened on."""

    code = "ErrPortInUse"


@contextmanager
def listen(
    addr: str,
    *,
    ready: Callable[[], bool],
    registry: CollectorRegistry = REGISTRY,
    routes: Routes | None = None,
    security: SecurityConfig | None = None,
    access: Access | None = None,
) -> Iterator[str]:
    """Serve for the block in threads of its own; yields the bound `host:port`.

    Raises:
        HttpPortError: the address is taken or not ours.
        ConfigError: it is no address.
        CredentialsError: a TLS file cannot be used.
    """
    host, port = listening_address("http-addr", addr)
    security = security or SecurityConfig()
    answering = _Port(
        ready,
        registry,
        routes or Routes(),
        # A port with a CA alone asks nobody: it stays plain HTTP.
        ListenerTls(security, demands=False) if security.cert_path and security.key_path else None,
        bool(security.ca_path),
        AllowedNames(security.cert_allowed_cn),
        access or OpenAccess(),
    )
    try:
        server = _Server((host, port), answering)
    except OSError as err:
        raise HttpPortError(
            f"cannot listen on {addr} for HTTP: {err.strerror}; choose another --http-addr"
        ) from err
    thread = threading.Thread(target=server.serve_forever, name="http", daemon=True)
    thread.start()
    try:
        yield f"{host}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass(frozen=True, slots=True)
class _Port:
    """The routes of the port, and the rules for its clients."""

    ready: Callable[[], bool]
    registry: CollectorRegistry
    routes: Routes
    tls: ListenerTls | None
    demands_certificate: bool
    """Whether routes require a client certificate; probes and metrics never do."""
    allowed: AllowedNames
    access: Access

    def builtin(self, path: str) -> Answer | None:
        """The routes of every daemon, for which no certificate is needed."""
        if path in _PAGES:
            return _PAGES[path]
        if path == "/metrics":
            return Answer(200, generate_latest(self.registry), CONTENT_TYPE_LATEST)
        if path == "/healthz":
            return Answer(200, b"ok\n")
        if path == "/readyz":
            reason = self.routes.not_ready() if self.ready() else "starting or stopping"
            return Answer(503, f"{reason}\n".encode()) if reason else Answer(200, b"ready\n")
        return None

    def client(self, connection: socket.socket, authorization: Sequence[str]) -> tuple[Client, str]:
        """Return the client that calls a route, and its name for the audit log.

        Raises:
            UnauthorizedError, UnauthenticatedError: nobody for whom there are routes.
        """
        names = self._checked_names(connection)
        client = self.access.client(tokens_of(authorization, basic=True), names)
        return client, client.name or shown_names(names)

    def _checked_names(self, connection: socket.socket) -> tuple[bytes, ...]:
        """The common names of the client's certificate, where the daemon has a CA."""
        if self.tls is None:
            return ()
        if not isinstance(connection, ssl.SSLSocket):
            raise _of_nobody(
                "this path is answered over https only; use the cluster's certificates"
            )
        if not self.demands_certificate:
            return ()
        certificate = connection.getpeercert()
        if not certificate:
            raise _of_nobody(
                "this path is answered to clients with a certificate of the cluster's CA only"
            )
        names = common_names(certificate)
        if reason := self.allowed.refusal(names):
            raise UnauthorizedError(reason)
        return names


def _of_nobody(message: str) -> UnauthorizedError:
    count_unauthenticated()
    return UnauthorizedError(message)


def _right_of(method: str, path: str) -> Right:
    """The right that a request for a route needs."""
    if path.startswith(_PD):
        # Whoever may not delete a safepoint by PD's protocol may not do it here.
        return right_of_request(method, path) or Right.SEE
    return Right.SEE if method == "GET" else Right.OPERATE


@dataclass(slots=True)
class _Connection:
    """One that is open; `socket` is the one with TLS once that has begun."""

    host: str
    socket: socket.socket
    is_sending: bool = True
    """Whether the client is not done with its request."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, address: tuple[str, int], port: _Port) -> None:
        self.port = port
        self.handshakes = RefusedHandshakes()
        self._lock = threading.Lock()
        self._open: dict[int, _Connection] = {}
        self._context = copy_context()
        super().__init__(address, _Handler)

    def process_request(self, request: Any, peer: Any) -> None:
        if self._admitted(request, client_address(peer)):
            super().process_request(request, peer)
            return
        REFUSED.inc()
        request.settimeout(0)
        with suppress(OSError):
            request.send(_FULL)
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, peer: Any) -> None:
        try:
            # with what the daemon's log lines have in common
            self._context.copy().run(super().process_request_thread, request, peer)
        finally:
            with self._lock:
                self._open.pop(id(request), None)

    def connection_of(self, request: socket.socket) -> _Connection:
        """What is known of a connection that was admitted, even if it has made room since."""
        with self._lock:
            return self._open.get(id(request)) or _Connection("", request)

    def _admitted(self, request: socket.socket, host: str) -> bool:
        with self._lock:
            counts = Counter(each.host for each in self._open.values())
            if counts[host] >= MAX_CONNECTIONS_PER_ADDRESS:
                has_room = self._make_room(host)
            elif counts.total() >= MAX_CONNECTIONS:
                has_room = self._make_room(counts.most_common(1)[0][0])
            else:
                has_room = True
            if has_room:
                self._open[id(request)] = _Connection(host, request)
            return has_room

    def _make_room(self, host: str) -> bool:
        """Close a connection of the host; returns whether one could be."""
        for key, each in self._open.items():
            if each.host == host and each.is_sending:
                del self._open[key]
                with suppress(OSError):
                    # Its thread finds out, and closes it. Not by SSLSocket, which forgets its TLS.
                    socket.socket.shutdown(each.socket, socket.SHUT_RDWR)
                EVICTED.labels("idle").inc()
                return True
        return False

    def handle_error(self, _request: Any, peer: Any) -> None:
        """A client that breaks off, or speaks neither HTTP nor TLS, is its own problem."""
        _log.debug("http connection broke", client=peer, exc_info=True)


class _Bounded(io.RawIOBase):
    """A connection's bytes, up to a size and until a deadline."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._deadline = time.monotonic() + REQUEST_SECONDS
        self._left = MAX_REQUEST_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0 or self._left <= 0:
            raise TimeoutError("the request is too long")
        self._connection.settimeout(left_s)
        size = self._connection.recv_into(buffer)
        self._left -= size
        return size


class _Handler(BaseHTTPRequestHandler):
    """One connection, one request."""

    server: _Server

    def setup(self) -> None:
        tls = self.server.port.tls
        self._connection = self.server.connection_of(self.request)
        self.request.settimeout(REQUEST_SECONDS)
        if tls is not None:
            try:
                self._begin_tls(tls)
            except OSError as err:
                self.server.handshakes.add(err, client_address(self.client_address))
                self.request.close()
                raise
        super().setup()
        self.rfile = io.BufferedReader(_Bounded(self.connection))

    def _begin_tls(self, tls: ListenerTls) -> None:
        """Begin with TLS if the client does."""
        if self.request.recv(1, socket.MSG_PEEK) == _TLS_HANDSHAKE:
            self.request = self._connection.socket = tls.context().wrap_socket(
                self.request, server_side=True, do_handshake_on_connect=False
            )
            self.request.do_handshake()

    def version_string(self) -> str:
        """What clients are told of the server: nothing of Python's version."""
        return "tidemark"

    def finish(self) -> None:
        super().finish()
        self.connection.close()

    def parse_request(self) -> bool:
        """Parse the target, too."""
        if not super().parse_request():
            return False
        try:
            self._target = urlsplit(self.path)
        except ValueError as err:
            self.send_error(HTTPStatus.BAD_REQUEST, f"the path cannot be read: {err}")
            return False
        return True

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base class refuses, in the form of all other errors."""
        del explain
        # Who speaks no HTTP, or TLS to a port without, is told so by a status line, too.
        self.request_version = self.protocol_version
        text = message or HTTPStatus(code).phrase
        self._send(fault(code, "ErrAPIInvalidParam", f"this request is not answered: {text}"))

    def do_GET(self) -> None:
        self._connection.is_sending = False
        self._send(self.server.port.builtin(self._target.path) or self._routed())

    def do_POST(self) -> None:
        self._send(self._routed())

    do_PUT = do_DELETE = do_POST  # noqa: N815 - the base class's names

    def _routed(self) -> Answer:
        sizes = self.headers.get_all("Content-Length", ["0"])
        if not _LENGTH.fullmatch(",".join(sizes)) or "Transfer-Encoding" in self.headers:
            return fault(411, "ErrAPIInvalidParam", "send the body with one Content-Length")
        size = int(sizes[0])
        if size > MAX_BODY_BYTES:
            return fault(
                413,
                "ErrAPIInvalidParam",
                f"the body has {size} bytes; at most {MAX_BODY_BYTES} are taken",
            )
        path = self._target.path
        try:
            handler, tail = self.server.port.routes.find(self.command, path)
        except TidemarkError as err:
            return error_answer(err)
        query = parse_qs(self._target.query, keep_blank_values=True)
        return self._answer(handler, Request(self.command, path, query, tail=tail), size)

    def _answer(self, handler: Handler, request: Request, body_bytes: int) -> Answer:
        what, name = f"{request.method} {request.path[:256]}", ""
        # Also for who is refused: an answer is lost where the connection is closed before that.
        request = replace(request, body=self.rfile.read(body_bytes))
        self._connection.is_sending = False
        try:
            authorization = self.headers.get_all("Authorization", [])
            client, name = self.server.port.client(self.connection, authorization)
            client.check(_right_of(request.method, request.path), what)
        except TidemarkError as err:
            answer = error_answer(err)
        else:
            answer = answer_of(handler, request)
        if request.method != "GET":
            peer = peer_text(self.client_address)
            log_change(what, None, outcome_of(answer), peer, name)
        return answer

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        for name, value in answer.headers:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Scrapes are not news."""
