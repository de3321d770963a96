"""How far a table of the sink is: three measures, and the rules that move them. Pure.

- `Progress` is where the table's next task begins. The progress heap (TiCDC's sinkProgressHeap)
  says which table is served next. A table has at most one entry, in the heap, parked, or with a
  worker; an entry of an earlier incarnation (version) is dropped when it comes up. Tables with
  nothing new are parked until they have, so they never keep others from their turn.
- `ResolvedTs` is what was handed over, normal or with a batch id. Several transactions may share a
  commit_ts. While more of them may come, what was handed over is announced with a batch id, and
  everything below that commit_ts only is complete. Source: TiCDC's sink manager.
- `Checkpoint` is what was acknowledged. Ranges may come in any order; the checkpoint moves over
  gapless ones only. No row above `start_ts` and at or below `checkpoint_ts` is unacknowledged; the
  checkpoint never goes back.
"""

import enum
import heapq
from dataclasses import dataclass
from typing import Final, NamedTuple

from storage.model.event import Position
from storage.model.span import Span
from storage.model.ts import MAX_TS

_ALL_BATCHES: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True, order=True)
class Progress:
    """Where the next task of a table begins; the slowest table sorts first."""

    next_lower: Position
    span: Span
    version: int


class ProgressHeap:
    """Tables waiting for a task, slowest first."""

    def __init__(self) -> None:
        self._heap: list[Progress] = []
        self._parked: dict[Span, Progress] = {}
        self._versions: dict[Span, int] = {}

    def admit(self, progress: Progress) -> None:
        """Begin with a new incarnation of the table;
        entries of an earlier one are ignored from now on.
        """
        # They stay in the heap, where finding them would cost as much as it has entries; `pop`
        # drops them.
        self.remove(progress.span)
        self._versions[progress.span] = progress.version
        self.push(progress)

    def remove(self, span: Span) -> None:
        """Accept no more entries of the table."""
        self._versions.pop(span, None)
        self._parked.pop(span, None)

    def push(self, progress: Progress) -> None:
        """Let a table wait for its next task; ignored when the table has left meanwhile."""
        if self._is_live(progress):
            heapq.heappush(self._heap, progress)

    def pop(self) -> Progress | None:
        """Take the slowest table."""
        while self._heap:
            progress = heapq.heappop(self._heap)
            if self._is_live(progress):
                return progress
        return None

    def park(self, progress: Progress) -> None:
        """Set a table aside that has nothing new."""
        if self._is_live(progress):
            self._parked[progress.span] = progress

    def is_parked(self, span: Span) -> bool:
        """Whether it was set aside."""
        return span in self._parked

    def wake(self, span: Span) -> bool:
        """Let a parked table wait for a task again, as it may have something new; returns whether
        it was parked.
        """
        progress = self._parked.pop(span, None)
        if progress is not None:
            heapq.heappush(self._heap, progress)
        return progress is not None

    def _is_live(self, progress: Progress) -> bool:
        return self._versions.get(progress.span) == progress.version


@dataclass(frozen=True, slots=True, order=True)
class ResolvedTs:
    """Everything up to `ts`, or (with a batch id) a part of what has commit_ts `ts` and everything
    below.
    """

    ts: int
    batch_id: int = _ALL_BATCHES

    @property
    def is_batch(self) -> bool:
        """Whether rows with commit_ts `ts` may still be missing."""
        return self.batch_id != _ALL_BATCHES

    @property
    def mark(self) -> int:
        """The commit_ts up to which nothing is missing."""
        return self.ts - 1 if self.is_batch else self.ts


class Acquire(enum.Enum):
    """How a task asks for more memory."""

    # stop here if there is none: the task is at the end of a transaction
    TRY = "try"
    # go on in any case: an unfinished transaction cannot be handed over, so waiting would deadlock
    FORCE = "force"
    # wait: what was handed over of the split transaction can drain meanwhile
    BLOCK = "block"


def acquire_mode(*, txn_finished: bool, split_txn: bool) -> Acquire:
    """TiCDC's rule for a task that has used up its memory."""
    if txn_finished:
        return Acquire.TRY
    return Acquire.BLOCK if split_txn else Acquire.FORCE


def advance_to(
    *,
    last: Position,
    current_commit_ts: int,
    previous_commit_ts: int,
    batch_id: int,
    split_txn: bool,
) -> ResolvedTs | None:
    """The timestamp that may be announced (None: nothing new); TiCDC's doEmitAndAdvance.

    `last` is the position of the last finished transaction, `current_commit_ts` that of the
    transaction being read, `previous_commit_ts` the last one before it that was read to its end.
    """
    if last.commit_ts == current_commit_ts > 0:
        return (
            ResolvedTs(current_commit_ts)
            if last.is_commit_fence
            else ResolvedTs(current_commit_ts, batch_id)
        )
    if split_txn:
        return ResolvedTs(current_commit_ts, batch_id) if current_commit_ts > 0 else None
    return ResolvedTs(previous_commit_ts) if previous_commit_ts > 0 else None


class CheckpointPosition(NamedTuple):
    """A checkpoint_ts, and where it stood before its last move:
    the range between can be asked for again.
    """

    previous_ts: int
    checkpoint_ts: int


class SharedCheckpoint:
    """The position that was acknowledged of all tables of a changefeed at once: one object that
    they share.
    """

    __slots__ = ("keep_ts", "position")

    def __init__(self) -> None:
        self.position = CheckpointPosition(0, 0)
        self.keep_ts = MAX_TS
        """What is acknowledged stays readable above it, too; MAX_TS: nothing is kept for long."""

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
        # The usual case, in order and without a gap, makes no dictionary: there are as many
        # checkpoints as tables.
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
        """The table's position if all tables were acknowledged up to `shared` besides."""
        if shared.checkpoint_ts <= self.checkpoint_ts:
            return CheckpointPosition(self.previous_ts, self.checkpoint_ts)
        return CheckpointPosition(max(self.checkpoint_ts, shared.previous_ts), shared.checkpoint_ts)

    def raise_to(self, shared: CheckpointPosition) -> None:
        """Note that all tables were acknowledged up to `shared`."""
        # In two steps, so that `previous_ts` is where the table could be asked again from before.
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
