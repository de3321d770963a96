"""How far a table sink may go: a ResolvedTs, normal or with a batch id,
and the rules that choose it. Pure.

Several transactions may share a commit_ts. While more of them may come, what was handed over is
announced with a batch id, and everything below that commit_ts only is complete. Source: TiCDC's
sink manager.
"""

import enum
from dataclasses import dataclass
from typing import Final

from storage.model.event import Position

_ALL_BATCHES: Final = (1 << 64) - 1


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
    """What may be announced (None: nothing new); TiCDC's doEmitAndAdvance.

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
