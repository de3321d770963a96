"""A listener's own certificate, read anew when its files change, and the names that clients'
certificates may have.

A certificate that runs out is replaced by writing its files: connections that come later see the
new one, and those that are open stay. Files that cannot be used, such as a half-written one, change
nothing: the log says so, and the old certificate serves on.

`cert-allowed-cn` is PD's and TiKV's setting. A CA that signs for a whole company lets in whoever it
signed for; the names narrow that down. A certificate with several common names needs all of them
allowed: engines differ in which one they call *the* name.
"""

import inspect
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import grpc
import grpc.aio
import structlog

from server.rpc import metrics
from server.rpc.credentials import SecurityConfig, server_certificate, server_tls
from server.rpc.errors import StatusError
from server.rpc.reloaded import Reloaded

_NAMES_LOGGED: Final = 256
_SHOWN_MAX: Final = 256
_ARITY: Final = ("unary", "stream")
T = TypeVar("T")

_log = structlog.get_logger(__name__)


class AllowedNames:
    """The common names that clients' certificates may have; shared by a listener's connections."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(name.encode() for name in names)
        self._logged: set[str] = set()

    def __bool__(self) -> bool:
        """Whether names matter at all."""
        return bool(self._names)

    def refusal(self, names: Iterable[bytes]) -> str:
        """Why a client with these common names is not let in, which is counted, and logged once
        a name; empty for one who is.
        """
        names = tuple(names)
        if not self._names or (names and self._names.issuperset(names)):
            return ""
        shown = b", ".join(names).decode(errors="backslashreplace")[:_SHOWN_MAX]
        metrics.NAMES_REFUSED.inc()
        if shown not in self._logged and len(self._logged) < _NAMES_LOGGED:
            self._logged.add(shown)
            _log.warning("a client's certificate has a name that is not allowed", name=shown)
        return (
            f"the common name {shown!r} of your certificate is not in --cert-allowed-cn of this "
            "daemon; add it there, or use another certificate"
        )

    def check(self, names: Iterable[bytes]) -> None:
        """The same as a gRPC status.

        Raises:
            StatusError: the client is not let in.
        """
        if reason := self.refusal(names):
            raise StatusError(grpc.StatusCode.PERMISSION_DENIED, f"[TM:ErrUnauthorized] {reason}")


class NamesInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Checks the names for gRPC's own engine, at each call of whatever service."""

    def __init__(self, allowed: AllowedNames) -> None:
        self._allowed = allowed

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """The method's handler, behind the check."""
        handler = await continuation(handler_call_details)
        if handler is None or not self._allowed:
            return handler
        kind = f"{_ARITY[handler.request_streaming]}_{_ARITY[handler.response_streaming]}"
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(
            self._checked(getattr(handler, kind), streams=handler.response_streaming),
            handler.request_deserializer,
            handler.response_serializer,
        )

    def _checked(self, function: Callable[..., Any], *, streams: bool) -> Callable[..., Any]:
        async def check(context: Any) -> None:
            reason = self._allowed.refusal(context.auth_context().get("x509_common_name", ()))
            if reason:
                await context.abort(
                    grpc.StatusCode.PERMISSION_DENIED, f"[TM:ErrUnauthorized] {reason}"
                )

        async def answer(request: Any, context: Any) -> Any:
            await check(context)
            return await function(request, context)

        async def stream(request: Any, context: Any) -> None:
            await check(context)
            answers = function(request, context)
            # gRPC takes both: a generator of the answers, and a coroutine that writes them.
            if inspect.isawaitable(answers):
                await answers
                return
            async for message in answers:
                await context.write(message)

        return stream if streams else answer


def common_names(certificate: Mapping[str, Any]) -> tuple[bytes, ...]:
    """The common names in what `ssl.SSLObject.getpeercert` says of a certificate."""
    return tuple(
        value.encode()
        for part in certificate.get("subject", ())
        for key, value in part
        if key == "commonName"
    )


def _reloaded(security: SecurityConfig, make: Callable[[], T]) -> Reloaded[T]:
    paths = [security.cert_path, security.key_path, security.ca_path]
    return Reloaded(paths, make, metrics.CERTIFICATE_RELOADS, "the TLS certificate")


class ListenerTls:
    """TLS of a listener of Python's own, for `context()` of each new connection."""

    def __init__(
        self, security: SecurityConfig, protocols: Sequence[str] = (), *, demands: bool = True
    ) -> None:
        """`protocols` are offered by ALPN; without `demands` a client may come without a
        certificate though there is a CA.

        Raises:
            CredentialsError: only some of the files are given, or one cannot be used.
        """
        self._security = security
        self._protocols = list(protocols)
        self._demands = demands
        self._files = _reloaded(security, self._read)

    def context(self) -> ssl.SSLContext:
        """What a connection that begins now uses."""
        return self._files.current()

    def offer(self, *protocols: str) -> None:
        """Offer these by ALPN from now on."""
        self._protocols = list(protocols)
        self._files = _reloaded(self._security, self._read)

    def _read(self) -> ssl.SSLContext:
        context = server_tls(self._security)
        if self._protocols:
            context.set_alpn_protocols(self._protocols)
        if not self._demands and context.verify_mode is ssl.CERT_REQUIRED:
            context.verify_mode = ssl.CERT_OPTIONAL
        return context


def listener_tls(security: SecurityConfig, *protocols: str) -> ListenerTls | None:
    """TLS of a listener that demands certificates if there is a CA; None means plaintext.

    Raises:
        CredentialsError: only some of the files are given, or one cannot be used.
    """
    return ListenerTls(security, protocols) if security.listens_with_tls() else None


def grpcio_credentials(security: SecurityConfig) -> grpc.ServerCredentials | None:
    """The same for gRPC's own engine, which asks for the certificate at each handshake.

    Raises:
        CredentialsError: only some of the files are given, or one cannot be read.
    """
    if not security.listens_with_tls():
        return None
    files = _reloaded(security, lambda: server_certificate(security))
    return grpc.dynamic_ssl_server_credentials(
        files.current(), files.current, require_client_authentication=bool(security.ca_path)
    )
