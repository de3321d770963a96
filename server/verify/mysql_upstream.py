"""The rows of a table of a MySQL or MariaDB server as they were at a cut of the lake,
while anybody writes.

    … cut … ─── changes, undone ───► log's end ≥ snapshot
    rows at the cut = snapshot without changed keys + before-images

The server shows no past, but its log has the before-image of every change. One snapshot is opened,
then the log is read from the cut to where it ends after that: whatever the snapshot shows of a
later change is in that part. Rows whose key is in it are taken from their first change there
(`before_images`), all others from the snapshot. So it does not matter which transactions the
snapshot has: no lock, no watermark and no exact position is needed, and the cut can be any whose
log is still there.

`begin_snapshot`, `query_rows` and `chunked_rows` read a session's snapshot; they block.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from server.changefeed.info import ChangefeedInfo
from server.changefeed.source import SourceUri
from server.changefeed.table import SourceTable
from server.dump.mysql.chunk import ChunkSize, last_row, quote_identifier, selected
from server.dump.mysql.reader import chunk_query, keys_of
from server.dump.mysql.statement import Statement
from server.dump.progress import Range
from server.puller.mysql.log.opening import Beginning
from server.puller.mysql.log.position import SavedPosition, TimeLimits
from server.puller.mysql.log.saved_positions import TimeLimitsRecord, prefix
from server.puller.mysql.session.connection import Session, log_in
from server.puller.mysql.session.options import MySqlOptions
from server.puller.mysql.transaction.scanner import log_end
from server.verify.before_images import BeforeImages, ChangedKeys, read_before_images
from server.verify.catalog import Table
from server.verify.errors import VerifyHistoryError
from server.verify.upstream import Cluster, Upstream
from storage.meta.meta import Meta
from storage.model.event import snapshot_rows
from storage.mysql.schema import Table as Columns

# The rows are compared while they arrive, so the server may have to wait to send more: its default
# net_write_timeout of 60 s would end the session, and the snapshot with it.
_SNAPSHOT: Final = (
    "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ",
    "SET SESSION net_write_timeout = 3600",
    "START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY",
)
_STORED_BYTES: Final = (
    "SET SESSION character_set_results = NULL, sql_mode = 'NO_ENGINE_SUBSTITUTION'"
)
_SAVEPOINT: Final = "tidemark"


def open_mysql(
    cluster: Cluster, info: ChangefeedInfo, tables: Sequence[Table], *, gently: bool
) -> AbstractAsyncContextManager[Upstream]:
    """The server of the changefeed, read in chunks if `gently`: see `upstream.OpenUpstream`."""
    return MySqlUpstream.open(cluster.meta, info, tables, in_chunks=gently)


class MySqlUpstream:
    """Implements `server.verify.upstream.Upstream`."""

    def __init__(self, session: Session, before: BeforeImages, *, in_chunks: bool = False) -> None:
        self._session = session
        self._before = before
        self._in_chunks = in_chunks

    @classmethod
    @asynccontextmanager
    async def open(
        cls, meta: Meta, info: ChangefeedInfo, tables: Sequence[Table], *, in_chunks: bool = False
    ) -> AsyncIterator["MySqlUpstream"]:
        """The server for the block, in one snapshot; whole tables are read by one query,
        or `in_chunks`.

        Raises:
            VerifyHistoryError, VerifyMovedError, VerifyBehindError: the cut cannot be reached from
            it. MySqlLoginError, MySqlUnavailableError, …: it does not let us in, or does not
            answer.
        """
        options = MySqlOptions.of(SourceUri.parse(info.source_uri))
        begin = await _log_beginning(meta, info.id, min(table.ts for table in tables))
        session = await asyncio.to_thread(log_in, options)
        try:
            before = await asyncio.to_thread(_open_snapshot, session, options, begin, tables)
            yield cls(session, before, in_chunks=in_chunks)
        finally:
            session.close()

    async def rows(self, table: Table) -> AsyncIterator[pa.RecordBatch]:
        """See `Upstream.rows`."""
        columns = Columns.parse(table.source.record.table_info)
        changed = self._before.changed(columns.id)
        before = self._before.rows(columns.id)
        yield await asyncio.to_thread(_mounted, table, before["key"], before["old_value"])

        batches = self._snapshot_rows(table, columns)
        while (rows := await asyncio.to_thread(next, batches, None)) is not None:
            yield await asyncio.to_thread(_unchanged, table, columns, rows, changed)

    def _snapshot_rows(self, table: Table, columns: Columns) -> Iterator[pa.Array]:
        name = (
            f"{quote_identifier(table.source.record.schema_name)}.{quote_identifier(columns.name)}"
        )
        query = f"SELECT {', '.join(map(selected, columns.columns))} FROM {name}"  # noqa: S608 - quoted names
        if table.spans is None:
            rows_of = (
                chunked_rows(self._session, table.source)
                if self._in_chunks
                else query_rows(self._session, query)
            )
            yield from rows_of
            return
        # A query for each range: an ALTER of the table waits for the end of one, not of all.
        for span in table.spans.each():
            yield from query_rows(
                self._session, f"{query} WHERE {span.condition(quote_identifier)}"
            )


def begin_snapshot(session: Session) -> None:
    """Begin a snapshot: the session sees its tables as they are now."""
    for statement in _SNAPSHOT:
        session.execute(statement)


def query_rows(session: Session, query: str) -> Iterator[pa.Array]:
    """The rows of a query, each behind its format byte; to be used up.

    The tables' metadata locks are let go at the end: an ALTER of one waits for this read, not for
    the session's end.

    Raises:
        MySqlStatementError, MySqlPrivilegeError: the server refuses, also because a table was
            altered meanwhile.
        MySqlUnavailableError: the connection broke.
    """
    session.execute(_STORED_BYTES)
    # A statement takes the table's metadata lock for the whole transaction. Rolling back to the
    # savepoint lets it go and keeps the snapshot.
    session.execute(f"SAVEPOINT {_SAVEPOINT}")
    statement = Statement(session, query)
    yield from statement.pieces()
    statement.close()
    session.execute(f"ROLLBACK TO SAVEPOINT {_SAVEPOINT}")


def chunked_rows(session: Session, table: SourceTable) -> Iterator[pa.Array]:
    """All rows of a table, as `query_rows` gives them,
    by one query after the other in the order of the key.

    An ALTER of the table waits for one of them, however slowly they are asked for. Raises as
    `query_rows`.
    """
    session.execute(_STORED_BYTES)
    query = chunk_query(session, table)
    part, size, at_end = Range(), ChunkSize(), False
    while not at_end:
        limit, began_s = size.rows, time.monotonic()
        # Rolled back to before the rows are given out, which may take long.
        session.execute(f"SAVEPOINT {_SAVEPOINT}")
        statement = Statement(session, query.sql(after=part.after is not None, until=False))
        rows = statement.rows(query.parameters(part, limit))
        statement.close()
        query.check(statement.types)
        session.execute(f"ROLLBACK TO SAVEPOINT {_SAVEPOINT}")

        size.took(len(rows), rows.nbytes, time.monotonic() - began_s)
        at_end = len(rows) < limit
        if not at_end:
            part = Range(query.cursor(last_row(rows)))
        yield rows


async def _log_beginning(meta: Meta, changefeed: str, ts: int) -> Beginning:
    """The newest saved position at or below the cut, and the decisions about times of the log."""
    saved_positions = [
        SavedPosition.from_json(pair.value) for pair in await meta.get_prefix(prefix(changefeed))
    ]
    usable = [saved_position for saved_position in saved_positions if saved_position.ts <= ts]
    if not usable:
        raise VerifyHistoryError(
            f"changefeed {changefeed} knows no place in the log at or before the cut {ts}"
        )
    saved_position = max(usable, key=lambda saved_position: saved_position.ts)
    time_limits = await TimeLimitsRecord(meta, changefeed).load()
    return Beginning(saved_position, saved_position.ts, time_limits or TimeLimits.accepting())


def _open_snapshot(
    session: Session, options: MySqlOptions, begin: Beginning, tables: Sequence[Table]
) -> BeforeImages:
    """Begin the snapshot and read what the log has changed since the cuts."""
    begin_snapshot(session)
    # The end is looked up after the snapshot is there: every change that the snapshot shows lies
    # before it.
    return read_before_images(session, options, begin, tables, log_end(session))


def _unchanged(
    table: Table, columns: Columns, rows: pa.Array, changed: ChangedKeys
) -> pa.RecordBatch:
    keys = keys_of(columns, rows)
    unchanged = pc.invert(changed.contain_each(keys))
    return _mounted(table, keys.filter(unchanged), rows.filter(unchanged))


def _mounted(table: Table, keys: pa.Array, values: pa.Array) -> pa.RecordBatch:
    return table.mounted(snapshot_rows(keys, values, table.ts))
