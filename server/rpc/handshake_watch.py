"""Reads the records of a TLS connection that is passed on without its keys, to see that a handshake
failed and, as far as possible, why.

gRPC's own engine ends a connection whose handshake fails, and says nothing, neither to us nor, by
an alert, to the client. But the records' types and sizes are in clear (RFC 8446 §5, RFC 5246 §6):

- a client's first encrypted record that has an alert's size is an alert: it does not accept the
  server's certificate;
- a server that closes after the client's last flight, and has answered it with nothing but an
  alert, does not accept the client's. A flight that brings a certificate begins with a record that
  is longer than any that brings none.

A client that goes away by itself, as port scans and probes do, has not failed.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from server.rpc.credentials import (
    CERTIFICATE,
    LATE_HANDSHAKE,
    NO_CERTIFICATE,
    NOT_TLS,
    OTHER,
    REFUSED_BY_CLIENT,
    HandshakeFault,
)

_CHANGE_CIPHER_SPEC, _ALERT, _HANDSHAKE, _ENCRYPTED = 20, 21, 22, 23
_HEADER_BYTES: Final = 5
_KEPT_BYTES: Final = 8
"""The bytes of a record's body that are kept."""
_ALERT_BYTES: Final = 2
_ENCRYPTED_ALERT_BYTES: Final = _ALERT_BYTES + 1 + 16
"""With the type and the tag of any cipher of TLS 1.3 that OpenSSL and gRPC use."""
_EMPTY_CERTIFICATE: Final = b"\x0b\0\0\3\0\0\0"
_CERTIFICATE_BYTES: Final = 100
"""A record with a certificate is longer; one with none and a Finished message is shorter."""


class Record(NamedTuple):
    """One record's header, and how its body begins."""

    kind: int
    size: int
    body: bytes


class Records:
    """Finds the records in one direction's bytes, in whatever pieces they come."""

    def __init__(self) -> None:
        self._header = b""
        self._body = b""
        self._left = 0
        self.has_begun = False

    def take(self, data: bytes) -> list[Record]:
        """The records that end in these bytes."""
        ended: list[Record] = []
        self.has_begun = True
        while data:
            if len(self._header) < _HEADER_BYTES:
                missing = _HEADER_BYTES - len(self._header)
                self._header, data = self._header + data[:missing], data[missing:]
                self._left = int.from_bytes(self._header[3:5])
            if len(self._header) == _HEADER_BYTES:
                part, data = data[: self._left], data[self._left :]
                self._left -= len(part)
                self._body += part[: _KEPT_BYTES - len(self._body)]
                if not self._left:
                    size = int.from_bytes(self._header[3:5])
                    ended.append(Record(self._header[0], size, self._body))
                    self._header = self._body = b""
        return ended


class HandshakeWatch:
    """One connection's handshake; give it all bytes before they are passed on, until it is over."""

    def __init__(self, report: Callable[[HandshakeFault], None]) -> None:
        """`report` gets the reason if it fails."""
        self._report = report
        self.is_over = False
        self._client, self._server = Records(), Records()
        self._flight: Record | None = None
        """The first bytes of the client's answer to the server's hello."""
        self._server_spoke = self._server_changed_cipher = False

    def client_sent(self, data: bytes) -> None:
        """Look at bytes of the client."""
        if not (self.is_over or self._client.has_begun) and data[:1] != bytes((_HANDSHAKE,)):
            self._end(HandshakeFault(NOT_TLS, "it speaks no TLS, and this port does"))
        for record in () if self.is_over else self._client.take(data):
            self._client_record(record)

    def server_sent(self, data: bytes) -> None:
        """Look at bytes of the server."""
        for record in () if self.is_over else self._server.take(data):
            self._server_record(record)

    def server_closed(self) -> None:
        """Note that the server closed the connection first."""
        if not self.is_over:
            if self._flight is not None:
                self._end(_refused(self._flight))
            elif not self._server_spoke:
                self._end(HandshakeFault(OTHER, "no version or cipher of TLS is common to both"))

    def client_closed(self) -> None:
        """Note that the client closed the connection; what follows says nothing about the
        handshake.
        """
        self.is_over = True

    def end_late(self) -> None:
        """Its deadline is over."""
        if not self.is_over:
            self._end(LATE_HANDSHAKE)

    def _client_record(self, record: Record) -> None:
        if self.is_over or not self._server_spoke or record.kind == _CHANGE_CIPHER_SPEC:
            return
        if record.kind == _ALERT or (
            self._flight is None
            and (record.kind, record.size) == (_ENCRYPTED, _ENCRYPTED_ALERT_BYTES)
        ):
            self._end(
                HandshakeFault(REFUSED_BY_CLIENT, "it does not accept this daemon's certificate")
            )
        elif self._flight is None:
            self._flight = record

    def _server_record(self, record: Record) -> None:
        if self.is_over:
            return
        if record.kind == _ALERT and not self._server_changed_cipher:
            self.server_closed()
        elif record.kind == _CHANGE_CIPHER_SPEC:
            self._server_changed_cipher = True
        elif self._server_changed_cipher and record.kind == _HANDSHAKE:
            self._end()  # TLS 1.2: it has accepted the client's part
        elif self._flight is not None and record.kind == _ENCRYPTED:
            if record.size == _ENCRYPTED_ALERT_BYTES:
                self.server_closed()
            else:
                self._end()
        self._server_spoke = True

    def _end(self, fault: HandshakeFault | None = None) -> None:
        self.is_over = True
        if fault is not None:
            self._report(fault)


def _refused(flight: Record) -> HandshakeFault:
    """Why a server closes that was sent this."""
    if flight.body.startswith(_EMPTY_CERTIFICATE) or (
        flight.kind == _ENCRYPTED and flight.size < _CERTIFICATE_BYTES
    ):
        return HandshakeFault(
            NO_CERTIFICATE, "it shows no certificate; this port demands one (--ca-path)"
        )
    return HandshakeFault(CERTIFICATE, "its certificate is not accepted")
