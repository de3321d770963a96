"""The GC worker's events as logs and Prometheus metrics:
TiDB's phrases and names where TiDB has one.

So its runbooks and dashboards apply. TiDB's counters `gc_failure`, `gc_action_result`,
`gc_region_too_many_locks`, `gc_unsafe_destroy_range_failures` have no `_total`, which this client
always adds to a Counter: they are gauges here that only grow.
"""

import structlog
from prometheus_client import Counter, Gauge, Histogram

from gcsafepoint.worker.config import GCConfig, format_duration_ms
from gcsafepoint.worker.delete_ranges import DeleteRange
from gcsafepoint.worker.gc_leader import Stage
from gcsafepoint.worker.round import Result, Round
from server.leader_gauge import LeaderGauge
from storage.model.errors import TidemarkError
from storage.model.ts import physical_s

ACTIONS = Counter("tidb_tikvclient_gc_worker_actions_total", "What the worker did", ["type"])
SECONDS = Histogram(
    "tidb_tikvclient_gc_seconds",
    "Duration of each stage of a round that went through it",
    ["stage"],
    buckets=tuple(2.0**power for power in range(-4, 20)),
)
CONFIG = Gauge(
    "tidb_tikvclient_gc_config", "Settings of the GC leader, in seconds; 0 at a follower", ["type"]
)
FAILURES = Gauge("tidb_tikvclient_gc_failure", "Stages that an error ended; only grows", ["type"])
REGION_RESULTS = Gauge(
    "tidb_tikvclient_gc_action_result", "Regions collected in mode central; only grows", ["type"]
)
TOO_MANY_LOCKS = Gauge(
    "tidb_tikvclient_gc_region_too_many_locks", "Second looks at one region's locks; only grows"
)
DESTROY_FAILURES = Gauge(
    "tidb_tikvclient_gc_unsafe_destroy_range_failures",
    "Ranges that a store did not destroy; only grows",
    ["type"],
)
LEADER = Gauge("tidemark_gc_leader", "1 while this worker is GC leader")
SAFE_POINT = LeaderGauge(
    "tidemark_gc_safe_point",
    "Safepoint of the leader's last round, a TSO timestamp; only at the leader",
)
SAFE_POINT_SECONDS = LeaderGauge(
    "tidemark_gc_safe_point_timestamp_seconds",
    "Unix time of tidemark_gc_safe_point; only at the leader",
)
ROUNDS = Counter("tidemark_gc_rounds_total", "GC rounds by how they ended", ["result"])
SKIPPED = Counter(
    "tidemark_gc_skipped_total", "Rounds that did not resolve or collect anything", ["reason"]
)
RESOLVED_LOCKS = Counter("tidemark_gc_resolved_locks_total", "Locks committed or rolled back by GC")
DELETED_RANGES = Counter(
    "tidemark_gc_deleted_ranges_total", "Ranges destroyed on all stores, or not", ["result"]
)

_SKIPPED = "there's already a gc job running, skipped"
_NOT_MOVED = "txn safe point not advanced, GC will be skipped"
_HELD = (
    "there's another service in the cluster requires an earlier safe point. gc will continue with "
    "the earlier one"
)
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
"""The labels of TiDB's metrics: what a stage counts as when it begins,
and when an error ends it.
"""


class LogAndCount:
    """See `gcsafepoint.worker.gc_leader.Listener`."""

    def __init__(self, uuid: str) -> None:
        self._log = structlog.get_logger(__name__).bind(category="gc worker", uuid=uuid)
        self._leads: bool | None = None
        self._enabled = True

    def tick_ended(self, *, leads: bool) -> None:
        """See `Listener`; only changes are news."""
        ACTIONS.labels("check_leader").inc()
        LEADER.set(leads)
        # A tick comes every minute; only changes are news.
        if leads != self._leads:
            self._log.info("gc leader" if leads else "gc follower")
            if leads:
                ACTIONS.labels("register_leader").inc()
        if not leads:
            for name in ("tikv_gc_run_interval", "tikv_gc_life_time"):
                CONFIG.labels(name).set(0)
            SAFE_POINT.clear()
            SAFE_POINT_SECONDS.clear()
        self._leads = leads

    def tick_failed(self, err: TidemarkError) -> None:
        """See `Listener`."""
        FAILURES.labels("check_leader").inc()
        self._log.warning("check leader", code=err.code, error=err.message)

    def configured(self, config: GCConfig) -> None:
        """See `Listener`; that GC is off is said when it is switched."""
        CONFIG.labels("tikv_gc_run_interval").set(config.run_interval_ms / 1000)
        CONFIG.labels("tikv_gc_life_time").set(config.life_time_ms / 1000)
        if self._enabled and not config.enable:
            self._log.warning("gc status is disabled.")
        self._enabled = config.enable

    def life_time_raised(self, configured_ms: int, least_ms: int) -> None:
        """See `Listener`."""
        self._log.warning(
            "invalid gc life time",
            found=format_duration_ms(configured_ms),
            used=format_duration_ms(least_ms),
        )

    def store_not_limited(self, address: str, err: TidemarkError) -> None:
        """See `Listener`."""
        FAILURES.labels("limit_writes").inc()
        self._log.warning(
            "a store could not be told its gc write rate", store=address, error=str(err)
        )

    def round_skipped(self, err: TidemarkError) -> None:
        """See `Listener`."""
        SKIPPED.labels("running").inc()
        self._log.info(_SKIPPED if err.message == _SKIPPED else err.message)

    def held_back(self, gc_round: Round, target_ts: int, *, moved: bool) -> None:
        """See `Listener`."""
        if not moved:
            SKIPPED.labels("safe_point_not_moved").inc()
        self._log.info(
            _HELD if moved else _NOT_MOVED,
            asked=target_ts,
            safe_point=gc_round.safe_point,
            blocker=gc_round.blocker,
        )

    def stage_began(self, stage: Stage, gc_round: Round) -> None:
        """See `Listener`."""
        if stage in _ACTIONS:
            ACTIONS.labels(_ACTIONS[stage]).inc()
        if stage in _BEGAN:
            self._log.info(
                _BEGAN[stage],
                round=gc_round.id,
                safe_point=gc_round.safe_point,
                total=gc_round.total,
            )

    def stage_ended(
        self, stage: Stage, gc_round: Round, seconds: float, err: TidemarkError | None
    ) -> None:
        """See `Listener`."""
        if err is None:
            SECONDS.labels(stage.value).observe(seconds)
            if stage in _ENDED:
                self._log.info(
                    _ENDED[stage], round=gc_round.id, seconds=round(seconds, 3), done=gc_round.done
                )
        elif stage in _FAILED:
            kind, phrase = _FAILED[stage]
            FAILURES.labels(kind).inc()
            self._log.error(
                phrase, round=gc_round.id, safe_point=gc_round.safe_point, error=str(err)
            )

    def page_resolved(self, locks: int, *, more: bool) -> None:
        """See `Listener`."""
        RESOLVED_LOCKS.inc(locks)
        if more:
            TOO_MANY_LOCKS.inc()

    def range_deleted(
        self, delete_range: DeleteRange, err: TidemarkError | None, *, redo: bool
    ) -> None:
        """See `Listener`."""
        DELETED_RANGES.labels("failed" if err else "done").inc()
        place = {
            "job_id": delete_range.job_id,
            "element_id": delete_range.element_id,
            "ts": delete_range.ts,
            "redo": redo,
        }
        if err:
            DESTROY_FAILURES.labels("send").inc()
            phrase = "redo-delete range failed on range" if redo else "delete range failed on range"
            self._log.warning(phrase, **place, attempts=delete_range.attempts + 1, error=str(err))
        else:
            self._log.info("range deleted", **place)

    def region_collected(self, err: TidemarkError | None) -> None:
        """See `Listener`."""
        REGION_RESULTS.labels("fail" if err else "success").inc()

    def round_ended(self, gc_round: Round) -> None:
        """See `Listener`."""
        ROUNDS.labels(gc_round.result.value).inc()
        # A round may end after another worker was elected.
        if gc_round.safe_point and self._leads:
            SAFE_POINT.set(gc_round.safe_point)
            SAFE_POINT_SECONDS.set(physical_s(gc_round.safe_point))
        say = self._log.error if gc_round.result is Result.FAILED else self._log.info
        say(
            "gc round ended",
            round=gc_round.id,
            result=gc_round.result.value,
            error=gc_round.error,
            safe_point=gc_round.safe_point,
            regions=gc_round.regions,
            resolved_locks=gc_round.resolved_locks,
            deleted_ranges=gc_round.deleted_ranges,
            failed_ranges=gc_round.failed_ranges,
            collected_regions=gc_round.collected_regions,
        )

    def round_not_recorded(self, gc_round: Round, err: TidemarkError) -> None:
        """See `Listener`."""
        FAILURES.labels("save_round").inc()
        self._log.warning(
            "the round could not be written to the history", round=gc_round.id, error=str(err)
        )
