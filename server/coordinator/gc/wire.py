"""What the services of GC share: how scopes and barriers look on the wire, and how refusals travel.

The old calls refuse with gRPC status Unknown, the newer ones with `header.error` of type UNKNOWN
and status OK.
"""

from functools import wraps
from typing import Any

from google.protobuf.unknown_fields import UnknownFieldSet
from kvproto import pdpb_pb2

from gcsafepoint.state import errors
from gcsafepoint.state.barrier import NEVER_S, ServiceSafePoint
from gcsafepoint.state.errors import SafePointRequestError
from gcsafepoint.state.go_text import valid_text
from gcsafepoint.state.records import SafePointRecordError
from gcsafepoint.state.service import GcStateManager
from gcsafepoint.state.states import NULL_KEYSPACE
from gcsafepoint.state.stored import SafePointConflictError
from server.coordinator.errors import RefusedError, RequestError
from server.coordinator.header import Handler

_SERVICE_FIELDS = 2
"""A service id and a TTL: the fields that follow those of a request about GC's own safe point."""
MAX_ID_BYTES = 1024
"""Of a service or barrier; PD takes any, and then cannot list them all in one message."""


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
