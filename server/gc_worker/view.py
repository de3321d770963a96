"""GC's records in the metadata, and their messages of tidemarkpb.v1.

The metadata store, etcd or PD, answers whether or not a worker runs, so the command line needs
none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidemarkpb.v1 import gc_pb2

from gcsafepoint.worker.config import GCConfig, format_instant
from gcsafepoint.worker.delete_ranges import KEPT_MS, DeleteRange, load
from gcsafepoint.worker.election import Leader, read_leader
from gcsafepoint.worker.gc_leader import Plan
from gcsafepoint.worker.records import (
    DONE,
    LAST_RUN_TIME,
    PENDING,
    SAFE_POINT_TS,
    Record,
    Records,
    load_rounds,
    read_ts,
)
from gcsafepoint.worker.round import Round
from storage.meta.meta import Compare, Delete, Meta, Put


class MetaRecords:
    """The `gcsafepoint.worker.records.Records` of a metadata client."""

    def __init__(self, meta: Meta) -> None:
        self._meta = meta

    async def read(self, prefix: str) -> dict[str, Record]:
        """See `Records`."""
        pairs = await self._meta.get_prefix(prefix.encode())
        return {pair.key.decode(): Record(pair.value.decode(), pair.mod_revision) for pair in pairs}

    async def write(self, changes: Mapping[str, str | None], expect: Mapping[str, int]) -> int:
        """See `Records`."""
        # Each write names the revisions that it was decided by: two workers cannot both lead, nor
        # two clients both set.
        compares = [Compare.unchanged(key.encode(), revision) for key, revision in expect.items()]
        ops = [
            Delete(key.encode()) if value is None else Put(key.encode(), value.encode())
            for key, value in changes.items()
        ]
        result = await self._meta.txn(compares, ops)
        return result.revision if result.succeeded else 0


@dataclass(frozen=True, slots=True)
class ListedRange:
    """A delete range, and what is next for it; `redo_ms`: when it is destroyed once more,
    0 if it was not yet.
    """

    delete_range: DeleteRange
    state: str
    redo_ms: int


@dataclass(frozen=True, slots=True)
class Overview:
    """The answer of GetGCStatus, which `tidemark cli gc status` shows."""

    leader: Leader | None
    last_run_time: str
    saved_safe_point: int
    newest: Round | None
    ranges: Sequence[ListedRange]

    @property
    def pending_ranges(self) -> int:
        """The number of ranges that were not destroyed yet."""
        return sum(not listed.delete_range.done_ms for listed in self.ranges)

    @property
    def failed_ranges(self) -> int:
        """The number of ranges that could not be destroyed at the last attempt."""
        return sum(bool(listed.delete_range.error) for listed in self.ranges)


async def overview(records: Records) -> Overview:
    """Read leader, last run, newest round and ranges from the records."""
    last_run, newest = await records.read(LAST_RUN_TIME), await load_rounds(records, 1)
    return Overview(
        leader=await read_leader(records),
        last_run_time=last_run[LAST_RUN_TIME].value if last_run else "",
        saved_safe_point=await read_ts(records, SAFE_POINT_TS),
        newest=newest[0] if newest else None,
        ranges=await list_ranges(records),
    )


async def list_ranges(records: Records) -> list[ListedRange]:
    """All recorded ranges, those still to be destroyed first."""
    safe_point = await read_ts(records, SAFE_POINT_TS)
    pending = [
        ListedRange(new, _pending_state(new, safe_point), 0) for new in await load(records, PENDING)
    ]
    done = [
        ListedRange(old, "redo failed" if old.error else "done", old.done_ms + KEPT_MS)
        for old in await load(records, DONE)
    ]
    return sorted(pending, key=lambda listed: listed.delete_range.ts) + sorted(
        done, key=lambda listed: listed.delete_range.done_ms
    )


def _pending_state(delete_range: DeleteRange, safe_point: int) -> str:
    if delete_range.error:
        return "failed"
    return "due" if delete_range.ts < safe_point else "waiting"


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
    """The leader as a message; `me` is the worker that answers."""
    return gc_pb2.GCLeader(
        uuid=leader.uuid,
        desc=leader.desc,
        lease=leader.lease,
        is_self=leader.uuid == me,
        address=leader.address,
    )


def round_message(gc_round: Round, now_ms: int) -> gc_pb2.GCRound:
    """Describe a round, with its remaining time as of `now_ms`."""
    return gc_pb2.GCRound(
        id=gc_round.id,
        worker=gc_round.worker,
        started=format_instant(gc_round.started_ms),
        started_ms=gc_round.started_ms,
        ended_ms=gc_round.ended_ms,
        phase=gc_round.phase.label,
        phase_ms=gc_round.phase_ms,
        safe_point=gc_round.safe_point,
        blocker=gc_round.blocker,
        total=gc_round.total,
        done=gc_round.done,
        regions=gc_round.regions,
        resolved_locks=gc_round.resolved_locks,
        deleted_ranges=gc_round.deleted_ranges,
        failed_ranges=gc_round.failed_ranges,
        collected_regions=gc_round.collected_regions,
        result=gc_round.result.value,
        error=gc_round.error,
        eta_ms=gc_round.eta_ms(now_ms),
    )


def range_message(delete_range: DeleteRange, state: str, redo_ms: int = 0) -> gc_pb2.DeleteRange:
    """A delete range and what is next for it."""
    return gc_pb2.DeleteRange(
        job_id=delete_range.job_id,
        element_id=delete_range.element_id,
        start_key=delete_range.start_key,
        end_key=delete_range.end_key,
        ts=delete_range.ts,
        state=state,
        attempts=delete_range.attempts,
        last_error=delete_range.error,
        done_ms=delete_range.done_ms,
        redo_ms=redo_ms,
    )


def listed_message(listed: ListedRange) -> gc_pb2.DeleteRange:
    """A range as it is listed."""
    return range_message(listed.delete_range, listed.state, listed.redo_ms)


def plan_message(plan: Plan) -> gc_pb2.GCPlan:
    """The work that a round would do, as a message."""
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
        ranges=[range_message(due, "redo" if due.done_ms else "due") for due in plan.ranges],
    )
