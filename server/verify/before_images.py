"""Before-images: rows at a cut that a MySQL or MariaDB log changed after it. Blocking.

A row that the log does not change between the cut and a later look at the table is at the cut what
it is at the look; one that it does change was at the cut what its first change found. So the two
together are the table at the cut, whoever writes meanwhile. `read_before_images` reads that part of
the log, `BeforeImages` collects what it finds.

Invariant: of a key only the first change is kept, so memory goes with the keys that changed.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from server.puller.mysql.ddl.statement import Kind
from server.puller.mysql.log.opening import Beginning, as_asked
from server.puller.mysql.log.position import LogPosition, SavedPosition
from server.puller.mysql.log.stream import LogPlace, open_stream
from server.puller.mysql.rows import LogRows, TableMapMismatch
from server.puller.mysql.session.catalogue import may_nest_savepoints
from server.puller.mysql.session.connection import Session, log_in_to
from server.puller.mysql.session.errors import TornTransactionError
from server.puller.mysql.session.options import MySqlOptions
from server.puller.mysql.tables import Tables
from server.puller.mysql.transaction.commits import Commits
from server.puller.mysql.transaction.open_transaction import Torn, UnclearSavepoint
from server.puller.mysql.transaction.scanner import Place, is_before
from server.puller.mysql.transaction.transactions import (
    Item,
    LogBegins,
    LoggedStatement,
    Transactions,
    UndecidedTimes,
    UnpreparedXaCommit,
)
from server.puller.open_transactions import OpenTransactions
from server.verify.catalog import Table
from server.verify.errors import VerifyBehindError, VerifyHistoryError, VerifyMovedError
from storage.model.event import RAW_SCHEMA
from storage.model.span import Span

BYTES_MAX: Final = 512 << 20
_COMPACT_BYTES: Final = 32 << 20
_SCHEMA: Final = pa.schema([RAW_SCHEMA.field(name) for name in ("key", "old_value")])
_READ_ONCE: Final = 0
"""The server's id for readers that are not replicas: it evicts nobody."""
_TAKE_S: Final = 10.0


class ChangedKeys:
    """A set of keys that is checked against successive pieces of a table.

    Only what lies between a piece's least and greatest key is hashed: of a table that is read in
    the order of its key that is as much as the piece has, not every key that has changed.
    """

    def __init__(self, keys: pa.Array) -> None:
        self._keys = pc.unique(keys).sort()

    def contain_each(self, keys: pa.Array) -> pa.Array:
        """Return for each key whether it is in the set."""
        if not len(keys):
            return pa.array([], pa.bool_())
        ends = pc.min_max(keys)
        begin = bisect_left(self._keys, ends["min"].as_py(), key=_bytes)
        end = bisect_right(self._keys, ends["max"].as_py(), begin, key=_bytes)
        return pc.is_in(keys, value_set=self._keys[begin:end])


class BeforeImages:
    """Implements `server.puller.source.Rows`: takes the changes above each table's cut,
    in the order of the log.
    """

    def __init__(self, cuts: Mapping[int, int], bytes_max: int = BYTES_MAX) -> None:
        """`cuts` are the tables' ts by id; changes of other tables are passed over."""
        self._cuts = cuts
        self._bytes_max = bytes_max
        self._bytes = 0
        self._compacted_bytes = 0
        self._parts: dict[int, list[pa.RecordBatch]] = {table_id: [] for table_id in cuts}

    @property
    def executor(self) -> Executor:
        """Its own threads."""
        return ThreadPoolExecutor(1)

    @property
    def open_transactions(self) -> OpenTransactions:
        """All in memory: logs have none of them."""
        return OpenTransactions()

    def add(self, span: Span, batch: pa.RecordBatch) -> None:
        """Take changes of RAW_SCHEMA.

        Raises:
            VerifyHistoryError: more rows have changed than fit into memory.
        """
        parts = self._parts.get(span.table_id)
        if parts is None:
            return
        late = pc.greater(batch["commit_ts"], pa.scalar(self._cuts[span.table_id], pa.uint64()))
        part = batch.select(_SCHEMA.names).filter(late)
        if part.num_rows:
            parts.append(part)
            self._bytes += part.nbytes
        # By what has come since the last time: with a fixed limit, a table whose keys alone reach
        # it would be compacted at each batch.
        if self._bytes > self._compacted_bytes + _COMPACT_BYTES:
            self._compact()

    def resolve(self, span: Span, ts: int) -> None:
        """Do nothing: a log is read up to a place, not up to a ts."""

    def changed(self, table_id: int) -> ChangedKeys:
        """The canonical keys that changed after the cut."""
        return ChangedKeys(_joined(self._parts[table_id])["key"].combine_chunks())

    def rows(self, table_id: int) -> pa.RecordBatch:
        """`key` and `old_value` of the rows that were there at the cut, and changed after it."""
        first = _first_changes(_joined(self._parts[table_id]))
        # A key whose first change inserts it was no row at the cut.
        return first.filter(first["old_value"].is_valid())

    def _compact(self) -> None:
        """Drop all but the first change of each key."""
        self._parts = {
            table_id: [_first_changes(_joined(parts))] for table_id, parts in self._parts.items()
        }
        self._bytes = self._compacted_bytes = sum(part.nbytes for (part,) in self._parts.values())
        if self._bytes > self._bytes_max:
            raise VerifyHistoryError(
                f"more than {self._bytes_max >> 20} MiB of rows have changed since the cut: "
                "verify the newest cut, or table by table (--table)"
            )


def read_before_images(
    session: Session, options: MySqlOptions, begin: Beginning, tables: Sequence[Table], end: Place
) -> BeforeImages:
    """Return the state at their table's cut of the rows that the log of the session's server
    changes up to `end`.

    It begins at a saved position of the changefeed, which gives each transaction the commit_ts that
    the lake knows it by.

    Raises:
        VerifyMovedError: a table's columns changed after the cut.
        VerifyBehindError: the log ends before the cut.
        VerifyHistoryError: too much has changed since.
        LogPurgedError, MySqlUnavailableError, …: the log cannot be read.
    """
    torn: Torn = {}
    while True:
        try:
            return _LogReader(tables, begin, torn).read(session, options, begin.saved_position, end)
        except TornTransactionError as err:
            # Rows of a large transaction were taken before the log undid them: read again, without
            # these.
            torn[err.transaction] = err.rows


class _LogReader:
    """Reads the log once."""

    def __init__(self, tables: Sequence[Table], begin: Beginning, torn: Torn) -> None:
        self._from_ts = min(table.ts for table in tables)
        self._to_ts = max(table.ts for table in tables)
        self._before = BeforeImages({table.source.span.table_id: table.ts for table in tables})
        self._tables = Tables([table.source for table in tables])
        self._rows = LogRows(self._tables, self._from_ts, self._before)
        self._transactions = Transactions(
            LogPosition(begin.saved_position), torn=torn, time_limits=begin.time_limits
        )

    def read(
        self, session: Session, options: MySqlOptions, saved_position: SavedPosition, end: Place
    ) -> BeforeImages:
        """Read from the saved position up to `end`; raises as `read_before_images`."""
        self._transactions.reconnected(
            fold_case=int(session.row("SELECT @@lower_case_table_names")[0]) > 0
        )
        self._rows.connected(mariadb=session.flavor.is_mariadb)
        # A connection of its own: the session's holds the snapshot.
        reader = log_in_to(session.address, options)
        reached = as_asked(session, saved_position)
        place = LogPlace(reached.gtids, reached.file, reached.position, reached.gtid_block)
        stream = open_stream(reader, place, options, _READ_ONCE, follow=False)
        try:
            while not stream.ended and is_before(self._place, end):
                for events in stream.take(_TAKE_S):
                    for item in self._transactions.take(events):
                        self._handle(item, session)
        finally:
            stream.close()

        if self._transactions.position.ts < self._to_ts:
            raise VerifyBehindError(
                f"the log of {session.address.host}:{session.address.port} ends before the cut "
                f"{self._to_ts}: it is a replica that is behind; verify again later, or name the "
                "primary first in the source URI"
            )
        return self._before

    @property
    def _place(self) -> Place:
        position = self._transactions.position
        return position.file, position.position

    def _handle(self, item: Item, session: Session) -> None:
        if isinstance(item, LogBegins):
            self._rows.log_begins()
        elif isinstance(item, Commits):
            for ignored in self._rows.add(item):
                self._ignore(ignored)
        elif isinstance(item, UndecidedTimes):
            # The time lies behind all cuts, where only the order of changes counts: any decision
            # will do.
            self._transactions.time_limits = self._transactions.time_limits.decide(
                item.previous_ts, item.times_ms, 0
            ).time_limits
        elif isinstance(item, UnclearSavepoint) and item.commit_ts > self._from_ts:
            self._tables.check_savepoint(item, nested=partial(may_nest_savepoints, session))
        elif isinstance(item, UnpreparedXaCommit) and item.commit_ts > self._from_ts:
            raise _unknown_rows(item)
        elif isinstance(item, LoggedStatement) and item.commit_ts > self._from_ts:
            self._check_statement(item)

    def _ignore(self, rows: TableMapMismatch) -> None:
        """Rows of a table that is not compared; one that is has other columns now."""
        for name in rows.table_maps:
            if name in self._tables.by_name:
                raise _table_moved(".".join(name), rows.commit_ts, "its rows have other columns")
            self._rows.ignored.add(name)

    def _check_statement(self, logged: LoggedStatement) -> None:
        if logged.statement.kind is not Kind.DDL:
            place = f"{logged.file}:{logged.position}"
            self._tables.check(logged.statement, logged.query.sql, place, logged.commit_ts)
            return
        effect = self._tables.effect(logged.statement, lambda *_: False)
        changed = (*effect.touched, *effect.dropped, *effect.truncated, *effect.moved)
        names = {".".join(name) for name in changed}
        if names:
            raise _table_moved(", ".join(sorted(names)), logged.commit_ts, logged.query.sql[:80])


def _unknown_rows(item: UnpreparedXaCommit) -> VerifyHistoryError:
    return VerifyHistoryError(
        f"XA transaction {item.xid} was prepared before the cut's place in the log, so the rows "
        f"that it changed at {item.commit_ts} are not known: verify a cut at or above that"
    )


def _table_moved(name: str, ts: int, change: str) -> VerifyMovedError:
    return VerifyMovedError(
        f"{name} has changed at {ts}, after the cut ({change}): rows of before cannot be read "
        "from it any more; verify again when the lake has a cut above that"
    )


def _bytes(key: pa.Scalar) -> bytes:
    return bytes(key.as_py())


def _joined(parts: list[pa.RecordBatch]) -> pa.Table:
    return pa.Table.from_batches(parts, _SCHEMA)


def _first_changes(changes: pa.Table) -> pa.RecordBatch:
    """The first change of each key, in order."""
    codes = changes["key"].combine_chunks().dictionary_encode().indices
    _, places = np.unique(np.asarray(codes), return_index=True)
    first = changes.take(pa.array(np.sort(places)))
    return pa.RecordBatch.from_arrays(
        [column.combine_chunks() for column in first.columns], schema=_SCHEMA
    )
