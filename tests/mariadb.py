"""A real MariaDB of the distribution: private directory, socket and port;
its binlog as MySQL sources want it.

TIDEMARK_TEST_MYSQLD=/path/to/mysqld has all tests run against a MySQL instead (tests/mysqld.py).

`running_mariadb()` starts one with any further flags; the session-wide `mariadb` fixture is in
tests/conftest.py. Tests that share the fixture work in a database of their own (`database()`), and
stop, kill or reconfigure only servers that they started themselves.
"""

import functools
import itertools
import os
import shutil
import subprocess
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pymysql
import pytest
from pymysql.connections import Connection
from pymysql.cursors import Cursor

from tests.ports import free_port

READY_S = 120.0
BINLOG = (
    "--log-bin=binlog",
    "--binlog-format=ROW",
    "--binlog-row-image=FULL",
    "--binlog-row-metadata=FULL",
    "--binlog-checksum=CRC32",
    "--gtid-strict-mode=ON",
    "--log-slave-updates=ON",
    "--sync-binlog=0",
)
SMALL = (
    "--innodb-buffer-pool-size=24M",
    "--innodb-log-file-size=16M",
    "--innodb-flush-log-at-trx-commit=2",
    "--innodb-buffer-pool-dump-at-shutdown=OFF",
    "--innodb-buffer-pool-load-at-startup=OFF",
    "--key-buffer-size=1M",
    "--aria-pagecache-buffer-size=1M",
    "--performance-schema=OFF",
    "--skip-name-resolve",
    "--default-time-zone=+00:00",
    "--character-set-server=utf8mb4",
)
MYSQLD = os.environ.get("TIDEMARK_TEST_MYSQLD", "")
"""The command of a MySQL that takes MariaDB's place."""
_databases = itertools.count(1)


@dataclass
class MariaDb:
    """A server that can be stopped, killed and started again over the same directory;
    its `root` has no password.
    """

    directory: Path
    flags: Sequence[str] = ()
    server_id: int = 1
    port: int = 0
    host: str = "127.0.0.1"
    running: subprocess.Popen[bytes] | None = None
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.port = self.port or free_port()
        self.log = self.directory / "error.log"

    @property
    def uri(self) -> str:
        """As a source of a changefeed, for root."""
        return f"mysql://root@{self.host}:{self.port}"

    def arguments(self) -> list[str]:
        """The command that runs it."""
        return ["/usr/sbin/mariadbd", "--no-defaults", *self.places(), *SMALL, *BINLOG, *self.flags]

    def prepared_datadir(self) -> Path:
        """A fresh data directory to copy: made once for each machine and version of the server,
        since it takes seconds to make.
        """
        return _prepared_datadir()

    def places(self) -> list[str]:
        """The flags with its directory, sockets and server id."""
        return [
            f"--user={user_of_process()}",
            f"--datadir={self.directory / 'data'}",
            f"--socket={self.directory / 's'}",
            # a server that starts removes temporary tables that it finds, of others, too
            f"--tmpdir={self.directory}",
            f"--pid-file={self.directory / 'pid'}",
            f"--log-error={self.log}",
            f"--bind-address={self.host}",
            f"--port={self.port}",
            f"--server-id={self.server_id}",
        ]

    def start(self) -> None:
        """Start it, and wait until it answers.

        Raises:
            RuntimeError: it ended, or did not answer in time; with the end of its log.
        """
        self.running = subprocess.Popen(
            self.arguments(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + READY_S
        while True:
            try:
                self.connect().close()
            except pymysql.Error as error:
                if self.running.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{error}\n{self.log_end()}") from error
                time.sleep(0.02)
            else:
                return

    def stop(self) -> None:
        """Shut it down in order."""
        if self.running is not None:
            self.running.terminate()
            self.running.wait(READY_S)
            self.running = None

    def kill(self) -> None:
        """Kill it as `kill -9` does."""
        if self.running is not None:
            self.running.kill()
            self.running.wait()
            self.running = None

    def connect(
        self, database: str | None = None, user: str = "root", password: str = ""
    ) -> "Connection[Cursor]":
        """A session of its own, in autocommit."""
        return pymysql.connect(
            host=self.host,
            port=self.port,
            user=user,
            password=password,
            database=database,
            autocommit=True,
            charset="utf8mb4",
            connect_timeout=60,
        )

    def execute(self, *statements: str, database: str | None = None) -> list[tuple[Any, ...]]:
        """Run statements in one new session; returns the rows of the last one."""
        connection = self.connect(database)
        try:
            with connection.cursor() as cursor:
                for statement in statements:
                    cursor.execute(statement)
                return list(cursor.fetchall())
        finally:
            connection.close()
            if any(statement.startswith("XA PREPARE") for statement in statements):
                self._wait_gone(connection.thread_id())

    def database(self, prefix: str = "t") -> str:
        """Create a database that nobody else uses; returns its name."""
        name = f"{prefix}_{os.getpid()}_{next(_databases)}"
        self.execute(f"CREATE DATABASE `{name}` CHARACTER SET utf8mb4")
        return name

    def follow(self, primary: "MariaDb") -> None:
        """Replicate from `primary` by GTID from what this server has,
        as a replica that only reads.
        """
        self.execute(
            "STOP SLAVE",
            f"CHANGE MASTER TO master_host='127.0.0.1', master_port={primary.port}, "
            "master_user='root',"
            " master_password='', master_use_gtid=slave_pos, master_connect_retry=1",
            "START SLAVE",
            "SET GLOBAL read_only=ON",
        )

    def caught_up(self, primary: "MariaDb", timeout_s: float = READY_S) -> None:
        """Wait until this replica has all that is in the log of `primary` now."""
        ((position,),) = primary.execute("SELECT @@gtid_binlog_pos")
        ((reached,),) = self.execute(f"SELECT MASTER_GTID_WAIT('{position}', {timeout_s})")
        assert reached == 0, f"the replica did not reach {position}\n{self.log_end()}"

    def _wait_gone(self, session: int) -> None:
        """Wait until a session is gone: only then may others end the XA transaction that it has
        prepared.
        """
        deadline = time.monotonic() + READY_S
        while self.execute(f"SELECT id FROM information_schema.processlist WHERE id = {session}"):
            assert time.monotonic() < deadline, f"session {session} does not end"
            time.sleep(0.01)

    def log_end(self) -> str:
        """The end of the server's log."""
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""


def mariadb_only(reason: str) -> pytest.MarkDecorator:
    """Mark a test, or a case of one, that needs what MySQL does not have: the `reason`."""
    return pytest.mark.skipif(bool(MYSQLD), reason=f"of MariaDB only: {reason}")


@contextmanager
def running_mariadb(
    *flags: str, server_id: int = 1, primary: MariaDb | None = None
) -> Iterator[MariaDb]:
    """A running server for the block, a replica of `primary` if there is one; `flags` override the
    usual ones.
    """
    directory = Path(tempfile.mkdtemp(prefix="tm-db-"))
    try:
        server = _kind()(directory, flags, server_id)
        shutil.copytree(server.prepared_datadir(), directory / "data")
        try:
            server.start()
            if primary is not None:
                server.follow(primary)
            yield server
        finally:
            server.kill()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _kind() -> type[MariaDb]:
    if not MYSQLD:
        return MariaDb
    from tests.mysqld import MySql  # here, as it builds on this module

    return MySql


@functools.cache
def _prepared_datadir() -> Path:
    version = subprocess.run(
        ["/usr/sbin/mariadbd", "--no-defaults", "--version"], capture_output=True, check=True
    )
    name = f"tidemark-mariadb-{os.getuid()}-{zlib.crc32(version.stdout):08x}"
    ready = Path(tempfile.gettempdir()) / name
    if not ready.exists():
        making = Path(tempfile.mkdtemp(prefix="tm-db-new-"))
        subprocess.run(
            [
                "mariadb-install-db",
                "--no-defaults",
                f"--datadir={making}",
                f"--user={user_of_process()}",
                "--auth-root-authentication-method=normal",
                "--skip-test-db",
                "--skip-name-resolve",
                "--innodb-log-file-size=16M",
            ],
            check=True,
            capture_output=True,
        )
        rename_ready(making, ready)
    return ready


def rename_ready(making: Path, ready: Path) -> None:
    try:
        making.rename(ready)
    except OSError:  # another process was first
        shutil.rmtree(making)


def user_of_process() -> str:
    return "root" if os.getuid() == 0 else str(os.getuid())
