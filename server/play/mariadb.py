"""The playground's MariaDB: the distribution's server over a directory of its own,
on loopback, with a binlog.
"""

import asyncio
import os
import shutil
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import pymysql
from pymysql.constants import CLIENT, CR

from server.process import drain
from storage.model.errors import UnavailableError

USER, PASSWORD = "tidemark", "playground"
"""The account that `shop.sql` creates."""
_SHOP, _DAY = "shop.sql", "day.sql"
_READY_SECONDS = 120.0
_ASK_SECONDS = 0.2
_DRAIN_SECONDS = 30.0
_BINLOG = (
    *(
        "--log-bin=binlog",
        "--binlog-format=ROW",
        "--binlog-row-image=FULL",
        "--binlog-row-metadata=FULL",
    ),
    *("--gtid-strict-mode=ON", "--sync-binlog=1"),  # what `source check` wants
)
_SMALL = ("--innodb-buffer-pool-size=64M", "--innodb-log-file-size=16M", "--performance-schema=OFF")


_GONE: Final = (CR.CR_CONN_HOST_ERROR, CR.CR_SERVER_GONE_ERROR, CR.CR_SERVER_LOST)
"""The client's own errors: no server is there, or it went away."""


class MariaDbError(UnavailableError):
    """MariaDB is not installed, or does not run; the message says what to do."""

    code = "ErrPlayMariaDb"


class MariaDb:
    """A server on 127.0.0.1 with the shop; its root has no password."""

    def __init__(self, port: int, log: Path) -> None:
        self.port = port
        self._log = log

    @classmethod
    @asynccontextmanager
    async def running(cls, directory: Path, port: int, log: Path) -> AsyncIterator["MariaDb"]:
        """The server over `directory` for the block, which is created the first time.

        Raises:
            MariaDbError: there is no MariaDB, or it does not start.
        """
        program = _program("mariadbd")
        await _ensure(directory, log)
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *_server_command(program, directory, port),
                stdin=PIPE,
                stdout=DEVNULL,
                stderr=output,
                start_new_session=True,
            )
        try:
            server = cls(port, log)
            await server._wait_ready(process, directory, log)
            if not await server.ask("SELECT 1 FROM mysql.user WHERE user = %s", USER):
                await server.ask(_script(_SHOP))
            yield server
        finally:
            await drain(process, _DRAIN_SECONDS)

    async def ask(self, statements: str, *arguments: str) -> list[Any]:
        """Run statements as root; the rows of the first one.

        Raises:
            MariaDbError: the server refuses one, or does not answer.
        """
        try:
            return await asyncio.to_thread(self._ask, statements, arguments)
        except pymysql.Error as err:
            said = f"MariaDB on 127.0.0.1:{self.port}"
            if err.args and err.args[0] in _GONE:
                raise MariaDbError(
                    f"{said} does not answer. If it has ended, {self._log} says why; started again, "
                    "the playground goes on with its data"
                ) from err
            raise MariaDbError(f"{said}: {err}") from err

    async def one_second_of_the_shop(self) -> None:
        """Take an order, and move others on; raises MariaDbError."""
        await self.ask(_script(_DAY))

    def _ask(self, statements: str, arguments: tuple[str, ...]) -> list[Any]:
        with (
            pymysql.connect(
                host="127.0.0.1",
                port=self.port,
                user="root",
                autocommit=True,
                charset="utf8mb4",
                client_flag=CLIENT.MULTI_STATEMENTS,
            ) as session,
            session.cursor() as cursor,
        ):
            cursor.execute(statements, arguments or None)
            rows = list(cursor.fetchall())
            while cursor.nextset():  # the fault of a later statement shows here
                pass
            return rows

    async def _wait_ready(self, process: Process, directory: Path, log: Path) -> None:
        """Wait until this very server answers."""
        # Another MariaDB may have the port: its data directory tells which one answers.
        deadline = asyncio.get_running_loop().time() + _READY_SECONDS
        while True:
            if process.returncode is not None or asyncio.get_running_loop().time() > deadline:
                raise MariaDbError(
                    f"MariaDB does not start; see {log}. If another server uses port {self.port}, "
                    "pass --mariadb-port"
                )
            try:
                [(where,)] = await self.ask("SELECT @@datadir")
            except MariaDbError:
                where = ""
            if where.rstrip("/") == str(directory):
                return
            await asyncio.sleep(_ASK_SECONDS)


def _server_command(program: str, directory: Path, port: int) -> list[str]:
    """The server's command line; it ends when this process does."""
    return [
        *("setpriv", "--pdeathsig", "TERM"),
        *(program, "--no-defaults", f"--datadir={directory}", *_as_user()),
        # Relative to the data directory, whose own path may be too long for a socket.
        *("--socket=s", "--pid-file=pid"),
        *("--bind-address=127.0.0.1", f"--port={port}", "--skip-name-resolve"),
        *("--server-id=1", "--character-set-server=utf8mb4", "--default-time-zone=+00:00"),
        *_BINLOG,
        *_SMALL,
    ]


async def _ensure(directory: Path, log: Path) -> None:
    """Make a data directory, if there is none."""
    # Made under another name and renamed at the end: one that was interrupted is begun anew.
    if directory.exists():  # noqa: ASYNC240 - nothing else goes on yet
        return
    making = directory.with_suffix(".new")
    shutil.rmtree(making, ignore_errors=True)
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *(_program("mariadb-install-db"), "--no-defaults", f"--datadir={making}", *_as_user()),
            *("--auth-root-authentication-method=normal", "--skip-test-db", "--skip-name-resolve"),
            stdin=PIPE,
            stdout=output,
            stderr=STDOUT,
        )
    if await process.wait():
        raise MariaDbError(f"mariadb-install-db failed; see {log}")
    making.rename(directory)


def _program(name: str) -> str:
    path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/bin")
    if path is None:
        raise MariaDbError(
            f"there is no {name}; install MariaDB's server (Debian and Ubuntu: make deps)"
        )
    return path


def _as_user() -> tuple[str, ...]:
    """The flag that MariaDB needs when it runs as root."""
    return ("--user=root",) if os.getuid() == 0 else ()


def _script(name: str) -> str:
    return files("server.play").joinpath(name).read_text(encoding="utf-8")
