"""A real PostgreSQL of the distribution: private directory and port,
run as the user `postgres` where we are root.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg

from tests.ports import free_port

_SETTINGS = ("fsync=off", "shared_buffers=16MB", "max_connections=40", "unix_socket_directories=''")
_READY_S = 120.0


@dataclass
class PostgreSql:
    """A running server; its user `tidemark` is a superuser and needs no password from loopback."""

    directory: Path
    port: int

    def uri(self, database: str) -> str:
        """As a target."""
        return f"postgresql://tidemark@127.0.0.1:{self.port}/{database}"

    def connect(self, database: str = "postgres") -> psycopg.Connection:
        """A connection without transactions."""
        return psycopg.connect(
            host="127.0.0.1", port=self.port, user="tidemark", dbname=database, autocommit=True
        )

    def create(self, database: str) -> str:
        """A new database; returns its target URI."""
        with self.connect() as connection:
            connection.execute(f'CREATE DATABASE "{database}"'.encode())
        return self.uri(database)

    def restart(self) -> None:
        """Kill all its connections, as a crash does."""
        _run(
            "pg_ctl",
            "-D",
            str(self.directory),
            "-m",
            "immediate",
            "-w",
            "restart",
            "-l",
            str(self.directory / "log"),
        )


@contextmanager
def running_postgres() -> Iterator[PostgreSql]:
    """A server for the block."""
    with tempfile.TemporaryDirectory(prefix="tidemark-postgres-") as parent:
        if os.geteuid() == 0:
            shutil.chown(parent, "postgres", "postgres")
        server = PostgreSql(Path(parent) / "data", free_port())
        _run(
            "initdb",
            "-D",
            str(server.directory),
            "-U",
            "tidemark",
            "-A",
            "trust",
            "-N",
            "-E",
            "UTF8",
            "--locale=C",
        )
        with (server.directory / "postgresql.conf").open("a") as file:
            file.writelines(f"{setting}\n" for setting in (*_SETTINGS, f"port={server.port}"))
        log = str(server.directory / "log")
        _run(
            "pg_ctl",
            "-D",
            str(server.directory),
            "-w",
            "-t",
            str(int(_READY_S)),
            "-l",
            log,
            "start",
        )
        try:
            yield server
        finally:
            with contextlib.suppress(subprocess.CalledProcessError):
                _run("pg_ctl", "-D", str(server.directory), "-m", "immediate", "-w", "stop")


def _run(program: str, *arguments: str) -> None:
    found = max(Path("/usr/lib/postgresql").glob(f"*/bin/{program}"))
    user = (
        ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
        if os.geteuid() == 0
        else []
    )
    subprocess.run(
        [*user, str(found), *arguments], check=True, stdout=subprocess.DEVNULL, timeout=_READY_S
    )
