"""tidemarkpb.v1.GCService: see and steer garbage collection. Any worker answers, only the leader runs a round."""

from typing import Any

from tidemarkpb.v1 import gc_pb2

from gcsafepoint.worker.cluster import Cluster
from gcsafepoint.worker.config import GCConfig
from gcsafepoint.worker.delete_ranges import DeleteRange, register
from gcsafepoint.worker.do_gc import check_mode
from gcsafepoint.worker.election import Leader
from gcsafepoint.worker.records import LAST_RUN_TIME, Records, read_config, write_config
from gcsafepoint.worker.round import Round
from gcsafepoint.worker.times import format_instant
from gcsafepoint.worker.worker import GCWorker
from server.rpc.pd import PdClient


class GCService:
    """The servicer; unary methods only."""

    def __init__(self, worker: GCWorker, cluster: Cluster, records: Records, pd: PdClient) -> None:
        self._worker = worker
        self._cluster = cluster
        self._records = records
        self._pd = pd

    async def GetGCStatus(self, _request: gc_pb2.GetGCStatusRequest, _context: Any) -> gc_pb2.GetGCStatusResponse:  # noqa: N802 - the protocol's name
        """Variables, leader, safepoint, and this worker's newest round."""
        held = await self._records.read(LAST_RUN_TIME)
        leader, newest = await self._worker.election.leader(), self._worker.rounds.newest
        return gc_pb2.GetGCStatusResponse(
            config=_config(await read_config(self._records)),
            leader=_leader(leader, self._worker.election.uuid) if leader else None,
            last_round=_round(newest) if newest else None,
            safe_point=await self._pd.gc_safe_point(),
            last_run_time=held[LAST_RUN_TIME].value if held else "",
        )

    async def SetGCConfig(self, request: gc_pb2.SetGCConfigRequest, _context: Any) -> gc_pb2.SetGCConfigResponse:  # noqa: N802 - the protocol's name
        """Set variables of mysql.tidb by their names; all or none."""
        wanted = (await read_config(self._records)).updated(request.variables)
        await check_mode(self._cluster, wanted)
        return gc_pb2.SetGCConfigResponse(config=_config(await write_config(self._records, request.variables)))

    async def RunGC(self, _request: gc_pb2.RunGCRequest, _context: Any) -> gc_pb2.RunGCResponse:  # noqa: N802 - the protocol's name
        """Run a round now; answers when it has ended."""
        return gc_pb2.RunGCResponse(round=_round(await self._worker.demand_round()))

    async def RegisterDeleteRange(  # noqa: N802 - the protocol's name
        self, request: gc_pb2.RegisterDeleteRangeRequest, _context: Any
    ) -> gc_pb2.RegisterDeleteRangeResponse:
        """Record what a dropped table or index left; registering the same range again does nothing."""
        new = DeleteRange(request.job_id, request.element_id, request.start_key, request.end_key, request.ts)
        await register(self._records, new)
        return gc_pb2.RegisterDeleteRangeResponse()


def _config(config: GCConfig) -> gc_pb2.GCConfig:
    shown = config.variables()
    return gc_pb2.GCConfig(
        enable=config.enable,
        run_interval=shown["tikv_gc_run_interval"],
        life_time=shown["tikv_gc_life_time"],
        mode=config.mode,
        auto_concurrency=config.auto_concurrency,
        concurrency=config.concurrency,
    )


def _leader(leader: Leader, me: str) -> gc_pb2.GCLeader:
    return gc_pb2.GCLeader(uuid=leader.uuid, desc=leader.desc, lease=leader.lease, is_self=leader.uuid == me)


def _round(it: Round) -> gc_pb2.GCRound:
    return gc_pb2.GCRound(
        safe_point=it.safe_point,
        started=format_instant(it.started_ms),
        phase=it.phase.label,
        regions=it.regions,
        resolved_locks=it.resolved_locks,
        deleted_ranges=it.deleted_ranges,
        result=it.result,
    )
