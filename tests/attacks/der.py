"""Certificates written byte by byte and signed by a CA of the test:
as odd as a CA may sign them, or odder.

`openssl` makes the keys and the signatures; nothing checks what is signed. Names: RFC 5280.
"""

import base64
import subprocess
from collections.abc import Iterable
from pathlib import Path

UTF8, PRINTABLE, T61, IA5, BMP, UNIVERSAL = 0x0C, 0x13, 0x14, 0x16, 0x1E, 0x1C
COMMON_NAME, ORGANIZATION, COUNTRY = "2.5.4.3", "2.5.4.10", "2.5.4.6"

_SEQUENCE, _SET, _INTEGER, _BITS, _OCTETS, _OID, _BOOLEAN, _TIME = 0x30, 0x31, 2, 3, 4, 6, 1, 0x17
_SUBJECT_ALTERNATIVE_NAME, _BASIC_CONSTRAINTS, _EXTENDED_KEY_USAGE = (
    "2.5.29.17",
    "2.5.29.19",
    "2.5.29.37",
)
_CLIENT_AUTH, _SERVER_AUTH = "1.3.6.1.5.5.7.3.2", "1.3.6.1.5.5.7.3.1"
_ECDSA_WITH_SHA256 = "1.2.840.10045.4.3.2"
_VALIDITY = (b"250101000000Z", b"490101000000Z")


def der(tag: int, *parts: bytes) -> bytes:
    """One element."""
    body = b"".join(parts)
    if len(body) < 0x80:
        return bytes((tag, len(body))) + body
    size = len(body).to_bytes((len(body).bit_length() + 7) // 8)
    return bytes((tag, 0x80 | len(size))) + size + body


def oid(dotted: str) -> bytes:
    """An object identifier."""
    first, second, *rest = (int(part) for part in dotted.split("."))
    body = bytearray((40 * first + second,))
    for number in rest:
        groups = [number & 0x7F]
        while number := number >> 7:
            groups.append(0x80 | number & 0x7F)
        body += bytes(reversed(groups))
    return der(_OID, bytes(body))


def name(*attributes: tuple[str, int, bytes]) -> bytes:
    """A Name of (type, string tag, bytes)."""
    return der(
        _SEQUENCE,
        *(der(_SET, der(_SEQUENCE, oid(kind), der(tag, raw))) for kind, tag, raw in attributes),
    )


def common_name(text: str) -> bytes:
    """A Name of a CN only."""
    return name((COMMON_NAME, UTF8, text.encode()))


def dns(text: bytes) -> bytes:
    """These are GeneralNames."""
    return der(0x82, text)


def mail(text: bytes) -> bytes:
    return der(0x81, text)


def uri(text: bytes) -> bytes:
    return der(0x86, text)


def address(packed: bytes) -> bytes:
    return der(0x87, packed)


def registered(dotted: str) -> bytes:
    return b"\x88" + oid(dotted)[1:]


def directory(subject: bytes) -> bytes:
    return der(0xA4, subject)


def other(dotted: str, value: bytes) -> bytes:
    return der(0xA0, oid(dotted), der(0xA0, value))


class Authority:
    """A CA, its server's certificate for 127.0.0.1,
    and whatever it is asked to sign for clients.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ca, self.key, self.node = path / "ca.pem", path / "key.pem", path / "node.pem"
        self._openssl(
            "genpkey",
            "-algorithm",
            "EC",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-out",
            str(self.key),
        )
        self._public = self._openssl("pkey", "-in", str(self.key), "-pubout", "-outform", "DER")
        self._serial = 1 << 24  # four bytes without a zero in front
        self._issuer = common_name("authority")
        constraints = _extension(_BASIC_CONSTRAINTS, der(_SEQUENCE, der(_BOOLEAN, b"\xff")))
        self.ca.write_bytes(self._signed(self._issuer, constraints))
        usage = _extension(
            _EXTENDED_KEY_USAGE, der(_SEQUENCE, oid(_SERVER_AUTH), oid(_CLIENT_AUTH))
        )
        names = _extension(
            _SUBJECT_ALTERNATIVE_NAME, der(_SEQUENCE, address(bytes((127, 0, 0, 1))))
        )
        self.node.write_bytes(self._signed(common_name("node"), usage + names))

    def client(
        self, subject: bytes, alternative: Iterable[bytes] = (), *, raw_names: bytes = b""
    ) -> bytes:
        """A client's certificate in PEM; `raw_names` is all of the subjectAltName's value,
        right or wrong.
        """
        extensions = _extension(_EXTENDED_KEY_USAGE, der(_SEQUENCE, oid(_CLIENT_AUTH)))
        value = raw_names or der(_SEQUENCE, *alternative)
        if len(value) > 2:
            extensions += _extension(_SUBJECT_ALTERNATIVE_NAME, value)
        return self._signed(subject, extensions)

    def flags(self) -> list[str]:
        """A daemon's flags for mTLS."""
        return [
            "--ca-path",
            str(self.ca),
            "--cert-path",
            str(self.node),
            "--key-path",
            str(self.key),
        ]

    def _signed(self, subject: bytes, extensions: bytes) -> bytes:
        self._serial += 1
        algorithm = der(_SEQUENCE, oid(_ECDSA_WITH_SHA256))
        body = der(
            _SEQUENCE,
            der(0xA0, der(_INTEGER, b"\2")),
            der(_INTEGER, self._serial.to_bytes(4)),
            algorithm,
            self._issuer,
            der(_SEQUENCE, *(der(_TIME, when) for when in _VALIDITY)),
            subject,
            self._public,
            der(0xA3, der(_SEQUENCE, extensions)),
        )
        signature = self._openssl("dgst", "-sha256", "-sign", str(self.key), stdin=body)
        whole = der(_SEQUENCE, body, algorithm, der(_BITS, b"\0", signature))
        return (
            b"-----BEGIN CERTIFICATE-----\n"
            + base64.encodebytes(whole)
            + b"-----END CERTIFICATE-----\n"
        )

    def _openssl(self, *arguments: str, stdin: bytes = b"") -> bytes:
        return subprocess.run(
            ["openssl", *arguments], input=stdin, check=True, capture_output=True
        ).stdout


def _extension(dotted: str, value: bytes) -> bytes:
    return der(_SEQUENCE, oid(dotted), der(_OCTETS, value))
