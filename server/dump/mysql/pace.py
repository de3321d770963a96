"""The order, size and pace of a dump's reads, so that the log lags little more than it would
without it. Pure.

`next_picks` chooses the ranges of a round; `Pace` and `Refusals` follow each table, `LastRound`
keeps to the rates of the job.

Lag is the time from a watermark's commit to its arrival through the log (`Lags`). It is measured
with every round, and now and then by a watermark of no round while nothing is read, which tells
what is usual on this machine at this time. Rounds that lag more halve the ease of the `LagGuard`;
others raise it slowly. With less ease chunks are smaller, fewer are read at a time, and nothing is
read for a while after each round. `XaWait` slows rounds down that cannot count yet.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from server.dump.job import Job
from server.dump.mysql.chunk import ChunkQuery, ChunkSize
from server.dump.progress import Range, TableDump
from storage.model.errors import TidemarkError

ATTEMPTS: Final = 3
LAG_FACTOR: Final = 1.5
"""The allowed lag of a round, as a multiple of the usual one."""
GRACE_S: Final = 0.001
"""The delay in seconds allowed beyond that; shorter ones do not matter."""
FAR_S: Final = 0.25
"""A single round with so much more lag than any before slows the dump down at once."""
EASE_MIN = 1 / 8
EASE_FIRST = 1 / 2
QUIET_FIRST: Final = 5
"""The number of measurements before the first chunk is read."""
QUIET_EVERY_S: Final = 1.0
SHARE_MIN: Final = 1 / 2
"""The least fraction of a chunk's rows to read: each round has a fixed cost about as high as this
half.
"""
_QUIET: Final = 32
_BUSY: Final = 6
_RAISE: Final = 1.1
_REST_MAX: Final = 3.0
XA_TELL_S: Final = 3.0
"""After this time the status names XA transactions for which the dump waits."""
_XA_REST_MAX_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Pick:
    """A range of a table that is to be read next."""

    table_id: int
    place: int
    part: Range
    epoch: int


def next_picks(dumps: Iterable[TableDump], most: int) -> Sequence[Pick]:
    """Choose up to `most` ranges: one of each table first, then more of each."""
    picks: list[Pick] = []
    dumping = {dump.durable.table_id: dump for dump in dumps}
    taken: dict[int, frozenset[int]] = {}
    while dumping and len(picks) < most:
        for table_id, dump in list(dumping.items()):
            place = dump.next_range(taken.get(table_id, frozenset()))
            if place is None or len(picks) == most:
                dumping.pop(table_id)
                continue
            taken[table_id] = taken.get(table_id, frozenset()) | {place}
            picks.append(Pick(table_id, place, *dump.unread(place)))
    return picks


@dataclass(slots=True)
class Pace:
    """The pace at which one version of a table is read."""

    version: int
    query: ChunkQuery
    size: ChunkSize
    epoch: int = -1
    """The epoch of the range read last; -1: none was read."""

    def begin(self, epoch: int) -> None:
        """Note the epoch of the next chunk. A greater epoch than before means that chunks were
        lost, so the next ones are smaller.
        """
        if 0 <= self.epoch < epoch:
            self.size.halve()
        self.epoch = max(self.epoch, epoch)


@dataclass(frozen=True, slots=True)
class Refused:
    """A table in this version cannot be read."""

    table_id: int
    version: int
    error: TidemarkError


class Refusals:
    """Counts successive refusals of each table in its present form."""

    def __init__(self) -> None:
        self._refused: dict[int, tuple[int, int]] = {}

    def last(self, refused: Iterable[Refused]) -> list[Refused]:
        """Count the refusals of one round; returns those of tables that were refused `ATTEMPTS`
        times in their present version.
        """
        final = []
        for each in {each.table_id: each for each in refused}.values():
            version, count = self._refused.get(each.table_id, (each.version, 0))
            count = count + 1 if version == each.version else 1
            self._refused[each.table_id] = each.version, count
            final += [each] if count >= ATTEMPTS else []
        return final

    def over(self, table_id: int) -> None:
        """Forget the refusals of a table that was read."""
        self._refused.pop(table_id, None)

    def clear(self) -> None:
        """Forget all refusals: every table is tried anew."""
        self._refused.clear()


@dataclass(frozen=True, slots=True)
class LastRound:
    """The round before, after which the next one waits; times are of one clock, in seconds."""

    began_s: float = 0.0
    rows: int = 0
    bytes: int = 0
    rest_until_s: float = 0.0
    """Pauses for the sake of the log, whatever the job allows."""

    def until_s(self, job: Job) -> float:
        """Return the earliest time of the next one at the pace that the job allows now."""
        rows_s = self.rows / job.rows_per_s if job.rows_per_s else 0.0
        bytes_s = self.bytes / job.bytes_per_s if job.bytes_per_s else 0.0
        return max(self.began_s + max(rows_s, bytes_s), self.rest_until_s)


class LagGuard:
    """Decides how fast one dump may read. Times are in seconds of any one clock."""

    def __init__(self) -> None:
        self.ease = EASE_FIRST
        """The fraction of full speed, from EASE_MIN to 1."""
        self._quiet: deque[float] = deque(maxlen=_QUIET)
        self._busy: deque[float] = deque(maxlen=_BUSY)
        self._quiet_at = 0.0

    @property
    def limit_s(self) -> float:
        """Return the greatest allowed delay of rounds."""
        return LAG_FACTOR * median(self._quiet or [0.0]) + GRACE_S

    def quiet_wanted(self, now: float) -> bool:
        """Whether the delay should be measured now, while nothing is read."""
        return len(self._quiet) < QUIET_FIRST or now - self._quiet_at >= QUIET_EVERY_S

    def quiet(self, lag_s: float, now: float) -> None:
        """The lag while nothing was read."""
        self._quiet.append(lag_s)
        self._quiet_at = now

    def busy(self, lag_s: float) -> None:
        """The lag of a round."""
        self._busy.append(lag_s)
        # By the median, as single rounds are late for many reasons; but one that is far later than
        # anything without a round cannot be chance.
        if (
            median(self._busy) > self.limit_s
            or lag_s > LAG_FACTOR * max(self._quiet, default=0.0) + FAR_S
        ):
            self.ease = max(self.ease / 2, EASE_MIN)
            # Rounds at the former ease say nothing about the new one; left in the median they would
            # halve it again at once.
            self._busy.clear()
        else:
            self.ease = min(self.ease * _RAISE, 1.0)

    def parallel(self, most: int) -> int:
        """Return how many chunks to read at a time."""
        return max(round(most * self.ease), 1)

    def rows(self, most: int) -> int:
        """Return how many rows a chunk may have."""
        return max(int(most * max(self.ease, SHARE_MIN)), 1)

    def rest_s(self, read_s: float) -> float:
        """Return how long to pause after a round that took this long."""
        return read_s * min((1 / self.ease - 1) / 2, _REST_MAX)


class XaWait:
    """Measures for how long chunks have been read in vain because the log has the COMMIT of an XA
    transaction while the server shows it as prepared. Times are in seconds of any one clock.

    That ends within milliseconds, unless its xid is used again by a transaction without changes, of
    which the log has nothing, or a crash of the server undid the COMMIT.
    """

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._xids: frozenset[str] = frozenset()

    def note_waiting(self, xids: frozenset[str], now_s: float) -> None:
        """Note the XA transactions that the last window waited for, if any."""
        if not xids:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s
        self._xids = xids

    def rest_s(self, now_s: float) -> float:
        """Return how long to pause after a round; longer rounds need longer pauses."""
        return (
            min((now_s - self._since_s) / 4, _XA_REST_MAX_S) if self._since_s is not None else 0.0
        )

    def note(self, now_s: float) -> str:
        """A hint for an operator; empty where it is too early for one."""
        if self._since_s is None or now_s < self._since_s + XA_TELL_S:
            return ""
        xids = sorted(self._xids)
        first = ",".join(f"X'{part}'" for part in xids[0].split(","))
        more = f" and {len(xids) - 1} more" if len(xids) > 1 else ""
        return (
            f"the XA transaction {first}{more} is prepared at the server (XA RECOVER lists it), but the log has its "
            f"COMMIT: chunks are read again until it ends. If nobody ends it, do so at the server: "
            f"XA ROLLBACK {first} if it is one without changes, else XA COMMIT {first}"
        )


class Lags:
    """Watermarks on their way through the log, by their identifiers."""

    # The thread that commits a watermark and the one that reads the log are not ordered: an arrival
    # may be noted before the commit is.

    def __init__(self) -> None:
        self._written: dict[str, float | None] = {}
        self._arrived: dict[str, float] = {}
        self._measured: dict[str, float] = {}

    def expect(self, unique_identifier: str) -> None:
        """Expect a watermark that is about to be written."""
        self._written[unique_identifier] = None

    def written(self, unique_identifier: str, at: float) -> None:
        """Note when it was committed."""
        if unique_identifier in self._written:
            self._written[unique_identifier] = at
            self._match(unique_identifier)

    def arrived(self, unique_identifier: str, at: float) -> None:
        """The log has passed it; nothing happens if it is not expected."""
        if unique_identifier in self._written:
            self._arrived[unique_identifier] = at
            self._match(unique_identifier)

    def forget(self, unique_identifier: str) -> None:
        """Expect it no longer: it may never arrive."""
        self._written.pop(unique_identifier, None)
        self._arrived.pop(unique_identifier, None)

    def taken(self) -> dict[str, float]:
        """The lags known since the last call, each once."""
        lags, self._measured = self._measured, {}
        return lags

    def _match(self, unique_identifier: str) -> None:
        written, arrived = self._written[unique_identifier], self._arrived.get(unique_identifier)
        if written is not None and arrived is not None:
            self._measured[unique_identifier] = max(arrived - written, 0.0)
            self.forget(unique_identifier)
