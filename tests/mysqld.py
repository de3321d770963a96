"""A real MySQL of Oracle's in place of MariaDB:
TIDEMARK_TEST_MYSQLD=/path/to/mysqld runs the same tests against it.

CI has no such server. What it cannot be asked, as MariaDB's own syntax and settings, skips the test
that asks for it.
"""

import functools
import os
import re
import ssl
import subprocess
import tempfile
import zlib
from pathlib import Path
from typing import Any

import pymysql
import pytest

from tests.mariadb import MYSQLD, READY_S, MariaDb, rename_ready, user_of_process

MYSQL_SYNTAX = (
    (r"\bSHOW MASTER STATUS\b", "SHOW BINARY LOG STATUS"),
    (
        r"\bFROM seq_(\d+)_to_(\d+)",
        r"FROM (WITH RECURSIVE s(seq) AS (SELECT \1 UNION ALL SELECT seq + 1 FROM s WHERE seq < \2) SELECT * FROM s) s",
    ),
    (r"\w+ (UUID|INET6|INET4),", ""),
    (r", '2001:db8::1'\)", ")"),
    (r"\bENGINE=Aria\b", "ENGINE=MyISAM"),
    (r"\brpl([-_])semi[-_]sync[-_]master", r"rpl\1semi\1sync\1source"),
    (r"^(START|STOP) SLAVE$", r"\1 REPLICA"),
    (r"\bBINLOG MONITOR\b", "REPLICATION CLIENT"),
    (r"@@gtid_binlog_pos\b", "@@gtid_executed"),
    (r"\butf8mb4_unicode_nopad_ci\b", "utf8mb4_0900_ai_ci"),
    (r"^SET timestamp=DEFAULT$", "SET original_commit_timestamp=DEFAULT"),
    (r"^SET timestamp=(\S+)$", r"SET original_commit_timestamp=FLOOR(\1 * 1000000)"),
    (r"^--log-bin-compress=", "--binlog-transaction-compression="),
    (r"^--log-bin-compress-min-len=.*", "--binlog-transaction-compression-level-zstd=1"),
    (r"^--innodb-log-file-size=", "--innodb-redo-log-capacity="),
)
"""MariaDB's syntax of statements and flags, and MySQL's for the same; types that MySQL lacks are
left out.
"""
ONLY_MARIADB = (1064, 1067, 1101, 1149, 1170, 1193, 1231, 1273, 1286, 1305)
"""Error codes of what only MariaDB takes: syntax, defaults, keys, variables, collations, engines,
functions.
"""
FLAGS = (
    "--mysqlx=OFF",
    "--cte-max-recursion-depth=1000000",
    "--gtid-mode=ON",
    "--enforce-gtid-consistency=ON",
    "--log-bin=binlog",
    "--binlog-format=ROW",
    "--binlog-row-image=FULL",
    "--binlog-row-metadata=FULL",
    "--sync-binlog=0",
    # as MariaDB's
    "--sql-mode=STRICT_TRANS_TABLES,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION",
    "--innodb-buffer-pool-size=24M",
    "--innodb-redo-log-capacity=64M",
    "--innodb-flush-log-at-trx-commit=2",
    "--innodb-buffer-pool-dump-at-shutdown=OFF",
    "--innodb-buffer-pool-load-at-startup=OFF",
    "--performance-schema=OFF",
    "--skip-name-resolve",
    "--secure-file-priv=",
    "--log-bin-trust-function-creators=ON",
    "--local-infile=ON",
    "--plugin-load-add=semisync_source.so",
    "--default-time-zone=+00:00",
    "--character-set-server=utf8mb4",
)


_CREATED = re.compile(r"(?:CREATE|ALTER) USER (\w+) IDENTIFIED BY '(\w+)'")
_UNCHECKED = ssl.create_default_context()
_UNCHECKED.check_hostname, _UNCHECKED.verify_mode = False, ssl.CERT_NONE


def in_mysql_syntax(statement: str) -> str:
    """A statement or a flag of a test, which are written for MariaDB, in MySQL's syntax."""
    for theirs, ours in MYSQL_SYNTAX:
        statement = re.sub(theirs, ours, statement)
    return statement


class MySql(MariaDb):
    """A server that can be stopped, killed and started again over the same directory;
    its `root` has no password.
    """

    def arguments(self) -> list[str]:
        return [MYSQLD, "--no-defaults", *self.places(), *FLAGS, *map(in_mysql_syntax, self.flags)]

    def prepared_datadir(self) -> Path:
        return _prepared_datadir()

    def start(self) -> None:
        try:
            super().start()
        except RuntimeError as error:
            unknown = re.search(r"unknown (variable|option) '[^']*'", str(error))
            if unknown is not None:
                pytest.skip(f"MySQL: {unknown[0]}")
            raise

    def execute(self, *statements: str, database: str | None = None) -> list[tuple[Any, ...]]:
        try:
            rows = super().execute(*map(in_mysql_syntax, statements), database=database)
        except pymysql.Error as error:
            if error.args[0] in ONLY_MARIADB:
                pytest.skip(f"MySQL: {error}")
            raise
        for created in filter(None, map(_CREATED.match, statements)):
            self._log_in_once(*created.groups())
        return rows

    def _log_in_once(self, user: str, password: str) -> None:
        """Log in by TLS once: from then on the server has the password in its cache, which logins
        without TLS need (caching_sha2_password).
        """
        pymysql.connect(
            host="127.0.0.1", port=self.port, user=user, password=password, ssl=_UNCHECKED
        ).close()

    def follow(self, primary: MariaDb) -> None:
        self.execute(
            "STOP REPLICA",
            f"CHANGE REPLICATION SOURCE TO source_host='127.0.0.1', source_port={primary.port}, "
            "source_user='root',"
            " source_password='', source_auto_position=1, source_connect_retry=1, "
            "get_source_public_key=1",
            "START REPLICA",
            "SET GLOBAL read_only=ON",
        )

    def caught_up(self, primary: MariaDb, timeout_s: float = READY_S) -> None:
        ((gtids,),) = primary.execute("SELECT @@gtid_executed")
        ((late,),) = self.execute(f"SELECT WAIT_FOR_EXECUTED_GTID_SET('{gtids}', {timeout_s})")
        assert late == 0, f"the replica did not reach {gtids}\n{self.log_end()}"


@functools.cache
def _prepared_datadir() -> Path:
    version = subprocess.run(
        [MYSQLD, "--no-defaults", "--version"], capture_output=True, check=True
    ).stdout
    ready = Path(tempfile.gettempdir()) / f"tidemark-mysql-{os.getuid()}-{zlib.crc32(version):08x}"
    if not ready.exists():
        making = Path(tempfile.mkdtemp(prefix="tm-db-new-"))
        grants = making.with_suffix(".sql")
        grants.write_text(
            "CREATE USER root@127.0.0.1; GRANT ALL ON *.* TO root@127.0.0.1 WITH GRANT OPTION;"
        )
        arguments = [
            f"--user={user_of_process()}",
            f"--datadir={making}",
            f"--init-file={grants}",
            "--skip-log-bin",
        ]
        subprocess.run(
            [MYSQLD, "--no-defaults", "--initialize-insecure", *arguments],
            check=True,
            capture_output=True,
        )
        grants.unlink()
        (making / "auto.cnf").unlink()  # each copy is a server of its own
        rename_ready(making, ready)
    return ready
