"""A position in a log, the commit_ts there, and which transaction times count for commit_ts. Pure.

    commit_ts(n) = max(commit_ts(n - 1) + 2, physical time of transaction n in TSO layout)

over all transactions of the log in its order, whatever tables they touch. The timestamp before each
commit_ts, which no transaction has, is for schema changes: a transaction may bring one and rows
above it (CREATE TABLE … SELECT). The time is one that replicas repeat, so that reading a replica
gives the same commit_ts: with MariaDB the second of the GTID event; with MySQL the millisecond of
the commit on the server that ran it (a replica's event header has the second of the last statement
instead). A saved position is a place and its commit_ts: reading on from there gives all later
transactions the same commit_ts again.

A time that is far in the future must not raise the commit_ts of everything behind it. A time is odd
if it was more than `max-clock-skew` after the present when its transaction was first read. Odd
times are ignored for commit_ts. When the log is read again, at another present, the decision must
be the same. So decisions are kept with the changefeed, durable before a commit_ts that depends on
them is used:

    time limit = (from_ts, until_ms, odd_ts)

Transactions whose predecessor has a commit_ts >= `from_ts`, and below the next limit's, are
accepted up to `until_ms`. Of those that are later, the ones whose predecessor has a commit_ts <=
`odd_ts` were decided, and are odd. The first one behind these is decided by the present: it extends
`until_ms` to the present plus the skew, or is odd.

Invariants of the limits:
1. Times up to `until_ms` need no decision, so one limit lasts for about the skew's length of log,
   and a log that is read hours late needs one.
2. `until_ms` of a limit is extended only while no time was found odd by it; else the next limit
   begins. So what was decided about a transaction never changes.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from typing import ClassVar, Final, Self

import numpy as np
import numpy.typing as npt

from storage.model.errors import CorruptError
from storage.model.ts import LOGICAL_BITS
from storage.mysql.control import MariaGtid, MysqlGtid
from storage.mysql.gtid import MariaGtidSet, MysqlGtidSet

FIRST_POSITION: Final = 4
"""Where a log file's first event stands, behind four bytes that say what the file is."""
STEP: Final = 2
_FOR_EVER_MS: Final = 1 << 43
_LIMITS_MAX: Final = 1024
"""Older ones are given up: the log before them is read as if the oldest one left were in force."""

Times = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class JsonRecord:
    """Values that the metadata keeps as a JSON object; `what` names them in errors."""

    what: ClassVar[str]

    def to_json(self) -> bytes:
        """The JSON that the metadata keeps."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, value: bytes) -> Self:
        """Read what `to_json` wrote; members that a later version has are left out.

        Raises:
            CorruptError: it is something else.
        """
        try:
            doc = json.loads(value)
            return cls(**{each.name: doc[each.name] for each in fields(cls) if each.name in doc})
        except (ValueError, TypeError, RecursionError) as err:
            raise CorruptError(f"{cls.what} in the metadata cannot be read: {err!r}") from err


@dataclass(frozen=True, slots=True)
class SavedPosition(JsonRecord):
    """A place between two transactions, as the metadata keeps it (key `anchor/…`): everything of
    the log before it has a commit_ts at or below `ts`.
    """

    what = "a saved position of a MySQL source"

    ts: int
    gtids: str
    """The GTIDs read, as the server writes them; empty where it has none."""
    file: str = ""
    """With `position` the place in the log of the server that was read;
    another server has another one.
    """
    position: int = FIRST_POSITION
    file_began_s: int = 0
    """The second in which that server began the file; 0: not known."""
    last_s: int = 0
    """The second of the last transaction that was read, on MariaDB; 0: not known."""

    @property
    def domains(self) -> int:
        """How many replication domains MariaDB's GTIDs are of."""
        return 0 if self.is_mysql else len(MariaGtidSet.parse(self.gtids).positions)

    @property
    def is_mysql(self) -> bool:
        """Whether the GTIDs are MySQL's, which hold a colon, not MariaDB's."""
        return ":" in self.gtids

    @property
    def gtid_block(self) -> bytes:
        """MySQL's GTIDs in binary form."""
        return MysqlGtidSet.parse(self.gtids).encode() if self.is_mysql else b""


class LogPosition:
    """The place after the last complete transaction; moved by `Transactions` alone.

    A server that is asked by GTID begins to send before that place, amid a file or at its
    beginning, and leaves out what was read: `read_file` is the file that it sends.
    """

    def __init__(self, saved_position: SavedPosition) -> None:
        self.ts = saved_position.ts
        self.file = saved_position.file
        self.position = saved_position.position
        self.read_file = saved_position.file
        self._file_began_s = saved_position.file_began_s
        self._last_s = saved_position.last_s
        self._is_of_server = True
        """Whether the place is one of the log that is read."""
        self._gtids: MariaGtidSet | MysqlGtidSet
        self._gtids = (
            MysqlGtidSet.parse(saved_position.gtids)
            if saved_position.is_mysql
            else MariaGtidSet.parse(saved_position.gtids)
        )

    @property
    def snapshot(self) -> SavedPosition:
        """The position now, as a value that can be saved."""
        return SavedPosition(
            self.ts,
            str(self._gtids),
            self.file,
            self.position,
            self._file_began_s,
            self._last_s,
        )

    @property
    def has_gtids(self) -> bool:
        """Whether any GTID is known."""
        return bool(str(self._gtids))

    def begin_with(self, gtids: str) -> None:
        """Set the GTIDs that a log file says were before it; for a log read by file and offset."""
        if not self.has_gtids:
            self._gtids = MysqlGtidSet.parse(gtids) if ":" in gtids else MariaGtidSet.parse(gtids)

    def passed(
        self, gtid: MariaGtid | MysqlGtid | None, ts: int, next_position: int, first_gno: int = 0
    ) -> None:
        """Move behind a complete transaction; with `first_gno` behind all MySQL transactions from
        that number up to `gtid`.
        """
        self.ts = ts
        if self.file != self.read_file:
            self._move(self.read_file, FIRST_POSITION)
        self.position = next_position or self.position
        if isinstance(gtid, MariaGtid):
            self._last_s = gtid.second
            maria = self._gtids if isinstance(self._gtids, MariaGtidSet) else MariaGtidSet()
            self._gtids = maria.add(gtid.domain, gtid.server, gtid.seq)
        elif gtid is not None and gtid.gno:
            mysql = self._gtids if isinstance(self._gtids, MysqlGtidSet) else MysqlGtidSet()
            self._gtids = mysql.add(gtid.server, gtid.gno, gtid.tag, first=first_gno)

    def rotated(self, file: str, position: int, *, logged: bool) -> None:
        """Go on with another file. Only a ROTATE of the log itself moves the place, unless that
        lies further; the one that a server makes for each reader says which file it sends.

        In the log of another server the place that was reached is not known: the beginning of the
        file that it sends first stands for it.
        """
        if not self._is_of_server:
            self._move(file, FIRST_POSITION)
            self._is_of_server = True
        elif logged and self.file == self.read_file:
            self._move(file, position)
        self.read_file = file

    def file_begins(self, second: int) -> None:
        """Note when the file that the server sends was begun."""
        if self.file == self.read_file:
            self._file_began_s = second

    def forget_place(self) -> None:
        """Another server's log is read from here on, where the place is another one."""
        self._is_of_server = False

    def _move(self, file: str, position: int) -> None:
        self.file, self.position, self._file_began_s = file, position, 0


def commit_timestamps(previous_ts: int, physical: Times) -> Times:
    """The commit_ts of transactions that follow `previous_ts`, by each one's time in ms."""
    steps = STEP * np.arange(1, len(physical) + 1, dtype=np.int64)
    at_least = np.maximum((physical << LOGICAL_BITS) - steps, previous_ts)
    commit_ts: Times = np.maximum.accumulate(at_least) + steps
    return commit_ts


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """The latest time that is accepted from one place of the log on."""

    from_ts: int
    until_ms: int
    odd_ts: int = -1
    """Below all commit_ts: no time was found odd."""


@dataclass(frozen=True, slots=True)
class TimeDecision:
    """The decision about times of transactions that were read for the first time, and the time
    limits from now on, which record it.
    """

    time_limits: "TimeLimits"
    odd_ms: Sequence[int]
    """The times that are odd."""


class TimeLimits:
    """The decisions about one log; a value."""

    def __init__(self, limits: Sequence[TimeLimit]) -> None:
        self.limits = tuple(limits)

    @classmethod
    def accepting(cls, until_ms: int = _FOR_EVER_MS) -> Self:
        """The limits of a log about which nothing was decided:
        times up to `until_ms` are accepted.
        """
        return cls([TimeLimit(0, until_ms)])

    def commit_timestamps(self, previous_ts: int, times: Times) -> tuple[Times, int | None]:
        """The commit_ts of transactions that follow `previous_ts`,
        and the number of the first one that must be decided, if any.
        """
        last = self.limits[-1]
        if len(times) and previous_ts >= last.from_ts and times.max() <= last.until_ms:
            return commit_timestamps(previous_ts, times), None
        parts: list[Times] = []
        done = 0
        while done < len(times):
            limit, next_from_ts = self._in_force(previous_ts)
            rest = times[done:]
            odd = rest > limit.until_ms
            part = commit_timestamps(previous_ts, np.where(odd, 0, rest))
            # the one that reaches it is the last one of this limit
            if next_from_ts is not None:
                part = part[: int(np.searchsorted(part, next_from_ts)) + 1]
            elif bool(odd.any()):
                before = np.append(previous_ts, part[:-1])
                undecided = np.flatnonzero(odd & (before > limit.odd_ts))
                if len(undecided):
                    return np.concatenate([*parts, part]), done + int(undecided[0])
            parts.append(part)
            done += len(part)
            previous_ts = int(part[-1])
        return (np.concatenate(parts) if parts else np.empty(0, np.int64)), None

    def decide(self, previous_ts: int, times: Times, present_ms: int) -> TimeDecision:
        """Decide about transactions that follow `previous_ts`, the first of which is undecided.

        `present_ms`: the latest time that is accepted now.
        """
        *past, last = self.limits
        if bool(((times > last.until_ms) & (times <= present_ms)).any()):
            if last.odd_ts >= 0:
                past.append(last)
                last = TimeLimit(previous_ts, present_ms)
            else:
                last = replace(last, until_ms=present_ms)
        odd = times > last.until_ms
        if bool(odd.any()):
            commit_ts = commit_timestamps(previous_ts, np.where(odd, 0, times))
            before = np.append(previous_ts, commit_ts[:-1])
            last = replace(last, odd_ts=int(before[odd][-1]))
        return TimeDecision(TimeLimits([*past, last][-_LIMITS_MAX:]), times[odd].tolist())

    def _in_force(self, previous_ts: int) -> tuple[TimeLimit, int | None]:
        """The time limit of the transaction that follows,
        and from which commit_ts on the next one is in force.
        """
        following = None
        for limit in reversed(self.limits):
            if limit.from_ts <= previous_ts:
                return limit, following
            following = limit.from_ts
        return self.limits[0], following

    def to_json(self) -> bytes:
        """The JSON that the metadata keeps."""
        return json.dumps(
            {"horizons": [astuple(each) for each in self.limits]}, separators=(",", ":")
        ).encode()

    @classmethod
    def from_json(cls, value: bytes) -> Self:
        """Read what `to_json` wrote.

        Raises:
            CorruptError: it is something else.
        """
        try:
            return cls(list(_limits(json.loads(value)["horizons"])))
        except (ValueError, TypeError, KeyError) as err:
            raise CorruptError(
                f"the time limits of a MySQL source in the metadata cannot be read: {err!r}"
            ) from err


def _limits(rows: Sequence[Sequence[int]]) -> Iterator[TimeLimit]:
    if not rows:
        raise ValueError("it has no time limit")
    for from_ts, until_ms, odd_ts in rows:
        yield TimeLimit(int(from_ts), int(until_ms), int(odd_ts))
