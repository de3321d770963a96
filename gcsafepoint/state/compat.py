"""UpdateServiceGCSafePoint and UpdateGCSafePoint in two dialects, over one state (pure).

`gcsafepoint.state.rules` has the rules 1 to 7 and the letters.

`ClassicCalls` (`--gc-compat classic`, the default) answers as PD did before #9292:

8. The minimum is the lowest of B + G + w. An update of a service is stored iff its safe point is >=
   the minimum (and >= t); the answer is the minimum after it. A service that is answered more than
   it asked for was refused: the history may be gone. `native_br` is a global barrier, as a backup
   covers all keyspaces.
9. An update removes the services whose TTL is over; a TTL <= 0 removes one at once, known or not.
10. `gc_worker` is there from the first update on. Its update, refused below the minimum, moves w to
    its safe point and t to min(w, B + G + M); the answer is the minimum, or the TiDB server that
    keeps t below it.
11. An update of g moves it to at most min(B + G + M), never back, and takes t and w along: a client
    that knows only this call (client-go before 2025) can collect garbage. The answer is what holds.

Rules 8 and 11 are where today's PD differs; see docs/design/0008-gc-state.md.

`Pd9Calls` (`--gc-compat pd-9`) redirects the calls to the newer family, as today's PD does.
`gc_worker` advances the txn safe point and is answered what blocks it. Everybody else sets a
barrier and is answered `gc_worker` at the txn safe point, never the service that is the minimum.
Source: PD pkg/gc/gc_state_manager.go `Compatible…`.
"""

import enum
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from gcsafepoint.state import errors
from gcsafepoint.state.rules import (
    GC_WORKER,
    NATIVE_BR,
    NEVER_S,
    GcState,
    ServiceSafePoint,
    check_barrier_id,
)
from gcsafepoint.state.states import NULL_KEYSPACE, GcStates
from storage.model.errors import InvalidError


class Compat(enum.StrEnum):
    """The version of PD whose answers the old calls give: PD before #9292, or today's PD."""

    CLASSIC = "classic"
    PD_9 = "pd-9"


class CompatError(InvalidError):
    """`--gc-compat` has an unknown value."""

    code = "ErrGcCompat"

    @classmethod
    def check(cls, text: str) -> Compat:
        """The setting's value. Raises: CompatError."""
        if text not in tuple(Compat):
            raise cls(f"--gc-compat {text!r} must be one of {', '.join(Compat)}")
        return Compat(text)


@dataclass(frozen=True, slots=True)
class ServiceUpdate:
    """One call of UpdateServiceGCSafePoint."""

    service_id: str
    ttl_s: int
    safe_point: int
    keyspace_id: int = NULL_KEYSPACE


class OldCalls(Protocol):
    """The two old calls that change something, in one dialect."""

    def update_service(
        self, states: GcStates, update: ServiceUpdate, now_s: float, /
    ) -> ServiceSafePoint:
        """UpdateServiceGCSafePoint: returns the service and safe point PD answers with.

        The update was refused if the answer's safe point is above the requested one.

        Raises:
            KeyspaceNotFoundError: no keyspace has that id.
            SafePointRequestError: no service id, or an update that `gc_worker` cannot make.
        """
        ...

    def update_gc_safe_point(self, state: GcState, safe_point: int, now_s: float, /) -> int:
        """UpdateGCSafePoint: returns the GC safe point that holds.

        Raises: SafePointRequestError.
        """
        ...


def old_calls(compat: Compat) -> OldCalls:
    """The implementation of a dialect."""
    return ClassicCalls() if compat is Compat.CLASSIC else Pd9Calls()


class ClassicCalls:
    """Rules 8 to 11."""

    def update_service(
        self, states: GcStates, update: ServiceUpdate, now_s: float
    ) -> ServiceSafePoint:
        """UpdateServiceGCSafePoint, rules 8 to 10; returns the minimum after it.

        Raises:
            KeyspaceNotFoundError: no keyspace has that id.
            SafePointRequestError: no service id, or a TTL that `gc_worker` cannot have.
        """
        service_id, ttl_s, safe_point = update.service_id, update.ttl_s, update.safe_point
        scope = states.scope_of_user(update.keyspace_id)
        state = states.of_user(scope)
        # Before anything is changed: a refused request leaves no trace.
        _check_service(service_id, ttl_s)
        state.drop_expired(now_s)
        state.lift_gc_worker(state.txn_safe_point)
        if service_id == GC_WORKER:
            return _advance_gc_worker(state, safe_point)
        if service_id == NATIVE_BR and scope == NULL_KEYSPACE:
            return _update_global(states, ttl_s, safe_point, now_s)
        if ttl_s <= 0:
            state.delete_barrier(service_id)
            return state.minimum()
        refusal = _refusal(state, safe_point, state.txn_safe_point)
        if refusal is None:
            state.set_barrier(service_id, safe_point, ttl_s, now_s)
        return refusal or state.minimum()

    def update_gc_safe_point(self, state: GcState, safe_point: int, now_s: float) -> int:
        """UpdateGCSafePoint, rule 11; returns the GC safe point that holds."""
        state.drop_expired(now_s)
        target = min(safe_point, state.lowest_needed())
        if target > state.gc_safe_point:
            # t first: g must never be above it (rule 1).
            state.lift_txn_safe_point(target)
            state.lift_gc_safe_point(target)
        return state.gc_safe_point


def _update_global(states: GcStates, ttl_s: int, safe_point: int, now_s: float) -> ServiceSafePoint:
    if ttl_s <= 0:
        states.delete_global_barrier(NATIVE_BR)
        return states.null.minimum()
    refusal = _refusal(states.null, safe_point, states.highest_txn_safe_point()[0])
    if refusal is None:
        states.set_global_barrier(NATIVE_BR, safe_point, ttl_s, now_s)
    return refusal or states.null.minimum()


def _refusal(state: GcState, safe_point: int, floor: int) -> ServiceSafePoint | None:
    lowest = state.minimum()
    if safe_point >= max(lowest.safe_point, floor):
        return None
    # A client reads a refusal out of an answer that is more than it asked for. What an operator
    # wrote may lie below t, and be no more than that.
    return lowest if lowest.safe_point > safe_point else ServiceSafePoint(GC_WORKER, NEVER_S, floor)


def _advance_gc_worker(state: GcState, safe_point: int) -> ServiceSafePoint:
    if safe_point >= state.minimum().safe_point:
        state.lift_gc_worker(safe_point)
        state.lift_txn_safe_point(min(state.gc_worker.safe_point, state.lowest_needed()))
    lowest = state.minimum()
    # Only a TiDB server's transaction lies below the minimum over services; GC must stop at t.
    blocker = state.blocker(lowest.safe_point)
    if blocker and state.txn_safe_point < lowest.safe_point:
        return ServiceSafePoint(blocker.service_id, NEVER_S, state.txn_safe_point)
    return lowest


def _check_service(service_id: str, ttl_s: int) -> None:
    if service_id != GC_WORKER:
        check_barrier_id(service_id)
    elif ttl_s <= 0:
        raise errors.gc_worker_stays()
    elif ttl_s != NEVER_S:
        raise errors.gc_worker_ends()


class Pd9Calls:
    """Today's PD: the calls redirected to barriers and to the txn safe point."""

    def update_service(
        self, states: GcStates, update: ServiceUpdate, now_s: float
    ) -> ServiceSafePoint:
        """UpdateServiceGCSafePoint; the update was refused if the answer is above `safe_point`.

        Raises:
            KeyspaceNotFoundError: no keyspace has that id.
            SafePointRequestError: no service id, a TTL that `gc_worker` cannot have, or `gc_worker`
                going back.
        """
        service_id, ttl_s, safe_point = update.service_id, update.ttl_s, update.safe_point
        scope = states.scope_of_user(update.keyspace_id)
        state = states.of_user(scope)
        if service_id == GC_WORKER:
            return _advance_as_gc_worker(state, ttl_s, safe_point, now_s)
        is_global = service_id == NATIVE_BR and scope == NULL_KEYSPACE
        # The old call has no error for it: the client sees in the answer that t lies above.
        with suppress(errors.BehindTxnSafePointError):
            if is_global and ttl_s > 0:
                states.set_global_barrier(service_id, safe_point, ttl_s, now_s)
            elif is_global:
                states.delete_global_barrier(service_id)
            elif ttl_s > 0:
                state.set_barrier(service_id, safe_point, ttl_s, now_s)
            else:
                state.delete_barrier(service_id)
        floor = states.highest_txn_safe_point()[0] if is_global else state.txn_safe_point
        return ServiceSafePoint(GC_WORKER, NEVER_S, floor)

    def update_gc_safe_point(self, state: GcState, safe_point: int, _now_s: float) -> int:
        """UpdateGCSafePoint: advance g, silently not back; returns the one that holds.

        Raises:
            SafePointRequestError: above the txn safe point.
        """
        if safe_point >= state.gc_safe_point:
            state.advance_gc_safe_point(safe_point)
        return state.gc_safe_point


def _advance_as_gc_worker(
    state: GcState, ttl_s: int, safe_point: int, now_s: float
) -> ServiceSafePoint:
    if ttl_s != NEVER_S:
        raise errors.gc_worker_ends()
    advance = state.advance_txn_safe_point(safe_point, now_s)
    blocker = advance.blocker if advance.new != safe_point else None
    return ServiceSafePoint(blocker.service_id if blocker else GC_WORKER, NEVER_S, advance.new)
