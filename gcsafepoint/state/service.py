"""The safepoint service of a coordinator: the RPCs of both families over one stored state.

`GcStateManager` reads and changes the states that `gcsafepoint.state.stored` keeps, by the rules
of `gcsafepoint.state.rules`. The old calls are answered in the dialect of `--gc-compat`
(`gcsafepoint.state.compat`).
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile

import structlog

from gcsafepoint.state import errors, metrics
from gcsafepoint.state.compat import Compat, ServiceUpdate, old_calls
from gcsafepoint.state.errors import SafePointRequestError
from gcsafepoint.state.records import GcKeys, SafePointRecordError
from gcsafepoint.state.rules import GC_WORKER, Advance, ServiceSafePoint
from gcsafepoint.state.states import (
    NULL_KEYSPACE,
    GcStates,
    GcView,
    Keyspace,
    KeyspaceState,
    all_keyspace_states,
    gc_view,
    global_barriers,
    keyspace_state,
)
from gcsafepoint.state.stored import MAX_CHANGES, MetadataStore, StoredStates
from storage.model.errors import TidemarkError

_log = structlog.get_logger(__name__)


Outcome = ServiceSafePoint | TidemarkError


class GcStateManager:
    """All safepoints of a cluster for one term of leadership; calls may overlap.

    Every call raises SafePointConflictError or MetaUnavailableError when its answer is not certain:
    try again.
    """

    def __init__(
        self,
        store: MetadataStore,
        keys: GcKeys,
        clock: Callable[[], float] | None = None,
        *,
        compat: Compat = Compat.CLASSIC,
        keyspace_of: Callable[[bytes], Keyspace] | None = None,
    ) -> None:
        """`keyspace_of` reads a stored keyspace's record;
        without it only the null keyspace is known.
        """
        self.compat = compat
        self._clock = clock or steady_clock()
        self._stored = StoredStates(store, keys, self._clock, keyspace_of)
        self._old_calls = old_calls(compat)

    @property
    def gc_safe_point(self) -> int:
        """The null keyspace's GC safe point; durable.

        Reading it costs nothing; `load` once before.
        """
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
        """Follow the writes of others (an operator with etcdctl, TiDB itself), until cancelled."""
        await self._stored.run()

    async def view(self) -> GcView:
        """Everything that holds GC back now; O(n log n) in the number of services, so not for hot
        paths.
        """
        return await self._stored.read(lambda states: gc_view(states, self.now_s()), NULL_KEYSPACE)

    async def gc_state(
        self, keyspace_id: int, *, with_barriers: bool
    ) -> tuple[KeyspaceState, tuple[ServiceSafePoint, ...]]:
        """GetGCState: the state the users of a keyspace share,
        and the global barriers of the same moment.

        Raises:
            KeyspaceNotFoundError: no keyspace has that id.
        """
        return await self._stored.read(
            lambda states: (
                keyspace_state(states, keyspace_id, with_barriers=with_barriers),
                global_barriers(states),
            )
        )

    async def all_gc_states(
        self, *, with_barriers: bool
    ) -> tuple[list[KeyspaceState], tuple[ServiceSafePoint, ...]]:
        """GetAllKeyspacesGCStates: all states, the null keyspace's first,
        and the global barriers of that moment.
        """
        return await self._stored.read(
            lambda states: (
                all_keyspace_states(states, with_barriers=with_barriers),
                global_barriers(states),
            )
        )

    async def update_services(self, updates: Sequence[ServiceUpdate]) -> list[Outcome]:
        """UpdateServiceGCSafePoint: apply the updates in order,
        in as few transactions as they fit into.

        Durable when it returns. Each outcome is the answer to the service after its update, or the
        error of an update that can never be accepted.
        """
        outcomes: list[Outcome] = []
        while len(outcomes) < len(updates):
            rest = updates[len(outcomes) :]
            # `gc_worker` needs what TiDB servers wrote, which is read for it alone: others neither
            # pay for it nor fail with it.
            if rest[0].service_id == GC_WORKER:
                outcomes.append(await self._update_gc_worker(rest[0]))
            else:
                services = list(takewhile(lambda update: update.service_id != GC_WORKER, rest))
                outcomes += await self._stored.change(partial(self._apply, services))
        metrics.UPDATES_TOTAL.inc(len(updates))
        return outcomes

    async def update_gc_safe_point(self, safe_point: int, keyspace_id: int = NULL_KEYSPACE) -> int:
        """UpdateGCSafePoint: move the GC safe point as the old call does;
        returns the one that holds.

        Raises:
            SafePointRequestError: as PD 9, above the txn safe point; no such keyspace, or no GC of
                its own.
        """
        return await self._stored.change(
            lambda states: self._old_calls.update_gc_safe_point(
                states.of_manager(keyspace_id), safe_point, self._clock()
            ),
            keyspace_id,
        )

    async def keyspace_gc_safe_point(self, keyspace_id: int) -> int:
        """The GC safe point of a keyspace that has GC of its own. Raises: SafePointRequestError."""
        return await self._stored.read(lambda states: states.of_manager(keyspace_id).gc_safe_point)

    async def advance_txn_safe_point(self, keyspace_id: int, target: int) -> Advance:
        """AdvanceTxnSafePoint (rule 3); durable when it returns. Raises: SafePointRequestError."""
        return await self._stored.change(
            lambda states: states.of_manager(keyspace_id).advance_txn_safe_point(
                target, self._clock()
            ),
            keyspace_id,
        )

    async def advance_gc_safe_point(self, keyspace_id: int, target: int) -> int:
        """AdvanceGCSafePoint (rule 4); returns the former value. Raises: SafePointRequestError."""
        return await self._stored.change(
            lambda states: states.of_manager(keyspace_id).advance_gc_safe_point(target)
        )

    async def set_barrier(
        self, keyspace_id: int, barrier_id: str, barrier_ts: int, ttl_s: int
    ) -> ServiceSafePoint:
        """SetGCBarrier (rule 5); durable when it returns. Raises: SafePointRequestError."""
        _check_ttl(ttl_s)
        return await self._stored.change(
            lambda states: states.of_user(keyspace_id).set_barrier(
                barrier_id, barrier_ts, ttl_s, self._clock()
            )
        )

    async def delete_barrier(self, keyspace_id: int, barrier_id: str) -> ServiceSafePoint | None:
        """DeleteGCBarrier: remove a barrier; returns it. Raises: SafePointRequestError."""
        return await self._stored.change(
            lambda states: states.of_user(keyspace_id).delete_barrier(barrier_id)
        )

    async def set_global_barrier(
        self, barrier_id: str, barrier_ts: int, ttl_s: int
    ) -> ServiceSafePoint:
        """SetGlobalGCBarrier: hold every keyspace back; durable when it returns.

        Raises: SafePointRequestError.
        """
        _check_ttl(ttl_s)
        return await self._stored.change(
            lambda states: states.set_global_barrier(barrier_id, barrier_ts, ttl_s, self._clock())
        )

    async def delete_global_barrier(self, barrier_id: str) -> ServiceSafePoint | None:
        """DeleteGlobalGCBarrier: remove a global barrier; returns it.

        Raises: SafePointRequestError.
        """
        return await self._stored.change(lambda states: states.delete_global_barrier(barrier_id))

    async def _update_gc_worker(self, update: ServiceUpdate) -> Outcome:
        """Apply an update of `gc_worker` alone: it reads what TiDB servers wrote,
        which may be unreadable.
        """
        try:
            (outcome,) = await self._stored.change(
                partial(self._apply, [update]), update.keyspace_id
            )
        except (SafePointRecordError, SafePointRequestError) as err:
            return err
        return outcome

    def _apply(self, updates: Sequence[ServiceUpdate], states: GcStates) -> list[Outcome]:
        outcomes: list[Outcome] = []
        now_s = self._clock()
        for update in updates:
            outcomes.append(self._applied(update, states, now_s))
            # What one transaction has no room for is applied when these are durable.
            if states.null.pending + states.global_barriers.pending >= MAX_CHANGES:
                break
        return outcomes

    def _applied(self, update: ServiceUpdate, states: GcStates, now_s: float) -> Outcome:
        try:
            answer = self._old_calls.update_service(states, update, now_s)
        except SafePointRequestError as err:
            return err
        if update.ttl_s > 0 and answer.safe_point > update.safe_point:
            _log.warning(
                "safe point below the minimum refused",
                service=update.service_id[:128],
                safe_point=update.safe_point,
                minimum=answer.safe_point,
            )
        return answer


def _check_ttl(ttl_s: int) -> None:
    if ttl_s <= 0:
        raise errors.bad_argument("ttl", "0s")


def steady_clock() -> Callable[[], float]:
    """Unix seconds that run with the monotonic clock."""
    offset = time.time() - time.monotonic()
    return lambda: time.monotonic() + offset
