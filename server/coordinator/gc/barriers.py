"""pdpb.PD: GC barriers, which hold one keyspace back, and global ones, which hold back all."""

from collections.abc import Mapping
from typing import Any

from kvproto import pdpb_pb2

from gcsafepoint.state.service import SafePointService
from server.coordinator.gc.wire import barrier_info, checked_id, global_barrier_info, refusing_in_header, scope_of
from server.coordinator.header import Headers


class GcBarrierService:
    """SetGCBarrier, DeleteGCBarrier, SetGlobalGCBarrier, DeleteGlobalGCBarrier; durable when they answer."""

    def __init__(self, headers: Headers, safe_points: SafePointService) -> None:
        self._headers = headers
        self._safe_points = safe_points

    def calls(self) -> Mapping[str, Any]:
        """PD's names for what is served here."""
        handlers = (
            ("SetGCBarrier", pdpb_pb2.SetGCBarrierResponse, self.set_barrier),
            ("DeleteGCBarrier", pdpb_pb2.DeleteGCBarrierResponse, self.delete_barrier),
            ("SetGlobalGCBarrier", pdpb_pb2.SetGlobalGCBarrierResponse, self.set_global_barrier),
            ("DeleteGlobalGCBarrier", pdpb_pb2.DeleteGlobalGCBarrierResponse, self.delete_global_barrier),
        )
        return {name: self._headers.bound(answer, refusing_in_header(handler)) for name, answer, handler in handlers}

    async def set_barrier(self, request: pdpb_pb2.SetGCBarrierRequest) -> pdpb_pb2.SetGCBarrierResponse:
        """Set or replace; the answer has the TTL as rounded up."""
        barrier_id = checked_id(request.barrier_id.encode())
        barrier = await self._safe_points.set_barrier(
            scope_of(request), barrier_id, request.barrier_ts, request.ttl_seconds
        )
        return pdpb_pb2.SetGCBarrierResponse(new_barrier_info=barrier_info(barrier, self._safe_points))

    async def delete_barrier(self, request: pdpb_pb2.DeleteGCBarrierRequest) -> pdpb_pb2.DeleteGCBarrierResponse:
        """Remove; the answer has what it was, nothing if there was none."""
        barrier = await self._safe_points.delete_barrier(scope_of(request), request.barrier_id)
        info = barrier_info(barrier, self._safe_points) if barrier else None
        return pdpb_pb2.DeleteGCBarrierResponse(deleted_barrier_info=info)

    async def set_global_barrier(
        self, request: pdpb_pb2.SetGlobalGCBarrierRequest
    ) -> pdpb_pb2.SetGlobalGCBarrierResponse:
        """Set or replace for every keyspace."""
        barrier_id = checked_id(request.barrier_id.encode())
        barrier = await self._safe_points.set_global_barrier(barrier_id, request.barrier_ts, request.ttl_seconds)
        return pdpb_pb2.SetGlobalGCBarrierResponse(new_barrier_info=global_barrier_info(barrier, self._safe_points))

    async def delete_global_barrier(
        self, request: pdpb_pb2.DeleteGlobalGCBarrierRequest
    ) -> pdpb_pb2.DeleteGlobalGCBarrierResponse:
        """Remove for every keyspace."""
        barrier = await self._safe_points.delete_global_barrier(request.barrier_id)
        info = global_barrier_info(barrier, self._safe_points) if barrier else None
        return pdpb_pb2.DeleteGlobalGCBarrierResponse(deleted_barrier_info=info)
