"""Makes of events committed transactions, each with its commit_ts, and the statements between them.

Invariants:
1. Rows are given when their transaction has ended (XID, COMMIT), in the order of the log; those of
   an XA transaction when its `XA COMMIT` comes, with the commit_ts of that. A transaction that
   never ends is never given.
2. An exception to 1: of a transaction larger than `HELD_BYTES` the rows are given as they come,
   since its commit_ts is known from its first event. If the server dies within it, or ROLLBACK TO
   SAVEPOINT undoes rows that were given, TornTransactionError says so, and the next attempt, which
   knows (`torn`), leaves it, or those rows, out. If only the connection breaks within it,
   TransactionInterruptedError says so, and the next attempt reads it as if it were new: another
   server may not have it, and its parts would end at other places.
3. Every transaction moves the position, whatever is in it.
4. What is held of transactions that have not ended is in memory up to the changefeed's share
   (`OpenTransactions`), on disk beyond it; the rows of a large one come from there part by part.
"""

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from server.puller.mysql.ddl.statement import Kind, Statement, dialect_of, of_session, statement_of
from server.puller.mysql.ddl.tokens import Dialect
from server.puller.mysql.log.position import LogPosition, TimeLimits, Times
from server.puller.mysql.session.errors import (
    LogDamagedError,
    TornTransactionError,
    TransactionInterruptedError,
)
from server.puller.mysql.transaction.commits import (
    GTIDS,
    Commits,
    Runs,
    TransactionBoundaries,
    ends_of_runs,
    gtid_of,
    joined,
    next_position,
    physical_ms_of,
    stretches,
    times_ms,
)
from server.puller.mysql.transaction.open_transaction import (
    OpenTransaction,
    Torn,
    TransactionPartStore,
    UnclearSavepoint,
)
from server.puller.open_transactions import OpenTransactions
from storage.mysql.buffer import Offsets
from storage.mysql.compressed import expanded
from storage.mysql.control import MariaGtid, MariaGtidList, Query, Rotate, XaPrepare
from storage.mysql.event import Events, EventType
from storage.mysql.gtid import MysqlGtidSet

HELD_BYTES: Final = 64 << 20
_RUN_MIN = 16
_NOTHING_TORN: Final[Torn] = {}


@dataclass(frozen=True, slots=True)
class LoggedStatement:
    """A statement of the log that may change tables, or changed rows, or is not understood."""

    commit_ts: int
    query: Query
    statement: Statement
    file: str
    position: int
    """Where the log goes on behind its transaction."""
    dialect: Dialect = field(default_factory=Dialect)
    """The server and session that ran it."""
    behind: int = 0
    """Where the log goes on behind the statement: with the rows of CREATE TABLE … SELECT."""


@dataclass(frozen=True, slots=True)
class UnpreparedXaCommit:
    """An XA transaction was committed that had been prepared before the place where the log began
    to be read.
    """

    commit_ts: int
    xid: str


@dataclass(frozen=True, slots=True)
class XaMoved:
    """An XA transaction waits for its commit from here on (`waits`), or was committed."""

    xid: str
    waits: bool


@dataclass(frozen=True, slots=True)
class LogBegins:
    """Another log file or another server begins: what it said of tables is no longer true."""


@dataclass(frozen=True, slots=True)
class UndecidedTimes:
    """Times of transactions behind `previous_ts`,
    the first of which is later than is accepted without a decision.

    Whoever takes this sets `Transactions.time_limits` to those of the decision before going on.
    """

    previous_ts: int
    times_ms: Times


Item: TypeAlias = (
    Commits
    | LoggedStatement
    | UnpreparedXaCommit
    | XaMoved
    | LogBegins
    | UnclearSavepoint
    | UndecidedTimes
)


class Transactions:
    """Takes the events of one connection; `position` moves with each complete transaction."""

    def __init__(
        self,
        position: LogPosition,
        *,
        torn: Torn = _NOTHING_TORN,
        held_bytes: int = HELD_BYTES,
        time_limits: TimeLimits | None = None,
        shared: OpenTransactions | None = None,
    ) -> None:
        """Without `shared` all that waits is in memory."""
        self.position = position
        self.time_limits = time_limits or TimeLimits.accepting()
        self._dialect = Dialect()
        self._torn = dict(torn)
        self._held_bytes = held_bytes
        self._open: OpenTransaction | None = None
        self._part_store = TransactionPartStore(shared or OpenTransactions())
        self._prepared: dict[str, OpenTransaction] = {}
        self._runs = Runs()
        self._rows_of_buffer: Offsets | None = None

    @property
    def is_at_rest(self) -> bool:
        """Whether a reader that begins at `position` misses nothing:
        no prepared XA transaction waits for its commit.
        """
        return not self._prepared

    def take(self, arrived: Events) -> Iterator[Item]:
        """Yield what these events commit; the iterator must be used up before the next call.

        Raises:
            CorruptError, EventUnsupportedError: the log, or what is on disk, cannot be read.
            OpenTransactionsClosedError: `end` was called while the disk took nothing.
            TornTransactionError, XaTooLargeError: see there.
        """
        for events in expanded(arrived):
            yield from self._take(events)

    def _take(self, events: Events) -> Iterator[Item]:
        """Take events that are not compressed."""
        events.check_known()
        self._runs.begin(events)
        self._rows_of_buffer = None
        boundaries = TransactionBoundaries.of(events)
        for first, last in stretches(boundaries.plain):
            at = first
            while at < last:
                if last - at >= _RUN_MIN and boundaries.plain[at] and self._open is None:
                    yield from self._many(events, boundaries.at[at:last], boundaries.kinds[at:last])
                    break
                yield from self._one(events, int(boundaries.at[at]), int(boundaries.kinds[at]))
                at += 1
        yield from self._rest(events)

    def reconnected(self, *, fold_case: bool, same_server: bool = False) -> None:
        """The log is sent from `position` on, maybe again; prepared XA transactions go on waiting.

        `fold_case`: the server keeps names of tables in lower case. `same_server`: `position` is a
        place of its log.

        Raises:
            TransactionInterruptedError: rows of the open transaction were given.
        """
        if self._open is not None and self._open.given:
            raise TransactionInterruptedError(
                f"the connection broke within the large transaction {self._open.gtid}; the log is "
                "read again from the checkpoint"
            )
        self._forget_open()
        if not same_server:
            self.position.forget_place()
        self._dialect = replace(self._dialect, fold_case=fold_case)

    def end(self) -> None:
        """End all waits for the disk; may be called from any thread."""
        self._part_store.end()

    def _many(
        self, events: Events, boundaries: npt.NDArray[np.int64], kinds: npt.NDArray[np.uint8]
    ) -> Iterator[Item]:
        """A stretch of GTIDs and XIDs, in turn, all at once;
        a last GTID without XID begins a transaction.
        """
        gtids, xids = boundaries[0::2], boundaries[1::2]
        if bool((kinds[1::2] != EventType.XID).any()) or bool((kinds[0::2] == EventType.XID).any()):
            raise LogDamagedError(
                "the log has a transaction without an end, or an end without a transaction"
            )
        complete = len(xids)
        mariadb = bool(kinds[0] == EventType.MARIADB_GTID)
        ts = yield from self._commit_timestamps(times_ms(events, gtids[:complete], mariadb=mariadb))
        self._runs.add(gtids[:complete], xids + 1, ts)
        for last, first_gno in ends_of_runs(events, gtids[:complete], mariadb=mariadb):
            place = next_position(events, int(xids[last]))
            self.position.passed(gtid_of(events, int(gtids[last])), int(ts[last]), place, first_gno)
        if len(gtids) > complete:
            yield from self._begin(events, int(gtids[-1]))

    def _commit_timestamps(self, times: Times) -> Generator[Item, None, Times]:
        """The commit_ts of the transactions that come next, by their times."""
        ts, undecided = self.time_limits.commit_timestamps(self.position.ts, times)
        if undecided is not None:
            # Whoever decides may lose the server, and go on from `position`: what is before it
            # comes first.
            yield from self._runs.flush()
            yield UndecidedTimes(
                int(ts[undecided - 1]) if undecided else self.position.ts, times[undecided:]
            )
            # Whoever took the item has set time limits that decide these times: compute it again.
            ts, undecided = self.time_limits.commit_timestamps(self.position.ts, times)
            assert undecided is None, "the time limits that were set decide all of them"
        return ts

    def _one(self, events: Events, event_number: int, kind: int) -> Iterator[Item]:
        if kind in GTIDS:
            if self._open is not None:
                self._tear()
            yield from self._begin(events, event_number)
        elif kind == EventType.XID:
            yield from self._end(events, event_number)
        elif kind in (EventType.QUERY, EventType.EXECUTE_LOAD_QUERY):
            yield from self._query(events, event_number, loads=kind == EventType.EXECUTE_LOAD_QUERY)
        elif kind == EventType.XA_PREPARE:
            prepare = XaPrepare.parse(events.body(event_number))
            if prepare.one_phase:
                yield from self._end(events, event_number)
            else:
                yield from self._prepare(events, event_number, _xid(prepare.xid))
        elif kind == EventType.FORMAT_DESCRIPTION:
            # A server never divides a transaction between two files: one that is open at the
            # beginning of a file was cut off by a crash.
            self._tear()
            self.position.file_begins(int(events.timestamps[event_number]))
            self._dialect = dialect_of(events.body(event_number), self._dialect)
            yield from self._runs.flush()
            yield LogBegins()
        elif kind == EventType.ROTATE:
            rotate = Rotate.parse(events.body(event_number))
            # An artificial ROTATE, which the server makes for each reader, has no place in the log.
            logged = next_position(events, event_number) > 0
            self.position.rotated(rotate.file, rotate.position, logged=logged)
        elif kind == EventType.MARIADB_GTID_LIST:
            listed = MariaGtidList.parse(events.body(event_number)).gtids
            self.position.begin_with(
                ",".join(f"{domain}-{server}-{seq}" for domain, server, seq in listed)
            )
        elif kind == EventType.PREVIOUS_GTIDS:
            self.position.begin_with(str(MysqlGtidSet.decode(events.body(event_number))))
        else:
            raise LogDamagedError(
                "the server says that events are missing in its log (INCIDENT): dump the tables "
                "anew"
            )

    def _begin(self, events: Events, event_number: int) -> Iterator[Item]:
        gtid = gtid_of(events, event_number)
        (ts,) = (
            yield from self._commit_timestamps(
                np.array([physical_ms_of(gtid, events, event_number)])
            )
        ).tolist()
        # MySQL's GTID does not say whether a BEGIN follows; if one does, it clears `single`.
        single = gtid.is_standalone if isinstance(gtid, MariaGtid) else True
        place = (self.position.read_file, next_position(events, event_number))
        prepared = isinstance(gtid, MariaGtid) and gtid.is_prepared
        left_out = self._torn.get((str(gtid), *place), ())
        self._open = OpenTransaction(
            ts,
            gtid,
            place,
            self._part_store.begin(),
            single,
            prepared,
            torn=left_out is None,
            left_out=left_out or (),
        )
        self._runs.open(event_number)

    def _query(self, events: Events, event_number: int, *, loads: bool) -> Iterator[Item]:
        query = Query.parse(events.body(event_number), loads=loads)
        statement = statement_of(query, self._dialect)
        if self._open is None:
            raise LogDamagedError(
                "the log has a statement outside of a transaction; MySQL before 5.7 is not read"
            )
        if isinstance(self._open.gtid, MariaGtid) and self._open.gtid.changes_nothing:
            yield from self._end(events, event_number)
            return
        kind, xid = statement.kind, statement.xid
        if kind in (Kind.BEGIN, Kind.XA_START):
            self._open.single = False
            self._open.prepared |= kind is Kind.XA_START
        elif kind is Kind.COMMIT:
            yield from self._end(events, event_number)
        elif kind is Kind.ROLLBACK:
            yield from self._end(events, event_number, rows=False)
        elif kind is Kind.XA_COMMIT:
            yield from self._commit_prepared(events, event_number, xid)
        elif kind is Kind.XA_ROLLBACK:
            self._forget_prepared(xid)
            yield from self._end(events, event_number, rows=False)
        elif kind in (Kind.SAVEPOINT, Kind.ROLLBACK_TO):
            pass_savepoint = self._set_savepoint if kind is Kind.SAVEPOINT else self._roll_back_to
            yield from pass_savepoint(events, event_number, statement.savepoint)
        else:
            if kind in (Kind.DDL, Kind.ROWS, Kind.UNKNOWN):
                behind = next_position(events, event_number)
                self._open.statements.append((query, statement, behind))
            # Without BEGIN the statement is the whole transaction: no COMMIT follows.
            if self._open.single:
                yield from self._end(events, event_number)

    def _set_savepoint(self, events: Events, event_number: int, name: str) -> Iterator[Item]:
        """Its rows stay in the buffer, so that many transactions with savepoints are decoded
        together.
        """
        opened = self._open
        assert opened is not None, "statements are in transactions"
        if opened.left_out:
            self._hold(opened, events, event_number)
        if self._rows_of_buffer is None:
            self._rows_of_buffer = events.rows
        first, last = np.searchsorted(self._rows_of_buffer, [self._runs.close(), event_number])
        opened.set_savepoint(name, int(last - first))
        yield from ()

    def _roll_back_to(self, events: Events, event_number: int, name: str) -> Iterator[Item]:
        opened = self._open
        assert opened is not None, "statements are in transactions"
        self._hold(opened, events, event_number)
        savepoint = opened.savepoints.get(name)
        # Whoever is told of an unclear one asks the server, and goes on from `position` if that is
        # gone: what is before it comes first.
        if savepoint is None:
            reason = "the log does not say surely where it was set"
            yield from self._runs.flush()
            yield UnclearSavepoint(opened.ts, name, opened.tables(), reason)
            return
        if savepoint.rows_if_outer < savepoint.rows:
            reason = "its name was set more than once, and a function or trigger may have set it"
            yield from self._runs.flush()
            yield UnclearSavepoint(opened.ts, name, opened.tables(), reason, nests=True)
        opened.savepoints.drop_behind(name)
        if opened.undoes_rows(savepoint):
            opened.roll_back_to(savepoint)

    def _hold(self, opened: OpenTransaction, events: Events, event_number: int) -> None:
        """Keep the open transaction's events up to this one;
        those behind it go on in the buffer.
        """
        opened.hold(events[self._runs.close() : event_number + 1])
        self._runs.open(event_number + 1)

    def _end(self, events: Events, event_number: int, *, rows: bool = True) -> Iterator[Item]:
        """End the open transaction with this event; `rows` False: drop its rows."""
        opened = self._open
        if opened is None:
            raise LogDamagedError("the log has an end without a transaction")
        self._open = None
        begin = self._runs.close()
        if opened.given and not rows:
            raise TornTransactionError(str(opened.gtid), opened.place)
        if opened.undone:
            raise TornTransactionError(str(opened.gtid), opened.place, opened.rows_left_out())
        self.position.passed(opened.gtid, opened.ts, next_position(events, event_number))
        if opened.statements:
            yield from self._runs.flush()
            for query, statement, place_behind in opened.statements:
                place = self.position.file, self.position.position
                # What is compressed as one event has no places inside. Nor has a transaction of
                # MariaDB 11.8, whose statement comes first: the log goes on behind its begin.
                behind = place_behind or (opened.place[1] if self._dialect.mariadb else 0)
                inside = opened.place[1] <= behind <= self.position.position
                yield LoggedStatement(
                    opened.ts - 1,
                    query,
                    statement,
                    *place,
                    of_session(self._dialect, query),
                    behind if inside else self.position.position,
                )
        if not rows or opened.torn:
            opened.parts.clear()
        elif opened.parts:
            yield from self._runs.flush()
            if opened.parts.size > self._held_bytes:
                yield from opened.give()
            whole = joined([*opened.parts.take(), events[begin : event_number + 1]])
            yield Commits(whole, np.full(len(whole), opened.ts), np.array([len(whole)]))
        else:
            self._runs.add(np.array([begin]), np.array([event_number + 1]), np.array([opened.ts]))

    def _prepare(self, events: Events, event_number: int, xid: str) -> Iterator[Item]:
        opened = self._open
        if opened is None:
            raise LogDamagedError("the log prepares an XA transaction that has not begun")
        self._open = None
        opened.hold(events[self._runs.close() : event_number + 1])
        self._forget_prepared(xid)  # of one that is told again, the last counts
        self._prepared[xid] = opened
        self.position.passed(opened.gtid, opened.ts, next_position(events, event_number))
        yield from self._runs.flush()
        yield XaMoved(xid, waits=True)

    def _commit_prepared(self, events: Events, event_number: int, xid: str) -> Iterator[Item]:
        opened, prepared = self._open, self._prepared.pop(xid, None)
        assert opened is not None, "statements are in transactions"
        if prepared is None:
            # The tables are resolved up to here: what was committed before comes first.
            yield from self._runs.flush()
            yield UnpreparedXaCommit(opened.ts, xid)
        else:
            opened.complete(prepared)
        yield from self._end(events, event_number)
        yield from self._runs.flush()
        yield XaMoved(xid, waits=False)

    def _rest(self, events: Events) -> Iterator[Item]:
        """Keep the open transaction's events at the end of a buffer; give them if it is large."""
        yield from self._runs.flush()
        opened = self._open
        if opened is not None:
            opened.hold(events[self._runs.close() :])
            self._runs.open(0)
            if opened.parts.size > self._held_bytes and not opened.prepared:
                yield from opened.give()
        self._part_store.spill_if_short()

    def _tear(self) -> None:
        """Drop the open transaction, which has no end: the server died in it."""
        opened = self._open
        if opened is not None:
            self._runs.close()
            if opened.given:
                raise TornTransactionError(str(opened.gtid), opened.place)
        self._forget_open()

    def _forget_open(self) -> None:
        if self._open is not None:
            self._open.parts.clear()
        self._open = None

    def _forget_prepared(self, xid: str) -> None:
        if (prepared := self._prepared.pop(xid, None)) is not None:
            prepared.parts.clear()


def _xid(xid: tuple[bytes, bytes]) -> str:
    return f"{xid[0].hex()},{xid[1].hex()}"
