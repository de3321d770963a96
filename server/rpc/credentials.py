"""TLS and mTLS for every listener and every channel, from one `SecurityConfig`;
plaintext only when nothing is set.

A listener's certificate that runs out is replaced by writing its files: connections that come later
see the new one, and those that are open stay. Files that cannot be used, such as a half-written
one, change nothing: the log says so, and the old certificate serves on. The same holds for the
certificate that a channel shows (`server.rpc.renewed_channel`).

`cert-allowed-cn` is PD's and TiKV's setting. A CA that signs for a whole company lets in whoever it
signed for; the names narrow that down. A certificate with several common names needs all of them
allowed: engines differ in which one they call *the* name.
"""

import ssl
from base64 import b64decode
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import grpc
import structlog
from prometheus_client import Counter, Gauge

from server.config import setting
from server.rpc.errors import StatusError
from server.rpc.reloaded import Reloaded
from storage.model.errors import InvalidError

_NAMES_LOGGED: Final = 256
_HANDSHAKES_LOGGED: Final = 256
NOT_TLS_REASONS: Final = frozenset(
    {
        "WRONG_VERSION_NUMBER",
        "HTTP_REQUEST",
        "PACKET_LENGTH_TOO_LONG",
        "RECORD_LAYER_FAILURE",
        "BAD_RECORD_TYPE",
    }
)
"""OpenSSL's reasons where the peer speaks something else."""
CERTIFICATE: Final = "certificate"
NO_CERTIFICATE: Final = "no_certificate"
NOT_TLS: Final = "not_tls"
REFUSED_BY_CLIENT: Final = "refused_by_client"
TIMEOUT: Final = "timeout"
OTHER: Final = "other"
_WENT_AWAY: Final = (ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""What port scans and probes do."""
_CHANNEL_FILES_MAX: Final = 64
_SHOWN_MAX: Final = 256
_VERSION_TAG, _UTC_TIME, _LONG_SIZE = 0xA0, 0x17, 0x80
T = TypeVar("T")

_NAMES_REFUSED = Counter(
    "tidemark_rpc_names_refused_total",
    "Calls and requests refused because the client's certificate has a common name that is not in "
    "cert-allowed-cn",
)
_HANDSHAKES_REFUSED = Counter(
    "tidemark_rpc_tls_handshakes_refused_total",
    "TLS handshakes that failed, of gRPC and HTTP ports, by reason: certificate, "
    "no_certificate, not_tls, refused_by_client, timeout, other",
    ["reason"],
)
_CERTIFICATE_RELOADS = Counter(
    "tidemark_rpc_certificate_reloads_total",
    "Changes of TLS files that a listener or channels use: `ok` if they use the new ones, `failed` "
    "if these cannot be used",
    ["outcome"],
)
_EXPIRES = Gauge(
    "tidemark_rpc_certificate_expires_timestamp_seconds",
    "When the certificate that listeners show runs out, in seconds since 1970; 0: there is none",
)
_log = structlog.get_logger(__name__)


class CredentialsError(InvalidError):
    """The TLS files are incomplete or unreadable."""

    code = "ErrCredentials"


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityConfig:
    """TLS files in PEM; all three for mTLS, which is then demanded of every client."""

    ca_path: str = setting("", "file with the CA certificates that peers are checked against")
    cert_path: str = setting("", "file with this node's certificate chain")
    key_path: str = setting("", "file with this node's private key")
    cert_allowed_cn: tuple[str, ...] = setting(
        (), "common name that a client's certificate may have; repeat it for several (default: any)"
    )

    @property
    def enabled(self) -> bool:
        """Whether anything is encrypted."""
        return bool(self.ca_path or self.cert_path or self.key_path)

    def listens_with_tls(self) -> bool:
        """Whether listeners use TLS.

        Raises:
            CredentialsError: only some of the files are given, or names without a CA.
        """
        if self.enabled and not (self.cert_path and self.key_path):
            raise CredentialsError(
                "TLS needs --cert-path and --key-path (and --ca-path to demand client certificates)"
            )
        # Without a CA nobody shows a certificate: the names would be a lock on no door.
        if self.cert_allowed_cn and not self.ca_path:
            raise CredentialsError("--cert-allowed-cn needs --ca-path, --cert-path and --key-path")
        return self.enabled

    def check_listener(self) -> None:
        """Check that listeners can use the files.

        Raises:
            CredentialsError: they cannot.
        """
        if self.listens_with_tls():
            server_tls(self)


@lru_cache(maxsize=_CHANNEL_FILES_MAX)
def channel_credentials(security: SecurityConfig) -> Reloaded[grpc.ChannelCredentials] | None:
    """Credentials for channels to peers, which share them; None means plaintext.

    Raises:
        CredentialsError: a file cannot be read, or they do not fit together.
    """
    if not security.enabled:
        return None
    return reloaded_files(security, lambda: _channel_credentials(security))


def _channel_credentials(security: SecurityConfig) -> grpc.ChannelCredentials:
    # gRPC would say nothing of files that cannot be used, and fail at every handshake.
    client_tls(security)
    return grpc.ssl_channel_credentials(
        root_certificates=_read(security.ca_path) if security.ca_path else None,
        private_key=_read(security.key_path) if security.key_path else None,
        certificate_chain=_read(security.cert_path) if security.cert_path else None,
    )


def client_tls(security: SecurityConfig) -> ssl.SSLContext | None:
    """The same for a connection of Python's own; None means plaintext.

    Raises:
        CredentialsError: a file cannot be used, or a certificate comes without its key.
    """
    if not security.enabled:
        return None
    # gRPC aborts the process if it gets only one of them.
    if bool(security.cert_path) != bool(security.key_path):
        raise CredentialsError("--cert-path and --key-path belong together: give both, or neither")
    _check_pem(security)
    try:
        context = ssl.create_default_context(cafile=security.ca_path or None)
        context.set_alpn_protocols(["h2"])
        if security.cert_path and security.key_path:
            context.load_cert_chain(security.cert_path, security.key_path, no_pass_phrase)
    except OSError as err:
        raise CredentialsError(
            f"the TLS files cannot be used: {err}; check --ca-path, --cert-path, --key-path"
        ) from err
    return context


def no_pass_phrase() -> str:
    """Refuse an encrypted private key: OpenSSL would ask at the terminal, and wait."""
    raise OSError("the private key is encrypted; write it without a pass phrase (openssl pkey)")


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
        self._files = reloaded_files(security, self._read)

    def context(self) -> ssl.SSLContext:
        """The context for connections that begin now."""
        return self._files.current()

    def offer(self, *protocols: str) -> None:
        """Offer these by ALPN from now on."""
        self._protocols = list(protocols)
        self._files = reloaded_files(self._security, self._read)

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


def server_tls(security: SecurityConfig) -> ssl.SSLContext:
    """The same for a listener of Python's own.

    Raises:
        CredentialsError: a file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    _check_pem(security)
    try:
        context.load_cert_chain(security.cert_path, security.key_path, no_pass_phrase)
        if security.ca_path:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(security.ca_path)
    # Of any kind: a file that is being replaced may be gone since it was checked.
    except OSError as err:
        raise CredentialsError(
            f"the TLS files cannot be used: {err}; check --cert-path, --key-path, --ca-path"
        ) from err
    _EXPIRES.set(expires_s(_read(security.cert_path).decode(errors="replace")))
    return context


def expires_s(pem: str) -> float:
    """When the first certificate of a PEM file runs out, in seconds since 1970; 0: that cannot be
    read.
    """
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    body = pem.partition(begin)[2].partition(end)[0]
    with suppress(ValueError, IndexError):
        to_be_signed = _elements(_elements(b64decode(body))[0][1])[0][1]
        # RFC 5280 §4.1: an optional version ([0]), serial number, algorithm, issuer, validity
        fields = [value for tag, value in _elements(to_be_signed) if tag != _VERSION_TAG]
        tag, not_after = _elements(fields[3])[1]
        form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
        return datetime.strptime(not_after.decode(), form).replace(tzinfo=UTC).timestamp()
    return 0.0


def _elements(der: bytes) -> list[tuple[int, bytes]]:
    """The tags and contents of the elements that follow each other (X.690)."""
    elements = []
    while der:
        tag, size, at = der[0], der[1], 2
        if size >= _LONG_SIZE:
            at += size - _LONG_SIZE
            size = int.from_bytes(der[2:at])
        elements.append((tag, der[at : at + size]))
        der = der[at + size :]
    return elements


def _check_pem(security: SecurityConfig) -> None:
    """Check that the files can be read and hold what they are for: OpenSSL does not name the file.

    Raises:
        CredentialsError: one does not.
    """
    for path, content, text in (
        (security.cert_path, "certificate", b"CERTIFICATE-----"),
        (security.key_path, "private key", b"PRIVATE KEY-----"),
        (security.ca_path, "certificate", b"CERTIFICATE-----"),
    ):
        if path and text not in _read(path):
            raise CredentialsError(
                f"the TLS file {path} holds no {content} in PEM; check --cert-path, --key-path, "
                "--ca-path"
            )


def grpcio_credentials(security: SecurityConfig) -> grpc.ServerCredentials | None:
    """The same for gRPC's own engine, which asks for the certificate at each handshake.

    Raises:
        CredentialsError: only some of the files are given, or one cannot be read.
    """
    if not security.listens_with_tls():
        return None
    files = reloaded_files(security, lambda: server_certificate(security))
    version = files.version

    def changed() -> Any:
        """What to show from now on; None: what was shown before."""
        # A certificate is given only when it has changed: gRPC's core replaces what its handshakes
        # share each time, and crashes where others end meanwhile.
        nonlocal version
        certificate = files.current()
        if files.version == version:
            return None
        version = files.version
        return certificate

    return grpc.dynamic_ssl_server_credentials(
        files.current(), changed, require_client_authentication=bool(security.ca_path)
    )


def server_certificate(security: SecurityConfig) -> grpc.ServerCertificateConfiguration:
    """The certificate that a listener of gRPC's own engine shows, and the CA it demands of clients.

    Raises:
        CredentialsError: a file cannot be used.
    """
    # gRPC would say nothing of a key that does not fit, and refuse every handshake.
    server_tls(security)
    return grpc.ssl_server_certificate_configuration(
        [(_read(security.key_path), _read(security.cert_path))],
        root_certificates=_read(security.ca_path) if security.ca_path else None,
    )


def reloaded_files(security: SecurityConfig, make: Callable[[], T]) -> Reloaded[T]:
    """The result of `make`, made again when the TLS files change; raises what `make` raises."""
    paths = [security.cert_path, security.key_path, security.ca_path]
    return Reloaded(paths, make, _CERTIFICATE_RELOADS, "the TLS certificate")


class HandshakeFault(NamedTuple):
    """Why a handshake failed: the kind that is counted, and the reason that operators read."""

    kind: str
    reason: str


LATE_HANDSHAKE: Final = HandshakeFault(TIMEOUT, "it did not end its part in time")


class RefusedHandshakes:
    """TLS handshakes of a listener that fail: counted, and logged once an address and reason."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, str]] = set()

    def add(self, err: OSError, address: str) -> None:
        """Note why the client at `address` (without its port) was not let in."""
        if isinstance(err, (TimeoutError, ConnectionAbortedError)):
            self.add_fault(LATE_HANDSHAKE, address)  # asyncio aborts a connection that is late
        elif isinstance(err, ssl.SSLError) and not isinstance(err, _WENT_AWAY):
            self.add_fault(_handshake_fault(err), address)

    def add_fault(self, fault: HandshakeFault, address: str) -> None:
        """The same of one that was looked at on its way."""
        kind, reason = fault
        _HANDSHAKES_REFUSED.labels(kind).inc()
        if (address, reason) not in self._logged and len(self._logged) < _HANDSHAKES_LOGGED:
            self._logged.add((address, reason))
            _log.warning("a client was refused at its TLS handshake", client=address, reason=reason)


def _handshake_fault(err: ssl.SSLError) -> HandshakeFault:
    if isinstance(err, ssl.SSLCertVerificationError):
        return HandshakeFault(CERTIFICATE, f"its certificate is not accepted: {err.verify_message}")
    if err.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return HandshakeFault(
            NO_CERTIFICATE, "it shows no certificate; this port demands one (--ca-path)"
        )
    if err.reason in NOT_TLS_REASONS:
        return HandshakeFault(NOT_TLS, "it speaks no TLS, and this port does")
    if err.reason and "ALERT" in err.reason:
        return HandshakeFault(
            REFUSED_BY_CLIENT, f"it does not accept this daemon's certificate: {err.reason}"
        )
    return HandshakeFault(OTHER, str(err.reason or err))


class AllowedNames:
    """The common names that clients' certificates may have; shared by a listener's connections."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(name.encode() for name in names)
        self._logged: set[str] = set()

    def __bool__(self) -> bool:
        """Whether names are restricted."""
        return bool(self._names)

    def refusal(self, names: Iterable[bytes]) -> str:
        """Why a client with these common names is not let in, which is counted, and logged once
        a name; empty for one who is.
        """
        names = tuple(names)
        if not self._names or (names and self._names.issuperset(names)):
            return ""
        shown = b", ".join(names).decode(errors="backslashreplace")[:_SHOWN_MAX]
        _NAMES_REFUSED.inc()
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


def common_names(certificate: Mapping[str, Any]) -> tuple[bytes, ...]:
    """The common names in what `ssl.SSLObject.getpeercert` says of a certificate."""
    return tuple(
        value.encode()
        for part in certificate.get("subject", ())
        for key, value in part
        if key == "commonName"
    )


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as err:
        raise CredentialsError(
            f"cannot read the TLS file {path}: {err.strerror}; check --cert-path, --key-path, "
            "--ca-path"
        ) from err
