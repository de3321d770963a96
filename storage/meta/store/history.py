"""How much history the embedded server keeps: by count, by age and, always, by bytes (pure:
the clock is an argument).

Reads of the past and watches that fell behind need the kept changes; a client that needs older ones
gets etcd's "compacted" error and reads the present state.
"""

from collections import deque
from dataclasses import dataclass

from storage.meta.store.state import State

_SAMPLES = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Bounds of the kept history, and of the pairs."""

    revisions: int = 10_000
    """Revisions kept; 0: any number."""
    age_s: float = 3600.0
    """Age of the oldest kept change in seconds; 0: any."""
    log_bytes: int = 64 << 20
    """Bytes of kept changes."""
    quota_bytes: int = 256 << 20
    """Bytes of the present pairs; beyond it puts are refused,
    as etcd does at --quota-backend-bytes.
    """


class History:
    """Decides at which revision to compact."""

    def __init__(self, retention: Retention) -> None:
        self._retention = retention
        # (time, newest revision then)
        self._newest: deque[tuple[float, int]] = deque()

    def due(self, state: State, now: float) -> int:
        """The revision to compact at; 0 when there is nothing to do.

        A tenth of slack keeps compactions few.
        """
        retention = self._retention
        floor = self._floor_by_age(state, now)
        if (
            retention.revisions
            and state.revision - state.compact_revision > retention.revisions * 11 // 10
        ):
            floor = max(floor, state.revision - retention.revisions)
        if state.log_bytes > retention.log_bytes:
            floor = max(floor, state.revision_within(retention.log_bytes * 9 // 10))
        return floor if floor > state.compact_revision else 0

    def _floor_by_age(self, state: State, now: float) -> int:
        age_s = self._retention.age_s
        if not age_s:
            return 0
        if not self._newest or now - self._newest[-1][0] >= age_s / _SAMPLES:
            self._newest.append((now, state.revision))
        floor = 0
        while self._newest and now - self._newest[0][0] > age_s:
            floor = self._newest.popleft()[1]
        return floor
