"""A table's checkpoint: acknowledged ranges may come in any order, the checkpoint moves over gapless ones only. Pure.

Invariant: no row above `start_ts` and at or below `checkpoint_ts` is unacknowledged; the checkpoint never goes back.
"""


class Checkpoint:
    """Tracks which commit_ts ranges `(start_ts, end_ts]` the target has committed."""

    def __init__(self, start_ts: int) -> None:
        self.checkpoint_ts = start_ts
        self.previous_ts = start_ts  # the checkpoint before its last move: the range between can be asked for again
        self._ahead: dict[int, int] = {}  # start -> end of disjoint ranges above a gap

    def ack(self, start_ts: int, end_ts: int) -> int:
        """Acknowledge the rows in `(start_ts, end_ts]`; returns the checkpoint. Repeating it is harmless."""
        if end_ts <= self.checkpoint_ts or end_ts <= start_ts:
            return self.checkpoint_ts
        if start_ts <= self.checkpoint_ts and not self._ahead:
            self.previous_ts, self.checkpoint_ts = self.checkpoint_ts, end_ts
        else:
            self._merge(start_ts, end_ts)
            reached = self._ahead.pop(self.checkpoint_ts, None)
            if reached is not None:
                self.previous_ts, self.checkpoint_ts = self.checkpoint_ts, reached
        return self.checkpoint_ts

    def _merge(self, start_ts: int, end_ts: int) -> None:
        start_ts = max(start_ts, self.checkpoint_ts)
        touching = [start for start, end in self._ahead.items() if start <= end_ts and end >= start_ts]
        for start in touching:
            start_ts, end_ts = min(start_ts, start), max(end_ts, self._ahead.pop(start))
        self._ahead[start_ts] = end_ts
