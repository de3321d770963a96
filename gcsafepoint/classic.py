"""The old calls, as the seed has them: the default (`--gc-compat classic`; pure). Rules 1 to 7: `gcsafepoint.rules`.

8. The minimum is the lowest of B + G + w. An update of a service is stored iff its safe point is >= the minimum (and
   >= t); the answer is the minimum after it. Whoever is answered more than it asked for was refused: the history may
   be gone. `native_br` is a global barrier, as a backup covers all keyspaces.
9. An update forgets the services whose TTL is over; a TTL <= 0 removes one at once, known or not.
10. `gc_worker` is there from the first update on. Its update, refused below the minimum, moves w to its safe point and
    t to min(w, B + G + M); the answer is the minimum, or the TiDB server that keeps t below it.
11. An update of g moves it to at most min(B + G + M), never back, and takes t and w along: a client that knows only
    this call (client-go before 2025) can collect garbage. The answer is what holds.

Rules 8 and 11 are where today's PD differs; see docs/design/0008-gc-state.md. Source: PD before #9292.
"""

from gcsafepoint import refusal
from gcsafepoint.barrier import GC_WORKER, NATIVE_BR, NEVER_S, ServiceSafePoint
from gcsafepoint.rules import SafePoints, check_barrier_id
from gcsafepoint.states import NULL_KEYSPACE, GcStates


def update_service(
    states: GcStates, keyspace_id: int, service_id: str, ttl_s: int, safe_point: int, now_s: float
) -> ServiceSafePoint:
    """Rules 8 to 10; returns the minimum after it.

    Raises:
        KeyspaceNotFoundError: no keyspace has that id.
        SafePointRequestError: no service id, or a TTL that `gc_worker` cannot have.
    """
    scope = states.scope_of_user(keyspace_id)
    state = states.of_user(scope)
    _check(service_id, ttl_s)
    state.drop_expired(now_s)
    state.lift_gc_worker(state.txn_safe_point)
    if service_id == GC_WORKER:
        return _update_gc_worker(state, safe_point)
    if service_id == NATIVE_BR and scope == NULL_KEYSPACE:
        return _update_everywhere(states, ttl_s, safe_point, now_s)
    if ttl_s <= 0:
        state.delete_barrier(service_id)
        return state.minimum()
    refused = _refused(state, safe_point, state.txn_safe_point)
    if refused is None:
        state.set_barrier(service_id, safe_point, ttl_s, now_s)
    return refused or state.minimum()


def update_gc_safe_point(state: SafePoints, safe_point: int, now_s: float) -> int:
    """Rule 11; returns the GC safe point that holds."""
    state.drop_expired(now_s)
    wanted = min(safe_point, state.lowest_needed())
    if wanted > state.gc_safe_point:
        state.lift_txn_safe_point(wanted)
        state.lift_gc_safe_point(wanted)
    return state.gc_safe_point


def _update_everywhere(states: GcStates, ttl_s: int, safe_point: int, now_s: float) -> ServiceSafePoint:
    if ttl_s <= 0:
        states.delete_global_barrier(NATIVE_BR)
        return states.null.minimum()
    refused = _refused(states.null, safe_point, states.highest_txn_safe_point()[0])
    if refused is None:
        states.set_global_barrier(NATIVE_BR, safe_point, ttl_s, now_s)
    return refused or states.null.minimum()


def _refused(state: SafePoints, safe_point: int, floor: int) -> ServiceSafePoint | None:
    lowest = state.minimum()
    if safe_point >= max(lowest.safe_point, floor):
        return None
    # what an operator wrote may lie below t: the answer must still be more than was asked for
    return lowest if lowest.safe_point > safe_point else ServiceSafePoint(GC_WORKER, NEVER_S, floor)


def _update_gc_worker(state: SafePoints, safe_point: int) -> ServiceSafePoint:
    if safe_point >= state.minimum().safe_point:
        state.lift_gc_worker(safe_point)
        state.lift_txn_safe_point(min(state.gc_worker.safe_point, state.lowest_needed()))
    lowest = state.minimum()
    blocker = state.blocker(lowest.safe_point)
    if blocker and state.txn_safe_point < lowest.safe_point:
        return ServiceSafePoint(blocker.service_id, NEVER_S, state.txn_safe_point)
    return lowest


def _check(service_id: str, ttl_s: int) -> None:
    if service_id != GC_WORKER:
        check_barrier_id(service_id)
    elif ttl_s <= 0:
        raise refusal.gc_worker_stays()
    elif ttl_s != NEVER_S:
        raise refusal.gc_worker_ends()
