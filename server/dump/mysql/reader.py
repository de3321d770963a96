"""What a dump reads and writes at the server: watermarks, plans and chunks. Calls block, each
reader in a thread of its own.

All sessions are with one server: only the server on which a watermark was written is sure to show
everything before it. `ServerThreads` makes these calls for the event loop, each in a thread, and
connects when it is first needed.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import pyarrow as pa

from server.changefeed.table import SourceTable
from server.dump.job import PARALLEL_MAX
from server.dump.mysql import watermarks
from server.dump.mysql.check import Check, ChunkMismatch
from server.dump.mysql.chunk import ChunkQuery, last_row, quote_identifier, split_ranges
from server.dump.mysql.pace import Pick
from server.dump.mysql.statement import Statement
from server.dump.mysql.window import Chunk
from server.dump.progress import ChunkRead, Range
from server.puller.mysql.ddl.tree import TableName
from server.puller.mysql.log.opening import prepared_xids
from server.puller.mysql.session.catalogue import read_columns, shows
from server.puller.mysql.session.connection import QueryThreads, Session, log_in, log_in_to
from server.puller.mysql.session.errors import MySqlUnavailableError
from server.puller.mysql.session.options import MySqlOptions
from sink.mounter import source_columns
from storage.model.errors import InvalidError
from storage.mysql.binary_row import binary_keys
from storage.mysql.buffer import PAD_BYTES, Bytes
from storage.mysql.changes import Plan
from storage.mysql.schema import INTEGERS, Table

SPLIT_ROWS_MIN = 200_000
"""Smaller tables are one range."""
_SESSION = "SET SESSION character_set_results = NULL, sql_mode = 'NO_ENGINE_SUBSTITUTION'"
_UUIDS = (
    "SELECT column_name FROM information_schema.columns"
    " WHERE table_schema = %s AND table_name = %s AND data_type = 'uuid'"
)
_KNOWN_UUID = "^([0-9a-f-]{14}[0-7][0-9a-f-]{4}[89ab][0-9a-f-]{16}|0{8}(-0{4}){3}-0{12}|f{8}(-f{4}){3}-f{12})$"
_ROWS = (
    "SELECT table_rows FROM information_schema.tables WHERE table_schema = %s AND table_name = %s"
)


T = TypeVar("T")
_THREADS_MAX: Final = PARALLEL_MAX + 1


@dataclass(frozen=True, slots=True)
class ReadChunk:
    """A chunk, with the cost of reading it."""

    chunk: Chunk
    bytes: int
    seconds: float


class Server:
    """The sessions of a dump: one for watermarks and look-ups, and one for each reader."""

    def __init__(self, changefeed: str, options: MySqlOptions) -> None:
        """Log in; raises as `log_in`, and as `watermarks.prepare`."""
        self._changefeed = changefeed
        self._options = options
        self._session = log_in(options)
        self._asking = threading.Lock()
        """Held while the first session is used, since several readers may use it."""
        self._idle: list[ChunkReader] = []
        self._open: list[Session] = [self._session]
        try:
            watermarks.prepare(self._session)
        except BaseException:
            self._session.close()
            raise

    def write(self, unique_identifier: str, kind: int) -> None:
        """Write a watermark; see `watermarks.write`."""
        with self._asking:
            watermarks.write(self._session, self._changefeed, unique_identifier, kind)

    def xa_prepared(self) -> frozenset[str]:
        """See `prepared_xids`."""
        with self._asking:
            return prepared_xids(self._session)

    def plan(
        self, table: SourceTable, where: str, parts: int
    ) -> tuple[ChunkQuery, tuple[Range, ...], int]:
        """Return how to read a table, its ranges, and an estimate of its rows."""
        name = (table.record.schema_name, table.record.table_name)
        query = self.query(table, where)
        answer = self._ask(_ROWS, *name)
        rows = int(answer[0][0] or 0) if answer else 0
        if where:
            rows = self._matching(query, rows)

        # Only integer keys are split: only the server knows the order of other keys, and we cannot
        # compute values between two of them.
        key = [query.table.columns[place] for place in query.table.key_places]
        if rows < SPLIT_ROWS_MIN or len(key) != 1 or key[0].type not in INTEGERS:
            return query, (Range(),), rows

        column = quote_identifier(key[0].name)
        ends = f"SELECT MIN({column}), MAX({column}) FROM {quote_identifier(name[0])}.{quote_identifier(name[1])}"  # noqa: S608 - quoted names
        least, most = (each or 0 for each in self._ask(ends)[0])
        if not (isinstance(least, int) and isinstance(most, int)):
            raise query.differs(key[0].name)
        ranges = split_ranges(key[0], least, most, parts)
        return query, ranges, rows

    def query(self, table: SourceTable, where: str) -> ChunkQuery:
        """See `chunk_query`."""
        with self._asking:
            return chunk_query(self._session, table, where)

    def _matching(self, query: ChunkQuery, rows: int) -> int:
        """The optimizer's estimate of how many rows meet the condition; all rows, if the server
        refuses the condition (the first chunk then reports that).
        """
        with self._asking, suppress(InvalidError):
            estimate = self._session.named(
                f"{self._session.flavor.explain} SELECT 1 {query.of(after=False, until=False)}"
            )[0]
            return int(float(estimate["rows"] or 0) * float(estimate.get("filtered") or 100) / 100)
        return rows

    def _ask(self, query: str, *values: str) -> list[tuple[Any, ...]]:
        with self._asking:
            return self._session.execute(query, values or None)

    def reader(self) -> "ChunkReader":
        """A reader that is not in use; give it back by `done`.

        Raises:
            MySqlUnavailableError: the server is gone, or lets nobody in any more, which is no fault
                of a table.
        """
        if self._idle:
            return self._idle.pop()
        # At the first session's address: another server of the source may not have the watermark
        # yet, and its chunks would miss changes.
        try:
            session = log_in_to(self._session.address, self._options)
        except InvalidError as err:
            raise MySqlUnavailableError(f"no further session: {err}") from err
        self._open.append(session)
        session.execute(_SESSION)
        return ChunkReader(session)

    def done(self, reader: "ChunkReader") -> None:
        """Give a reader back."""
        self._idle.append(reader)

    def close(self) -> None:
        """End all sessions; calls under way fail."""
        for session in self._open:
            if session.connection.open:  # else it has broken already
                session.raw_socket().close()


class ChunkReader:
    """Reads chunks in one session, one after the other."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._statements: dict[str, Statement] = {}

    def read(
        self, pick: Pick, version: int, query: ChunkQuery, limit: int, *, verify: bool = False
    ) -> ReadChunk:
        """Read the next rows of a range, `limit` at most, of a table in this `version`; to `verify`
        compare them with sums of the server, too.

        Raises:
            MySqlStatementError, MySqlPrivilegeError: the server refuses.
            TableDiffersError, CorruptError: the table has other columns now.
            MySqlUnavailableError: the connection broke.
        """
        began, part = time.monotonic(), pick.part
        sql = query.sql(after=part.after is not None, until=part.until is not None)
        statement = self._statement(sql)
        rows = statement.rows(query.parameters(part, limit))
        query.check(statement.types)
        # Fewer rows than the limit mean that the range has ended.
        count = len(rows)
        last = query.cursor(last_row(rows)) if count else None
        read = ChunkRead(pick.place, pick.epoch, last, count < limit, count, rows.nbytes, verify)
        keys = keys_of(query.table, rows)
        mismatch = (
            self._mismatch(query, Range(part.after, part.until if read.ends else last), keys, rows)
            if verify
            else None
        )
        return ReadChunk(
            Chunk(pick.table_id, version, read, keys, rows, mismatch),
            rows.nbytes,
            time.monotonic() - began,
        )

    def _mismatch(
        self, query: ChunkQuery, part: Range, keys: pa.Array, rows: pa.Array
    ) -> ChunkMismatch | None:
        """The rows of a range that differ from the server's present ones."""
        check, bounds = Check(query), query.bounds(part)
        ours = check.ours(keys, rows)
        total_row = self._statement(check.total_sql(part)).rows(bounds)
        total = check.total(total_row)
        if total == ours.total:
            return None
        # Row by row only where the sums differ, as this sends the key of each row.
        digest_rows = self._statement(check.rows_sql(part)).rows(bounds)
        differing = ours.differing(check.theirs(digest_rows))
        return ChunkMismatch(part, differing, ours.total, total) if len(differing) else None

    def _statement(self, sql: str) -> Statement:
        # Prepared statements of all sessions count towards the server's max_prepared_stmt_count.
        if sql not in self._statements:
            self._forget_many()
            self._statements[sql] = Statement(self._session, sql)
        return self._statements[sql]

    def _forget_many(self) -> None:
        while len(self._statements) >= 64:
            self._statements.pop(next(iter(self._statements))).close()


def chunk_query(session: Session, table: SourceTable, where: str = "") -> ChunkQuery:
    """Return the query for a table as the server has it now.

    Raises:
        TableDiffersError: a column there is another one than in `table`.
    """
    name = (table.record.schema_name, table.record.table_name)
    there = read_columns(session, [name]).get(name, [])
    now = {name: column for name, column, _ in there}
    collations = {name: collation for name, _, collation in there if collation}
    whole, taken = Table.parse(table.record.table_info), source_columns(table.mounter)
    left_out = frozenset(column.name for column in whole.columns if column.name not in taken)
    query = ChunkQuery(
        name[0], whole, collations, where, left_out, _misordered(session, name, whole.primary_key)
    )
    for place, column in enumerate(whole.columns):
        if column.name in now:
            current = now[column.name]
            differs = current is None or not shows(current, column)
        else:
            # A hidden column (my_row_id) is not listed, and a dropped one makes the SELECT fail, so
            # nothing is lost. But a text key needs the collation, which is not known then.
            differs = column.is_text and place in whole.key_places
        if differs:
            raise query.differs(column.name)
    return query


def _misordered(session: Session, name: TableName, key: Sequence[str]) -> frozenset[str]:
    """The UUID columns of a key that hold values of no known version and variant.

    MariaDB orders such values in an index otherwise than it compares them, so `key > last ORDER BY
    key` passes over rows (seen on 10.11: 1043 of 2000).
    """
    table = ".".join(map(quote_identifier, name))
    uuids = [column for (column,) in session.execute(_UUIDS, name) if column in key]
    return frozenset(
        column
        for column in uuids
        if session.execute(
            f"SELECT 1 FROM {table} WHERE {quote_identifier(column)} NOT RLIKE %s LIMIT 1",  # noqa: S608 - quoted names
            [_KNOWN_UUID],
        )
    )


def keys_of(table: Table, rows: pa.Array) -> pa.Array:
    """The canonical keys of rows behind their format byte."""
    if not len(rows):
        return pa.array([], pa.binary())
    _, offsets, content = rows.buffers()
    begin = np.frombuffer(offsets, np.int32)[rows.offset : rows.offset + len(rows)].astype(np.int64)
    data = Bytes(np.concatenate([np.frombuffer(content, np.uint8), np.zeros(PAD_BYTES, np.uint8)]))
    return binary_keys(data, begin + 1, table.columns, Plan.of(table).key)


class ServerThreads:
    """Calls the server of one dump from the event loop."""

    def __init__(self, changefeed: str, options: MySqlOptions) -> None:
        self._changefeed = changefeed
        self._options = options
        self._server: Server | None = None
        self._threads = QueryThreads(_THREADS_MAX, f"dump {changefeed}")

    async def connected(self) -> Server:
        """The server; raises as `Server` does if it must log in."""
        if self._server is None:
            self._server = await self.call(Server, self._changefeed, self._options)
        return self._server

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a call in a thread; returns and raises what the call does."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    def hang_up(self) -> None:
        """End the sessions, in which calls under way fail; the next `connected` has new ones."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def close(self) -> None:
        """End all sessions and threads."""
        self.hang_up()
