"""The worker's values as messages of tidemarkpb.v1."""

from tidemarkpb.v1 import gc_pb2

from gcsafepoint.worker.config import GCConfig
from gcsafepoint.worker.delete_range import DeleteRange
from gcsafepoint.worker.election import Leader
from gcsafepoint.worker.plan import Plan
from gcsafepoint.worker.round import Round
from gcsafepoint.worker.times import format_instant
from server.gc_worker.view import ListedRange


def config_message(config: GCConfig) -> gc_pb2.GCConfig:
    """The settings."""
    shown = config.variables()
    return gc_pb2.GCConfig(
        enable=config.enable,
        run_interval=shown["tikv_gc_run_interval"],
        life_time=shown["tikv_gc_life_time"],
        mode=config.mode,
        auto_concurrency=config.auto_concurrency,
        concurrency=config.concurrency,
        max_write_bytes_per_sec=config.max_write_bytes_per_s,
    )


def leader_message(leader: Leader, me: str) -> gc_pb2.GCLeader:
    """Who leads, as `me` sees it."""
    return gc_pb2.GCLeader(
        uuid=leader.uuid, desc=leader.desc, lease=leader.lease, is_self=leader.uuid == me, address=leader.address
    )


def round_message(it: Round, now_ms: int) -> gc_pb2.GCRound:
    """A round; how long it will still take is told as of `now_ms`."""
    return gc_pb2.GCRound(
        id=it.id,
        worker=it.worker,
        started=format_instant(it.started_ms),
        started_ms=it.started_ms,
        ended_ms=it.ended_ms,
        phase=it.phase.label,
        phase_ms=it.phase_ms,
        safe_point=it.safe_point,
        blocker=it.blocker,
        total=it.total,
        done=it.done,
        regions=it.regions,
        resolved_locks=it.resolved_locks,
        deleted_ranges=it.deleted_ranges,
        failed_ranges=it.failed_ranges,
        collected_regions=it.collected_regions,
        result=it.result.value,
        error=it.error,
        eta_ms=it.eta_ms(now_ms),
    )


def range_message(it: DeleteRange, state: str, redo_ms: int = 0) -> gc_pb2.DeleteRange:
    """A delete range and what is next for it."""
    return gc_pb2.DeleteRange(
        job_id=it.job_id,
        element_id=it.element_id,
        start_key=it.start_key,
        end_key=it.end_key,
        ts=it.ts,
        state=state,
        attempts=it.attempts,
        last_error=it.error,
        done_ms=it.done_ms,
        redo_ms=redo_ms,
    )


def listed_message(listed: ListedRange) -> gc_pb2.DeleteRange:
    """A range as it is listed."""
    return range_message(listed.it, listed.state, listed.redo_ms)


def plan_message(plan: Plan) -> gc_pb2.GCPlan:
    """What a round would do."""
    return gc_pb2.GCPlan(
        safe_point=plan.safe_point,
        saved_safe_point=plan.saved,
        blocker=plan.blocker,
        enabled=plan.config.enable,
        fresh=plan.fresh,
        mode=plan.config.mode,
        regions=plan.regions,
        locks=plan.locks,
        transactions=plan.transactions,
        ranges=[range_message(it, "redo" if it.done_ms else "due") for it in plan.ranges],
    )
