"""Which transaction times of a log are accepted: one that is far in the future must not move all
commit_ts behind it. Pure.

A time is odd if it was more than `max-clock-skew` after the present when its transaction was read
for the first time. Odd times count as nothing for commit_ts (`position`). Whoever reads
the log again must decide the same, at whatever present, so decisions are kept with the changefeed,
durable before a commit_ts that depends on them is used:

    time limit = (from_ts, until_ms, odd_ts)

Transactions whose predecessor has a commit_ts >= `from_ts`, and below the next limit's, are
accepted up to `until_ms`. Of those that are later, the ones whose predecessor has a commit_ts <=
`odd_ts` were decided, and are odd. The first one behind these is decided by the present: it extends
`until_ms` to the present plus the skew, or is odd.

Invariants:
1. Times up to `until_ms` need no decision, so one limit lasts for about the skew's length of log,
   and a log that is read hours late needs one.
2. `until_ms` of a limit is extended only while no time was found odd by it; else the next limit
   begins. So what was decided about a transaction never changes.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from server.puller.mysql.log.position import commit_timestamps
from storage.model.errors import CorruptError

_FOR_EVER_MS: Final = 1 << 43
_LIMITS_MAX: Final = 1024
"""Older ones are given up: the log before them is read as if the oldest one left were in force."""

Times = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """The latest time that is accepted from one place of the log on."""

    from_ts: int
    until_ms: int
    odd_ts: int = -1
    """Below all commit_ts: no time was found odd."""


@dataclass(frozen=True, slots=True)
class TimeDecision:
    """What was decided about times of transactions that were read for the first time,
    and the time limits that say so from now on.
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
