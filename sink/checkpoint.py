"""A table's checkpoint: acknowledged ranges may come in any order,
the checkpoint moves over gapless ones only. Pure.

Invariant: no row above `start_ts` and at or below `checkpoint_ts` is unacknowledged; the checkpoint
never goes back.
"""

from typing import NamedTuple


class CheckpointPosition(NamedTuple):
    """A checkpoint_ts, and where it stood before its last move:
    the range between can be asked for again.
    """

    previous_ts: int
    checkpoint_ts: int


class SharedCheckpoint:
    """What was acknowledged of all tables of a changefeed at once: one object that they share."""

    __slots__ = ("position",)

    def __init__(self) -> None:
        self.position = CheckpointPosition(0, 0)

    def move(self, ts: int) -> bool:
        """All up to `ts` is acknowledged; returns whether that is news."""
        before_ts = self.position.checkpoint_ts
        if ts > before_ts:
            self.position = CheckpointPosition(before_ts, ts)
        return ts > before_ts


class Checkpoint:
    """Tracks which commit_ts ranges `(start_ts, end_ts]` the target has committed."""

    __slots__ = ("_ahead", "checkpoint_ts", "previous_ts")

    def __init__(self, start_ts: int) -> None:
        self.checkpoint_ts = start_ts
        self.previous_ts = start_ts
        # start -> end of disjoint ranges above a gap
        self._ahead: dict[int, int] | None = None

    def ack(self, start_ts: int, end_ts: int) -> int:
        """Acknowledge the rows in `(start_ts, end_ts]`; returns the checkpoint.

        Repeating it is harmless.
        """
        if end_ts <= self.checkpoint_ts or end_ts <= start_ts:
            return self.checkpoint_ts
        if start_ts <= self.checkpoint_ts and not self._ahead:
            self.previous_ts, self.checkpoint_ts = self.checkpoint_ts, end_ts
        else:
            ahead = self._merge(start_ts, end_ts)
            reached = ahead.pop(self.checkpoint_ts, None)
            if reached is not None:
                self.previous_ts, self.checkpoint_ts = self.checkpoint_ts, reached
            self._ahead = ahead or None
        return self.checkpoint_ts

    def with_shared(self, shared: CheckpointPosition) -> CheckpointPosition:
        """Where the table stands if all up to `shared` was acknowledged, too, in its two steps."""
        if shared.checkpoint_ts <= self.checkpoint_ts:
            return CheckpointPosition(self.previous_ts, self.checkpoint_ts)
        return CheckpointPosition(max(self.checkpoint_ts, shared.previous_ts), shared.checkpoint_ts)

    def raise_to(self, shared: CheckpointPosition) -> None:
        """All up to `shared` was acknowledged, in its two steps."""
        for ts in shared:
            self.ack(self.checkpoint_ts, ts)

    def _merge(self, start_ts: int, end_ts: int) -> dict[int, int]:
        ahead = self._ahead or {}
        start_ts = max(start_ts, self.checkpoint_ts)
        touching = [start for start, end in ahead.items() if start <= end_ts and end >= start_ts]
        for start in touching:
            start_ts, end_ts = min(start_ts, start), max(end_ts, ahead.pop(start))
        ahead[start_ts] = end_ts
        return ahead
