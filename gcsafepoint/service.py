"""The safepoints as a service: both families of calls over one state.

The rules are in `gcsafepoint.rules`, `.classic` and `.pd9`; how it is kept, in `gcsafepoint.stored`.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Protocol

import structlog

from gcsafepoint import classic, metrics, pd9, refusal, view
from gcsafepoint.barrier import GC_WORKER, ServiceSafePoint
from gcsafepoint.clock import steady_clock
from gcsafepoint.keys import GcKeys
from gcsafepoint.record import SafePointRecordError
from gcsafepoint.refusal import SafePointRequestError
from gcsafepoint.rules import Advance, SafePoints
from gcsafepoint.states import NULL_KEYSPACE, GcStates, Keyspace
from gcsafepoint.stored import MAX_CHANGES, Store, StoredStates
from gcsafepoint.view import GcView, KeyspaceState
from storage.model.errors import InvalidError, TidemarkError

_log = structlog.get_logger(__name__)


class Compat(enum.StrEnum):
    """Whose answers the old calls get: the seed's, or those of today's PD."""

    CLASSIC = "classic"
    PD_9 = "pd-9"


class CompatError(InvalidError):
    """The setting names no such answers."""

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


Outcome = ServiceSafePoint | TidemarkError


class OldCalls(Protocol):
    """The two old calls that change something, as one of the two modules answers them."""

    def update_service(
        self, states: GcStates, keyspace_id: int, service_id: str, ttl_s: int, safe_point: int, now_s: float, /
    ) -> ServiceSafePoint:
        """See `gcsafepoint.classic`."""
        ...

    def update_gc_safe_point(self, state: SafePoints, safe_point: int, now_s: float, /) -> int:
        """See `gcsafepoint.classic`."""
        ...


class SafePointService:
    """All safepoints of a cluster for one term of leadership; calls may overlap.

    Every call raises SafePointConflictError or MetaUnavailableError when its answer is not certain: try again.
    """

    def __init__(
        self,
        store: Store,
        keys: GcKeys,
        clock: Callable[[], float] | None = None,
        *,
        compat: Compat = Compat.CLASSIC,
        keyspace_of: Callable[[bytes], Keyspace] | None = None,
    ) -> None:
        """`keyspace_of` reads a stored keyspace's record; without it only the null keyspace is known."""
        self.compat = compat
        self._clock = clock or steady_clock()
        self._stored = StoredStates(store, keys, self._clock, keyspace_of)
        self._old_calls: OldCalls = classic if compat is Compat.CLASSIC else pd9

    @property
    def gc_safe_point(self) -> int:
        """The null keyspace's GC safe point; durable. Reading it costs nothing; `load` once before."""
        return self._stored.gc_safe_point

    def now_s(self) -> int:
        """Unix seconds, which jumps of the wall clock do not move."""
        return int(self._clock())

    def ttl_s(self, barrier: ServiceSafePoint) -> int:
        """Whole seconds the barrier has left now; see `ServiceSafePoint.ttl_s`."""
        return barrier.ttl_s(self._clock())

    async def load(self) -> GcStates:
        """Read the state from the metadata."""
        return await self._stored.load()

    async def run(self) -> None:
        """Follow what others write (an operator with etcdctl, TiDB itself), until cancelled."""
        await self._stored.run()

    async def view(self) -> GcView:
        """What holds GC back now; O(n log n) in the number of services, so not for hot paths."""
        return await self._stored.read(lambda states: view.gc_view(states, self.now_s()), NULL_KEYSPACE)

    async def gc_state(
        self, keyspace_id: int, *, with_barriers: bool
    ) -> tuple[KeyspaceState, tuple[ServiceSafePoint, ...]]:
        """The state the users of a keyspace share, and the global barriers of the same moment.

        Raises:
            KeyspaceNotFoundError: no keyspace has that id.
        """
        return await self._stored.read(
            lambda states: (
                view.state_of(states, keyspace_id, with_barriers=with_barriers),
                view.global_barriers(states),
            )
        )

    async def all_gc_states(self, *, with_barriers: bool) -> tuple[list[KeyspaceState], tuple[ServiceSafePoint, ...]]:
        """Every keyspace's state, the null keyspace's first, and the global barriers of the same moment."""
        return await self._stored.read(
            lambda states: (view.all_states(states, with_barriers=with_barriers), view.global_barriers(states))
        )

    async def update_services(self, updates: Sequence[ServiceUpdate]) -> list[Outcome]:
        """Apply the updates in order, in as few transactions as they fit into; durable when it returns.

        Each outcome is what PD tells the service after its update (`gcsafepoint.classic`, `gcsafepoint.pd9`), or what
        was wrong with it.
        """
        outcomes: list[Outcome] = []
        while len(outcomes) < len(updates):
            rest = updates[len(outcomes) :]
            if rest[0].service_id == GC_WORKER:
                outcomes.append(await self._update_gc_worker(rest[0]))
            else:
                services = list(takewhile(lambda update: update.service_id != GC_WORKER, rest))
                outcomes += await self._stored.change(partial(self._apply, services))
        metrics.UPDATES_TOTAL.inc(len(updates))
        return outcomes

    async def update_gc_safe_point(self, safe_point: int, keyspace_id: int = NULL_KEYSPACE) -> int:
        """Move the GC safe point as the old call does; returns what holds.

        Raises:
            SafePointRequestError: as PD 9, above the txn safe point; no such keyspace, or no GC of its own.
        """
        return await self._stored.change(
            lambda states: self._old_calls.update_gc_safe_point(
                states.of_manager(keyspace_id), safe_point, self._clock()
            ),
            keyspace_id,
        )

    async def held_gc_safe_point(self, keyspace_id: int) -> int:
        """The GC safe point of a keyspace that has GC of its own. Raises: SafePointRequestError."""
        return await self._stored.read(lambda states: states.of_manager(keyspace_id).gc_safe_point)

    async def advance_txn_safe_point(self, keyspace_id: int, target: int) -> Advance:
        """Rule 3; durable when it returns. Raises: SafePointRequestError."""
        return await self._stored.change(
            lambda states: states.of_manager(keyspace_id).advance_txn_safe_point(target, self._clock()), keyspace_id
        )

    async def advance_gc_safe_point(self, keyspace_id: int, target: int) -> int:
        """Rule 4; returns what it was. Raises: SafePointRequestError."""
        return await self._stored.change(lambda states: states.of_manager(keyspace_id).advance_gc_safe_point(target))

    async def set_barrier(self, keyspace_id: int, barrier_id: str, barrier_ts: int, ttl_s: int) -> ServiceSafePoint:
        """Rule 5; durable when it returns. Raises: SafePointRequestError."""
        _check_ttl(ttl_s)
        return await self._stored.change(
            lambda states: states.of_user(keyspace_id).set_barrier(barrier_id, barrier_ts, ttl_s, self._clock())
        )

    async def delete_barrier(self, keyspace_id: int, barrier_id: str) -> ServiceSafePoint | None:
        """Remove a barrier; returns what it was. Raises: SafePointRequestError."""
        return await self._stored.change(lambda states: states.of_user(keyspace_id).delete_barrier(barrier_id))

    async def set_global_barrier(self, barrier_id: str, barrier_ts: int, ttl_s: int) -> ServiceSafePoint:
        """Hold every keyspace back; durable when it returns. Raises: SafePointRequestError."""
        _check_ttl(ttl_s)
        return await self._stored.change(
            lambda states: states.set_global_barrier(barrier_id, barrier_ts, ttl_s, self._clock())
        )

    async def delete_global_barrier(self, barrier_id: str) -> ServiceSafePoint | None:
        """Remove a global barrier; returns what it was. Raises: SafePointRequestError."""
        return await self._stored.change(lambda states: states.delete_global_barrier(barrier_id))

    async def _update_gc_worker(self, update: ServiceUpdate) -> Outcome:
        """Alone: it advances, and what TiDB servers wrote for that to read may be no good."""
        try:
            (outcome,) = await self._stored.change(partial(self._apply, [update]), update.keyspace_id)
        except (SafePointRecordError, SafePointRequestError) as err:
            return err
        return outcome

    def _apply(self, updates: Sequence[ServiceUpdate], states: GcStates) -> list[Outcome]:
        outcomes: list[Outcome] = []
        now_s = self._clock()
        for update in updates:
            outcomes.append(self._applied(update, states, now_s))
            if states.null.pending + states.global_barriers.pending >= MAX_CHANGES:
                break
        return outcomes

    def _applied(self, update: ServiceUpdate, states: GcStates, now_s: float) -> Outcome:
        try:
            told = self._old_calls.update_service(
                states, update.keyspace_id, update.service_id, update.ttl_s, update.safe_point, now_s
            )
        except SafePointRequestError as err:
            return err
        if update.ttl_s > 0 and told.safe_point > update.safe_point:
            _log.warning(
                "safe point below the minimum refused",
                service=update.service_id[:128],
                safe_point=update.safe_point,
                minimum=told.safe_point,
            )
        return told


def _check_ttl(ttl_s: int) -> None:
    if ttl_s <= 0:
        raise refusal.bad_argument("ttl", "0s")
