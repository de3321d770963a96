"""pdpb.PD: GC states, as today's clients read and advance them."""

from collections.abc import Mapping
from typing import Any

from kvproto import pdpb_pb2

from gcsafepoint.state.barrier import ServiceSafePoint
from gcsafepoint.state.service import SafePointService
from gcsafepoint.state.states import KeyspaceState
from server.coordinator.gc.wire import barrier_info, global_barrier_info, refusing_in_header, scope_of
from server.coordinator.header import Headers


class GcStateService:
    """GetGCState, GetAllKeyspacesGCStates, AdvanceTxnSafePoint, AdvanceGCSafePoint."""

    def __init__(self, headers: Headers, safe_points: SafePointService) -> None:
        self._headers = headers
        self._safe_points = safe_points

    def calls(self) -> Mapping[str, Any]:
        """PD's names for what is served here."""
        handlers = (
            ("GetGCState", pdpb_pb2.GetGCStateResponse, self.state),
            ("GetAllKeyspacesGCStates", pdpb_pb2.GetAllKeyspacesGCStatesResponse, self.all_states),
            ("AdvanceTxnSafePoint", pdpb_pb2.AdvanceTxnSafePointResponse, self.advance_txn_safe_point),
            ("AdvanceGCSafePoint", pdpb_pb2.AdvanceGCSafePointResponse, self.advance_gc_safe_point),
        )
        return {name: self._headers.bound(answer, refusing_in_header(handler)) for name, answer, handler in handlers}

    async def state(self, request: pdpb_pb2.GetGCStateRequest) -> pdpb_pb2.GetGCStateResponse:
        """The state the keyspace's users share; from memory."""
        told, everywhere = await self._safe_points.gc_state(
            scope_of(request), with_barriers=not request.exclude_gc_barriers
        )
        answer = pdpb_pb2.GetGCStateResponse(gc_state=self._message(told))
        if request.include_global_gc_barriers:
            answer.global_gc_barriers.SetInParent()
            answer.global_gc_barriers.barriers.extend(self._messages(everywhere))
        return answer

    async def all_states(
        self, request: pdpb_pb2.GetAllKeyspacesGCStatesRequest
    ) -> pdpb_pb2.GetAllKeyspacesGCStatesResponse:
        """Every keyspace's state, the null keyspace's first; from memory."""
        told, everywhere = await self._safe_points.all_gc_states(with_barriers=not request.exclude_gc_barriers)
        barriers = [] if request.exclude_global_gc_barriers else self._messages(everywhere)
        return pdpb_pb2.GetAllKeyspacesGCStatesResponse(
            gc_states=[self._message(state) for state in told], global_gc_barriers=barriers
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
        return pdpb_pb2.AdvanceGCSafePointResponse(old_gc_safe_point=old, new_gc_safe_point=request.target)

    def _messages(self, barriers: tuple[ServiceSafePoint, ...]) -> list[pdpb_pb2.GlobalGCBarrierInfo]:
        return [global_barrier_info(barrier, self._safe_points) for barrier in barriers]

    def _message(self, state: KeyspaceState) -> pdpb_pb2.GCState:
        return pdpb_pb2.GCState(
            keyspace_scope=pdpb_pb2.KeyspaceScope(keyspace_id=state.keyspace_id),
            is_keyspace_level_gc=state.level_gc,
            txn_safe_point=state.txn_safe_point,
            gc_safe_point=state.gc_safe_point,
            gc_barriers=[barrier_info(barrier, self._safe_points) for barrier in state.barriers],
        )
