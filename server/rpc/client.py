"""Channels to peers, with TLS, limits, keepalive and a token; the cluster's metadata; and diagnosis
of an address where no channel gets ready.

Every coordinator serves the metadata, by etcd's API, at its own address. A token is read from its
file for each call that brings it: a new one is in use with the next call. While the file cannot be
used, such as one that is being written, calls bring the former one.

gRPC only says that a channel does not get ready, whatever the reason: nobody listens, a web server
answers, only one side uses TLS, a certificate does not fit, or the peer accepts connections and
stays silent. `diagnose` finds the reason with one plain connection, for the log.
"""

import asyncio
import os
import socket
import ssl
import urllib.request
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

import grpc
import grpc.aio
import structlog

from server.rpc.config import MAX_MESSAGE_BYTES
from server.rpc.credentials import NOT_TLS_REASONS, SecurityConfig, channel_credentials, client_tls
from server.rpc.reloaded import UNUSABLE
from server.rpc.renewed_channel import RenewedChannel
from sink.flight.tokens import TokenFileError, read_token
from storage.meta.client import EtcdMeta, open_meta
from storage.model.errors import InvalidError

NO_WEB_PROXY: Final = ("grpc.enable_http_proxy", int("grpc_proxy" in os.environ))
"""gRPC would send calls to 127.0.0.1, too, through the proxy of `http_proxy` or `https_proxy`. Only
its own variable, `grpc_proxy`, is obeyed.
"""

_OPTIONS = (
    NO_WEB_PROXY,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    # Without it a silent peer is only noticed after a minute.
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)
_CONNECTION_MS: Final = 2_000
_AUTHORIZATION: Final = "authorization"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""The beginning of an HTTP/2 client's bytes: the preface, and an empty SETTINGS frame."""
_FRAME_HEAD_BYTES = 9
_SETTINGS_FRAME = 4
_TLS_RECORDS = (b"\x15\x03", b"\x16\x03")
_ANSWER_BYTES = 64
_ANSWER_S = 2.0
_FILES: Final = "the token for other daemons"
_tokens: dict[str, str] = {}
"""The latest token of each file."""
_failing: set[str] = set()
"""Files that cannot be used now."""

_log = structlog.get_logger(__name__)


class LoginInAddressError(InvalidError):
    """An address names a user or a password, which errors and logs would show."""

    code = "ErrLoginInAddress"

    @classmethod
    def check(cls, addresses: str) -> None:
        """Refuse addresses with a login; the message does not repeat them.

        Raises:
            LoginInAddressError: there is one.
        """
        if "@" in addresses:
            raise cls(
                "an address is host:port, without user and password: an etcd's login comes from "
                "TIDEMARK_METADATA_USER and TIDEMARK_METADATA_PASSWORD_FILE, and daemons know each "
                "other by certificates and token files"
            )


def connect(
    address: str,
    security: SecurityConfig | None = None,
    token_file: str = "",
    *,
    connection_ms: int = _CONNECTION_MS,
) -> grpc.aio.Channel:
    """A channel to `host:port`; connects lazily and reconnects by itself.

    A scheme in front is dropped. With a `token_file`, calls bring its token. An attempt to connect
    ends after `connection_ms`: a busy server answers late.

    Raises:
        CredentialsError: our own TLS files cannot be used.
        LoginInAddressError: it is no address but a login, too.
    """
    LoginInAddressError.check(address)
    target = address.rpartition("//")[2]
    files = channel_credentials(security or SecurityConfig())
    interceptors = token_interceptors(token_file) if token_file else None
    # What gRPC calls a backoff here is the time that an attempt to connect has.
    options = (*_OPTIONS, ("grpc.min_reconnect_backoff_ms", connection_ms))
    if files is None:
        return grpc.aio.insecure_channel(target, options=options, interceptors=interceptors)
    return RenewedChannel(
        files,
        lambda credentials: grpc.aio.secure_channel(
            target, credentials, options=options, interceptors=interceptors
        ),
    )


def metadata_at(
    coordinator: str, security: SecurityConfig
) -> AbstractAsyncContextManager[EtcdMeta]:
    """Yield a client of the metadata at `coordinator` (host:port) for the block; it connects at its
    first call.
    """
    return open_meta(f"etcd://{coordinator}", lambda address: connect(address, security))


def token_interceptors(path: str) -> list[Any]:
    """Return interceptors that send the token of a file with each call of an asyncio channel.

    Calls raise TokenFileError as long as it could never be read.
    """
    return [_UnaryUnary(path), _UnaryStream(path)]


def with_token(channel: grpc.Channel, path: str) -> grpc.Channel:
    """The same for a channel of threads."""
    return grpc.intercept_channel(channel, _Sync(path)) if path else channel


class _UnaryUnary(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    def __init__(self, path: str) -> None:
        self._path = path

    async def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: Any, request: Any
    ) -> Any:
        return await continuation(_with_token(client_call_details, self._path), request)


class _UnaryStream(grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    def __init__(self, path: str) -> None:
        self._path = path

    async def intercept_unary_stream(
        self, continuation: Callable[..., Any], client_call_details: Any, request: Any
    ) -> Any:
        return await continuation(_with_token(client_call_details, self._path), request)


class _Sync(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    def __init__(self, path: str) -> None:
        self._path = path

    def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: Any, request: Any
    ) -> Any:
        return continuation(_Details(client_call_details, self._path), request)

    intercept_unary_stream = intercept_unary_unary


class _Details(grpc.ClientCallDetails):
    """The details of a call, and the token."""

    def __init__(self, details: Any, path: str) -> None:
        self.method = details.method
        self.timeout = details.timeout
        self.credentials = details.credentials
        self.wait_for_ready = details.wait_for_ready
        self.compression = getattr(details, "compression", None)
        self.metadata = _metadata_with_token(details.metadata, path)


def _with_token(details: Any, path: str) -> Any:
    metadata = _metadata_with_token(details.metadata, path)
    return details._replace(metadata=grpc.aio.Metadata(*metadata))


def _metadata_with_token(metadata: Any, path: str) -> tuple[tuple[str, Any], ...]:
    return (*(metadata or ()), (_AUTHORIZATION, f"Bearer {token_of(path)}"))


def token_of(path: str) -> str:
    """The token of a file, or the one that it had before it became unusable.

    Raises:
        TokenFileError: there has been none.
    """
    try:
        _tokens[path] = read_token(path)
    except TokenFileError as err:
        if path not in _tokens:
            raise
        if path not in _failing:
            _failing.add(path)
            UNUSABLE.labels(_FILES).set(1)
            _log.warning(f"{_FILES} changed and cannot be used; it stays", reason=str(err))
    else:
        if path in _failing:
            _failing.discard(path)
            UNUSABLE.labels(_FILES).set(0)
    return _tokens[path]


def http_opener(security: SecurityConfig | None = None) -> urllib.request.OpenerDirector:
    """Return what opens the URLs of daemons, with `security` by TLS: without the proxy of
    `http_proxy`, which is for the web.

    Raises:
        CredentialsError: our own TLS files cannot be used.
    """
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    context = client_tls(security) if security is not None else None
    if context is not None:
        context.set_alpn_protocols(["http/1.1"])
        handlers.append(urllib.request.HTTPSHandler(context=context))
    return urllib.request.build_opener(*handlers)


def scrape(address: str, timeout_s: float) -> str | None:
    """The metrics of another process of this machine, as Prometheus reads them; None: it gives
    none.
    """
    try:
        with http_opener().open(f"http://{address}/metrics", timeout=timeout_s) as answer:
            return str(answer.read().decode())
    except (OSError, ValueError):
        return None


async def diagnose(address: str, security: SecurityConfig) -> str:
    """One sentence, without a full stop, about the server at `host:port`; takes at most a few
    seconds.

    Raises:
        CredentialsError: our own TLS files cannot be used.
    """
    fault = await connection_fault(address, security)
    return fault or f"{address} speaks HTTP/2, but does not answer our calls in time"


async def connection_fault(address: str, security: SecurityConfig) -> str:
    """The same, but empty if the server speaks HTTP/2, as gRPC needs it; raises as `diagnose`."""
    tls = client_tls(security)
    try:
        answer = await _first_bytes(address, tls)
    except ssl.SSLCertVerificationError as err:
        return (
            f"{address} has a certificate that --ca-path does not trust for this name: "
            f"{err.verify_message}"
        )
    except ssl.SSLError as err:
        if err.reason in NOT_TLS_REASONS:
            return f"{address} speaks no TLS: leave out --ca-path, --cert-path and --key-path"
        return f"{address} {_tls_fault(err.reason or str(err))}"
    except TimeoutError:
        return f"{address} accepts no connection, or no TLS on it, within {_ANSWER_S:g} s"
    except OSError as err:
        return f"{address} cannot be connected to: {_reason(err)}"
    return await _described(address, answer, security)


def _tls_fault(reason: str) -> str:
    if "CERTIFICATE_REQUIRED" in reason:
        return "asks for a client's certificate: give --cert-path and --key-path"
    if "UNKNOWN_CA" in reason or "CERTIFICATE" in reason:
        return f"refuses the client's certificate of --cert-path: {reason}"
    return f"and this side have no version of TLS, or no cipher, in common: {reason}"


def _reason(err: OSError) -> str:
    if err.errno is None or isinstance(err, socket.gaierror):
        return err.strerror or str(err)
    # asyncio says "Connect call failed" and the address instead of the system's words
    return os.strerror(err.errno)


async def _described(address: str, answer: bytes | None, security: SecurityConfig) -> str:
    if answer is None:
        return f"{address} accepts connections and never answers; it is no gRPC server"
    if answer[3:4] == bytes([_SETTINGS_FRAME]) and len(answer) >= _FRAME_HEAD_BYTES:
        return ""
    if answer.startswith(_TLS_RECORDS) or (
        not answer and not security.enabled and await _speaks_tls(address)
    ):
        return (
            f"{address} speaks TLS: give --ca-path, and --cert-path and --key-path if it asks for "
            "a client's certificate"
        )
    if answer.startswith(b"HTTP/1"):
        status = answer.splitlines()[0].decode(errors="replace")
        return f"{address} is an HTTP/1.1 server and no gRPC server: it answers {status!r}"
    if not answer:
        closes = f"{address} closes the connection without an answer; it is no gRPC server, or"
        if security.enabled and not security.cert_path:
            return f"{closes} asks for a client's certificate: give --cert-path and --key-path"
        return f"{closes} refuses this client"
    return f"{address} is no gRPC server: it answers with {answer[:16]!r}"


async def _first_bytes(address: str, tls: ssl.SSLContext | None) -> bytes | None:
    """The peer's answer to the beginning of HTTP/2; None if there is none in time, empty if it
    closes the connection.
    """
    host, _, port = address.rpartition("//")[2].rpartition(":")
    async with asyncio.timeout(_ANSWER_S):
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=tls)
    try:
        writer.write(_PREFACE)
        async with asyncio.timeout(_ANSWER_S):
            return await reader.read(_ANSWER_BYTES)
    except TimeoutError:
        return None
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


async def _speaks_tls(address: str) -> bool:
    """Whether the server answers a TLS handshake; nothing is trusted or sent."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        await _first_bytes(address, context)
    except ssl.SSLError as err:
        # Without a client's certificate, a server that demands one ends the handshake by an alert.
        return "ALERT" in (err.reason or "")
    except (OSError, TimeoutError):
        return False
    return True
