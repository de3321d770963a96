"""Waiting for rows to be complete, in the threads of a Flight server; whoever waits is let go when it closes."""

import threading
import time
from typing import Final

from server.capture.processor import Sink
from storage.model.span import Span

READ_WAIT_S: Final = 60.0
_STEP_S = 0.5


class Waiting:
    """Shared by all calls of one listener."""

    def __init__(self) -> None:
        self._closing = threading.Event()

    def close(self) -> None:
        """End all waiting."""
        self._closing.set()

    def pause(self, seconds: float) -> bool:
        """Wait; returns whether the listener closes."""
        return self._closing.wait(seconds)

    def resolved(self, sink: Sink, span: Span | None, ts: int, limit_s: float) -> bool:
        """Wait until the table (None: all) is resolved up to `ts`, for `limit_s` at most; returns whether it is."""
        deadline = time.monotonic() + limit_s
        while (left_s := deadline - time.monotonic()) > 0 and not self._closing.is_set():
            if sink.wait_resolved(ts - 1, min(left_s, _STEP_S), span) >= ts:
                return True
        return sink.resolved_ts(span) >= ts
