"""From events to committed transactions, each with its commit_ts, and the statements between them. Pure.

Invariants:
1. Rows are given when their transaction has ended (XID, COMMIT), in the order of the log; those of an XA transaction
   when its `XA COMMIT` comes, with the commit_ts of that. A transaction that never ends is never given.
2. An exception to 1: of a transaction larger than `HELD_BYTES` the rows are given as they come, since its commit_ts is
   known from its first event. If the server dies within it, TornTransactionError says so, and the next attempt, which
   knows (`torn`), leaves it out.
3. Every transaction moves the position, whatever is in it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from server.puller.mysql.commits import Commits, Runs, joined, size_of
from server.puller.mysql.ddl import read_statement
from server.puller.mysql.errors import LogDamagedError, TornTransactionError
from server.puller.mysql.marks import (
    GTIDS,
    Gtid,
    Marks,
    ends_of_runs,
    gtid_of,
    next_position,
    physical_ms_of,
    stretches,
    times_ms,
)
from server.puller.mysql.position import LogPosition, fold
from server.puller.mysql.prepared import Prepared
from server.puller.mysql.statement import Kind, Statement
from storage.mysql.compressed import expand
from storage.mysql.control import MariaGtid, MariaGtidList, Query, Rotate, XaPrepare
from storage.mysql.event import Events, EventType
from storage.mysql.gtid import MysqlGtidSet

HELD_BYTES: Final = 64 << 20
_RUN_MIN = 16


@dataclass(frozen=True, slots=True)
class Stated:
    """A statement of the log that may change tables, or changed rows, or is not understood."""

    commit_ts: int
    query: Query
    statement: Statement
    file: str
    position: int
    """Where the log goes on behind its transaction."""


@dataclass(frozen=True, slots=True)
class Unprepared:
    """An XA transaction was committed that had been prepared before the place where the log began to be read."""

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


Item: TypeAlias = Commits | Stated | Unprepared | XaMoved | LogBegins


@dataclass(slots=True)
class _Open:
    """A transaction that has begun."""

    ts: int
    gtid: Gtid | None
    place: tuple[str, int]
    """The log's file, and the offset behind its first event."""
    single: bool
    """Its first statement ends it."""
    parts: list[Events] = field(default_factory=list)
    size: int = 0
    stated: list[tuple[Query, Statement]] = field(default_factory=list)
    prepared: bool = False
    """It is of two phases: its rows wait for `XA COMMIT`."""
    given: int = 0
    """How many parts of it were given before its end."""


class Transactions:
    """Takes the events of one connection; `position` moves with each complete transaction."""

    def __init__(
        self,
        position: LogPosition,
        *,
        torn: frozenset[tuple[str, int]] = frozenset(),
        held_bytes: int = HELD_BYTES,
    ) -> None:
        self.position = position
        self._fold_case = False
        self._torn = torn
        self._held_bytes = held_bytes
        self._open: _Open | None = None
        self._prepared = Prepared()
        self._runs = Runs()

    @property
    def is_at_rest(self) -> bool:
        """Whether whoever begins at `position` misses nothing: no prepared XA transaction waits for its commit."""
        return not self._prepared

    def take(self, arrived: Events) -> Iterator[Item]:
        """What is committed by these events; to be used up before the next call.

        Raises:
            CorruptError, EventUnsupportedError: the log cannot be read.
            TornTransactionError, XaTooLargeError: see there.
        """
        events = expand(arrived)
        self._runs.begin(events)
        marks = Marks.of(events)
        for first, last in stretches(marks.plain):
            at = first
            while at < last:
                if last - at >= _RUN_MIN and marks.plain[at] and self._open is None:
                    self._many(events, marks.at[at:last], marks.kinds[at:last])
                    break
                yield from self._one(events, int(marks.at[at]), int(marks.kinds[at]))
                at += 1
        yield from self._rest(events)

    def reconnected(self, *, fold_case: bool) -> None:
        """The log is sent from `position` on, maybe again; prepared XA transactions go on waiting.

        `fold_case`: the server keeps names of tables in lower case.
        """
        self._open = None
        self._fold_case = fold_case

    def _many(self, events: Events, marks: npt.NDArray[np.int64], kinds: npt.NDArray[np.uint8]) -> None:
        """A stretch of GTIDs and XIDs, in turn, all at once; a last GTID without XID begins a transaction."""
        gtids, xids = marks[0::2], marks[1::2]
        if bool((kinds[1::2] != EventType.XID).any()) or bool((kinds[0::2] == EventType.XID).any()):
            raise LogDamagedError("the log has a transaction without an end, or an end without a transaction")
        complete = len(xids)
        mariadb = bool(kinds[0] == EventType.MARIADB_GTID)
        ts = fold(self.position.ts, times_ms(events, gtids[:complete], mariadb=mariadb))
        self._runs.add(gtids[:complete], xids + 1, ts)
        for last, first_gno in ends_of_runs(events, gtids[:complete], mariadb=mariadb):
            place = next_position(events, int(xids[last]))
            self.position.passed(gtid_of(events, int(gtids[last])), int(ts[last]), place, first_gno)
        if len(gtids) > complete:
            self._begin(events, int(gtids[-1]))

    def _one(self, events: Events, mark: int, kind: int) -> Iterator[Item]:
        if kind in GTIDS:
            if self._open is not None:
                self._tear()
            self._begin(events, mark)
        elif kind == EventType.XID:
            yield from self._end(events, mark)
        elif kind == EventType.QUERY:
            yield from self._query(events, mark)
        elif kind == EventType.XA_PREPARE:
            prepare = XaPrepare.parse(events.body(mark))
            if prepare.one_phase:
                yield from self._end(events, mark)
            else:
                yield from self._prepare(events, mark, _xid(prepare.xid))
        elif kind == EventType.FORMAT_DESCRIPTION:
            self._tear()
            yield from self._runs.flush()
            yield LogBegins()
        elif kind == EventType.ROTATE:
            rotate = Rotate.parse(events.body(mark))
            self.position.moved_to_file(rotate.file, rotate.position)
        elif kind == EventType.MARIADB_GTID_LIST:
            listed = MariaGtidList.parse(events.body(mark)).gtids
            self.position.begin_with(",".join(f"{domain}-{server}-{seq}" for domain, server, seq in listed))
        elif kind == EventType.PREVIOUS_GTIDS:
            self.position.begin_with(str(MysqlGtidSet.decode(events.body(mark))))
        else:
            raise LogDamagedError("the server says that events are missing in its log (INCIDENT): dump the tables anew")

    def _begin(self, events: Events, mark: int) -> None:
        gtid = gtid_of(events, mark)
        ts = int(fold(self.position.ts, np.array([physical_ms_of(gtid, events, mark)]))[0])
        single = gtid.is_standalone if isinstance(gtid, MariaGtid) else True
        place = (self.position.file, next_position(events, mark))
        prepared = isinstance(gtid, MariaGtid) and gtid.is_prepared
        self._open = _Open(ts, gtid, place, single, prepared=prepared)
        self._runs.open(mark)

    def _query(self, events: Events, mark: int) -> Iterator[Item]:
        query = Query.parse(events.body(mark))
        statement = read_statement(query.sql, query.schema, fold_case=self._fold_case)
        if self._open is None:
            raise LogDamagedError("the log has a statement outside of a transaction; MySQL before 5.7 is not read")
        kind, xid = statement.kind, statement.xid
        if kind in (Kind.BEGIN, Kind.XA_START):
            self._open.single = False
            self._open.prepared |= kind is Kind.XA_START
        elif kind is Kind.COMMIT:
            yield from self._end(events, mark)
        elif kind is Kind.ROLLBACK:
            yield from self._end(events, mark, rows=False)
        elif kind is Kind.XA_COMMIT:
            parts = self._prepared.pop(xid)
            if parts is None:
                yield Unprepared(self._open.ts, xid)
            self._open.parts = [*(parts or ()), *self._open.parts]
            yield from self._end(events, mark)
            yield from self._runs.flush()
            yield XaMoved(xid, waits=False)
        elif kind is Kind.XA_ROLLBACK:
            self._prepared.pop(xid)
            yield from self._end(events, mark, rows=False)
        else:
            if kind in (Kind.DDL, Kind.ROWS, Kind.UNKNOWN):
                self._open.stated.append((query, statement))
            if self._open.single:
                yield from self._end(events, mark)

    def _end(self, events: Events, mark: int, *, rows: bool = True) -> Iterator[Item]:
        """The open transaction ends with this event."""
        opened = self._open
        if opened is None:
            raise LogDamagedError("the log has an end without a transaction")
        self._open = None
        begin = self._runs.close()
        if opened.given and not rows:
            raise TornTransactionError(str(opened.gtid), opened.place)
        left_out = not rows or opened.place in self._torn
        self.position.passed(opened.gtid, opened.ts, next_position(events, mark))
        if opened.stated:
            yield from self._runs.flush()
            for query, statement in opened.stated:
                yield Stated(opened.ts - 1, query, statement, self.position.file, self.position.position)
        if left_out:
            return
        if opened.parts:
            yield from self._runs.flush()
            whole = joined([*opened.parts, events[begin : mark + 1]])
            yield Commits(whole, np.full(len(whole), opened.ts), np.array([len(whole)]))
        else:
            self._runs.add(np.array([begin]), np.array([mark + 1]), np.array([opened.ts]))

    def _prepare(self, events: Events, mark: int, xid: str) -> Iterator[Item]:
        opened = self._open
        if opened is None:
            raise LogDamagedError("the log prepares an XA transaction that has not begun")
        self._open = None
        self._prepared.put(xid, [joined([*opened.parts, events[self._runs.close() : mark + 1]])])
        self.position.passed(opened.gtid, opened.ts, next_position(events, mark))
        yield from self._runs.flush()
        yield XaMoved(xid, waits=True)

    def _rest(self, events: Events) -> Iterator[Item]:
        """At the end of a buffer: what is open is kept, or given already if it is large."""
        yield from self._runs.flush()
        opened = self._open
        if opened is None:
            return
        part = events[self._runs.close() :]
        self._runs.open(0)
        if len(part):
            opened.parts.append(joined([part]))
            opened.size += size_of(part)
        if opened.size > self._held_bytes and not opened.prepared and opened.place not in self._torn:
            for each in opened.parts:
                opened.given += 1
                yield Commits(each, np.full(len(each), opened.ts), np.empty(0, np.int64), opened.given)
            opened.parts.clear()

    def _tear(self) -> None:
        """A transaction ended without an end: the server died in it."""
        opened, self._open = self._open, None
        if opened is not None:
            self._runs.close()
            if opened.given:
                raise TornTransactionError(str(opened.gtid), opened.place)


def _xid(xid: tuple[bytes, bytes]) -> str:
    return f"{xid[0].hex()},{xid[1].hex()}"
