"""No database server gets a password because it asks for it: sources, lakes in databases,
and `verify` log in there.
"""

import socket
import ssl
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.opening import database as database_of
from pyspark_tidemark.sink_uri import SinkUri

from server.changefeed.source import SourceUri
from server.cli.main import main
from server.puller.mysql.session.connection import log_in
from server.puller.mysql.session.errors import MySqlLoginError, MySqlUnavailableError
from server.puller.mysql.session.options import MySqlOptions
from server.verify.lake.mysql import MySqlReader
from storage.model.errors import TidemarkError
from tests.attacks.rogue_mysql import OK, PUBLIC_KEY, SALT, rogue_server, switch

PASSWORD = "s3cret-of-the-source"
SALTED = SALT[0] + SALT[1] + b"\0"
FULL = b"\x01\x04"
DEMANDS = {
    "clear": ("mysql_native_password", [switch("mysql_clear_password", b"")]),
    "clear-in-greeting": ("mysql_clear_password", [switch("mysql_clear_password", b"")]),
    "dialog": ("mysql_native_password", [switch("dialog", b"\x02Password: ")]),
    "old": ("mysql_native_password", [switch("mysql_old_password", b"12345678\0")]),
    "sha256": ("mysql_native_password", [switch("sha256_password"), PUBLIC_KEY]),
    "sha256-in-greeting": ("sha256_password", [PUBLIC_KEY]),
    "sha256-greeting-and-switch": ("sha256_password", [switch("sha256_password"), PUBLIC_KEY]),
    "caching-full": ("caching_sha2_password", [FULL, PUBLIC_KEY]),
    "caching-full-by-switch": (
        "mysql_native_password",
        [switch("caching_sha2_password"), FULL, PUBLIC_KEY],
    ),
    "unknown": ("mysql_native_password", [switch("no_such_plugin")]),
}
DEFERRED = ("caching-full-by-switch",)
"""Answered once, with a proof, before the demand."""


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(PASSWORD + "\n")
    return path


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tls")
    for arguments in (
        "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=ca -keyout ca.key -out ca.pem",
        (
            "req -newkey rsa:2048 -nodes -subj /CN=right -addext subjectAltName=IP:127.0.0.1 -keyout "
            "s.key -out s.csr"
        ),
        (
            "x509 -req -in s.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -copy_extensions "
            "copy -out s.pem"
        ),
        (
            "req -newkey rsa:2048 -nodes -subj /CN=other -addext subjectAltName=DNS:other -keyout "
            "o.key -out o.csr"
        ),
        (
            "x509 -req -in o.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -copy_extensions "
            "copy -out o.pem"
        ),
    ):
        subprocess.run(
            ["openssl", *arguments.split()], cwd=directory, check=True, capture_output=True
        )
    return directory


def context(certificates: Path, name: str) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.load_cert_chain(certificates / f"{name}.pem", certificates / f"{name}.key")
    return made


def source(port: int, secret: Path, options: str = "") -> None:
    log_in(
        MySqlOptions.of(
            SourceUri.parse(f"mysql://cdc@127.0.0.1:{port}?password-file={secret}{options}")
        )
    ).close()


def lake(port: int, secret: Path, options: str = "") -> None:
    database = database_of(
        SinkUri.parse(f"mysql://cdc@127.0.0.1:{port}/lake?password-file={secret}{options}")
    )
    try:
        database.connect().close()
    except database.errors as err:
        raise database.error_of(err) from None


def verified(port: int, secret: Path, options: str = "") -> None:
    MySqlReader(
        SinkUri.parse(f"mysql://cdc@127.0.0.1:{port}/lake?password-file={secret}{options}")
    ).close()


CLIENTS = [source, lake, verified]
Client = Callable[..., None]


def check_nothing_given(received: list[bytes], demand: str) -> None:
    proofs = 2 if demand in DEFERRED else 1
    assert len(received) == proofs, received
    assert all(PASSWORD.encode() not in payload for payload in received)


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("demand", DEMANDS)
def test_a_server_that_asks_for_the_password_gets_none(
    client: Client, demand: str, secret: Path
) -> None:
    plugin, answers = DEMANDS[demand]
    with (
        rogue_server(plugin, answers) as server,
        pytest.raises((TidemarkError, SourceError)) as refused,
    ):
        client(server.port, secret)
    check_nothing_given(server.received, demand)
    assert PASSWORD not in str(refused.value)
    if demand != "sha256-in-greeting":
        assert refused.value.code in ("ErrMySQLLogin", "ErrCredentials")
        assert "add tls=verify" in str(refused.value) or "add ca-path" in str(refused.value)
    if demand == "caching-full":
        assert "the password is wrong, or the user has not logged in" in str(refused.value)


@pytest.mark.parametrize("demand", DEMANDS)
@pytest.mark.parametrize("options", ["&tls=require", "&tls=verify-ca&ca={ca}"])
def test_tls_that_does_not_prove_who_the_server_is_changes_nothing(
    demand: str, options: str, secret: Path, certificates: Path
) -> None:
    plugin, answers = DEMANDS[demand]
    tls = context(certificates, "o")  # a certificate of the same CA, for another host
    with rogue_server(plugin, answers, tls) as server, pytest.raises(TidemarkError):
        source(server.port, secret, options.format(ca=certificates / "ca.pem"))
    check_nothing_given(server.received, demand)


@pytest.mark.parametrize("demand", ["clear", "sha256-in-greeting"])
def test_a_lake_without_a_ca_takes_tls_but_trusts_it_with_nothing(
    demand: str, secret: Path, certificates: Path
) -> None:
    plugin, answers = DEMANDS[demand]
    with (
        rogue_server(plugin, answers, context(certificates, "o")) as server,
        pytest.raises(SourceError),
    ):
        lake(server.port, secret)
    check_nothing_given(server.received, demand)


@pytest.mark.parametrize("client", CLIENTS)
def test_the_wrong_host_and_a_server_without_tls_learn_not_even_the_user(
    client: Client, secret: Path, certificates: Path
) -> None:
    option = "&ca=" if client is source else "&ca-path="
    for tls in (context(certificates, "o"), None):
        with (
            rogue_server(*DEMANDS["clear"], tls) as server,
            pytest.raises((TidemarkError, SourceError)),
        ):
            client(server.port, secret, f"{option}{certificates / 'ca.pem'}")
        assert server.received == []


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("demand", ["clear", "caching-full"])
def test_the_right_server_may_ask_over_tls(
    client: Client, demand: str, secret: Path, certificates: Path
) -> None:
    """PAM and LDAP log-ins need it."""
    option = "&ca=" if client is source else "&ca-path="
    plugin, answers = DEMANDS[demand]
    with (
        rogue_server(plugin, answers[:1], context(certificates, "s")) as server,
        pytest.raises((TidemarkError, SourceError)),  # the server ends after the password
    ):
        client(server.port, secret, f"{option}{certificates / 'ca.pem'}")
    assert server.received[-1] == PASSWORD.encode() + b"\0"


def test_the_command_line_gives_no_password_either(
    secret: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with rogue_server(*DEMANDS["clear"]) as server:
        uri = f"mysql://cdc@127.0.0.1:{server.port}?password-file={secret}"
        assert main(["cli", "source", "check", "--source-uri", uri]) != 0
    check_nothing_given(server.received, "clear")
    told = capsys.readouterr()
    assert "mysql_clear_password" in told.err
    assert PASSWORD not in told.out + told.err


@pytest.mark.parametrize("client", CLIENTS)
def test_a_server_that_asks_for_a_file_gets_none(client: Client, secret: Path) -> None:
    asks = b"\xfb" + str(secret).encode()
    with (
        rogue_server("mysql_native_password", [OK, asks], repeat_last=True) as server,
        pytest.raises((TidemarkError, SourceError), match="asks for a file of this machine"),
    ):
        client(server.port, secret)
    assert all(PASSWORD.encode() not in payload for payload in server.received)


@pytest.mark.parametrize(
    "greeting", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x05\0\0\0\x0anot", b"\xff" * 64]
)
def test_what_is_no_mysql_server_is_named(greeting: bytes, secret: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            client, _ = listener.accept()
            with client:
                client.sendall(greeting)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with pytest.raises((MySqlUnavailableError, MySqlLoginError)):
            source(listener.getsockname()[1], secret)
        thread.join(30)


@pytest.fixture
def rogue_postgres() -> Iterator[tuple[int, list[bytes]]]:
    """Refuses TLS, then asks for the password in clear text."""
    received: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            client, _ = listener.accept()
            with client:
                client.settimeout(30)
                while len(first := client.recv(1 << 12)) == 8:  # SSLRequest, GSSENCRequest
                    client.sendall(b"N")
                if not first:
                    return
                client.sendall(b"R" + struct.pack(">II", 8, 3))
                received.append(client.recv(1 << 12))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield int(listener.getsockname()[1]), received
        thread.join(30)


def test_a_postgresql_server_that_asks_for_the_password_gets_none(
    rogue_postgres: tuple[int, list[bytes]], secret: Path
) -> None:
    port, received = rogue_postgres
    database = database_of(
        SinkUri.parse(f"postgresql://me@127.0.0.1:{port}/lake?password-file={secret}")
    )
    with pytest.raises(database.errors) as refused:
        database.connect()
    assert database.error_of(refused.value).code == "ErrCredentials"
    assert all(PASSWORD.encode() not in payload for payload in received)
