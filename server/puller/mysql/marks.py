"""The events that begin and end transactions, or steer the log otherwise: found and read, many at once. Pure."""

import itertools
from collections.abc import Iterator, Sequence
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
from storage.mysql.event import HEADER_BYTES, Events, EventType

Gtid: TypeAlias = MariaGtid | MysqlGtid
GTIDS = (EventType.MARIADB_GTID, EventType.GTID, EventType.ANONYMOUS_GTID, EventType.GTID_TAGGED)
IS_MARK = np.isin(
    np.arange(256),
    [
        *GTIDS,
        EventType.XID,
        EventType.QUERY,
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


def plain_marks(events: Events, marks: npt.NDArray[np.int64], kinds: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Which marks are XIDs, or GTIDs of MariaDB that an XID will follow."""
    gtids = kinds == EventType.MARIADB_GTID
    plain: npt.NDArray[np.bool_] = kinds == EventType.XID
    plain[gtids] = (events.data.u8(events.begin[marks[gtids]] + _MARIA_FLAGS_AT) & _UNUSUAL_FLAGS) == 0
    return plain


def stretches(plain: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Parts that are all plain or all not, in order."""
    borders = np.flatnonzero(plain[1:] != plain[:-1]) + 1
    edges = [0, *borders.tolist(), len(plain)]
    return ((first, last) for first, last in itertools.pairwise(edges) if first < last)


def last_of_each(domains: npt.NDArray[np.unsignedinteger]) -> Sequence[int]:
    """For each domain the last transaction in it."""
    if len(domains) and bool((domains == domains[0]).all()):
        return [len(domains) - 1]
    _, first_from_behind = np.unique(domains[::-1], return_index=True)
    return [len(domains) - 1 - int(place) for place in first_from_behind]


def gtid_of(events: Events, mark: int) -> Gtid:
    """What a GTID event says."""
    header = events.header(mark)
    if header[4] == EventType.MARIADB_GTID:
        return MariaGtid.parse(header, events.body(mark))
    body = events.body(mark)
    return MysqlGtid.parse_tagged(body) if header[4] == EventType.GTID_TAGGED else MysqlGtid.parse(body)


def physical_ms_of(gtid: Gtid, events: Events, mark: int) -> int:
    """When a transaction was committed, as all servers of one history tell it; at most year 2106, as seconds are."""
    if isinstance(gtid, MysqlGtid) and gtid.committed_us:
        return min(gtid.committed_us // 1000, _LAST_MS)
    return 1000 * int.from_bytes(events.header(mark)[:4], "little")


def next_position(events: Events, mark: int) -> int:
    """The offset in the log file after an event."""
    return int.from_bytes(events.header(mark)[13:17], "little")
