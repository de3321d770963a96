"""The safepoints as a service: the rules in memory, etcd as the only truth.

Concurrent updates share one transaction. It is guarded by `<gc>/gc_state_revision`, which every writer raises: when
somebody else wrote first, or a write may or may not have happened, the state is read again before the next answer.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import structlog

from gcsafepoint import metrics, record
from gcsafepoint.record import GcKeys
from gcsafepoint.rules import Changes, SafePointRequestError, SafePoints, ServiceSafePoint
from gcsafepoint.view import GcView
from storage.meta.errors import CompactedError, MetaUnavailableError
from storage.meta.meta import Compare, KeyValue, Op, Put, TxnResult, WatchEvent
from storage.model.errors import ConflictError, TidemarkError

R = TypeVar("R")
_MAX_CHANGES = 90
_ATTEMPTS = 10

_log = structlog.get_logger(__name__)


class SafePointConflictError(ConflictError):
    """Other writers of the safepoints were always first."""

    code = "ErrSafePointConflict"


class Store(Protocol):
    """The part of the metadata the service needs; fenced by whoever provides it."""

    async def txn(self, compares: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op] = ()) -> TxnResult:
        """See `Meta.txn`."""
        ...

    async def get_prefix(self, prefix: bytes) -> list[KeyValue]:
        """See `Meta.get_prefix`."""
        ...

    def watch(self, prefix: bytes, start_revision: int = 0) -> AsyncIterator[list[WatchEvent]]:
        """See `Meta.watch`."""
        ...


@dataclass(frozen=True, slots=True)
class ServiceUpdate:
    """One call of UpdateServiceGCSafePoint."""

    service_id: str
    ttl_s: int
    safe_point: int


Outcome = ServiceSafePoint | TidemarkError


class SafePointService:
    """All safepoints of a cluster; calls may overlap."""

    def __init__(self, store: Store, keys: GcKeys, clock: Callable[[], float] | None = None) -> None:
        self._store = store
        self._keys = keys
        self._clock = clock or _steady_clock()
        self._lock = asyncio.Lock()
        self._state: SafePoints | None = None
        self._guard = (0, 0)
        self.gc_safe_point = 0
        """The GC safe point; durable. Reading it costs nothing; `load` once before."""

    def now_s(self) -> int:
        """Unix seconds, which jumps of the wall clock do not move."""
        return int(self._clock())

    async def view(self) -> GcView:
        """What holds GC back now; O(n log n) in the number of services, so not for hot paths.

        Raises:
            MetaUnavailableError: the state has to be read again, and cannot be.
        """
        async with self._lock:
            state = self._state or await self.load()
        lowest_first = sorted(state.services.values(), key=lambda service: (service.safe_point, service.service_id))
        return GcView(
            now_s=self.now_s(),
            gc_safe_point=state.gc_safe_point,
            txn_safe_point=state.txn_safe_point,
            minimum=state.minimum(),
            gc_worker=state.gc_worker,
            services=tuple(lowest_first),
        )

    async def load(self) -> SafePoints:
        """Read the state from the metadata."""
        self._state = None
        pairs = await self._store.get_prefix(self._keys.prefix)
        pairs += await self._store.get_prefix(self._keys.txn_safe_point)
        state = record.parse(pairs, self._keys)
        self._guard = record.parse_guard(pairs, self._keys)
        self._publish(state)
        return state

    async def run(self) -> None:
        """Follow what others write (an operator with etcdctl, TiDB itself), until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for prefix in (self._keys.prefix, self._keys.txn_safe_point):
                tasks.create_task(self._follow(prefix), name=f"safepoints-{prefix.decode()}")

    async def update_services(self, updates: Sequence[ServiceUpdate]) -> list[Outcome]:
        """Apply the updates in order, in as few transactions as they fit into; durable when it returns.

        Each outcome is the minimum after its update, or what was wrong with it.

        Raises:
            SafePointConflictError, MetaUnavailableError: none of the answers is certain; try again.
        """
        outcomes: list[Outcome] = []
        async with self._lock:
            while len(outcomes) < len(updates):
                outcomes += await self._commit(partial(self._apply, updates[len(outcomes) :]))
        metrics.UPDATES_TOTAL.inc(len(updates))
        return outcomes

    async def update_gc_safe_point(self, safe_point: int) -> int:
        """Move the GC safe point as far as the rules allow; durable when it returns what holds."""
        async with self._lock:
            return await self._commit(lambda state: state.update_gc_safe_point(safe_point, self.now_s()))

    async def _follow(self, prefix: bytes) -> None:
        revision = self._guard[1] + 1
        while True:
            try:
                async for events in self._store.watch(prefix, revision):
                    await self._heard(events[-1].pair.mod_revision)
                    revision = events[-1].pair.mod_revision + 1
            except CompactedError as err:
                revision = err.compact_revision
                await self._heard(revision)
            except MetaUnavailableError as err:
                _log.warning("safepoints cannot be read", reason=err.message)  # the next update reads them

    async def _heard(self, revision: int) -> None:
        async with self._lock:
            if revision > self._guard[1]:
                _log.info("safepoints were written by somebody else", revision=revision)
                await self.load()

    async def _commit(self, change: Callable[[SafePoints], R]) -> R:
        for _ in range(_ATTEMPTS):
            state = self._state or await self.load()
            answer = change(state)
            changes = state.take_changes()
            if not len(changes) or await self._save(state, changes):
                return answer
        raise SafePointConflictError(f"other writers of the safepoints were first {_ATTEMPTS} times; try again later")

    async def _save(self, state: SafePoints, changes: Changes) -> bool:
        number, mod_revision = self._guard
        guard = Compare.unchanged(self._keys.revision, mod_revision)
        ops = [*record.operations(changes, self._keys), Put(self._keys.revision, b"%d" % (number + 1))]
        self._state = None  # whatever interrupts the write, the next call reads what became of it
        result = await self._store.txn([guard], ops)
        if result.succeeded:
            self._guard = (number + 1, result.revision)
            self._publish(state)
            metrics.TRANSACTIONS_TOTAL.inc()
        return result.succeeded

    def _publish(self, state: SafePoints) -> None:
        self._state = state
        self.gc_safe_point = state.gc_safe_point
        metrics.SAFE_POINTS.state = state

    def _apply(self, updates: Sequence[ServiceUpdate], state: SafePoints) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for update in updates:
            try:
                outcomes.append(state.update_service(update.service_id, update.ttl_s, update.safe_point, self.now_s()))
            except SafePointRequestError as err:
                outcomes.append(err)
            if state.pending >= _MAX_CHANGES:
                break
        return outcomes


def _steady_clock() -> Callable[[], float]:
    """Unix time that runs with the monotonic clock: a jump of the wall clock expires nobody."""
    offset = time.time() - time.monotonic()
    return lambda: time.monotonic() + offset
