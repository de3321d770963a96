"""pdpb.PD: the old GC calls. The two hot ones are batch functions: what gathers on a route shares one transaction."""

from collections.abc import Mapping, Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from kvproto import pdpb_pb2

from gcsafepoint.state.compat import Compat
from gcsafepoint.state.errors import SafePointRequestError
from gcsafepoint.state.go_text import key_bytes
from gcsafepoint.state.service import Outcome, SafePointService, ServiceUpdate
from server.coordinator.errors import RefusedError, RequestError
from server.coordinator.gc.wire import check_names_no_service, checked_id, refusing_by_status
from server.coordinator.header import Headers
from server.rpc.errors import StatusError
from server.rpc.front import Answer, BatchHandler
from storage.model.errors import TidemarkError


class GcClassicService:
    """The old calls: service safe points, and the GC safe point stores poll."""

    def __init__(self, headers: Headers, safe_points: SafePointService) -> None:
        self._headers = headers
        self._safe_points = safe_points

    def calls(self) -> Mapping[str, Any]:
        """PD's names for what is served here one by one."""
        handler = refusing_by_status(self.update_gc_safe_point)
        return {"UpdateGCSafePoint": self._headers.bound(pdpb_pb2.UpdateGCSafePointResponse, handler)}

    def batches(self) -> Mapping[str, BatchHandler]:
        """PD's names for what is served here in batches."""
        return {
            "GetGCSafePoint": self.get_gc_safe_points,
            "UpdateServiceGCSafePoint": self.update_service_gc_safe_points,
        }

    async def update_gc_safe_point(
        self, request: pdpb_pb2.UpdateGCSafePointRequest
    ) -> pdpb_pb2.UpdateGCSafePointResponse:
        """Move the GC safe point; answers what holds, which may be less than asked."""
        check_names_no_service(request, "UpdateServiceGCSafePoint")
        held = await self._safe_points.update_gc_safe_point(request.safe_point)
        return pdpb_pb2.UpdateGCSafePointResponse(new_safe_point=held)

    async def get_gc_safe_points(self, requests: Sequence[bytes]) -> Sequence[Answer]:
        """Answer from memory; also a request without any field, as a person with grpcurl sends it (PD refuses it)."""
        held = pdpb_pb2.GetGCSafePointResponse(header=self._headers.ok, safe_point=self._safe_points.gc_safe_point)
        answer = held.SerializeToString()
        by_hand = answer if self._safe_points.compat is Compat.CLASSIC else None
        return [(not raw and by_hand) or self._got(raw) or answer for raw in requests]

    async def update_service_gc_safe_points(self, requests: Sequence[bytes]) -> Sequence[Answer]:
        """Apply all of them in one go; the bad ones are answered alone."""
        parsed = [self._parsed(raw) for raw in requests]
        outcomes = iter(
            await self._safe_points.update_services([item for item in parsed if isinstance(item, ServiceUpdate)])
        )
        return [self._answer(next(outcomes)) if isinstance(item, ServiceUpdate) else item for item in parsed]

    def _got(self, raw: bytes) -> Answer | None:
        request = self._request(pdpb_pb2.GetGCSafePointRequest, raw)
        return request if isinstance(request, bytes | TidemarkError) else None

    def _parsed(self, raw: bytes) -> ServiceUpdate | Answer:
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
            return pdpb_pb2.GetGCSafePointResponse(header=self._headers.refused(err)).SerializeToString()
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
