"""Rows of a MySQL or MariaDB server's tables in a session's snapshot, as they come. Blocking; one thread at a time."""

import time
from collections.abc import Iterator
from typing import Final

import pyarrow as pa

from server.changefeed.table import SourceTable
from server.dump.mysql.chunk import ChunkSize, last_row
from server.dump.mysql.reader import chunk_query
from server.dump.mysql.statement import Statement
from server.dump.progress import Range
from server.puller.mysql.connection import Session

_SNAPSHOT: Final = (
    "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ",
    "SET SESSION net_write_timeout = 3600",
    "START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY",
)
_STORED_BYTES: Final = "SET SESSION character_set_results = NULL, sql_mode = 'NO_ENGINE_SUBSTITUTION'"
_MARK: Final = "tidemark"


def begin_snapshot(session: Session) -> None:
    """From here on the session sees its tables as they are now."""
    for statement in _SNAPSHOT:
        session.execute(statement)


def pieces(session: Session, query: str) -> Iterator[pa.Array]:
    """The rows of a query, each behind its format byte; to be used up.

    The tables' metadata locks are let go at the end: an ALTER of one waits for this read, not for the session's end.

    Raises:
        MySqlStatementError, MySqlPrivilegeError: the server refuses, also because a table was altered meanwhile.
        MySqlUnavailableError: the connection broke.
    """
    session.execute(_STORED_BYTES)
    session.execute(f"SAVEPOINT {_MARK}")
    statement = Statement(session, query)
    yield from statement.pieces()
    statement.close()
    session.execute(f"ROLLBACK TO SAVEPOINT {_MARK}")


def chunks(session: Session, table: SourceTable) -> Iterator[pa.Array]:
    """All rows of a table, as `pieces` gives them, by one query after the other in the order of the key.

    An ALTER of the table waits for one of them, however slowly they are asked for. Raises as `pieces`.
    """
    session.execute(_STORED_BYTES)
    query = chunk_query(lambda sql, *values: session.execute(sql, values or None), table)
    part, size, ends = Range(), ChunkSize(), False
    while not ends:
        limit, began_s = size.rows, time.monotonic()
        session.execute(f"SAVEPOINT {_MARK}")
        statement = Statement(session, query.sql(after=part.after is not None, until=False))
        rows = statement.rows(query.parameters(part, limit))
        statement.close()
        session.execute(f"ROLLBACK TO SAVEPOINT {_MARK}")
        size.took(len(rows), rows.nbytes, time.monotonic() - began_s)
        ends = len(rows) < limit
        if not ends:
            part = Range(query.cursor(last_row(rows)))
        yield rows
