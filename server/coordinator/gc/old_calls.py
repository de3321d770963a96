"""pdpb.PD: the old GC RPCs, UpdateServiceGCSafePoint, UpdateGCSafePoint, GetGCSafePoint,
and their V2 with a keyspace.

The two hot ones, UpdateServiceGCSafePoint and GetGCSafePoint, are batch functions: the requests
that gather on a route share one metadata transaction.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from kvproto import pdpb_pb2

from gcsafepoint.state.barrier import ServiceSafePoint
from gcsafepoint.state.compat import Compat, ServiceUpdate
from gcsafepoint.state.errors import SafePointRequestError
from gcsafepoint.state.go_text import key_bytes
from gcsafepoint.state.service import GcStateManager, Outcome
from gcsafepoint.state.states import NULL_KEYSPACE
from server.coordinator.errors import RefusedError, RequestError
from server.coordinator.gc.wire import check_names_no_service, checked_id, refusing_by_status
from server.coordinator.header import Headers
from server.rpc.errors import StatusError
from server.rpc.front import Answer, BatchHandler
from storage.model.errors import TidemarkError


class GcClassicService:
    """The old calls: service safe points, and the GC safe point stores poll."""

    def __init__(self, headers: Headers, safe_points: GcStateManager) -> None:
        self._headers = headers
        self._safe_points = safe_points

    def calls(self) -> Mapping[str, Any]:
        """The handlers of single requests by the names of their RPCs."""
        handler = refusing_by_status(self.update_gc_safe_point)
        return {
            "UpdateGCSafePoint": self._headers.call(pdpb_pb2.UpdateGCSafePointResponse, handler)
        }

    def batches(self) -> Mapping[str, BatchHandler]:
        """The batch handlers by the names of their RPCs."""
        return {
            "GetGCSafePoint": self.get_gc_safe_points,
            "UpdateServiceGCSafePoint": self.update_service_gc_safe_points,
        }

    async def update_gc_safe_point(
        self, request: pdpb_pb2.UpdateGCSafePointRequest
    ) -> pdpb_pb2.UpdateGCSafePointResponse:
        """UpdateGCSafePoint: answers the safe point that holds,
        which may be less than requested.
        """
        check_names_no_service(request, "UpdateServiceGCSafePoint")
        new_safe_point = await self._safe_points.update_gc_safe_point(request.safe_point)
        return pdpb_pb2.UpdateGCSafePointResponse(new_safe_point=new_safe_point)

    async def get_gc_safe_points(self, requests: Sequence[bytes]) -> Sequence[Answer]:
        """GetGCSafePoint, from memory; also a request without any field,
        as grpcurl sends it (PD refuses it).
        """
        response = pdpb_pb2.GetGCSafePointResponse(
            header=self._headers.ok, safe_point=self._safe_points.gc_safe_point
        )
        answer = response.SerializeToString()
        answer_to_empty = answer if self._safe_points.compat is Compat.CLASSIC else None
        return [(not raw and answer_to_empty) or self._refusal(raw) or answer for raw in requests]

    async def update_service_gc_safe_points(self, requests: Sequence[bytes]) -> Sequence[Answer]:
        """UpdateServiceGCSafePoint: apply all requests in one go;
        a bad request is answered by itself.
        """
        parsed = [self._parse(raw) for raw in requests]
        outcomes = iter(
            await self._safe_points.update_services(
                [item for item in parsed if isinstance(item, ServiceUpdate)]
            )
        )
        return [
            self._answer(next(outcomes)) if isinstance(item, ServiceUpdate) else item
            for item in parsed
        ]

    def _refusal(self, raw: bytes) -> Answer | None:
        request = self._request(pdpb_pb2.GetGCSafePointRequest, raw)
        return request if isinstance(request, bytes | TidemarkError) else None

    def _parse(self, raw: bytes) -> ServiceUpdate | Answer:
        request = self._request(pdpb_pb2.UpdateServiceGCSafePointRequest, raw)
        if isinstance(request, bytes | TidemarkError):
            return request
        try:
            return ServiceUpdate(checked_id(request.service_id), request.TTL, request.safe_point)
        except SafePointRequestError as err:
            return RequestError(err.message)

    def _request(self, kind: type[Any], raw: bytes) -> Any | Answer:
        """The checked request, or the answer that refuses it."""
        try:
            request = kind.FromString(raw)
            self._headers.check(request.header)
            self._headers.check_bootstrapped()
        except RefusedError as err:  # the header has the same field number in every answer of PD
            return pdpb_pb2.GetGCSafePointResponse(
                header=self._headers.refused(err)
            ).SerializeToString()
        except StatusError as err:
            return err
        except DecodeError:
            return StatusError(grpc.StatusCode.INTERNAL, "the request is not a message of its kind")
        return request

    def _answer(self, outcome: Outcome) -> Answer:
        if isinstance(outcome, SafePointRequestError):
            return RequestError(outcome.message)
        if isinstance(outcome, TidemarkError):
            return outcome
        return pdpb_pb2.UpdateServiceGCSafePointResponse(
            header=self._headers.ok,
            service_id=key_bytes(outcome.service_id),
            TTL=self._safe_points.ttl_s(outcome),
            min_safe_point=outcome.safe_point,
        ).SerializeToString()


_OBSOLETE = "WatchGCSafePointV2 is obsolete. Poll GetAllKeyspacesGCStates instead if necessary"


class GcV2Service:
    """GetGCSafePointV2, UpdateGCSafePointV2, UpdateServiceSafePointV2, GetAllGCSafePointV2;
    the watch is refused.
    """

    def __init__(self, headers: Headers, safe_points: GcStateManager) -> None:
        self._headers = headers
        self._safe_points = safe_points

    def calls(self) -> Mapping[str, Any]:
        """The handlers by the names of their RPCs."""
        handlers = (
            ("GetGCSafePointV2", pdpb_pb2.GetGCSafePointV2Response, self.get_gc_safe_point_v2),
            (
                "UpdateGCSafePointV2",
                pdpb_pb2.UpdateGCSafePointV2Response,
                self.update_gc_safe_point_v2,
            ),
            (
                "UpdateServiceSafePointV2",
                pdpb_pb2.UpdateServiceSafePointV2Response,
                self.update_service_safe_point_v2,
            ),
            (
                "GetAllGCSafePointV2",
                pdpb_pb2.GetAllGCSafePointV2Response,
                self.get_all_gc_safe_point_v2,
            ),
        )
        calls = {
            name: self._headers.call(answer, refusing_by_status(handler))
            for name, answer, handler in handlers
        }
        return {**calls, "WatchGCSafePointV2": self.watch_gc_safe_point_v2}

    async def get_gc_safe_point_v2(
        self, request: pdpb_pb2.GetGCSafePointV2Request
    ) -> pdpb_pb2.GetGCSafePointV2Response:
        """What stores collect up to in the keyspace."""
        safe_point = await self._safe_points.keyspace_gc_safe_point(request.keyspace_id)
        return pdpb_pb2.GetGCSafePointV2Response(safe_point=safe_point)

    async def update_gc_safe_point_v2(
        self, request: pdpb_pb2.UpdateGCSafePointV2Request
    ) -> pdpb_pb2.UpdateGCSafePointV2Response:
        """Move it; answers what holds."""
        check_names_no_service(request, "UpdateServiceSafePointV2")
        new_safe_point = await self._safe_points.update_gc_safe_point(
            request.safe_point, request.keyspace_id
        )
        return pdpb_pb2.UpdateGCSafePointV2Response(new_safe_point=new_safe_point)

    async def update_service_safe_point_v2(
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

    async def get_all_gc_safe_point_v2(
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

    async def watch_gc_safe_point_v2(
        self, _request: pdpb_pb2.WatchGCSafePointV2Request, _context: Any
    ) -> AsyncIterator[pdpb_pb2.WatchGCSafePointV2Response]:
        """PD has given it up, and says what to do instead."""
        raise StatusError(grpc.StatusCode.UNIMPLEMENTED, _OBSOLETE)
        yield
