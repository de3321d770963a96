"""The retention of history that readers have acknowledged: for a time, up to a size. Pure.

A changefeed that retains nothing gives up what all readers have acknowledged. One that retains
keeps it in the sorter, so that a reader which comes later can begin before the checkpoint.
`RetainedHistory` says from where on: its floor.

Invariants:
1. The floor never goes back, is never above what is acknowledged, and never above what a reader
   holds: no row that somebody has yet to take is given up, whatever time and size say.
2. Of what is acknowledged, the floor leaves out only what is older than the time, or what is the
   oldest of more than the size. Where both are given, the one that leaves out more counts.
3. Time is that of the source: its resolved_ts, not a clock here. A clock that jumps deletes
   nothing, and while the source is silent nothing grows old.

Sizes are those of the sorter's blocks. They are noted in stretches between two acknowledgements, of
which at most `STRETCHES_MAX` are told apart: older ones are joined in pairs.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final

from storage.model.ts import compose

STRETCHES_MAX: Final = 2048


@dataclass(frozen=True, slots=True)
class Retention:
    """How much acknowledged history is kept; 0: no such limit. Without any, nothing is."""

    age_s: int = 0
    """In seconds before the source's present."""
    size_bytes: int = 0
    """As the sorter's blocks hold it, all tables together."""

    def __bool__(self) -> bool:
        """Whether any history is kept."""
        return bool(self.age_s or self.size_bytes)


NOTHING_RETAINED: Final = Retention()


@dataclass(frozen=True, slots=True)
class _Stretch:
    """The rows up to `end_ts`, from where the one before ends."""

    end_ts: int
    size_bytes: int


class RetainedHistory:
    """The acknowledged history of one run of a changefeed; the caller serialises the calls."""

    def __init__(self, start_ts: int) -> None:
        """Begin without history at or below `start_ts`."""
        self.floor_ts = start_ts
        """Everything above it is kept."""
        self.acknowledged_ts = start_ts
        """Up to where sizes are known."""
        self.size_bytes = 0
        """What lies between the two."""
        self._stretches: deque[_Stretch] = deque()

    def acknowledged(self, ts: int, size_bytes: int) -> None:
        """Readers have what lies between the last call's `ts` and this one, so many bytes."""
        if ts <= self.acknowledged_ts:
            return
        self.acknowledged_ts = ts
        self.size_bytes += size_bytes
        if size_bytes or not self._stretches:
            self._stretches.append(_Stretch(ts, size_bytes))
        else:
            # A stretch without rows belongs to the one before: it costs nothing to keep.
            self._stretches[-1] = _Stretch(ts, self._stretches[-1].size_bytes)
        if len(self._stretches) > STRETCHES_MAX:
            self._join_pairs()

    def due_floor(self, retention: Retention, now_ts: int, held_ts: int) -> int:
        """Up to where history need not be kept at `now_ts`, the source's present.

        `held_ts`: a reader has yet to take what lies above it.
        """
        most_ts = min(self.acknowledged_ts, held_ts)
        if not retention:
            return max(self.floor_ts, most_ts)
        by_age_ts = max(0, now_ts - compose(retention.age_s * 1000)) if retention.age_s else 0
        by_size_ts = self._floor_by_size(retention.size_bytes) if retention.size_bytes else 0
        return max(self.floor_ts, min(most_ts, max(by_age_ts, by_size_ts)))

    def give_up(self, ts: int) -> int:
        """Drop all history at or below `ts`; returns the floor."""
        self.floor_ts = max(self.floor_ts, ts)
        self.acknowledged_ts = max(self.acknowledged_ts, self.floor_ts)
        # One that lies in the middle of a stretch leaves it its size: it counts too much, not too
        # little.
        while self._stretches and self._stretches[0].end_ts <= self.floor_ts:
            self.size_bytes -= self._stretches.popleft().size_bytes
        return self.floor_ts

    def _floor_by_size(self, size_bytes: int) -> int:
        """The end of the last stretch that does not fit any more; 0: all fit."""
        excess_bytes = self.size_bytes - size_bytes
        floor_ts = 0
        for stretch in self._stretches:
            if excess_bytes <= 0:
                break
            excess_bytes -= stretch.size_bytes
            floor_ts = stretch.end_ts
        return floor_ts

    def _join_pairs(self) -> None:
        """Halve the number of stretches, but for the newest, which are told apart longest."""
        stretches = [*self._stretches]
        old, new = stretches[: STRETCHES_MAX // 2], stretches[STRETCHES_MAX // 2 :]
        joined = [
            _Stretch(second.end_ts, first.size_bytes + second.size_bytes)
            for first, second in zip(old[::2], old[1::2], strict=True)
        ]
        self._stretches = deque([*joined, *new])
