"""How far the tables of a share are, as its worker last told:
all that is asked often is answered from here.

Positions only move forward: a message that was overtaken by an acknowledgement's answer changes
nothing back.
"""

import threading

from tidemarkpb.v1 import worker_pb2 as pb

from server.capture.processor import ProcessorStats
from server.capture.worker.wire import span_of
from storage.model.span import Span


class Mirror:
    """Written on the event loop and by acknowledgements, read by any thread."""

    def __init__(self, start_ts: int) -> None:
        self.resolved_ts = self.checkpoint_ts = start_ts
        self.stats = ProcessorStats()
        self.ends = 0
        """How many pullers of tables have ended; as new as the checkpoint_ts, or newer."""
        self._lock = threading.Lock()
        self._spans: dict[Span, tuple[int, int]] = {}
        self._start_ts = start_ts

    def absorb(self, message: pb.ShareProgress) -> None:
        """Take what the worker tells."""
        self.ended(message.ends)
        for progress in message.spans:
            span = span_of(progress.span)
            resolved_ts, checkpoint_ts = self.table(span)
            self._spans[span] = (
                max(resolved_ts, progress.resolved_ts),
                max(checkpoint_ts, progress.checkpoint_ts),
            )
        self.resolved_ts = max(self.resolved_ts, message.resolved_ts)
        self.acknowledged(message.checkpoint_ts)
        self.stats = ProcessorStats(
            message.regions,
            message.staged_bytes,
            message.sorter_memory_bytes,
            message.sorter_disk_bytes,
            message.disk_error,
            message.waiting,
            message.pulled_ts,
            message.sorted_ts,
        )

    def acknowledged(self, checkpoint_ts: int) -> None:
        """The share's checkpoint_ts is at least that."""
        with self._lock:
            self.checkpoint_ts = max(self.checkpoint_ts, checkpoint_ts)

    def ended(self, ends: int) -> None:
        """At least so many pullers have; to be told before the checkpoint_ts that comes with it."""
        with self._lock:
            self.ends = max(self.ends, ends)

    def table(self, span: Span) -> tuple[int, int]:
        """The resolved_ts and checkpoint_ts of one table in one place."""
        return self._spans.get(span, (self._start_ts, self._start_ts))
