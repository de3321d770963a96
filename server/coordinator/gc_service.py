"""pdpb.PD: all RPCs about GC, two families over one state (docs/design/0008-gc-state.md):
messages and statuses here, the rules in `gcsafepoint.state`.

The old family is `GcClassicService` (UpdateServiceGCSafePoint, UpdateGCSafePoint, GetGCSafePoint)
and `GcV2Service`, the same with a keyspace. They refuse with gRPC status Unknown. The two hot ones,
UpdateServiceGCSafePoint and GetGCSafePoint, are batch functions: the requests that gather on a
route share one metadata transaction.

The newer family is `GcStateService`, by which today's clients read and advance the states, and
`GcBarrierService`, which holds one keyspace back, or all. They refuse with `header.error` of type
UNKNOWN and status OK.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from functools import wraps
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from kvproto import pdpb_pb2

from gcsafepoint.state import errors
from gcsafepoint.state.compat import Compat, ServiceUpdate
from gcsafepoint.state.errors import SafePointRequestError
from gcsafepoint.state.records import SafePointRecordError, key_bytes, valid_text
from gcsafepoint.state.rules import NEVER_S, ServiceSafePoint
from gcsafepoint.state.service import GcStateManager, Outcome
from gcsafepoint.state.states import NULL_KEYSPACE, KeyspaceState
from gcsafepoint.state.stored import SafePointConflictError
from server.coordinator.errors import RefusedError, RequestError
from server.coordinator.header import Handler, Headers, by_name
from server.rpc.errors import StatusError
from server.rpc.front import Answer, BatchHandler
from storage.model.errors import TidemarkError

_OBSOLETE = "WatchGCSafePointV2 is obsolete. Poll GetAllKeyspacesGCStates instead if necessary"


_SERVICE_FIELDS = 2
"""A service id and a TTL: the fields that follow those of a request about GC's own safe point."""
MAX_ID_BYTES = 1024
"""The limit of a service's or barrier's id; PD takes any, and then cannot list them all in one
message.
"""


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


class GcClassicService:
    """The old calls: service safe points, and the GC safe point stores poll."""

    def __init__(self, headers: Headers, safe_points: GcStateManager) -> None:
        self._headers = headers
        self._safe_points = safe_points

    def calls(self) -> Mapping[str, Any]:
        """The handlers of single requests by the names of their RPCs."""
        return self._headers.calls(refusing_by_status(self.UpdateGCSafePoint))

    def batches(self) -> Mapping[str, BatchHandler]:
        """The batch handlers by the names of their RPCs."""
        return by_name(self.UpdateServiceGCSafePoint, self.GetGCSafePoint)

    async def UpdateGCSafePoint(
        self, request: pdpb_pb2.UpdateGCSafePointRequest
    ) -> pdpb_pb2.UpdateGCSafePointResponse:
        """UpdateGCSafePoint: answers the safe point that holds,
        which may be less than requested.
        """
        # PD ignores these fields, so such a request would silently move GC past everybody.
        check_names_no_service(request, "UpdateServiceGCSafePoint")
        new_safe_point = await self._safe_points.update_gc_safe_point(request.safe_point)
        return pdpb_pb2.UpdateGCSafePointResponse(new_safe_point=new_safe_point)

    async def GetGCSafePoint(self, requests: Sequence[bytes]) -> Sequence[Answer]:
        """GetGCSafePoint, from memory; also a request without any field,
        as grpcurl sends it (PD refuses it).
        """
        response = pdpb_pb2.GetGCSafePointResponse(
            header=self._headers.ok, safe_point=self._safe_points.gc_safe_point
        )
        answer = response.SerializeToString()
        # A person with grpcurl sends no header; PD refuses that, and `--gc-compat pd-9` with it.
        answer_to_empty = answer if self._safe_points.compat is Compat.CLASSIC else None
        return [(not raw and answer_to_empty) or self._refusal(raw) or answer for raw in requests]

    async def UpdateServiceGCSafePoint(self, requests: Sequence[bytes]) -> Sequence[Answer]:
        """UpdateServiceGCSafePoint: apply all requests in one go;
        a bad request is answered by itself.
        """
        # A request that cannot be parsed, or names another cluster, has its refusal in its place;
        # its neighbours share the transaction.
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


class GcV2Service:
    """GetGCSafePointV2, UpdateGCSafePointV2, UpdateServiceSafePointV2, GetAllGCSafePointV2;
    the watch is refused.
    """

    def __init__(self, headers: Headers, safe_points: GcStateManager) -> None:
        self._headers = headers
        self._safe_points = safe_points

    def calls(self) -> Mapping[str, Any]:
        """The handlers by the names of their RPCs."""
        handlers: tuple[Handler, ...] = (
            self.GetGCSafePointV2,
            self.UpdateGCSafePointV2,
            self.UpdateServiceSafePointV2,
            self.GetAllGCSafePointV2,
        )
        calls = self._headers.calls(*map(refusing_by_status, handlers))
        return {**calls, **by_name(self.WatchGCSafePointV2)}

    async def GetGCSafePointV2(
        self, request: pdpb_pb2.GetGCSafePointV2Request
    ) -> pdpb_pb2.GetGCSafePointV2Response:
        """The safepoint up to which stores collect the keyspace's history."""
        safe_point = await self._safe_points.keyspace_gc_safe_point(request.keyspace_id)
        return pdpb_pb2.GetGCSafePointV2Response(safe_point=safe_point)

    async def UpdateGCSafePointV2(
        self, request: pdpb_pb2.UpdateGCSafePointV2Request
    ) -> pdpb_pb2.UpdateGCSafePointV2Response:
        """Advance the safepoint; answers the one in force."""
        check_names_no_service(request, "UpdateServiceSafePointV2")
        new_safe_point = await self._safe_points.update_gc_safe_point(
            request.safe_point, request.keyspace_id
        )
        return pdpb_pb2.UpdateGCSafePointV2Response(new_safe_point=new_safe_point)

    async def UpdateServiceSafePointV2(
        self, request: pdpb_pb2.UpdateServiceSafePointV2Request
    ) -> pdpb_pb2.UpdateServiceSafePointV2Response:
        """Set a service's safepoint in one keyspace, as UpdateServiceGCSafePoint does for all of
        them.
        """
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

    async def GetAllGCSafePointV2(
        self, _request: pdpb_pb2.GetAllGCSafePointV2Request
    ) -> pdpb_pb2.GetAllGCSafePointV2Response:
        """The safepoints of all keyspaces but the null one."""
        states, _ = await self._safe_points.all_gc_states(with_barriers=False)
        points = [
            pdpb_pb2.GCSafePointV2(keyspace_id=state.keyspace_id, gc_safe_point=state.gc_safe_point)
            for state in states
            if state.keyspace_id != NULL_KEYSPACE
        ]
        return pdpb_pb2.GetAllGCSafePointV2Response(gc_safe_points=points)

    async def WatchGCSafePointV2(
        self, _request: pdpb_pb2.WatchGCSafePointV2Request, _context: Any
    ) -> AsyncIterator[pdpb_pb2.WatchGCSafePointV2Response]:
        """PD has given it up, and says what to do instead."""
        raise StatusError(grpc.StatusCode.UNIMPLEMENTED, _OBSOLETE)
        yield


class GcStateService:
    """GetGCState, GetAllKeyspacesGCStates, AdvanceTxnSafePoint, AdvanceGCSafePoint."""

    def __init__(self, headers: Headers, safe_points: GcStateManager) -> None:
        self._headers = headers
        self._safe_points = safe_points

    def calls(self) -> Mapping[str, Any]:
        """The handlers by the names of their RPCs."""
        handlers: tuple[Handler, ...] = (
            self.GetGCState,
            self.GetAllKeyspacesGCStates,
            self.AdvanceTxnSafePoint,
            self.AdvanceGCSafePoint,
        )
        return self._headers.calls(*map(refusing_in_header, handlers))

    async def GetGCState(self, request: pdpb_pb2.GetGCStateRequest) -> pdpb_pb2.GetGCStateResponse:
        """The state the keyspace's users share; from memory."""
        state, global_barriers = await self._safe_points.gc_state(
            scope_of(request), with_barriers=not request.exclude_gc_barriers
        )
        answer = pdpb_pb2.GetGCStateResponse(gc_state=self._message(state))
        if request.include_global_gc_barriers:
            answer.global_gc_barriers.SetInParent()
            answer.global_gc_barriers.barriers.extend(self._messages(global_barriers))
        return answer

    async def GetAllKeyspacesGCStates(
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

    async def AdvanceTxnSafePoint(
        self, request: pdpb_pb2.AdvanceTxnSafePointRequest
    ) -> pdpb_pb2.AdvanceTxnSafePointResponse:
        """Advance the txn safe point as far as nothing blocks it; the answer names the blocker."""
        advance = await self._safe_points.advance_txn_safe_point(scope_of(request), request.target)
        return pdpb_pb2.AdvanceTxnSafePointResponse(
            old_txn_safe_point=advance.old,
            new_txn_safe_point=advance.new,
            blocker_description=advance.blocker.description if advance.blocker else "",
        )

    async def AdvanceGCSafePoint(
        self, request: pdpb_pb2.AdvanceGCSafePointRequest
    ) -> pdpb_pb2.AdvanceGCSafePointResponse:
        """Advance the GC safe point; stores collect older versions from now on."""
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
        handlers: tuple[Handler, ...] = (
            self.SetGCBarrier,
            self.DeleteGCBarrier,
            self.SetGlobalGCBarrier,
            self.DeleteGlobalGCBarrier,
        )
        return self._headers.calls(*map(refusing_in_header, handlers))

    async def SetGCBarrier(
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

    async def DeleteGCBarrier(
        self, request: pdpb_pb2.DeleteGCBarrierRequest
    ) -> pdpb_pb2.DeleteGCBarrierResponse:
        """Remove a barrier; the answer has the removed one, or none."""
        barrier = await self._safe_points.delete_barrier(scope_of(request), request.barrier_id)
        info = barrier_info(barrier, self._safe_points) if barrier else None
        return pdpb_pb2.DeleteGCBarrierResponse(deleted_barrier_info=info)

    async def SetGlobalGCBarrier(
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

    async def DeleteGlobalGCBarrier(
        self, request: pdpb_pb2.DeleteGlobalGCBarrierRequest
    ) -> pdpb_pb2.DeleteGlobalGCBarrierResponse:
        """Remove for every keyspace."""
        barrier = await self._safe_points.delete_global_barrier(request.barrier_id)
        info = global_barrier_info(barrier, self._safe_points) if barrier else None
        return pdpb_pb2.DeleteGlobalGCBarrierResponse(deleted_barrier_info=info)


def scope_of(request: Any) -> int:
    """The keyspace a request names; without a scope the null keyspace,
    with an empty one keyspace 0, as in PD.
    """
    return (
        int(request.keyspace_scope.keyspace_id)
        if request.HasField("keyspace_scope")
        else NULL_KEYSPACE
    )


def checked_id(raw: bytes) -> str:
    """A service id as text. Raises: SafePointRequestError: not UTF-8, or too long."""
    if len(raw) > MAX_ID_BYTES:
        raise errors.bad_argument(
            "barrierID", f"{len(raw)} bytes long, at most {MAX_ID_BYTES} are kept"
        )
    try:
        return raw.decode()
    except UnicodeDecodeError as err:
        raise errors.bad_argument("barrierID", "not UTF-8") from err


def check_names_no_service(request: Any, service_call: str) -> None:
    """Refuse a request about GC's own safe point that carries a service's id or TTL.

    The first design of service safe points put `service_id` and `TTL` into UpdateGCSafePoint
    itself. PD never read them there and moves GC's own safe point, past everything that other
    services hold back with later calls.

    Raises:
        SafePointRequestError: it does; `service_call` is the call it should have been.
    """
    known_fields = request.DESCRIPTOR.fields
    beyond = max(field.number for field in known_fields) + _SERVICE_FIELDS
    unknown = UnknownFieldSet(request)
    fields = [unknown[index] for index in range(len(unknown))]
    if any(field.data and field.field_number <= beyond for field in fields):
        name = request.DESCRIPTOR.name.removesuffix("Request")
        raise SafePointRequestError(
            f"[TM:ErrGcSafePointOfService] {name} moves GC's own safe point and takes no service "
            f"id or TTL; call {service_call} to hold back GC for a service"
        )


def barrier_info(barrier: ServiceSafePoint, safe_points: GcStateManager) -> pdpb_pb2.GCBarrierInfo:
    """A barrier with the TTL it has left; the largest number stands for ever."""
    return pdpb_pb2.GCBarrierInfo(**_fields(barrier, safe_points))


def global_barrier_info(
    barrier: ServiceSafePoint, safe_points: GcStateManager
) -> pdpb_pb2.GlobalGCBarrierInfo:
    """A global barrier, likewise."""
    return pdpb_pb2.GlobalGCBarrierInfo(**_fields(barrier, safe_points))


def refusing_in_header(handler: Handler) -> Handler:
    """The handler of a newer call."""

    @wraps(handler)
    async def call(request: Any) -> Any:
        try:
            return await handler(request)
        except (SafePointRequestError, SafePointConflictError, SafePointRecordError) as err:
            raise RefusedError(pdpb_pb2.UNKNOWN, err.message) from err

    return call


def refusing_by_status(handler: Handler) -> Handler:
    """The handler of an old call."""

    @wraps(handler)
    async def call(request: Any) -> Any:
        try:
            return await handler(request)
        except SafePointRequestError as err:
            raise RequestError(err.message) from err

    return call


def _fields(barrier: ServiceSafePoint, safe_points: GcStateManager) -> dict[str, Any]:
    ttl_s = NEVER_S if barrier.expired_at == NEVER_S else safe_points.ttl_s(barrier)
    return {
        "barrier_id": valid_text(barrier.service_id),
        "barrier_ts": barrier.safe_point,
        "ttl_seconds": ttl_s,
    }
