"""Asks a server whether its log can be followed, and proves it:
a written row must come back through the log.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from typing import Final

from server.changefeed.filter import TableFilter
from server.changefeed.source import FAILURE, OK, WARNING, Check
from server.changefeed.table import TableRecord
from server.puller.mysql.ddl.tree import TableName
from server.puller.mysql.log import heartbeat
from server.puller.mysql.log.opening import present
from server.puller.mysql.log.stream import LogPlace, LogStream, open_stream
from server.puller.mysql.session.catalogue import read_definitions
from server.puller.mysql.session.checks import (
    Facts,
    check_settings,
    check_tables,
)
from server.puller.mysql.session.connection import Session, log_in, log_in_to
from server.puller.mysql.session.errors import MySqlPrivilegeError, MySqlStatementError
from server.puller.mysql.session.options import MySqlOptions
from storage.model.errors import TidemarkError
from storage.model.system_schemas import OF_MYSQL, WATERMARK_SCHEMA
from storage.mysql.compressed import expanded
from storage.mysql.rows import TableMaps

_PROBE: Final = "tidemark-source-check"
_PROBE_S: Final = 5.0
_CASCADES = """
SELECT constraint_schema, table_name, constraint_name, CONCAT('ON DELETE ', delete_rule, ' ON UPDATE ', update_rule)
FROM information_schema.referential_constraints
WHERE delete_rule IN ('CASCADE', 'SET NULL', 'SET DEFAULT') OR update_rule IN ('CASCADE', 'SET NULL', 'SET DEFAULT')"""


def check_source(
    options: MySqlOptions,
    rules: tuple[str, ...],
    server_id: int,
    read: Callable[[TableRecord], object],
    *,
    target: str = "",
    write: bool,
) -> Iterator[Check]:
    """All checks of the first server that answers; blocks, for some seconds at most.

    Raises:
        MySqlUnavailableError, MySqlLoginError, MySqlTlsError: no server lets us in.
    """
    with log_in(options) as session:
        yield Check("login", OK, f"{options.user} at {session.address.host}:{session.address.port}")
        facts = _facts(session, options, TableFilter(rules, OF_MYSQL))
        yield from check_settings(facts)
        yield from check_tables(facts, read, target)
        logged = list(_log_access(session))
        yield from logged
        if any(check.state == FAILURE for check in logged):
            return
        yield from _xa_access(session)
        if session.row("SELECT @@global.read_only")[0]:
            why = "no rows can be written here: cuts stand while it is idle, and dumps cannot run"
            yield Check(
                "watermark", WARNING, "read_only", why, "name the primary in the source URI"
            )
        elif write:
            yield _probe(session, options, server_id)


def _facts(session: Session, options: MySqlOptions, table_filter: TableFilter) -> Facts:
    definitions = read_definitions(session)
    status: dict[str, object] = {}
    replicas: list[dict[str, object]] = []
    with suppress(TidemarkError):
        status = next(iter(session.named(_log_status_statement(session))), {})
    with suppress(TidemarkError):
        replicas = session.named(
            "SHOW ALL SLAVES STATUS" if session.flavor.is_mariadb else "SHOW REPLICA STATUS"
        )
    now_s = float(session.row("SELECT UNIX_TIMESTAMP(NOW(3))")[0])
    return Facts(
        flavor=session.flavor,
        variables=session.variables(),
        log_status=status,
        replica_status=replicas,
        definitions=[
            definitions[name] for name in sorted(definitions) if table_filter.takes(*name)
        ],
        cascades=[each for each in _cascades(session) if table_filter.takes(*each[0])],
        grants=[str(row[0]) for row in session.execute("SHOW GRANTS")],
        clock_skew_s=now_s - time.time(),
        several_hosts=len(options.addresses) > 1,
    )


def _cascades(session: Session) -> list[tuple[TableName, str, str]]:
    return [
        ((schema, table), name, rule) for schema, table, name, rule in session.execute(_CASCADES)
    ]


def _log_access(session: Session) -> Iterator[Check]:
    right = "BINLOG MONITOR" if session.flavor.is_mariadb else "REPLICATION CLIENT"
    statement = _log_status_statement(session)
    try:
        rows = session.execute(statement)
    except TidemarkError as err:
        yield Check(statement, FAILURE, "refused", err.message, f"GRANT {right} ON *.* TO the user")
        return
    position = f"{rows[0][0]}:{rows[0][1]}" if rows else "no log"
    yield Check("log position", OK if rows else FAILURE, position)


def _xa_access(session: Session) -> Iterator[Check]:
    """A warning where the user may not see prepared XA transactions (`prepared_xids`)."""
    try:
        session.execute("XA RECOVER")
    except (MySqlPrivilegeError, MySqlStatementError):
        why = (
            "which XA transactions are prepared is not seen: rows of one that is prepared while a "
            "changefeed begins or a dump reads may be missing; no matter where nobody uses XA"
        )
        fix = "GRANT XA_RECOVER_ADMIN ON *.* TO the user"
        yield Check("XA RECOVER", WARNING, "refused", why, fix)


def _probe(session: Session, options: MySqlOptions, server_id: int) -> Check:
    """Write a row and wait for it in the log."""
    name, began = "watermark", time.monotonic()
    try:
        heartbeat.create_table(session)
    except TidemarkError as err:
        fix = f"GRANT CREATE, SELECT, INSERT, UPDATE ON {WATERMARK_SCHEMA}.* TO the user"
        return Check(name, FAILURE, "cannot be written", err.message, fix)
    try:
        end = present(options)
        place = LogPlace(end.gtids, end.file, end.position, end.gtid_block)
        stream = open_stream(log_in_to(session.address, options), place, options, server_id)
    except TidemarkError as err:
        return Check(
            name,
            FAILURE,
            "the log cannot be read",
            err.message,
            "GRANT REPLICATION SLAVE ON *.* TO the user",
        )
    try:
        heartbeat.write_row(session, _PROBE)
        seen = _seen(stream, mariadb=session.flavor.is_mariadb)
    except TidemarkError as err:
        return Check(
            name,
            FAILURE,
            "the log cannot be read",
            err.message,
            "GRANT REPLICATION SLAVE ON *.* TO the user",
        )
    finally:
        stream.close()
    if seen:
        return Check(
            name, OK, f"came back through the log in {(time.monotonic() - began) * 1000:.0f} ms"
        )
    why = (
        "a committed row did not come back: filters, sql_log_bin=0 for this user, or another "
        "server behind the address"
    )
    return Check(name, FAILURE, f"not seen within {_PROBE_S:.0f} s", why)


def _seen(stream: LogStream, *, mariadb: bool) -> bool:
    maps = TableMaps(mariadb=mariadb)
    deadline = time.monotonic() + _PROBE_S
    while time.monotonic() < deadline:
        for plain in chain.from_iterable(map(expanded, stream.take(1.0))):
            for group in maps.group(plain):
                rows = b"".join(plain.body(int(number)) for number in group.numbers)
                if (
                    f"{group.table.schema}.{group.table.table}" == heartbeat.TABLE
                    and _PROBE.encode() in rows
                ):
                    return True
    return False


def _log_status_statement(session: Session) -> str:
    newer = not session.flavor.is_mariadb and session.flavor.number >= (8, 4)
    return "SHOW BINARY LOG STATUS" if newer else "SHOW MASTER STATUS"
