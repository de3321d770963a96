"""The rounds of GC as a state machine (pure): their phases in order, what is skipped, what has been done.

1. A round goes prepare → resolve locks → delete ranges → do gc → ended, or ends early; it never goes back.
2. A round in one of the first phases is alone there: the next one is skipped.
3. Do GC gives way: once a newer round gets there, the older one is superseded, for the newer does its work as well.
"""

import enum
from dataclasses import dataclass, replace

from storage.model.errors import ConflictError


class GCRunningError(ConflictError):
    """The previous round has not come far enough for another one."""

    code = "ErrGCRunning"


class Phase(enum.IntEnum):
    """Where a round is, in order."""

    PREPARE = 0
    RESOLVE_LOCKS = 1
    DELETE_RANGES = 2
    DO_GC = 3
    ENDED = 4

    @property
    def label(self) -> str:
        """Its name for people, as in the seed: "resolve locks"."""
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round, running or ended."""

    number: int
    started_ms: int
    phase: Phase = Phase.PREPARE
    safe_point: int = 0
    regions: int = 0
    resolved_locks: int = 0
    deleted_ranges: int = 0
    failed_ranges: int = 0
    result: str = ""


class Rounds:
    """Which rounds run; of those that ended, the last."""

    def __init__(self) -> None:
        self._running: dict[int, Round] = {}
        self._started = 0
        self._newest_in_do_gc = 0
        self.last: Round | None = None

    @property
    def newest(self) -> Round | None:
        """The newest running round, or the last that ended."""
        return max(self._running.values(), key=lambda it: it.number, default=self.last)

    def admit(self, now_ms: int) -> int:
        """Start a round; returns its number.

        Raises:
            GCRunningError: one has not reached Do GC yet.
        """
        if any(it.phase < Phase.DO_GC for it in self._running.values()):
            raise GCRunningError("there's already a gc job running, skipped")
        self._started += 1
        self._running[self._started] = Round(number=self._started, started_ms=now_ms)
        return self._started

    def enter(self, number: int, phase: Phase) -> None:
        """Go on to the next phase."""
        before = self._running[number]
        assert phase == before.phase + 1 < Phase.ENDED, f"from {before.phase.label} to {phase.label}"
        self._running[number] = replace(before, phase=phase)
        if phase is Phase.DO_GC:
            self._newest_in_do_gc = number

    def aim(self, number: int, safe_point: int) -> None:
        """Set what the round collects up to, before its first phase on data."""
        before = self._running[number]
        assert before.phase is Phase.PREPARE, f"a safepoint for {before.phase.label}"
        self._running[number] = replace(before, safe_point=safe_point)

    def superseded(self, number: int) -> bool:
        """Whether a newer round has reached Do GC."""
        return number < self._newest_in_do_gc

    def count(
        self, number: int, *, regions: int = 0, resolved_locks: int = 0, deleted_ranges: int = 0, failed_ranges: int = 0
    ) -> None:
        """Add to what the round has done."""
        it = self._running[number]
        self._running[number] = replace(
            it,
            regions=it.regions + regions,
            resolved_locks=it.resolved_locks + resolved_locks,
            deleted_ranges=it.deleted_ranges + deleted_ranges,
            failed_ranges=it.failed_ranges + failed_ranges,
        )

    def end(self, number: int, result: str) -> Round:
        """Take the round from the running ones."""
        self.last = replace(self._running.pop(number), phase=Phase.ENDED, result=result)
        return self.last
