"""The old calls, as today's PD answers them (`--gc-compat pd-9`; pure): they are redirected to the newer family.

`gc_worker` advances the txn safe point and is told what blocks it; everybody else sets a barrier and is told
`gc_worker` at the txn safe point, never the service that is the minimum.
Source: PD pkg/gc/gc_state_manager.go `Compatible…`.
"""

from contextlib import suppress

from gcsafepoint import refusal
from gcsafepoint.barrier import GC_WORKER, NATIVE_BR, NEVER_S, ServiceSafePoint
from gcsafepoint.rules import SafePoints
from gcsafepoint.states import NULL_KEYSPACE, GcStates


def update_service(
    states: GcStates, keyspace_id: int, service_id: str, ttl_s: int, safe_point: int, now_s: float
) -> ServiceSafePoint:
    """What PD tells the service; it was refused if that is more than it asked for.

    Raises:
        KeyspaceNotFoundError: no keyspace has that id.
        SafePointRequestError: no service id, a TTL that `gc_worker` cannot have, or `gc_worker` going back.
    """
    scope = states.scope_of_user(keyspace_id)
    state = states.of_user(scope)
    if service_id == GC_WORKER:
        return _update_gc_worker(state, ttl_s, safe_point, now_s)
    everywhere = service_id == NATIVE_BR and scope == NULL_KEYSPACE
    with suppress(refusal.BehindTxnSafePointError):
        if everywhere and ttl_s > 0:
            states.set_global_barrier(service_id, safe_point, ttl_s, now_s)
        elif everywhere:
            states.delete_global_barrier(service_id)
        elif ttl_s > 0:
            state.set_barrier(service_id, safe_point, ttl_s, now_s)
        else:
            state.delete_barrier(service_id)
    floor = states.highest_txn_safe_point()[0] if everywhere else state.txn_safe_point
    return ServiceSafePoint(GC_WORKER, NEVER_S, floor)


def update_gc_safe_point(state: SafePoints, safe_point: int, _now_s: float) -> int:
    """Advance g, silently not back; returns what holds.

    Raises:
        SafePointRequestError: above the txn safe point.
    """
    if safe_point >= state.gc_safe_point:
        state.advance_gc_safe_point(safe_point)
    return state.gc_safe_point


def _update_gc_worker(state: SafePoints, ttl_s: int, safe_point: int, now_s: float) -> ServiceSafePoint:
    if ttl_s != NEVER_S:
        raise refusal.gc_worker_ends()
    advance = state.advance_txn_safe_point(safe_point, now_s)
    blocker = advance.blocker if advance.new != safe_point else None
    return ServiceSafePoint(blocker.service_id if blocker else GC_WORKER, NEVER_S, advance.new)
