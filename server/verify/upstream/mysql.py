"""The rows of a table of a MySQL or MariaDB server as they were at a cut of the lake, while anybody writes.

    … cut … ─── changes, undone ───► log's end ≥ snapshot        rows = snapshot without changed keys + before-images

The server shows no past, but its log has the before-image of every change. One snapshot is opened, then the log is read
from the cut to where it ends after that: whatever the snapshot shows of a later change is in that part. Rows whose key
is in it are taken from their first change there, all others from the snapshot (`before`). So it does not matter
which transactions the snapshot has: no lock, no watermark and no exact position is needed, and the cut can be any whose
log is still there.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

import pyarrow as pa
import pyarrow.compute as pc

from server.changefeed.info import ChangefeedInfo
from server.changefeed.source_uri import SourceUri
from server.dump.mysql.chunk import quoted, selected
from server.dump.mysql.reader import keys_of
from server.puller.mysql.anchors import ClockRecord, prefix
from server.puller.mysql.clock import Clock
from server.puller.mysql.connection import Session, log_in
from server.puller.mysql.log import Beginning
from server.puller.mysql.lookahead import log_end
from server.puller.mysql.options import MySqlOptions
from server.puller.mysql.position import Anchor
from server.verify.catalog import Table
from server.verify.errors import VerifyHistoryError
from server.verify.mysql_rows import begin_snapshot, chunks, pieces
from server.verify.upstream.before import Before, Changed
from server.verify.upstream.mysql_log import read_before
from storage.meta.meta import Meta
from storage.model.event import snapshot_rows
from storage.mysql.schema import Table as Columns


class MySqlUpstream:
    """Implements `server.verify.upstream.upstream.Upstream`."""

    def __init__(self, session: Session, before: Before, *, in_chunks: bool = False) -> None:
        self._session = session
        self._before = before
        self._in_chunks = in_chunks

    @classmethod
    @asynccontextmanager
    async def open(
        cls, meta: Meta, info: ChangefeedInfo, tables: Sequence[Table], *, in_chunks: bool = False
    ) -> AsyncIterator["MySqlUpstream"]:
        """The server for the block, in one snapshot; whole tables are read by one query, or `in_chunks`.

        Raises:
            VerifyHistoryError, VerifyMovedError, VerifyBehindError: the cut cannot be reached from it.
            MySqlLoginError, MySqlUnavailableError, …: it does not let us in, or does not answer.
        """
        options = MySqlOptions.of(SourceUri.parse(info.source_uri))
        begin = await _begin(meta, info.id, min(table.ts for table in tables))
        session = await asyncio.to_thread(log_in, options)
        try:
            before = await asyncio.to_thread(_before_of, session, options, begin, tables)
            yield cls(session, before, in_chunks=in_chunks)
        finally:
            session.close()

    async def rows(self, table: Table) -> AsyncIterator[pa.RecordBatch]:
        """See `Upstream.rows`."""
        columns = Columns.parse(table.source.record.table_info)
        changed = self._before.changed(columns.id)
        was = self._before.rows(columns.id)
        yield await asyncio.to_thread(_mounted, table, was["key"], was["old_value"])
        found = self._found(table, columns)
        while (rows := await asyncio.to_thread(next, found, None)) is not None:
            yield await asyncio.to_thread(_unchanged, table, columns, rows, changed)

    def _found(self, table: Table, columns: Columns) -> Iterator[pa.Array]:
        """What the snapshot shows; each range by a query of its own, for whose end an ALTER of the table waits."""
        name = f"{quoted(table.source.record.schema_name)}.{quoted(columns.name)}"
        query = f"SELECT {', '.join(map(selected, columns.columns))} FROM {name}"  # noqa: S608 - quoted names
        if table.spans is None:
            yield from chunks(self._session, table.source) if self._in_chunks else pieces(self._session, query)
            return
        for span in table.spans.each():
            yield from pieces(self._session, f"{query} WHERE {span.condition(quoted)}")


def _before_of(session: Session, options: MySqlOptions, begin: Beginning, tables: Sequence[Table]) -> Before:
    begin_snapshot(session)
    return read_before(session, options, begin, tables, log_end(session))


def _unchanged(table: Table, columns: Columns, rows: pa.Array, changed: Changed) -> pa.RecordBatch:
    keys = keys_of(columns, rows)
    kept = pc.invert(changed.holds(keys))
    return _mounted(table, keys.filter(kept), rows.filter(kept))


def _mounted(table: Table, keys: pa.Array, values: pa.Array) -> pa.RecordBatch:
    return table.mounted(snapshot_rows(keys, values, table.ts))


async def _begin(meta: Meta, changefeed: str, ts: int) -> Beginning:
    """The newest anchor at or below the cut, and what was decided about times of the log."""
    found = [Anchor.from_json(pair.value) for pair in await meta.get_prefix(prefix(changefeed))]
    usable = [anchor for anchor in found if anchor.ts <= ts]
    if not usable:
        raise VerifyHistoryError(f"changefeed {changefeed} knows no place in the log at or before the cut {ts}")
    anchor = max(usable, key=lambda anchor: anchor.ts)
    clock = await ClockRecord(meta, changefeed).load()
    return Beginning(anchor, anchor.ts, clock or Clock.believing())
