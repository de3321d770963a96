"""What the services of GC share: how scopes and barriers look on the wire, and how refusals travel.

The old calls refuse with gRPC status Unknown, the newer ones with `header.error` of type UNKNOWN and status OK.
"""

from functools import wraps
from typing import Any

from kvproto import pdpb_pb2

from gcsafepoint import refusal
from gcsafepoint.barrier import NEVER_S, ServiceSafePoint
from gcsafepoint.go_text import valid_text
from gcsafepoint.record import SafePointRecordError
from gcsafepoint.refusal import SafePointRequestError
from gcsafepoint.service import SafePointService
from gcsafepoint.states import NULL_KEYSPACE
from gcsafepoint.stored import SafePointConflictError
from server.coordinator.errors import RefusedError, RequestError
from server.coordinator.header import Handler

MAX_ID_BYTES = 1024
"""Of a service or barrier; PD takes any, and then cannot list them all in one message."""


def scope_of(request: Any) -> int:
    """The keyspace a request names; without a scope the null keyspace, with an empty one keyspace 0, as in PD."""
    return int(request.keyspace_scope.keyspace_id) if request.HasField("keyspace_scope") else NULL_KEYSPACE


def checked_id(raw: bytes) -> str:
    """A service id as text. Raises: SafePointRequestError: not UTF-8, or too long."""
    if len(raw) > MAX_ID_BYTES:
        raise refusal.bad_argument("barrierID", f"{len(raw)} bytes long, at most {MAX_ID_BYTES} are kept")
    try:
        return raw.decode()
    except UnicodeDecodeError as err:
        raise refusal.bad_argument("barrierID", "not UTF-8") from err


def barrier_info(barrier: ServiceSafePoint, safe_points: SafePointService) -> pdpb_pb2.GCBarrierInfo:
    """A barrier with the TTL it has left; the largest number stands for ever."""
    return pdpb_pb2.GCBarrierInfo(**_fields(barrier, safe_points))


def global_barrier_info(barrier: ServiceSafePoint, safe_points: SafePointService) -> pdpb_pb2.GlobalGCBarrierInfo:
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


def _fields(barrier: ServiceSafePoint, safe_points: SafePointService) -> dict[str, Any]:
    ttl_s = NEVER_S if barrier.expired_at == NEVER_S else safe_points.ttl_s(barrier)
    return {
        "barrier_id": valid_text(barrier.service_id),
        "barrier_ts": barrier.safe_point,
        "ttl_seconds": ttl_s,
    }
