"""Which times of a log are believed: one that is far in the future must not move all commit_ts
behind it. Pure.

A time is odd if it was more than `max-clock-skew` after the present when its transaction was read
for the first time. Odd times count as nothing in the fold of commit_ts (`position`). Whoever reads
the log again must decide the same, at whatever present, so decisions are kept with the changefeed,
durable before a commit_ts that depends on them is used:

    horizon = (from_ts, until_ms, odd_ts)

Transactions whose predecessor has a commit_ts >= `from_ts`, and below the next horizon's, are
believed up to `until_ms`. Of those that are later, the ones whose predecessor has a commit_ts <=
`odd_ts` were judged, and are odd. The first one behind these is judged by the present: it extends
`until_ms` to the present plus the skew, or is odd.

Invariants:
1. Times up to `until_ms` need no judgement, so one horizon lasts for about the skew's length of
   log, and a log that is read hours late needs one.
2. `until_ms` of a horizon is extended only while nothing was judged odd by it; else the next
   horizon begins. So what was decided about a transaction never changes.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from server.puller.mysql.log.position import fold
from storage.model.errors import CorruptError

_FOR_EVER_MS: Final = 1 << 43
_HORIZONS_MAX: Final = 1024
"""Older ones are given up: the log before them is read as if the oldest one left were in force."""

Times = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Horizon:
    """Up to which time transactions are believed."""

    from_ts: int
    until_ms: int
    odd_ts: int = -1
    """Below all commit_ts: nothing was judged odd."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the times of transactions that were not judged yet are,
    and the clock that says so from now on.
    """

    clock: "Clock"
    odd_ms: Sequence[int]
    """The times that are odd."""


class Clock:
    """The decisions about one log; a value."""

    def __init__(self, horizons: Sequence[Horizon]) -> None:
        self.horizons = tuple(horizons)

    @classmethod
    def believing(cls, until_ms: int = _FOR_EVER_MS) -> Self:
        """The clock of a log about which nothing was decided:
        times up to `until_ms` are believed.
        """
        return cls([Horizon(0, until_ms)])

    def fold(self, previous_ts: int, times: Times) -> tuple[Times, int | None]:
        """The commit_ts of transactions that follow `previous_ts`,
        and which of them must be judged first, if any.
        """
        last = self.horizons[-1]
        if len(times) and previous_ts >= last.from_ts and times.max() <= last.until_ms:
            return fold(previous_ts, times), None
        folded: list[Times] = []
        done = 0
        while done < len(times):
            horizon, next_from_ts = self._in_force(previous_ts)
            rest = times[done:]
            odd = rest > horizon.until_ms
            part = fold(previous_ts, np.where(odd, 0, rest))
            # the one that reaches it is the last one of this horizon
            if next_from_ts is not None:
                part = part[: int(np.searchsorted(part, next_from_ts)) + 1]
            elif bool(odd.any()):
                before = np.append(previous_ts, part[:-1])
                unjudged = np.flatnonzero(odd & (before > horizon.odd_ts))
                if len(unjudged):
                    return np.concatenate([*folded, part]), done + int(unjudged[0])
            folded.append(part)
            done += len(part)
            previous_ts = int(part[-1])
        return (np.concatenate(folded) if folded else np.empty(0, np.int64)), None

    def judge(self, previous_ts: int, times: Times, present_ms: int) -> Judgement:
        """Decide about transactions that follow `previous_ts`, the first of which must be judged.

        `present_ms`: the latest time that is believed now.
        """
        *past, last = self.horizons
        if bool(((times > last.until_ms) & (times <= present_ms)).any()):
            if last.odd_ts >= 0:
                past.append(last)
                last = Horizon(previous_ts, present_ms)
            else:
                last = replace(last, until_ms=present_ms)
        odd = times > last.until_ms
        if bool(odd.any()):
            folded = fold(previous_ts, np.where(odd, 0, times))
            before = np.append(previous_ts, folded[:-1])
            last = replace(last, odd_ts=int(before[odd][-1]))
        return Judgement(Clock([*past, last][-_HORIZONS_MAX:]), times[odd].tolist())

    def _in_force(self, previous_ts: int) -> tuple[Horizon, int | None]:
        """The horizon of the transaction that follows,
        and from which commit_ts on the next one is in force.
        """
        following = None
        for horizon in reversed(self.horizons):
            if horizon.from_ts <= previous_ts:
                return horizon, following
            following = horizon.from_ts
        return self.horizons[0], following

    def to_json(self) -> bytes:
        """As the metadata keeps it."""
        return json.dumps(
            {"horizons": [astuple(each) for each in self.horizons]}, separators=(",", ":")
        ).encode()

    @classmethod
    def from_json(cls, value: bytes) -> Self:
        """Read what `to_json` wrote.

        Raises:
            CorruptError: it is something else.
        """
        try:
            return cls(list(_horizons(json.loads(value)["horizons"])))
        except (ValueError, TypeError, KeyError) as err:
            raise CorruptError(
                f"the clock of a MySQL source in the metadata cannot be read: {err!r}"
            ) from err


def _horizons(rows: Sequence[Sequence[int]]) -> Iterator[Horizon]:
    if not rows:
        raise ValueError("it has no horizon")
    for from_ts, until_ms, odd_ts in rows:
        yield Horizon(int(from_ts), int(until_ms), int(odd_ts))
