"""From events to committed transactions, each with its commit_ts, and the statements between them.

Invariants:
1. Rows are given when their transaction has ended (XID, COMMIT), in the order of the log; those of
   an XA transaction when its `XA COMMIT` comes, with the commit_ts of that. A transaction that
   never ends is never given.
2. An exception to 1: of a transaction larger than `HELD_BYTES` the rows are given as they come,
   since its commit_ts is known from its first event. If the server dies within it, or ROLLBACK TO
   SAVEPOINT undoes rows that were given, TornTransactionError says so, and the next attempt, which
   knows (`torn`), leaves it, or those rows, out.
3. Every transaction moves the position, whatever is in it.
4. What is held of transactions that have not ended is in memory up to the changefeed's share
   (`OpenTransactions`), on disk beyond it; the rows of a large one come from there part by part.
"""

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from server.puller.mysql.ddl.statement import Kind, Statement, dialect_of, of_session, statement_of
from server.puller.mysql.ddl.tokens import Dialect
from server.puller.mysql.log.clock import Clock, Times
from server.puller.mysql.log.position import LogPosition
from server.puller.mysql.session.errors import LogDamagedError, TornTransactionError
from server.puller.mysql.transaction.boundary import (
    GTIDS,
    Marks,
    ends_of_runs,
    gtid_of,
    next_position,
    physical_ms_of,
    stretches,
    times_ms,
)
from server.puller.mysql.transaction.commits import Commits, Runs, joined
from server.puller.mysql.transaction.open_transaction import (
    HeldParts,
    OpenTransaction,
    RowRanges,
    UnclearSavepoint,
)
from server.puller.tikv.open_transactions import OpenTransactions
from storage.mysql.buffer import Offsets
from storage.mysql.compressed import expanded
from storage.mysql.control import MariaGtid, MariaGtidList, Query, Rotate, XaPrepare
from storage.mysql.event import Events, EventType
from storage.mysql.gtid import MysqlGtidSet

HELD_BYTES: Final = 64 << 20
_RUN_MIN = 16
_NOTHING_TORN: Final[Mapping[tuple[str, int], RowRanges | None]] = {}


@dataclass(frozen=True, slots=True)
class Stated:
    """A statement of the log that may change tables, or changed rows, or is not understood."""

    commit_ts: int
    query: Query
    statement: Statement
    file: str
    position: int
    """Where the log goes on behind its transaction."""
    dialect: Dialect = field(default_factory=Dialect)
    """The server and session that ran it."""


@dataclass(frozen=True, slots=True)
class Unprepared:
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
class Unjudged:
    """Times of transactions behind `previous_ts`,
    the first of which is later than is believed without a judgement.

    Whoever takes this sets `Transactions.clock` to the clock of the judgement before going on.
    """

    previous_ts: int
    times_ms: Times


Item: TypeAlias = Commits | Stated | Unprepared | XaMoved | LogBegins | UnclearSavepoint | Unjudged


class Transactions:
    """Takes the events of one connection; `position` moves with each complete transaction."""

    def __init__(
        self,
        position: LogPosition,
        *,
        torn: Mapping[tuple[str, int], RowRanges | None] = _NOTHING_TORN,
        held_bytes: int = HELD_BYTES,
        clock: Clock | None = None,
        shared: OpenTransactions | None = None,
    ) -> None:
        """Without `shared` all that waits is in memory."""
        self.position = position
        self.clock = clock or Clock.believing()
        self._dialect = Dialect()
        self._torn = dict(torn)
        self._held_bytes = held_bytes
        self._open: OpenTransaction | None = None
        self._held = HeldParts(shared or OpenTransactions())
        self._prepared: dict[str, OpenTransaction] = {}
        self._runs = Runs()
        self._rows_of_buffer: Offsets | None = None

    @property
    def is_at_rest(self) -> bool:
        """Whether whoever begins at `position` misses nothing:
        no prepared XA transaction waits for its commit.
        """
        return not self._prepared

    def take(self, arrived: Events) -> Iterator[Item]:
        """What is committed by these events; to be used up before the next call.

        Raises:
            CorruptError, EventUnsupportedError: the log, or what is on disk, cannot be read.
            OpenTransactionsClosedError: `end` was called while the disk took nothing.
            TornTransactionError, XaTooLargeError: see there.
        """
        for events in expanded(arrived):
            yield from self._take(events)

    def _take(self, events: Events) -> Iterator[Item]:
        """As `take`, of events that are not compressed."""
        events.check_known()
        self._runs.begin(events)
        self._rows_of_buffer = None
        marks = Marks.of(events)
        for first, last in stretches(marks.plain):
            at = first
            while at < last:
                if last - at >= _RUN_MIN and marks.plain[at] and self._open is None:
                    yield from self._many(events, marks.at[at:last], marks.kinds[at:last])
                    break
                yield from self._one(events, int(marks.at[at]), int(marks.kinds[at]))
                at += 1
        yield from self._rest(events)

    def reconnected(self, *, fold_case: bool) -> None:
        """The log is sent from `position` on, maybe again; prepared XA transactions go on waiting.

        `fold_case`: the server keeps names of tables in lower case.
        """
        self._forget_open()
        self._dialect = replace(self._dialect, fold_case=fold_case)

    def end(self) -> None:
        """Let nobody wait for the disk any more; may be called from any thread."""
        self._held.end()

    def _many(
        self, events: Events, marks: npt.NDArray[np.int64], kinds: npt.NDArray[np.uint8]
    ) -> Iterator[Item]:
        """A stretch of GTIDs and XIDs, in turn, all at once;
        a last GTID without XID begins a transaction.
        """
        gtids, xids = marks[0::2], marks[1::2]
        if bool((kinds[1::2] != EventType.XID).any()) or bool((kinds[0::2] == EventType.XID).any()):
            raise LogDamagedError(
                "the log has a transaction without an end, or an end without a transaction"
            )
        complete = len(xids)
        mariadb = bool(kinds[0] == EventType.MARIADB_GTID)
        ts = yield from self._fold(times_ms(events, gtids[:complete], mariadb=mariadb))
        self._runs.add(gtids[:complete], xids + 1, ts)
        for last, first_gno in ends_of_runs(events, gtids[:complete], mariadb=mariadb):
            place = next_position(events, int(xids[last]))
            self.position.passed(gtid_of(events, int(gtids[last])), int(ts[last]), place, first_gno)
        if len(gtids) > complete:
            yield from self._begin(events, int(gtids[-1]))

    def _fold(self, times: Times) -> Generator[Item, None, Times]:
        """The commit_ts of transactions of these times, which come next."""
        ts, unjudged = self.clock.fold(self.position.ts, times)
        if unjudged is not None:
            yield Unjudged(
                int(ts[unjudged - 1]) if unjudged else self.position.ts, times[unjudged:]
            )
            ts, unjudged = self.clock.fold(self.position.ts, times)
            assert unjudged is None, "the clock that was set judges all of them"
        return ts

    def _one(self, events: Events, mark: int, kind: int) -> Iterator[Item]:
        if kind in GTIDS:
            if self._open is not None:
                self._tear()
            yield from self._begin(events, mark)
        elif kind == EventType.XID:
            yield from self._end(events, mark)
        elif kind in (EventType.QUERY, EventType.EXECUTE_LOAD_QUERY):
            yield from self._query(events, mark, loads=kind == EventType.EXECUTE_LOAD_QUERY)
        elif kind == EventType.XA_PREPARE:
            prepare = XaPrepare.parse(events.body(mark))
            if prepare.one_phase:
                yield from self._end(events, mark)
            else:
                yield from self._prepare(events, mark, _xid(prepare.xid))
        elif kind == EventType.FORMAT_DESCRIPTION:
            self._tear()
            self._dialect = dialect_of(events.body(mark), self._dialect)
            yield from self._runs.flush()
            yield LogBegins()
        elif kind == EventType.ROTATE:
            rotate = Rotate.parse(events.body(mark))
            self.position.moved_to_file(rotate.file, rotate.position)
        elif kind == EventType.MARIADB_GTID_LIST:
            listed = MariaGtidList.parse(events.body(mark)).gtids
            self.position.begin_with(
                ",".join(f"{domain}-{server}-{seq}" for domain, server, seq in listed)
            )
        elif kind == EventType.PREVIOUS_GTIDS:
            self.position.begin_with(str(MysqlGtidSet.decode(events.body(mark))))
        else:
            raise LogDamagedError(
                "the server says that events are missing in its log (INCIDENT): dump the tables "
                "anew"
            )

    def _begin(self, events: Events, mark: int) -> Iterator[Item]:
        gtid = gtid_of(events, mark)
        (ts,) = (yield from self._fold(np.array([physical_ms_of(gtid, events, mark)]))).tolist()
        single = gtid.is_standalone if isinstance(gtid, MariaGtid) else True
        place = (self.position.file, next_position(events, mark))
        prepared = isinstance(gtid, MariaGtid) and gtid.is_prepared
        left_out = self._torn.get(place, ())
        self._open = OpenTransaction(
            ts,
            gtid,
            place,
            self._held.begin(),
            single,
            prepared,
            torn=left_out is None,
            left_out=left_out or (),
        )
        self._runs.open(mark)

    def _query(self, events: Events, mark: int, *, loads: bool) -> Iterator[Item]:
        query = Query.parse(events.body(mark), loads=loads)
        statement = statement_of(query, self._dialect)
        if self._open is None:
            raise LogDamagedError(
                "the log has a statement outside of a transaction; MySQL before 5.7 is not read"
            )
        if isinstance(self._open.gtid, MariaGtid) and self._open.gtid.changes_nothing:
            yield from self._end(events, mark)
            return
        kind, xid = statement.kind, statement.xid
        if kind in (Kind.BEGIN, Kind.XA_START):
            self._open.single = False
            self._open.prepared |= kind is Kind.XA_START
        elif kind is Kind.COMMIT:
            yield from self._end(events, mark)
        elif kind is Kind.ROLLBACK:
            yield from self._end(events, mark, rows=False)
        elif kind is Kind.XA_COMMIT:
            yield from self._commit_prepared(events, mark, xid)
        elif kind is Kind.XA_ROLLBACK:
            self._forget_prepared(xid)
            yield from self._end(events, mark, rows=False)
        elif kind in (Kind.SAVEPOINT, Kind.ROLLBACK_TO):
            pass_savepoint = self._set_savepoint if kind is Kind.SAVEPOINT else self._roll_back_to
            yield from pass_savepoint(events, mark, statement.savepoint)
        else:
            if kind in (Kind.DDL, Kind.ROWS, Kind.UNKNOWN):
                self._open.stated.append((query, statement))
            if self._open.single:
                yield from self._end(events, mark)

    def _set_savepoint(self, events: Events, mark: int, name: str) -> Iterator[Item]:
        """Its rows stay in the buffer, so that many transactions with savepoints are decoded
        together.
        """
        opened = self._open
        assert opened is not None, "statements are in transactions"
        if opened.left_out:
            self._hold(opened, events, mark)
        if self._rows_of_buffer is None:
            self._rows_of_buffer = events.rows
        first, last = np.searchsorted(self._rows_of_buffer, [self._runs.close(), mark])
        opened.set_savepoint(name, int(last - first))
        yield from ()

    def _roll_back_to(self, events: Events, mark: int, name: str) -> Iterator[Item]:
        opened = self._open
        assert opened is not None, "statements are in transactions"
        self._hold(opened, events, mark)
        savepoint = opened.savepoints.get(name)
        if savepoint is None:
            reason = "the log does not say surely where it was set"
            yield UnclearSavepoint(opened.ts, name, opened.tables(), reason)
            return
        if savepoint.rows_if_outer < savepoint.rows:
            reason = "its name was set more than once, and a function or trigger may have set it"
            yield UnclearSavepoint(opened.ts, name, opened.tables(), reason, nests=True)
        opened.savepoints.drop_behind(name)
        if opened.undoes_rows(savepoint):
            opened.roll_back_to(savepoint)

    def _hold(self, opened: OpenTransaction, events: Events, mark: int) -> None:
        """Keep the open transaction's events up to this one;
        those behind it go on in the buffer.
        """
        opened.hold(events[self._runs.close() : mark + 1])
        self._runs.open(mark + 1)

    def _end(self, events: Events, mark: int, *, rows: bool = True) -> Iterator[Item]:
        """The open transaction ends with this event."""
        opened = self._open
        if opened is None:
            raise LogDamagedError("the log has an end without a transaction")
        self._open = None
        begin = self._runs.close()
        if opened.given and not rows:
            raise TornTransactionError(str(opened.gtid), opened.place)
        if opened.undone:
            raise TornTransactionError(str(opened.gtid), opened.place, opened.rows_left_out())
        self.position.passed(opened.gtid, opened.ts, next_position(events, mark))
        if opened.stated:
            yield from self._runs.flush()
            for query, statement in opened.stated:
                place = self.position.file, self.position.position
                yield Stated(
                    opened.ts - 1, query, statement, *place, of_session(self._dialect, query)
                )
        if not rows or opened.torn:
            opened.parts.clear()
        elif opened.parts:
            yield from self._runs.flush()
            if opened.parts.size > self._held_bytes:
                yield from opened.give()
            whole = joined([*opened.parts.take(), events[begin : mark + 1]])
            yield Commits(whole, np.full(len(whole), opened.ts), np.array([len(whole)]))
        else:
            self._runs.add(np.array([begin]), np.array([mark + 1]), np.array([opened.ts]))

    def _prepare(self, events: Events, mark: int, xid: str) -> Iterator[Item]:
        opened = self._open
        if opened is None:
            raise LogDamagedError("the log prepares an XA transaction that has not begun")
        self._open = None
        opened.hold(events[self._runs.close() : mark + 1])
        self._forget_prepared(xid)  # of one that is told again, the last counts
        self._prepared[xid] = opened
        self.position.passed(opened.gtid, opened.ts, next_position(events, mark))
        yield from self._runs.flush()
        yield XaMoved(xid, waits=True)

    def _commit_prepared(self, events: Events, mark: int, xid: str) -> Iterator[Item]:
        opened, prepared = self._open, self._prepared.pop(xid, None)
        assert opened is not None, "statements are in transactions"
        if prepared is None:
            yield Unprepared(opened.ts, xid)
        else:
            opened.complete(prepared)
        yield from self._end(events, mark)
        yield from self._runs.flush()
        yield XaMoved(xid, waits=False)

    def _rest(self, events: Events) -> Iterator[Item]:
        """At the end of a buffer: what is open is kept, or given already if it is large."""
        yield from self._runs.flush()
        opened = self._open
        if opened is not None:
            opened.hold(events[self._runs.close() :])
            self._runs.open(0)
            if opened.parts.size > self._held_bytes and not opened.prepared:
                yield from opened.give()
        self._held.spill_if_short()

    def _tear(self) -> None:
        """A transaction ended without an end: the server died in it."""
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
