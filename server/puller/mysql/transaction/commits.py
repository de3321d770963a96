"""The committed transactions of one buffer of events: found by the events that begin and end them,
and gathered so that their rows are decoded together. Pure.

`TransactionBoundaries` finds the events that begin and end transactions, or steer the log
otherwise, many at once; the functions behind it read them: GTIDs, times, positions. `Runs` gathers
stretches of committed events, and gives them as `Commits`.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from storage.mysql.control import (
    MARIADB_COMPLETED_XA,
    MARIADB_PREPARED_XA,
    MARIADB_STANDALONE,
    MariaGtid,
    MysqlGtid,
)
from storage.mysql.event import HEADER_BYTES, Events, EventType, join_events

Gtid: TypeAlias = MariaGtid | MysqlGtid
GTIDS = (EventType.MARIADB_GTID, EventType.GTID, EventType.ANONYMOUS_GTID, EventType.GTID_TAGGED)
IS_BOUNDARY = np.isin(
    np.arange(256),
    [
        *GTIDS,
        EventType.XID,
        EventType.QUERY,
        EventType.EXECUTE_LOAD_QUERY,
        EventType.XA_PREPARE,
        EventType.FORMAT_DESCRIPTION,
        EventType.ROTATE,
        EventType.INCIDENT,
        EventType.MARIADB_GTID_LIST,
        EventType.PREVIOUS_GTIDS,
    ],
)
_UNUSUAL_FLAGS = MARIADB_STANDALONE | MARIADB_PREPARED_XA | MARIADB_COMPLETED_XA
_MARIA_FLAGS_AT = HEADER_BYTES + 12
_LAST_MS = 1000 * 0xFFFFFFFF
_IS_MYSQL_GTID = np.isin(np.arange(256), [EventType.GTID, EventType.ANONYMOUS_GTID])
_MYSQL_TIMES_AT = HEADER_BYTES + 42
_TIME_BYTES = 7
_ORIGINAL = np.uint64(1 << 55)
_BEGIN = b"BEGIN"
_BEGIN_NUMBER = int.from_bytes(_BEGIN, "little")


@dataclass(frozen=True, slots=True)
class TransactionBoundaries:
    """The boundary events of a buffer by place; without the BEGINs of plain transactions."""

    at: npt.NDArray[np.int64]
    kinds: npt.NDArray[np.uint8]
    plain: npt.NDArray[np.bool_]
    """XIDs, and the GTIDs that an XID ends: MariaDB's by their flags,
    MySQL's where BEGIN and XID are there, too.
    """

    @classmethod
    def of(cls, events: Events) -> "TransactionBoundaries":
        """Find the boundary events of a buffer."""
        types = events.types
        at = np.flatnonzero(IS_BOUNDARY[types])
        kinds = types[at]
        plain: npt.NDArray[np.bool_] = kinds == EventType.XID
        maria = kinds == EventType.MARIADB_GTID
        plain[maria] = (
            events.data.u8(events.begin[at[maria]] + _MARIA_FLAGS_AT) & _UNUSUAL_FLAGS
        ) == 0
        begins = _plain_begins(events, at, kinds)
        plain[begins - 1] = True
        keep = np.ones(len(at), np.bool_)
        keep[begins] = False
        return cls(at[keep], kinds[keep], plain[keep])


def _plain_begins(
    events: Events, at: npt.NDArray[np.int64], kinds: npt.NDArray[np.uint8]
) -> npt.NDArray[np.signedinteger]:
    """Find the BEGINs between a GTID of MySQL that carries its commit time and an XID."""
    places = np.flatnonzero(kinds[1:-1] == EventType.QUERY) + 1
    places = places[_IS_MYSQL_GTID[kinds[places - 1]] & (kinds[places + 1] == EventType.XID)]
    gtids, queries, data = at[places - 1], at[places], events.data
    times = events.begin[gtids] + _MYSQL_TIMES_AT
    room = events.end[gtids] - times
    has_own_time = (room >= 2 * _TIME_BYTES) | (
        (room >= _TIME_BYTES) & (data.number(times, _TIME_BYTES) & _ORIGINAL == 0)
    )
    body, end = events.begin[queries] + HEADER_BYTES, events.end[queries]
    sql = (
        body + 14 + data.u8(body + 8).astype(np.int64) + data.number(body + 11, 2).astype(np.int64)
    )
    begins = (end - sql == len(_BEGIN)) & (
        data.number(end - len(_BEGIN), len(_BEGIN)) == _BEGIN_NUMBER
    )
    plain: npt.NDArray[np.signedinteger] = places[has_own_time & begins]
    return plain


def stretches(plain: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Yield the ranges `[first, last)` that are all plain or all not, in order."""
    borders = np.flatnonzero(plain[1:] != plain[:-1]) + 1
    edges = [0, *borders.tolist(), len(plain)]
    return ((first, last) for first, last in itertools.pairwise(edges) if first < last)


def ends_of_runs(
    events: Events, gtids: npt.NDArray[np.int64], *, mariadb: bool
) -> Sequence[tuple[int, int]]:
    """The transactions to tell a position of, each with the number of the first one that it stands
    for.

    MariaDB: the last one of each domain. MySQL: the last of each row of numbers that one server
    gave without a gap.
    """
    headers, data = events.begin[gtids] + HEADER_BYTES, events.data
    if mariadb:
        return [(last, 0) for last in sorted(last_of_each(data.number(headers + 8, 4)))]
    high, low, gno = (data.number(headers + at, 8) for at in (1, 9, 17))
    goes_on = (
        (high[1:] == high[:-1]) & (low[1:] == low[:-1]) & (gno[1:] == gno[:-1] + (gno[:-1] > 0))
    )
    ends = [*np.flatnonzero(~goes_on).tolist(), len(gtids) - 1] if len(gtids) else []
    firsts = [0, *(end + 1 for end in ends[:-1])]
    return [(end, int(gno[first])) for first, end in zip(firsts, ends, strict=False)]


def times_ms(
    events: Events, gtids: npt.NDArray[np.int64], *, mariadb: bool
) -> npt.NDArray[np.int64]:
    """`physical_ms_of` for plain transactions, many at once."""
    headers = events.begin[gtids]
    if mariadb:
        return 1000 * events.data.number(headers, 4).astype(np.int64)
    times = headers + _MYSQL_TIMES_AT
    first = events.data.number(times, _TIME_BYTES)
    us = np.where(
        first & _ORIGINAL, events.data.number(times + _TIME_BYTES, _TIME_BYTES), first
    ).astype(np.int64)
    seconds = 1000 * events.data.number(headers, 4).astype(np.int64)
    return np.where(us > 0, np.minimum(us // 1000, _LAST_MS), seconds)


def last_of_each(domains: npt.NDArray[np.unsignedinteger]) -> Sequence[int]:
    """Find the last transaction of each domain."""
    if len(domains) and bool((domains == domains[0]).all()):
        return [len(domains) - 1]
    _, first_from_behind = np.unique(domains[::-1], return_index=True)
    return [len(domains) - 1 - int(place) for place in first_from_behind]


def gtid_of(events: Events, event_number: int) -> Gtid:
    """Parse a GTID event of any kind."""
    header = events.header(event_number)
    if header[4] == EventType.MARIADB_GTID:
        return MariaGtid.parse(header, events.body(event_number))
    body = events.body(event_number)
    return (
        MysqlGtid.parse_tagged(body)
        if header[4] == EventType.GTID_TAGGED
        else MysqlGtid.parse(body)
    )


def physical_ms_of(gtid: Gtid, events: Events, event_number: int) -> int:
    """The time of a transaction that all servers of one history repeat, in Unix milliseconds:
    MySQL's commit time on the server that ran it first, else the second in the header of the GTID
    event. At most of the year 2106, as seconds are.
    """
    if isinstance(gtid, MysqlGtid) and gtid.committed_us:
        return min(gtid.committed_us // 1000, _LAST_MS)
    return 1000 * int.from_bytes(events.header(event_number)[:4], "little")


def next_position(events: Events, event_number: int) -> int:
    """The offset in the log file after an event."""
    return int.from_bytes(events.header(event_number)[13:17], "little")


@dataclass(frozen=True, slots=True)
class Commits:
    """Events of committed transactions; `commit_ts` has that of each event's transaction."""

    events: Events
    commit_ts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    """How many of the events each transaction ends after; without its last one where it goes on."""
    part: int = 0
    """The part's number, from 1 on, if a transaction's rows are given before its end; else 0."""


class Runs:
    """Stretches of committed events of one buffer, gathered so that they are decoded together."""

    def __init__(self) -> None:
        self._events: Events | None = None
        self._begin: list[npt.NDArray[np.int64]] = []
        self._end: list[npt.NDArray[np.int64]] = []
        self._ts: list[npt.NDArray[np.int64]] = []
        self._opened_at = 0

    def begin(self, events: Events) -> None:
        """Begin another buffer; an open transaction goes on at its first event."""
        self._events = events

    def open(self, event_number: int) -> None:
        """Begin a transaction with that event."""
        self._opened_at = event_number

    def close(self) -> int:
        """Where the open transaction's part in this buffer begins."""
        return self._opened_at

    def add(
        self,
        begin: npt.NDArray[np.int64],
        end: npt.NDArray[np.int64],
        commit_ts: npt.NDArray[np.int64],
    ) -> None:
        """Add committed transactions, each the events `[begin, end)`."""
        if len(begin):
            self._begin.append(begin)
            self._end.append(end)
            self._ts.append(commit_ts)

    def flush(self) -> Iterator[Commits]:
        """Yield the transactions gathered so far, as one batch."""
        if not self._begin or self._events is None:
            return
        begin, end, ts = (np.concatenate(each) for each in (self._begin, self._end, self._ts))
        self._begin, self._end, self._ts = [], [], []
        sizes = end - begin
        ends = np.cumsum(sizes)
        numbers = np.arange(int(ends[-1])) + np.repeat(begin - (ends - sizes), sizes)
        events = Events(self._events.data, self._events.begin[numbers], self._events.end[numbers])
        yield Commits(events, np.repeat(ts, sizes), ends)


def joined(parts: Sequence[Events]) -> Events:
    """Copy the events into a buffer of their own."""
    return join_events(
        [
            events.header(number) + events.body(number)
            for events in parts
            for number in range(len(events))
        ]
    )


def pieces(events: Events, size: int) -> Iterator[Events]:
    """Divide the events into pieces of about `size` bytes; an event is never divided."""
    numbers = np.cumsum(events.end - events.begin) // size
    borders = (np.flatnonzero(np.diff(numbers)) + 1).tolist()
    return (events[first:last] for first, last in itertools.pairwise([0, *borders, len(events)]))


def size_of(events: Events) -> int:
    """Bytes of all the events."""
    return int((events.end - events.begin).sum()) if len(events) else 0
