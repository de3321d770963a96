"""tidemarkpb.v1.GCService: see and steer garbage collection.

Any worker answers, only the leader runs a round.
"""

from typing import Any

from tidemarkpb.v1 import gc_pb2

from gcsafepoint.worker.cluster import Cluster
from gcsafepoint.worker.delete_ranges import DeleteRange, register
from gcsafepoint.worker.do_gc import check_mode
from gcsafepoint.worker.gc_leader import make_plan
from gcsafepoint.worker.records import (
    ROUNDS_KEPT,
    Records,
    load_rounds,
    read_config,
    read_table,
    write_config,
)
from gcsafepoint.worker.worker import GCWorker
from server.gc_worker.view import (
    config_message,
    leader_message,
    list_ranges,
    listed_message,
    overview,
    plan_message,
    round_message,
)
from server.rpc.pd import PdClient


class GCService:
    """The servicer; unary methods only."""

    def __init__(self, worker: GCWorker, cluster: Cluster, records: Records, pd: PdClient) -> None:
        self._worker = worker
        self._cluster = cluster
        self._records = records
        self._pd = pd

    async def GetGCStatus(
        self, _request: gc_pb2.GetGCStatusRequest, _context: Any
    ) -> gc_pb2.GetGCStatusResponse:
        """Settings, leader, safepoints, and the newest round;
        of this worker's own rounds as they are right now.
        """
        seen, own = await overview(self._records), self._worker.rounds.newest
        # This worker's own round may be newer than what is recorded: progress is written now and
        # then.
        candidates = [gc_round for gc_round in (seen.newest, own) if gc_round]
        newest = max(candidates, key=lambda gc_round: (gc_round.id, gc_round is own), default=None)
        return gc_pb2.GetGCStatusResponse(
            config=config_message(await read_config(self._records)),
            leader=leader_message(seen.leader, self._worker.election.uuid) if seen.leader else None,
            last_round=round_message(newest, self._worker.clock.now_ms()) if newest else None,
            safe_point=await self._pd.gc_safe_point(),
            last_run_time=seen.last_run_time,
            saved_safe_point=seen.saved_safe_point,
            blocker=newest.blocker if newest else "",
            pending_ranges=seen.pending_ranges,
            failed_ranges=seen.failed_ranges,
        )

    async def GetGCConfig(
        self, _request: gc_pb2.GetGCConfigRequest, _context: Any
    ) -> gc_pb2.GetGCConfigResponse:
        """The settings, and all variables as rows of mysql.tidb."""
        rows = [
            gc_pb2.GCVariable(variable_name=name, variable_value=value, comment=comment)
            for name, value, comment in await read_table(self._records)
        ]
        return gc_pb2.GetGCConfigResponse(
            config=config_message(await read_config(self._records)), variables=rows
        )

    async def SetGCConfig(
        self, request: gc_pb2.SetGCConfigRequest, _context: Any
    ) -> gc_pb2.SetGCConfigResponse:
        """Set variables of mysql.tidb by their names, all or none; durable at once,
        in force at the next tick.
        """
        bounds = self._worker.bounds
        # Checked with the settings as they would be: mode central needs stores that take KvGC.
        await check_mode(
            self._cluster, (await read_config(self._records)).updated(request.variables, bounds)
        )
        config = await write_config(self._records, request.variables, bounds)
        await self._worker.settings_changed()
        return gc_pb2.SetGCConfigResponse(config=config_message(config))

    async def RunGC(self, request: gc_pb2.RunGCRequest, _context: Any) -> gc_pb2.RunGCResponse:
        """Run a round now; answers when it has ended, or has begun,
        or at once with what it would do.
        """
        if request.dry_run:
            least_ms = self._worker.bounds.least_ms
            plan = await make_plan(self._cluster, self._records, least_ms)
            return gc_pb2.RunGCResponse(plan=plan_message(plan))
        if request.no_wait:
            gc_round, _ = await self._worker.begin_round()
        else:
            gc_round = await self._worker.run_round_now()
        return gc_pb2.RunGCResponse(round=round_message(gc_round, self._worker.clock.now_ms()))

    async def ListRounds(
        self, request: gc_pb2.ListRoundsRequest, _context: Any
    ) -> gc_pb2.ListRoundsResponse:
        """The last rounds, newest first."""
        rounds = await load_rounds(self._records, request.limit or ROUNDS_KEPT)
        now_ms = self._worker.clock.now_ms()
        return gc_pb2.ListRoundsResponse(
            rounds=[round_message(gc_round, now_ms) for gc_round in rounds]
        )

    async def RegisterDeleteRange(
        self, request: gc_pb2.RegisterDeleteRangeRequest, _context: Any
    ) -> gc_pb2.RegisterDeleteRangeResponse:
        """Record what a dropped table or index left;
        registering the same range again does nothing.
        """
        new = DeleteRange(
            request.job_id, request.element_id, request.start_key, request.end_key, request.ts
        )
        await register(self._records, new)
        return gc_pb2.RegisterDeleteRangeResponse()

    async def ListDeleteRanges(
        self, _request: gc_pb2.ListDeleteRangesRequest, _context: Any
    ) -> gc_pb2.ListDeleteRangesResponse:
        """List the ranges that wait to be destroyed, and those that were within the last day."""
        return gc_pb2.ListDeleteRangesResponse(
            ranges=[listed_message(listed) for listed in await list_ranges(self._records)]
        )
