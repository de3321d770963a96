"""What the worker does, as logs and metrics. Phrases are TiDB's gcworker's where it has one: its runbooks apply."""

import structlog

from gcsafepoint.worker.config import GCConfig
from gcsafepoint.worker.delete_range import DeleteRange
from gcsafepoint.worker.listener import Stage
from gcsafepoint.worker.round import Result, Round
from gcsafepoint.worker.variables import shown
from server.gc_worker import metrics
from storage.model.errors import TidemarkError

_SKIPPED = "there's already a gc job running, skipped"
_NOT_MOVED = "txn safe point not advanced, GC will be skipped"
_HELD = "there's another service in the cluster requires an earlier safe point. gc will continue with the earlier one"
_BEGAN = {
    Stage.TOTAL: "starts the whole job",
    Stage.RESOLVE_LOCKS: "start resolve locks",
    Stage.DELETE_RANGES: "start delete ranges",
    Stage.REDO_DELETE_RANGES: "start redo-delete ranges",
    Stage.DO_GC: "start doing gc for all keys",
}
_ENDED = {
    Stage.RESOLVE_LOCKS: "finish resolve locks",
    Stage.DELETE_RANGES: "finish delete ranges",
    Stage.REDO_DELETE_RANGES: "finish redo-delete ranges",
    Stage.DO_GC: "finish doing gc for all keys",
}
_FAILED = {
    Stage.PREPARE: ("prepare", "leader tick"),
    Stage.RESOLVE_LOCKS: ("resolve_lock", "resolve locks returns an error"),
    Stage.DELETE_RANGES: ("delete_range", "delete range returns an error"),
    Stage.REDO_DELETE_RANGES: ("redo_delete_range", "redo-delete range returns an error"),
    Stage.UPLOAD_SAFE_POINT: ("upload_safe_point", "failed to upload safe point to PD"),
    Stage.DO_GC: ("do_gc", "do gc returns an error"),
}
_ACTIONS = {
    Stage.TOTAL: "run_job",
    Stage.RESOLVE_LOCKS: "resolve_locks",
    Stage.DELETE_RANGES: "delete_range",
    Stage.REDO_DELETE_RANGES: "redo_delete_range",
    Stage.DO_GC: "do_gc",
}
"""The labels of TiDB's metrics: what a stage counts as when it begins, and when an error ends it."""


class LogAndCount:
    """See `gcsafepoint.worker.listener.Listener`."""

    def __init__(self, uuid: str) -> None:
        self._log = structlog.get_logger(__name__).bind(category="gc worker", uuid=uuid)
        self._leads: bool | None = None
        self._enabled = True

    def led(self, *, leads: bool) -> None:
        """See `Listener`; only changes are news."""
        metrics.ACTIONS.labels("check_leader").inc()
        metrics.LEADER.set(leads)
        if leads != self._leads:
            self._log.info("gc leader" if leads else "gc follower")
            if leads:
                metrics.ACTIONS.labels("register_leader").inc()
        if not leads:
            for name in ("tikv_gc_run_interval", "tikv_gc_life_time"):
                metrics.CONFIG.labels(name).set(0)
        self._leads = leads

    def tick_failed(self, err: TidemarkError) -> None:
        """See `Listener`."""
        metrics.FAILURES.labels("check_leader").inc()
        self._log.warning("check leader", code=err.code, error=err.message)

    def configured(self, config: GCConfig) -> None:
        """See `Listener`; that GC is off is said when it is switched."""
        metrics.CONFIG.labels("tikv_gc_run_interval").set(config.run_interval_ms / 1000)
        metrics.CONFIG.labels("tikv_gc_life_time").set(config.life_time_ms / 1000)
        if self._enabled and not config.enable:
            self._log.warning("gc status is disabled.")
        self._enabled = config.enable

    def life_time_raised(self, found_ms: int, least_ms: int) -> None:
        """See `Listener`."""
        self._log.warning("invalid gc life time", found=shown(found_ms), used=shown(least_ms))

    def store_not_limited(self, address: str, err: TidemarkError) -> None:
        """See `Listener`."""
        metrics.FAILURES.labels("limit_writes").inc()
        self._log.warning("a store could not be told its gc write rate", store=address, error=str(err))

    def round_skipped(self, err: TidemarkError) -> None:
        """See `Listener`."""
        metrics.SKIPPED.labels("running").inc()
        self._log.info(_SKIPPED if err.message == _SKIPPED else err.message)

    def held_back(self, it: Round, asked_ts: int, *, moved: bool) -> None:
        """See `Listener`."""
        if not moved:
            metrics.SKIPPED.labels("safe_point_not_moved").inc()
        self._log.info(_HELD if moved else _NOT_MOVED, asked=asked_ts, safe_point=it.safe_point, blocker=it.blocker)

    def stage_began(self, stage: Stage, it: Round) -> None:
        """See `Listener`."""
        if stage in _ACTIONS:
            metrics.ACTIONS.labels(_ACTIONS[stage]).inc()
        if stage in _BEGAN:
            self._log.info(_BEGAN[stage], round=it.id, safe_point=it.safe_point, total=it.total)

    def stage_ended(self, stage: Stage, it: Round, seconds: float, err: TidemarkError | None) -> None:
        """See `Listener`."""
        if err is None:
            metrics.SECONDS.labels(stage.value).observe(seconds)
            if stage in _ENDED:
                self._log.info(_ENDED[stage], round=it.id, seconds=round(seconds, 3), done=it.done)
        elif stage in _FAILED:
            kind, phrase = _FAILED[stage]
            metrics.FAILURES.labels(kind).inc()
            self._log.error(phrase, round=it.id, safe_point=it.safe_point, error=str(err))

    def page_resolved(self, locks: int, *, more: bool) -> None:
        """See `Listener`."""
        metrics.RESOLVED_LOCKS.inc(locks)
        if more:
            metrics.TOO_MANY_LOCKS.inc()

    def range_deleted(self, it: DeleteRange, err: TidemarkError | None, *, redo: bool) -> None:
        """See `Listener`."""
        metrics.DELETED_RANGES.labels("failed" if err else "done").inc()
        place = {"job_id": it.job_id, "element_id": it.element_id, "ts": it.ts, "redo": redo}
        if err:
            metrics.DESTROY_FAILURES.labels("send").inc()
            phrase = "redo-delete range failed on range" if redo else "delete range failed on range"
            self._log.warning(phrase, **place, attempts=it.attempts + 1, error=str(err))
        else:
            self._log.info("range deleted", **place)

    def region_collected(self, err: TidemarkError | None) -> None:
        """See `Listener`."""
        metrics.REGION_RESULTS.labels("fail" if err else "success").inc()

    def round_ended(self, it: Round) -> None:
        """See `Listener`."""
        metrics.ROUNDS.labels(it.result.value).inc()
        if it.safe_point:
            metrics.SAFE_POINT.set(it.safe_point)
        say = self._log.error if it.result is Result.FAILED else self._log.info
        say(
            "gc round ended",
            round=it.id,
            result=it.result.value,
            error=it.error,
            safe_point=it.safe_point,
            regions=it.regions,
            resolved_locks=it.resolved_locks,
            deleted_ranges=it.deleted_ranges,
            failed_ranges=it.failed_ranges,
            collected_regions=it.collected_regions,
        )

    def not_remembered(self, it: Round, err: TidemarkError) -> None:
        """See `Listener`."""
        metrics.FAILURES.labels("save_round").inc()
        self._log.warning("the round could not be written to the history", round=it.id, error=str(err))
