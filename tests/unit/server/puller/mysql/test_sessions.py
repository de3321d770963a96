"""A session that is of no use any more is closed at once, not by the garbage collector; one with
a client's key that is encrypted does not begin.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pymysql
import pytest

from server.changefeed.source import WARNING, Address
from server.dump.mysql import reader as dump
from server.puller.mysql.log import opening
from server.puller.mysql.log.position import SavedPosition
from server.puller.mysql.log.stream import LogPlace, open_stream
from server.puller.mysql.session import preflight
from server.puller.mysql.session.connection import Flavor, Session, log_in_to
from server.puller.mysql.session.errors import (
    MySqlStatementError,
    MySqlTlsError,
    MySqlUnavailableError,
)
from server.puller.mysql.session.options import MySqlOptions
from tests.unit.server.certificates import Certificates

ADDRESS = Address("db", 3306)
UUID = "3e11fa47-71ca-11e1-9e33-c80aa9429562"
OPTIONS = MySqlOptions(addresses=(ADDRESS,), user="u")


class Connection:
    """One of PyMySQL, that breaks with the statement of that number."""

    def __init__(self, breaks_at: int) -> None:
        self.open = True
        self._left = breaks_at

    def cursor(self) -> "Connection":
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def execute(self, *_: object) -> None:
        self._left -= 1
        if self._left < 0:
            raise pymysql.OperationalError(2013, "Lost connection")

    def fetchall(self) -> list[tuple[Any, ...]]:
        return [(1,)]

    def close(self) -> None:
        self.open = False


@pytest.fixture
def made() -> Iterator[list[Connection]]:
    """All connections of a test, which must be closed at its end."""
    connections: list[Connection] = []
    yield connections
    assert connections
    assert not any(each.open for each in connections)


def session_of(made: list[Connection], breaks_at: int) -> Session:
    connection: Any = Connection(breaks_at)
    made.append(connection)
    return Session(connection, ADDRESS)


def test_one_whose_server_does_not_tell_its_version(made: list[Connection]) -> None:
    with pytest.raises(MySqlUnavailableError):
        session_of(made, 0)


@pytest.mark.parametrize("breaks_at", range(1, 6))
def test_one_that_was_to_become_a_stream(made: list[Connection], breaks_at: int) -> None:
    with pytest.raises(MySqlUnavailableError):
        open_stream(session_of(made, breaks_at), LogPlace("", "log.1"), OPTIONS, 0)


@pytest.mark.parametrize("breaks_at", range(6))
def test_one_that_was_to_say_when_a_log_began(
    made: list[Connection], breaks_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "log_in_to", lambda *_: session_of(made, breaks_at))
    with pytest.raises(MySqlUnavailableError), session_of(made, 9) as session:
        opening.began(session, "log.1", OPTIONS)


class MySql:
    """A session with a MySQL that had gtid_mode=ON once, and what its stream was asked for."""

    flavor = Flavor("8.0.46")
    address = ADDRESS

    def __init__(self, gtid_mode: str) -> None:
        self.answers = {
            "SELECT @@global.gtid_mode": gtid_mode,
            "SELECT @@gtid_executed": f"{UUID}:1-9",
            "SELECT @@server_uuid": UUID,
            "SELECT @@lower_case_table_names": "0",
        }
        self.place = LogPlace()

    def row(self, statement: str) -> tuple[str]:
        return (self.answers[statement],)

    def execute(self, statement: str, *_: object) -> list[tuple[object, ...]]:
        assert "WAIT_FOR_EXECUTED_GTID_SET" in statement
        assert self.answers["SELECT @@global.gtid_mode"] == "ON"
        return [(0,)]

    def open_stream(self, _: object, place: LogPlace, *__: object) -> "MySql":
        self.place = place
        return self

    def take(self, _: float) -> list[object]:
        return []


@pytest.mark.parametrize(
    ("mode", "by_gtid"),
    [("ON", True), ("OFF", False), ("ON_PERMISSIVE", False), ("OFF_PERMISSIVE", False)],
)
def test_a_mysql_is_asked_by_gtid_only_where_it_sends_its_log_so(
    mode: str, by_gtid: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server: Any = MySql(mode)
    assert bool(opening._gtids(server)) == by_gtid
    monkeypatch.setattr(opening, "log_in_to", lambda *_: server)
    monkeypatch.setattr(opening, "check_log", lambda *_: False)
    monkeypatch.setattr(opening, "open_stream", server.open_stream)
    # of a file's first event, which says what was executed before
    opened = opening.open_log(OPTIONS, SavedPosition(7, f"{UUID}:1-9", "log.3", 500), 1)
    assert (server.place.gtids, server.place.file) == (f"{UUID}:1-9" if by_gtid else "", "log.3")
    assert (server.place.gtid_block != b"") == by_gtid
    # What is read from a file and an offset on is a place of that log: it is not forgotten.
    assert opened.same_server != by_gtid


def test_a_user_who_may_not_see_prepared_xa_transactions_is_warned_by_name() -> None:
    class Refused:
        def execute(self, statement: str) -> None:
            assert statement == "XA RECOVER"
            raise MySqlStatementError("XAER_RMERR: fatal error in the transaction branch")

    session: Any = Refused()
    (check,) = preflight._xa_access(session)
    assert (check.name, check.state) == ("XA RECOVER", WARNING)
    assert "XA_RECOVER_ADMIN" in check.fix
    session.execute = lambda _: []
    assert not list(preflight._xa_access(session))


def test_one_of_a_dump_that_may_write_no_watermark(
    made: list[Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dump, "log_in", lambda _: session_of(made, 1))
    with pytest.raises(MySqlUnavailableError):
        dump.Server("feed", OPTIONS)


def test_nobody_is_asked_for_the_pass_phrase_of_a_key(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    password = tmp_path / "password"
    password.write_text("p")
    encrypted = replace(
        OPTIONS,
        password_file=str(password),
        tls="verify",
        ca=str(tmp_path / "ca.pem"),
        cert=str(tmp_path / "node.pem"),
        key=certificates.encrypted_key("secret"),
    )
    with pytest.raises(MySqlTlsError, match="key is encrypted; write it without a pass phrase"):
        log_in_to(Address("127.0.0.1", 1), encrypted)
