"""What the worker does, as logs and metrics. Phrases follow TiDB's gcworker, so that its runbooks apply."""

import structlog

from gcsafepoint.worker.delete_ranges import DeleteRange
from gcsafepoint.worker.round import Phase, Round
from server.gc_worker import metrics
from storage.model.errors import TidemarkError

_log = structlog.get_logger(__name__)


class LogAndCount:
    """See `gcsafepoint.worker.worker.Listener`."""

    def __init__(self, uuid: str) -> None:
        self._log = _log.bind(uuid=uuid)
        self._leads: bool | None = None

    def led(self, *, leads: bool) -> None:
        """See `Listener`; only changes are news."""
        metrics.LEADER.set(leads)
        if leads != self._leads:
            self._log.info("gc leader" if leads else "gc follower")
        self._leads = leads

    def tick_failed(self, err: TidemarkError) -> None:
        """See `Listener`."""
        metrics.TICK_FAILURES.inc()
        self._log.warning("gc tick failed", code=err.code, error=err.message)

    def round_skipped(self, err: TidemarkError) -> None:
        """See `Listener`."""
        metrics.ROUNDS.labels("skipped").inc()
        self._log.warning(err.message)

    def phase_ended(self, phase: Phase, seconds: float) -> None:
        """See `Listener`."""
        metrics.PHASE_SECONDS.labels(phase.label).observe(seconds)

    def locks_resolved(self, locks: int) -> None:
        """See `Listener`."""
        metrics.RESOLVED_LOCKS.inc(locks)

    def range_deleted(self, it: DeleteRange, err: TidemarkError | None) -> None:
        """See `Listener`."""
        metrics.DELETED_RANGES.labels("failed" if err else "done").inc()
        place = {"job_id": it.job_id, "element_id": it.element_id, "ts": it.ts}
        if err:
            self._log.error("delete range failed, the next round tries again", **place, error=str(err))
        else:
            self._log.info("range deleted", **place)

    def round_ended(self, it: Round, outcome: str, err: TidemarkError | None) -> None:
        """See `Listener`."""
        metrics.ROUNDS.labels(outcome).inc()
        if it.safe_point:
            metrics.SAFE_POINT.set(it.safe_point)
        say = self._log.error if err else self._log.info
        say(
            "gc round ended",
            result=it.result,
            safe_point=it.safe_point,
            regions=it.regions,
            resolved_locks=it.resolved_locks,
            deleted_ranges=it.deleted_ranges,
            failed_ranges=it.failed_ranges,
        )
