"""Client certificates that a CA may sign and nobody expects: the client is answered,
or refused; the daemon goes on.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from server.rpc.config import Engine
from tests.attacks import der
from tests.attacks.der import Authority
from tests.attacks.peer import Peer
from tests.attacks.target import Target, coordinator, pump

ANSWERED = ("0", "2")
"""The status of the coordinator's answer, and of the pump's to a call without a cluster id."""

NAME = der.common_name("client")
PERSON = der.name((der.COUNTRY, der.PRINTABLE, b"DE"), (der.ORGANIZATION, der.UTF8, b"Example"))

# the subject and the subjectAltName of each; OpenSSL reads no certificate whose subject is
# malformed
ODD = {
    "directoryName": (NAME, [der.directory(PERSON)]),
    "directoryName without a name": (NAME, [der.directory(der.name())]),
    "otherName": (
        NAME,
        [der.other("1.3.6.1.4.1.311.20.2.3", der.der(der.UTF8, b"me@example.test"))],
    ),
    "registeredID": (NAME, [der.registered("1.2.3.4")]),
    "IPv4 and IPv6": (NAME, [der.address(bytes((10, 0, 0, 1))), der.address(bytes(15) + b"\1")]),
    "IP address of five bytes": (NAME, [der.address(bytes(5))]),
    "URI": (NAME, [der.uri(b"spiffe://example.test/a?b#c")]),
    "mail": (NAME, [der.mail(b"me@example.test")]),
    "DNS that is no ASCII": (NAME, [der.dns("ü.example".encode())]),
    "DNS that is no UTF-8": (NAME, [der.dns(b"\xff\xfe")]),
    "DNS with a NUL": (NAME, [der.dns(b"node\0.example")]),
    "mail that is no UTF-8": (NAME, [der.mail(b"\xff\xfe@example")]),
    "URI that is no UTF-8": (NAME, [der.uri(b"\xff\xfe:")]),
    "all kinds": (
        NAME,
        [
            der.directory(PERSON),
            der.dns(b"a"),
            der.mail(b"b@c"),
            der.uri(b"d:"),
            der.registered("1.2"),
        ],
    ),
    "no subject": (der.name(), [der.dns(b"a.example")]),
    "no names at all": (der.name(), []),
    "CN in BMPString": (der.name((der.COMMON_NAME, der.BMP, "Zoë".encode("utf-16-be"))), []),
    "CN in T61String, Latin-1": (der.name((der.COMMON_NAME, der.T61, "Zoë".encode("latin-1"))), []),
    "CN in UniversalString": (
        der.name((der.COMMON_NAME, der.UNIVERSAL, "Zoë".encode("utf-32-be"))),
        [],
    ),
    "CN of no bytes": (der.name((der.COMMON_NAME, der.UTF8, b"")), []),
    "two CNs": (der.name((der.COMMON_NAME, der.UTF8, b"a"), (der.COMMON_NAME, der.UTF8, b"b")), []),
    "1,000 names": (NAME, [der.dns(b"n%d.example" % number) for number in range(1000)]),
}
# RFC 5280 does not allow these: a client that has one may be refused
MALFORMED = {
    "DNS that is no ASCII",
    "DNS that is no UTF-8",
    "mail that is no UTF-8",
    "URI that is no UTF-8",
    "IP address of five bytes",
}

# gRPC's own engine ends calls of such a client with UNAVAILABLE, or its connection
GRPCIO_REFUSES = {"1,000 names"}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module", params=[coordinator, pump], ids=["coordinator", "pump"])
def target(
    request: pytest.FixtureRequest,
    engine: Engine,
    authority: Authority,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Target]:
    directory: Path = tmp_path_factory.mktemp("daemon")
    with request.param(directory, engine, authority) as daemon:
        yield daemon


@pytest.mark.parametrize("which", ODD)
def test_an_odd_certificate_ends_nothing_but_its_own_connection(
    target: Target, engine: Engine, authority: Authority, which: str
) -> None:
    certificate = authority.client(*ODD[which])
    outcome = called(target, certificate)
    print(f"{which}: {outcome}")
    refused = MALFORMED | (GRPCIO_REFUSES if engine is Engine.GRPCIO else set())
    assert outcome in ANSWERED or which in refused
    target.check_alive()


def called(target: Target, certificate: bytes) -> str:
    """One call with this certificate: its status, or how it was refused."""
    try:
        with Peer(target, certificate) as peer:
            return peer.introduce().call(target.method)
    except OSError as err:
        return f"refused: {err}"
