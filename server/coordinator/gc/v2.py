"""pdpb.PD: the second generation of the old calls, which names a keyspace."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
from kvproto import pdpb_pb2

from gcsafepoint.state.barrier import ServiceSafePoint
from gcsafepoint.state.go_text import key_bytes
from gcsafepoint.state.service import SafePointService, ServiceUpdate
from gcsafepoint.state.states import NULL_KEYSPACE
from server.coordinator.gc.wire import check_names_no_service, checked_id, refusing_by_status
from server.coordinator.header import Headers
from server.rpc.errors import StatusError

_OBSOLETE = "WatchGCSafePointV2 is obsolete. Poll GetAllKeyspacesGCStates instead if necessary"


class GcV2Service:
    """GetGCSafePointV2, UpdateGCSafePointV2, UpdateServiceSafePointV2, GetAllGCSafePointV2; the watch is refused."""

    def __init__(self, headers: Headers, safe_points: SafePointService) -> None:
        self._headers = headers
        self._safe_points = safe_points

    def calls(self) -> Mapping[str, Any]:
        """PD's names for what is served here."""
        handlers = (
            ("GetGCSafePointV2", pdpb_pb2.GetGCSafePointV2Response, self.gc_safe_point),
            ("UpdateGCSafePointV2", pdpb_pb2.UpdateGCSafePointV2Response, self.update_gc_safe_point),
            ("UpdateServiceSafePointV2", pdpb_pb2.UpdateServiceSafePointV2Response, self.update_service),
            ("GetAllGCSafePointV2", pdpb_pb2.GetAllGCSafePointV2Response, self.all_gc_safe_points),
        )
        calls = {name: self._headers.bound(answer, refusing_by_status(handler)) for name, answer, handler in handlers}
        return {**calls, "WatchGCSafePointV2": self.watch}

    async def gc_safe_point(self, request: pdpb_pb2.GetGCSafePointV2Request) -> pdpb_pb2.GetGCSafePointV2Response:
        """What stores collect up to in the keyspace."""
        held = await self._safe_points.keyspace_gc_safe_point(request.keyspace_id)
        return pdpb_pb2.GetGCSafePointV2Response(safe_point=held)

    async def update_gc_safe_point(
        self, request: pdpb_pb2.UpdateGCSafePointV2Request
    ) -> pdpb_pb2.UpdateGCSafePointV2Response:
        """Move it; answers what holds."""
        check_names_no_service(request, "UpdateServiceSafePointV2")
        held = await self._safe_points.update_gc_safe_point(request.safe_point, request.keyspace_id)
        return pdpb_pb2.UpdateGCSafePointV2Response(new_safe_point=held)

    async def update_service(
        self, request: pdpb_pb2.UpdateServiceSafePointV2Request
    ) -> pdpb_pb2.UpdateServiceSafePointV2Response:
        """As UpdateServiceGCSafePoint, in one keyspace."""
        service_id = checked_id(request.service_id)
        update = ServiceUpdate(service_id, request.ttl, request.safe_point, request.keyspace_id)
        (outcome,) = await self._safe_points.update_services([update])
        if not isinstance(outcome, ServiceSafePoint):
            raise outcome
        return pdpb_pb2.UpdateServiceSafePointV2Response(
            service_id=key_bytes(outcome.service_id),
            ttl=self._safe_points.ttl_s(outcome),
            min_safe_point=outcome.safe_point,
        )

    async def all_gc_safe_points(
        self, _request: pdpb_pb2.GetAllGCSafePointV2Request
    ) -> pdpb_pb2.GetAllGCSafePointV2Response:
        """Of all keyspaces but the null one."""
        states, _ = await self._safe_points.all_gc_states(with_barriers=False)
        points = [
            pdpb_pb2.GCSafePointV2(keyspace_id=state.keyspace_id, gc_safe_point=state.gc_safe_point)
            for state in states
            if state.keyspace_id != NULL_KEYSPACE
        ]
        return pdpb_pb2.GetAllGCSafePointV2Response(gc_safe_points=points)

    async def watch(
        self, _request: pdpb_pb2.WatchGCSafePointV2Request, _context: Any
    ) -> AsyncIterator[pdpb_pb2.WatchGCSafePointV2Response]:
        """PD has given it up, and says what to do instead."""
        raise StatusError(grpc.StatusCode.UNIMPLEMENTED, _OBSOLETE)
        yield
