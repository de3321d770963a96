"""The acknowledged history that a changefeed keeps (docs/design/0035): its size, and which part may
be dropped.

Each run of a changefeed has its own history, as its sorter is empty at the beginning.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from gcsafepoint.explain.explanation import time_of
from server.capture.processor import Sink
from sink.holds import Holds
from sink.retention import RetainedHistory, Retention
from sink.versions import Versions
from sorter.errors import RangeCleanedError, TableNotFoundError


def not_kept(changefeed: str, start_ts: int, kept_ts: int) -> RangeCleanedError:
    """Return the error for a reader that requests history older than what is kept."""
    return RangeCleanedError(
        f"changefeed {changefeed} keeps what was committed after {kept_ts} ({time_of(kept_ts)}), and "
        f"what was between {start_ts} and then is gone: begin at {kept_ts} or later. A longer history "
        "is kept by `tidemark cli changefeed update --retain`, from then on"
    )


class KeptHistory:
    """The acknowledged history that a run of a changefeed keeps."""

    def __init__(self, *, is_kept: bool) -> None:
        self.changing = asyncio.Lock()
        """Held while some of it is given up, and while a reader is given its place in it."""
        self.size_bytes = 0
        """The size at the last measurement."""
        self.is_kept = is_kept
        """Whether the run keeps history; that does not change before the run ends."""
        self._sink: Sink | None = None
        self._history = RetainedHistory(0)

    def begin(self, *, is_kept: bool) -> None:
        """Forget the history of the former run, and begin that of another one."""
        self.is_kept, self.size_bytes, self._sink = is_kept, 0, None

    def look(self, sink: Sink, due: "RetentionBounds") -> None:
        """Measure the history acknowledged since the last call, and drop what need not be kept;
        blocks.

        Raises:
            TidemarkError: a capture that has some of the tables does not answer; the next look
                does what this one left.
        """
        if sink is not self._sink:
            # Readers may have acknowledged something before this first look.
            self._sink, self._history = sink, RetainedHistory(sink.kept_ts())
        history = self._history
        # A table that was pulled again, or has moved, has its history only from there on.
        history.give_up(sink.kept_ts())
        acknowledged = (history.acknowledged_ts, sink.checkpoint_ts())
        for start_ts, end_ts in _stretches(due.versions, *acknowledged):
            history.acknowledged(end_ts, _size_bytes(sink, start_ts, end_ts))
        due_ts = history.due_floor(due.retention, sink.resolved_ts(), due.held_ts)
        # No reader can begin within a stretch where tables were read again.
        due_ts = due.holds.acknowledged(due_ts)
        if due_ts > history.floor_ts:
            sink.keep_above(due_ts)
            history.give_up(due_ts)
        self.size_bytes = history.size_bytes


@dataclass(frozen=True, slots=True)
class RetentionBounds:
    """Inputs for deciding how much history to keep."""

    retention: Retention
    held_ts: int
    """The lowest ts that a reader still needs the changes above."""
    versions: Versions
    holds: Holds


def _stretches(versions: Versions, start_ts: int, end_ts: int) -> Iterator[tuple[int, int]]:
    """The range, divided at schema changes: nothing is planned across one."""
    while start_ts < end_ts:
        until_ts = min(versions.next_change(start_ts), end_ts)
        yield start_ts, until_ts
        start_ts = until_ts


def _size_bytes(sink: Sink, start_ts: int, end_ts: int) -> int:
    try:
        return sum(part.bytes for part in sink.plan_tables(None, start_ts, end_ts))
    except (RangeCleanedError, TableNotFoundError):
        # A table has come, gone or moved just now: what it had here is not kept.
        return 0
