"""pdpb.PD: all RPCs about GC, two families over one state (docs/design/0008-gc-state.md).

`GcService` puts the old calls (`server.coordinator.gc.old_calls`) and the newer ones together. The
newer ones are `GcStateService`, by which today's clients read and advance the states, and
`GcBarrierService`, which holds one keyspace back, or all.
"""

from collections.abc import Mapping
from typing import Any

from kvproto import pdpb_pb2

from gcsafepoint.state.barrier import ServiceSafePoint
from gcsafepoint.state.service import GcStateManager
from gcsafepoint.state.states import KeyspaceState
from server.coordinator.gc.old_calls import GcClassicService, GcV2Service
from server.coordinator.gc.wire import (
    barrier_info,
    checked_id,
    global_barrier_info,
    refusing_in_header,
    scope_of,
)
from server.coordinator.header import Headers
from server.rpc.front import BatchHandler


class GcService:
    """All calls about GC."""

    def __init__(self, headers: Headers, safe_points: GcStateManager) -> None:
        self._classic = GcClassicService(headers, safe_points)
        self._newer = (
            GcStateService(headers, safe_points),
            GcBarrierService(headers, safe_points),
            GcV2Service(headers, safe_points),
        )

    def calls(self) -> Mapping[str, Any]:
        """The handlers of single requests by the names of their RPCs."""
        calls = dict(self._classic.calls())
        for service in self._newer:
            calls |= service.calls()
        return calls

    def batches(self) -> Mapping[str, BatchHandler]:
        """The batch handlers by the names of their RPCs."""
        return self._classic.batches()


class GcStateService:
    """GetGCState, GetAllKeyspacesGCStates, AdvanceTxnSafePoint, AdvanceGCSafePoint."""

    def __init__(self, headers: Headers, safe_points: GcStateManager) -> None:
        self._headers = headers
        self._safe_points = safe_points

    def calls(self) -> Mapping[str, Any]:
        """The handlers by the names of their RPCs."""
        handlers = (
            ("GetGCState", pdpb_pb2.GetGCStateResponse, self.get_gc_state),
            (
                "GetAllKeyspacesGCStates",
                pdpb_pb2.GetAllKeyspacesGCStatesResponse,
                self.get_all_keyspaces_gc_states,
            ),
            (
                "AdvanceTxnSafePoint",
                pdpb_pb2.AdvanceTxnSafePointResponse,
                self.advance_txn_safe_point,
            ),
            ("AdvanceGCSafePoint", pdpb_pb2.AdvanceGCSafePointResponse, self.advance_gc_safe_point),
        )
        return {
            name: self._headers.call(answer, refusing_in_header(handler))
            for name, answer, handler in handlers
        }

    async def get_gc_state(
        self, request: pdpb_pb2.GetGCStateRequest
    ) -> pdpb_pb2.GetGCStateResponse:
        """The state the keyspace's users share; from memory."""
        state, global_barriers = await self._safe_points.gc_state(
            scope_of(request), with_barriers=not request.exclude_gc_barriers
        )
        answer = pdpb_pb2.GetGCStateResponse(gc_state=self._message(state))
        if request.include_global_gc_barriers:
            answer.global_gc_barriers.SetInParent()
            answer.global_gc_barriers.barriers.extend(self._messages(global_barriers))
        return answer

    async def get_all_keyspaces_gc_states(
        self, request: pdpb_pb2.GetAllKeyspacesGCStatesRequest
    ) -> pdpb_pb2.GetAllKeyspacesGCStatesResponse:
        """Every keyspace's state, the null keyspace's first; from memory."""
        states, global_barriers = await self._safe_points.all_gc_states(
            with_barriers=not request.exclude_gc_barriers
        )
        barriers = [] if request.exclude_global_gc_barriers else self._messages(global_barriers)
        return pdpb_pb2.GetAllKeyspacesGCStatesResponse(
            gc_states=[self._message(state) for state in states], global_gc_barriers=barriers
        )

    async def advance_txn_safe_point(
        self, request: pdpb_pb2.AdvanceTxnSafePointRequest
    ) -> pdpb_pb2.AdvanceTxnSafePointResponse:
        """Move t as far as nobody blocks it, and say who does."""
        advance = await self._safe_points.advance_txn_safe_point(scope_of(request), request.target)
        return pdpb_pb2.AdvanceTxnSafePointResponse(
            old_txn_safe_point=advance.old,
            new_txn_safe_point=advance.new,
            blocker_description=advance.blocker.description if advance.blocker else "",
        )

    async def advance_gc_safe_point(
        self, request: pdpb_pb2.AdvanceGCSafePointRequest
    ) -> pdpb_pb2.AdvanceGCSafePointResponse:
        """Move g; stores collect what is older from now on."""
        old = await self._safe_points.advance_gc_safe_point(scope_of(request), request.target)
        return pdpb_pb2.AdvanceGCSafePointResponse(
            old_gc_safe_point=old, new_gc_safe_point=request.target
        )

    def _messages(
        self, barriers: tuple[ServiceSafePoint, ...]
    ) -> list[pdpb_pb2.GlobalGCBarrierInfo]:
        return [global_barrier_info(barrier, self._safe_points) for barrier in barriers]

    def _message(self, state: KeyspaceState) -> pdpb_pb2.GCState:
        return pdpb_pb2.GCState(
            keyspace_scope=pdpb_pb2.KeyspaceScope(keyspace_id=state.keyspace_id),
            is_keyspace_level_gc=state.level_gc,
            txn_safe_point=state.txn_safe_point,
            gc_safe_point=state.gc_safe_point,
            gc_barriers=[barrier_info(barrier, self._safe_points) for barrier in state.barriers],
        )


class GcBarrierService:
    """SetGCBarrier, DeleteGCBarrier, SetGlobalGCBarrier, DeleteGlobalGCBarrier;
    durable when they answer.
    """

    def __init__(self, headers: Headers, safe_points: GcStateManager) -> None:
        self._headers = headers
        self._safe_points = safe_points

    def calls(self) -> Mapping[str, Any]:
        """The handlers by the names of their RPCs."""
        handlers = (
            ("SetGCBarrier", pdpb_pb2.SetGCBarrierResponse, self.set_gc_barrier),
            ("DeleteGCBarrier", pdpb_pb2.DeleteGCBarrierResponse, self.delete_gc_barrier),
            ("SetGlobalGCBarrier", pdpb_pb2.SetGlobalGCBarrierResponse, self.set_global_gc_barrier),
            (
                "DeleteGlobalGCBarrier",
                pdpb_pb2.DeleteGlobalGCBarrierResponse,
                self.delete_global_gc_barrier,
            ),
        )
        return {
            name: self._headers.call(answer, refusing_in_header(handler))
            for name, answer, handler in handlers
        }

    async def set_gc_barrier(
        self, request: pdpb_pb2.SetGCBarrierRequest
    ) -> pdpb_pb2.SetGCBarrierResponse:
        """Set or replace; the answer has the TTL as rounded up."""
        barrier_id = checked_id(request.barrier_id.encode())
        barrier = await self._safe_points.set_barrier(
            scope_of(request), barrier_id, request.barrier_ts, request.ttl_seconds
        )
        return pdpb_pb2.SetGCBarrierResponse(
            new_barrier_info=barrier_info(barrier, self._safe_points)
        )

    async def delete_gc_barrier(
        self, request: pdpb_pb2.DeleteGCBarrierRequest
    ) -> pdpb_pb2.DeleteGCBarrierResponse:
        """Remove; the answer has what it was, nothing if there was none."""
        barrier = await self._safe_points.delete_barrier(scope_of(request), request.barrier_id)
        info = barrier_info(barrier, self._safe_points) if barrier else None
        return pdpb_pb2.DeleteGCBarrierResponse(deleted_barrier_info=info)

    async def set_global_gc_barrier(
        self, request: pdpb_pb2.SetGlobalGCBarrierRequest
    ) -> pdpb_pb2.SetGlobalGCBarrierResponse:
        """Set or replace for every keyspace."""
        barrier_id = checked_id(request.barrier_id.encode())
        barrier = await self._safe_points.set_global_barrier(
            barrier_id, request.barrier_ts, request.ttl_seconds
        )
        return pdpb_pb2.SetGlobalGCBarrierResponse(
            new_barrier_info=global_barrier_info(barrier, self._safe_points)
        )

    async def delete_global_gc_barrier(
        self, request: pdpb_pb2.DeleteGlobalGCBarrierRequest
    ) -> pdpb_pb2.DeleteGlobalGCBarrierResponse:
        """Remove for every keyspace."""
        barrier = await self._safe_points.delete_global_barrier(request.barrier_id)
        info = global_barrier_info(barrier, self._safe_points) if barrier else None
        return pdpb_pb2.DeleteGlobalGCBarrierResponse(deleted_barrier_info=info)
