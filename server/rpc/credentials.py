"""TLS and mTLS for every listener and every channel, from one `SecurityConfig`;
plaintext only when nothing is set.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from server.config import setting
from storage.model.errors import InvalidError


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
        """Whether listeners speak TLS.

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


def server_certificate(security: SecurityConfig) -> grpc.ServerCertificateConfiguration:
    """What a listener of gRPC's own engine shows and demands.

    Raises:
        CredentialsError: a file cannot be used.
    """
    # gRPC would say nothing of a key that does not fit, and refuse every handshake.
    server_tls(security)
    return grpc.ssl_server_certificate_configuration(
        [(_read(security.key_path), _read(security.cert_path))],
        root_certificates=_read(security.ca_path) if security.ca_path else None,
    )


def server_tls(security: SecurityConfig) -> ssl.SSLContext:
    """The same for a listener of Python's own.

    Raises:
        CredentialsError: a file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    for path in filter(None, (security.cert_path, security.key_path, security.ca_path)):
        _read(path)  # its own message for a file that cannot be read
    try:
        context.load_cert_chain(security.cert_path, security.key_path)
        if security.ca_path:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(security.ca_path)
    except ssl.SSLError as err:
        raise CredentialsError(
            f"the TLS files cannot be used: {err}; check --cert-path, --key-path, --ca-path"
        ) from err
    return context


def channel_credentials(security: SecurityConfig) -> grpc.ChannelCredentials | None:
    """Credentials for a channel to a peer; None means plaintext."""
    if not security.enabled:
        return None
    return grpc.ssl_channel_credentials(
        root_certificates=_read(security.ca_path) if security.ca_path else None,
        private_key=_read(security.key_path) if security.key_path else None,
        certificate_chain=_read(security.cert_path) if security.cert_path else None,
    )


def client_tls(security: SecurityConfig) -> ssl.SSLContext | None:
    """The same for a connection of Python's own; None means plaintext.

    Raises:
        CredentialsError: a file cannot be used.
    """
    if not security.enabled:
        return None
    try:
        context = ssl.create_default_context(cafile=security.ca_path or None)
        context.set_alpn_protocols(["h2"])
        if security.cert_path and security.key_path:
            context.load_cert_chain(security.cert_path, security.key_path)
    except OSError as err:
        raise CredentialsError(
            f"the TLS files cannot be used: {err}; check --ca-path, --cert-path, --key-path"
        ) from err
    return context


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as err:
        raise CredentialsError(
            f"cannot read the TLS file {path}: {err.strerror}; check --cert-path, --key-path, "
            "--ca-path"
        ) from err
