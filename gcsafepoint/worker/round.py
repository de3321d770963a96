"""The rounds of GC as a state machine: their phases in order, skipped rounds, and the bound of a
round (pure).

1. A round goes prepare → resolve locks → delete ranges → do gc → ended, or ends early; it never
   goes back.
2. A round in one of the first phases is alone there: the next one is skipped.
3. Do GC gives way: once a newer round gets there, the older one is superseded, for the newer does
   its work as well.

A round may go up to now - life_time, held back by running transactions and by other services
(`SafePointBound`):

4. A snapshot at or after the safepoint reads the same before and after GC, and its transaction may
   still commit.
5. The safepoint never goes back: what a longer life_time would keep may be gone already.
6. Of all services the one with the smallest safepoint decides (TiDB: adaptive GC safepoint).
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from storage.model.errors import ConflictError
from storage.model.ts import compose, physical_ms


class GCRunningError(ConflictError):
    """The previous round has not come far enough for another one."""

    code = "ErrGCRunning"


class Phase(enum.IntEnum):
    """The phases of a round, in order."""

    PREPARE = 0
    RESOLVE_LOCKS = 1
    DELETE_RANGES = 2
    DO_GC = 3
    ENDED = 4

    @property
    def label(self) -> str:
        """Its name for people, as TiDB's documents have it: "resolve locks"."""
        return self.name.lower().replace("_", " ")


class Result(enum.StrEnum):
    """The outcome of a round; RUNNING: it has not ended."""

    RUNNING = ""
    DONE = "done"
    NOTHING_NEW = "no new safepoint"
    GAVE_WAY = "gave way to the next round"
    LOST = "lost the lease"
    FAILED = "failed"
    STOPPED = "stopped"
    ABANDONED = "abandoned"


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round, running or ended; times in ms on the coordinator's clock."""

    id: int
    """The timestamp it began at; no two rounds share one."""
    worker: str = ""
    phase: Phase = Phase.PREPARE
    started_ms: int = 0
    ended_ms: int = 0
    phase_started_ms: int = 0
    phase_ms: Mapping[str, int] = field(default_factory=dict)
    """The time that each phase took."""
    safe_point: int = 0
    blocker: str = ""
    """The service or transaction that keeps the safepoint from being greater; "" if only life_time
    does.
    """
    total: int = 0
    """The regions or ranges of the current phase that were to be done when it began."""
    done: int = 0
    """The number of them that are done; more than `total` if regions split meanwhile."""
    regions: int = 0
    resolved_locks: int = 0
    deleted_ranges: int = 0
    failed_ranges: int = 0
    collected_regions: int = 0
    result: Result = Result.RUNNING
    error: str = ""

    def eta_ms(self, now_ms: int) -> int | None:
        """The time that the current phase still takes at its present rate; None if that is not
        known.
        """
        if self.phase is Phase.ENDED or not self.done:
            return None
        return max(0, (now_ms - self.phase_started_ms) * (self.total - self.done) // self.done)


class Rounds:
    """The running rounds, and the last one that has ended."""

    def __init__(self, worker: str = "") -> None:
        self._worker = worker
        self._running: dict[int, Round] = {}
        self._newest_in_do_gc = 0
        self.last: Round | None = None

    @property
    def newest(self) -> Round | None:
        """The newest running round, or the last that ended."""
        return max(self._running.values(), key=lambda gc_round: gc_round.id, default=self.last)

    @property
    def running(self) -> frozenset[int]:
        """The ids of those that run."""
        return frozenset(self._running)

    def __getitem__(self, round_id: int) -> Round:
        """The running round of that id."""
        return self._running[round_id]

    def admit(self, round_id: int, now_ms: int) -> Round:
        """Start the round with the id `round_id`.

        Raises:
            GCRunningError: one has not reached Do GC yet.
        """
        # Do GC may take longer than the interval between rounds, and gives way to the next one.
        if any(gc_round.phase < Phase.DO_GC for gc_round in self._running.values()):
            raise GCRunningError("there's already a gc job running, skipped")
        gc_round = Round(
            id=round_id, worker=self._worker, started_ms=now_ms, phase_started_ms=now_ms
        )
        self._running[round_id] = gc_round
        return gc_round

    def enter(self, round_id: int, phase: Phase, now_ms: int) -> Round:
        """Go on to the next phase; the one before it took until now."""
        before = self._running[round_id]
        assert phase == before.phase + 1 < Phase.ENDED, (
            f"from {before.phase.label} to {phase.label}"
        )
        self._running[round_id] = replace(
            _with_phase_ended(before, now_ms), phase=phase, phase_started_ms=now_ms, total=0, done=0
        )
        if phase is Phase.DO_GC:
            self._newest_in_do_gc = max(self._newest_in_do_gc, round_id)
        return self._running[round_id]

    def set_safe_point(self, round_id: int, safe_point: int, blocker: str = "") -> None:
        """Set the round's safepoint, before its first phase on data."""
        before = self._running[round_id]
        assert before.phase is Phase.PREPARE, f"a safepoint for {before.phase.label}"
        self._running[round_id] = replace(before, safe_point=safe_point, blocker=blocker)

    def set_total(self, round_id: int, total: int) -> None:
        """Set how many regions or ranges the current phase has to do."""
        self._running[round_id] = replace(self._running[round_id], total=total)

    def superseded(self, round_id: int) -> bool:
        """Whether a newer round has reached Do GC."""
        return round_id < self._newest_in_do_gc

    def count(
        self,
        round_id: int,
        *,
        regions: int = 0,
        resolved_locks: int = 0,
        deleted_ranges: int = 0,
        failed_ranges: int = 0,
        collected_regions: int = 0,
    ) -> None:
        """Add to the round's counts."""
        gc_round = self._running[round_id]
        self._running[round_id] = replace(
            gc_round,
            done=gc_round.done + regions + deleted_ranges + failed_ranges + collected_regions,
            regions=gc_round.regions + regions,
            resolved_locks=gc_round.resolved_locks + resolved_locks,
            deleted_ranges=gc_round.deleted_ranges + deleted_ranges,
            failed_ranges=gc_round.failed_ranges + failed_ranges,
            collected_regions=gc_round.collected_regions + collected_regions,
        )

    def end(self, round_id: int, result: Result, now_ms: int, error: str = "") -> Round:
        """End a running round."""
        gc_round = _with_phase_ended(self._running.pop(round_id), now_ms)
        self.last = replace(
            gc_round, phase=Phase.ENDED, ended_ms=now_ms, result=result, error=error
        )
        return self.last


def _with_phase_ended(gc_round: Round, now_ms: int) -> Round:
    took_ms = {
        **gc_round.phase_ms,
        gc_round.phase.label: max(0, now_ms - gc_round.phase_started_ms),
    }
    return replace(gc_round, phase_ms=took_ms)


@dataclass(frozen=True, slots=True)
class SafePointBound:
    """A safepoint, and the service or transaction that keeps it from being greater; "" if only
    life_time does.
    """

    ts: int
    blocker: str = ""


def target_safe_point(
    now_ts: int, life_time_ms: int, running: tuple[int, str] | None
) -> SafePointBound:
    """The safepoint by the life time and by the oldest running transaction of a TiDB server:
    `running` has its start_ts and the server.
    """
    by_age = compose(max(0, physical_ms(now_ts) - life_time_ms))
    # A transaction that began at the safepoint itself may still commit (rule 4).
    if running is None or running[0] >= by_age:
        return SafePointBound(by_age)
    start_ts, server = running
    return SafePointBound(start_ts, f"the transaction {start_ts} of TiDB server {server}")


def limited_by_service(target: SafePointBound, service_min: int, service_id: str) -> SafePointBound:
    """The lower one of `target` and the minimum over all services, which `service_id` has."""
    return (
        SafePointBound(service_min, f"the service {service_id}")
        if service_min < target.ts
        else target
    )


def round_is_due(now_ms: int, last_run_ms: int | None, run_interval_ms: int) -> bool:
    """Whether it is time for the next round."""
    return last_run_ms is None or now_ms - last_run_ms >= run_interval_ms
