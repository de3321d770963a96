"""Reads the part of a MySQL or MariaDB server's log that is behind a cut: what its changes found. Blocking.

It begins at an anchor of the changefeed, which gives each transaction the commit_ts that the lake knows it by.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from server.puller.mysql.catalogue import may_nest_savepoints
from server.puller.mysql.commits import Commits
from server.puller.mysql.connection import Session, log_in_to
from server.puller.mysql.errors import TornTransactionError
from server.puller.mysql.log import Beginning
from server.puller.mysql.lookahead import Place, is_before
from server.puller.mysql.open_transaction import RowRanges, UnclearSavepoint
from server.puller.mysql.options import MySqlOptions
from server.puller.mysql.position import Anchor, LogPosition
from server.puller.mysql.rows import LogRows, Untold
from server.puller.mysql.statement import Kind
from server.puller.mysql.stream import LogPlace, open_stream
from server.puller.mysql.tables import Tables
from server.puller.mysql.transactions import Item, LogBegins, Stated, Transactions, Unjudged, Unprepared
from server.verify.catalog import Table
from server.verify.errors import VerifyBehindError, VerifyHistoryError, VerifyMovedError
from server.verify.upstream.before import Before

_READ_ONCE: Final = 0
"""The server's id for readers that are not replicas: it evicts nobody."""
_TAKE_S: Final = 10.0


def read_before(
    session: Session, options: MySqlOptions, begin: Beginning, tables: Sequence[Table], end: Place
) -> Before:
    """What rows were at their table's cut, of those that the log of the session's server changes up to `end`.

    Raises:
        VerifyMovedError: a table's columns changed after the cut.
        VerifyBehindError: the log ends before the cut.
        VerifyHistoryError: too much has changed since.
        LogPurgedError, MySqlUnavailableError, …: the log cannot be read.
    """
    torn: dict[Place, RowRanges | None] = {}
    while True:
        try:
            return _Reading(tables, begin, torn).read(session, options, begin.anchor, end)
        except TornTransactionError as err:
            torn[err.place] = err.rows


class _Reading:
    """Of the log, once."""

    def __init__(self, tables: Sequence[Table], begin: Beginning, torn: Mapping[Place, RowRanges | None]) -> None:
        self._from_ts = min(table.ts for table in tables)
        self._to_ts = max(table.ts for table in tables)
        self._before = Before({table.source.span.table_id: table.ts for table in tables})
        self._tables = Tables([table.source for table in tables])
        self._rows = LogRows(self._tables, self._from_ts, self._before)
        self._transactions = Transactions(LogPosition(begin.anchor), torn=torn, clock=begin.clock)

    def read(self, session: Session, options: MySqlOptions, anchor: Anchor, end: Place) -> Before:
        self._transactions.reconnected(fold_case=int(session.row("SELECT @@lower_case_table_names")[0]) > 0)
        self._rows.connected(mariadb=session.flavor.is_mariadb)
        reader = log_in_to(session.address, options)
        try:
            place = LogPlace(anchor.gtids, anchor.file, anchor.position, anchor.gtid_block)
            stream = open_stream(reader, place, options, _READ_ONCE, follow=False)
        except BaseException:
            reader.close()
            raise
        try:
            while not stream.ended and is_before(self._place, end):
                for events in stream.take(_TAKE_S):
                    for item in self._transactions.take(events):
                        self._pass(item, session)
        finally:
            stream.close()
        if self._transactions.position.ts < self._to_ts:
            raise VerifyBehindError(
                f"the log of {session.address.host}:{session.address.port} ends before the cut {self._to_ts}: it is a "
                "replica that is behind; verify again later, or name the primary first in the source URI"
            )
        return self._before

    @property
    def _place(self) -> Place:
        position = self._transactions.position
        return position.file, position.position

    def _pass(self, item: Item, session: Session) -> None:
        if isinstance(item, LogBegins):
            self._rows.log_begins()
        elif isinstance(item, Commits):
            for untold in self._rows.add(item):
                self._ignore(untold)
        elif isinstance(item, Unjudged):  # behind all cuts, where only the order counts
            self._transactions.clock = self._transactions.clock.judge(item.previous_ts, item.times_ms, 0).clock
        elif isinstance(item, UnclearSavepoint) and item.commit_ts > self._from_ts:
            self._tables.check_savepoint(item, nested=partial(may_nest_savepoints, session))
        elif isinstance(item, Unprepared) and item.commit_ts > self._from_ts:
            raise _unknown(item)
        elif isinstance(item, Stated) and item.commit_ts > self._from_ts:
            self._check(item)

    def _ignore(self, untold: Untold) -> None:
        """Rows of a table that is not compared; one that is has other columns now."""
        if untold.name in self._tables.by_name:
            raise _moved(".".join(untold.name), untold.commit_ts, "its rows have other columns")
        self._rows.ignored.add(untold.name)

    def _check(self, stated: Stated) -> None:
        if stated.statement.kind is not Kind.DDL:
            at = f"{stated.file}:{stated.position}"
            self._tables.check(stated.statement, stated.query.sql, at, stated.commit_ts)
            return
        effect = self._tables.effect(stated.statement, lambda *_: False)
        names = {".".join(name) for name in (*effect.touched, *effect.dropped, *effect.truncated)}
        if names:
            raise _moved(", ".join(sorted(names)), stated.commit_ts, stated.query.sql[:80])


def _unknown(item: Unprepared) -> VerifyHistoryError:
    return VerifyHistoryError(
        f"XA transaction {item.xid} was prepared before the cut's place in the log, so the rows that it changed at "
        f"{item.commit_ts} are not known: verify a cut at or above that"
    )


def _moved(name: str, ts: int, what: str) -> VerifyMovedError:
    return VerifyMovedError(
        f"{name} has changed at {ts}, after the cut ({what}): rows of before cannot be read from it any more; verify "
        "again when the lake has a cut above that"
    )
