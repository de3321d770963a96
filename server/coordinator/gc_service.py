"""pdpb.PD: safepoints. The two hot calls are batch functions: what gathers on a route shares one transaction."""

from collections.abc import Mapping, Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from kvproto import pdpb_pb2

from gcsafepoint.rules import SafePointRequestError
from gcsafepoint.service import Outcome, SafePointService, ServiceUpdate
from server.coordinator.errors import RefusedError, RequestError
from server.coordinator.header import Headers
from server.rpc.errors import StatusError
from server.rpc.front import Answer, BatchHandler
from storage.model.errors import TidemarkError

MAX_SERVICE_ID_BYTES = 1024


class GcService:
    """The classic calls: service safe points, and the GC safe point stores poll."""

    def __init__(self, headers: Headers, safe_points: SafePointService) -> None:
        self._headers = headers
        self._safe_points = safe_points

    def calls(self) -> Mapping[str, Any]:
        """PD's names for what is served here one by one."""
        return {
            "UpdateGCSafePoint": self._headers.bound(pdpb_pb2.UpdateGCSafePointResponse, self.update_gc_safe_point),
        }

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
        held = await self._safe_points.update_gc_safe_point(request.safe_point)
        return pdpb_pb2.UpdateGCSafePointResponse(new_safe_point=held)

    async def get_gc_safe_points(self, requests: Sequence[bytes]) -> Sequence[Answer]:
        """Answer from memory; also a request without any field, as a person with grpcurl sends it (PD refuses it)."""
        held = pdpb_pb2.GetGCSafePointResponse(header=self._headers.ok, safe_point=self._safe_points.gc_safe_point)
        answer = held.SerializeToString()
        return [(raw and self._refusal(pdpb_pb2.GetGCSafePointRequest, raw)) or answer for raw in requests]

    async def update_service_gc_safe_points(self, requests: Sequence[bytes]) -> Sequence[Answer]:
        """Apply all of them in one go; the bad ones are answered alone."""
        answers: list[Answer | None] = []
        updates: list[ServiceUpdate] = []
        for raw in requests:
            refusal = self._refusal(pdpb_pb2.UpdateServiceGCSafePointRequest, raw)
            parsed = _update(raw) if refusal is None else refusal
            answers.append(None if isinstance(parsed, ServiceUpdate) else parsed)
            if isinstance(parsed, ServiceUpdate):
                updates.append(parsed)
        outcomes = iter(await self._safe_points.update_services(updates))
        return [self._answer(next(outcomes)) if answer is None else answer for answer in answers]

    def _refusal(self, kind: type[Any], raw: bytes) -> Answer | None:
        try:
            self._headers.check(kind.FromString(raw).header)
            self._headers.check_bootstrapped()
        except RefusedError as err:  # the header has the same field number in every answer of PD
            return pdpb_pb2.GetGCSafePointResponse(header=self._headers.refused(err)).SerializeToString()
        except StatusError as err:
            return err
        except DecodeError:
            return StatusError(grpc.StatusCode.INTERNAL, "the request is not a message of its kind")
        return None

    def _answer(self, outcome: Outcome) -> Answer:
        if isinstance(outcome, SafePointRequestError):
            return RequestError(outcome.message)
        if isinstance(outcome, TidemarkError):
            return outcome
        return pdpb_pb2.UpdateServiceGCSafePointResponse(
            header=self._headers.ok,
            service_id=outcome.service_id.encode(),
            TTL=outcome.ttl_s(self._safe_points.now_s()),
            min_safe_point=outcome.safe_point,
        ).SerializeToString()


def _update(raw: bytes) -> ServiceUpdate | RequestError:
    request = pdpb_pb2.UpdateServiceGCSafePointRequest.FromString(raw)
    try:
        service_id = request.service_id.decode()
    except UnicodeDecodeError:
        return RequestError("[PD:common:ErrInvalidArgument]invalid argument for barrierID: not UTF-8")
    if len(request.service_id) > MAX_SERVICE_ID_BYTES:
        size = len(request.service_id)
        return RequestError(f"[PD:common:ErrInvalidArgument]invalid argument for barrierID: {size} bytes long")
    return ServiceUpdate(service_id, request.TTL, request.safe_point)
