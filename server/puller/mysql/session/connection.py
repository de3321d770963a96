"""Sessions with a server, by PyMySQL: login, TLS, statements;
every error enters here and leaves as one of ours.

A session is used by one thread at a time, and is always in autocommit, UTC, and with a time limit
on each answer.
"""

import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, ParamSpec, Self, TypeVar

import pymysql
from pymysql.connections import Connection
from pymysql.constants import CR
from pymysql.cursors import Cursor
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.databases.mysql_login import GuardedConnection
from pyspark_tidemark.uri_secrets import read_secret

from server.changefeed.source import Address
from server.puller.mysql.session.errors import (
    MySqlLoginError,
    MySqlTlsError,
    MySqlUnavailableError,
    refusal,
)
from server.puller.mysql.session.options import MySqlOptions
from server.rpc.credentials import no_pass_phrase
from storage.model.errors import TidemarkError

P = ParamSpec("P")
T = TypeVar("T")

ANSWER_S: Final = 60.0
_GARBLED: Final = (struct.error, LookupError, ValueError, TypeError, AssertionError, RuntimeError)
"""What PyMySQL raises for packets that no MySQL server sends."""
_SQL_MODE: Final = "NO_BACKSLASH_ESCAPES,NO_ENGINE_SUBSTITUTION"


@dataclass(frozen=True, slots=True)
class Flavor:
    """Which server answers."""

    version: str

    @property
    def is_mariadb(self) -> bool:
        """Whether it is MariaDB, whose GTIDs, events and variables differ from MySQL's."""
        return "mariadb" in self.version.lower()

    @property
    def explain(self) -> str:
        """EXPLAIN with rows and the share that a condition takes by name;
        MySQL 9 answers plain EXPLAIN with a text.
        """
        return "EXPLAIN EXTENDED" if self.is_mariadb else "EXPLAIN FORMAT=TRADITIONAL"

    @property
    def number(self) -> tuple[int, int]:
        """Major and minor version; (0, 0) if they cannot be read."""
        parts = self.version.removeprefix("5.5.5-").split(".")
        return (
            (int(parts[0]), int(parts[1]))
            if len(parts) > 1 and all(p.isdecimal() for p in parts[:2])
            else (0, 0)
        )


class Session:
    """One connection that has logged in; closed at the end of its `with`."""

    def __init__(self, connection: "Connection[Cursor]", address: Address) -> None:
        self.connection = connection
        self.address = address
        try:
            self.flavor = Flavor(str(self.row("SELECT VERSION()")[0]))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        """The session."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """End it; another thread's call on it fails then."""
        if self.connection.open:
            with answers("closing a session"):
                self.connection.close()

    def raw_socket(self) -> socket.socket:
        """The connection under it, for what PyMySQL does not speak; there is no other way to it."""
        sock: socket.socket = vars(self.connection)["_sock"]
        return sock

    def execute(
        self, statement: str, values: Sequence[object] | None = None
    ) -> list[tuple[Any, ...]]:
        """Run one statement; its rows, if it has any.

        Raises:
            MySqlUnavailableError: the connection broke.
            MySqlPrivilegeError, MySqlStatementError: the server refuses.
        """
        with answers(statement.split("\n", 1)[0][:80]), self.connection.cursor() as cursor:
            cursor.execute(statement, values)
            return list(cursor.fetchall())

    def row(self, statement: str, values: Sequence[object] | None = None) -> tuple[Any, ...]:
        """The first row of a statement that has at least one."""
        return self.execute(statement, values)[0]

    def named(self, statement: str) -> list[dict[str, Any]]:
        """The rows of a statement by column name, for SHOW statements whose columns differ from
        server to server.
        """
        with answers(statement[:80]), self.connection.cursor() as cursor:
            cursor.execute(statement)
            names = [column[0] for column in cursor.description or ()]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def variables(self) -> dict[str, str]:
        """All global variables, their names in lower case."""
        return {
            str(name).lower(): str(value) for name, value in self.execute("SHOW GLOBAL VARIABLES")
        }


@contextmanager
def answers(doing: str) -> Iterator[None]:
    """Turn PyMySQL's errors into ours."""
    try:
        yield
    except (pymysql.Error, OSError) as err:
        raise _error_of(err, doing) from err


def log_in(options: MySqlOptions) -> Session:
    """Open a session with the first server that answers.

    Raises:
        MySqlUnavailableError: none answers; with what each one said.
        MySqlLoginError, MySqlTlsError: one answers, and does not let us in.
    """
    failures: list[str] = []
    for address in options.addresses:
        try:
            return log_in_to(address, options)
        except MySqlUnavailableError as err:
            failures.append(err.message)
    raise MySqlUnavailableError("no server answers: " + "; ".join(failures))


def log_in_to(address: Address, options: MySqlOptions) -> Session:
    """Open a session with one server; raises as `log_in`."""
    where = f"{address.host}:{address.port}"
    with _greeting_of(where), answers(f"connecting to {where}"):
        connection = GuardedConnection(
            server_is_verified=options.tls == "verify",
            host=address.host,
            port=address.port,
            user=options.user,
            password=_password(options),
            autocommit=True,
            charset="utf8mb4",
            sql_mode=_SQL_MODE,
            init_command="SET time_zone='+00:00', SESSION wait_timeout=28800",
            connect_timeout=options.connect_timeout_s,
            read_timeout=ANSWER_S,
            write_timeout=ANSWER_S,
            program_name="tidemark",
            **_tls(options),
        )
    return Session(connection, address)


@contextmanager
def _greeting_of(where: str) -> Iterator[None]:
    """Name what PyMySQL cannot do, or cannot read, while it logs in."""
    try:
        yield
    except _GARBLED as err:
        if "pynacl" in str(err):
            raise MySqlLoginError(f"{where} wants client_ed25519: pip install pynacl") from err
        raise MySqlUnavailableError(
            f"{where} does not answer as a MySQL or MariaDB server does ({err!r})"
        ) from err


def _password(options: MySqlOptions) -> bytes:
    named = {"password-file": options.password_file, "password-env": options.password_env}
    try:
        return read_secret({option: value for option, value in named.items() if value}).encode()
    except SourceError as err:
        raise MySqlLoginError(err.message) from None


def _tls(options: MySqlOptions) -> dict[str, Any]:
    if options.tls == "off":
        return {"ssl_disabled": True}
    try:
        context = ssl.create_default_context(cafile=options.ca or None)
        if options.cert:
            context.load_cert_chain(options.cert, options.key, no_pass_phrase)
    except (OSError, ssl.SSLError) as err:
        raise MySqlTlsError(f"the TLS files of the source URI cannot be read: {err}") from err
    context.check_hostname = options.tls == "verify"
    context.verify_mode = ssl.CERT_NONE if options.tls == "require" else ssl.CERT_REQUIRED
    return {"ssl": context}


def _error_of(err: Exception, doing: str) -> TidemarkError:
    cause = getattr(err, "original_exception", err)
    if isinstance(cause, ssl.SSLError):
        return MySqlTlsError(
            f"{doing}: TLS failed: {cause}; check tls, ca, cert and key of the source URI"
        )
    if isinstance(err, pymysql.Error) and err.args and err.args[0] == CR.CR_AUTH_PLUGIN_CANNOT_LOAD:
        return MySqlLoginError(
            f"{doing}: {err.args[1]}; to send it, add tls=verify and ca=/path to the source URI"
        )
    if isinstance(err, pymysql.Error) and err.args and isinstance(err.args[0], int) and err.args[0]:
        return refusal(err.args[0], str(err.args[1] if len(err.args) > 1 else ""), doing)
    return MySqlUnavailableError(f"{doing}: {err}")


class QueryThreads(Executor):
    """Runs each query in a daemon thread of its own: a server may take a minute to answer.

    The end of the process waits for none of these threads, so only queries belong here, not calls
    that write files of ours.
    """

    def __init__(self, most: int, name: str) -> None:
        """Run at most `most` queries at once; the others wait."""
        self._name = name
        self._free = threading.Semaphore(most)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See `Executor.submit`."""
        future: Future[T] = Future()
        call = partial(fn, *args, **kwargs)
        threading.Thread(
            target=self._make, args=(future, call), name=self._name, daemon=True
        ).start()
        return future

    def _make(self, future: Future[Any], call: Callable[[], Any]) -> None:
        with self._free:
            if not future.set_running_or_notify_cancel():
                return
            try:
                answer = call()
            except BaseException as err:  # noqa: BLE001 - whoever waits gets it
                future.set_exception(err)
            else:
                future.set_result(answer)
